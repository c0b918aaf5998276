"""Drafters of known quality: averages are exact, texts differ, matches come in stretches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.simulate.acceptance import Loaded, Skill, Spread, confidences, hazard, stretches

CHANCE = st.floats(0.01, 1.0)
SHAPE = st.sampled_from([0.3, 0.5, 1.0, 4.0, 20.0, math.inf])


@given(CHANCE, SHAPE)
def test_a_hazard_gives_its_chance_back(chance, shape):
    """E[exp(-h g)] over a Gamma of mean 1, which is (1 + h / shape)^-shape, is the chance it was made of."""
    h = float(hazard(np.array(chance), shape))
    back = math.exp(-h) if math.isinf(shape) else (1 + h / shape) ** -shape
    assert back == pytest.approx(chance)


def test_chances_average_to_what_was_given():
    """100,000 texts: survival to each position is the product of the acceptances, whatever the spread; four standard
    errors."""
    skill, rng, count = Skill("small", (0.9, 0.8, 0.6), 4), np.random.default_rng(0), 100_000
    expected = np.multiply.accumulate([0.9, 0.8, 0.6, 0.6])
    for spread in (Spread(4.0, 0.5), Spread(1.0, math.inf), Spread(math.inf, 0.3), Spread(math.inf, math.inf)):
        text = np.ones(count) if math.isinf(spread.between) else rng.gamma(spread.between, 1 / spread.between, count)
        places = np.ones((count, 4))
        if not math.isinf(spread.within):
            places = rng.gamma(spread.within, 1 / spread.within, (count, 4))
        chances = spread.chances(spread.rates(skill), text, places)
        assert chances.min() >= 0
        assert chances.max() <= 1
        survival = np.multiply.accumulate(chances, axis=1)
        error = survival.std(axis=0) / math.sqrt(count)
        assert np.all(np.abs(survival.mean(axis=0) - expected) <= 4 * error + 1e-12)


def test_texts_and_places_differ_as_they_are_told():
    """Harder texts have lower chances at every place; without spread all are the same."""
    skill = Skill("small", (0.8,), 3)
    spread = Spread(4.0, math.inf)
    chances = spread.chances(spread.rates(skill), np.array([0.3, 1.0, 2.5]), np.ones((3, 3)))
    assert np.all(np.diff(chances, axis=0) < 0)
    even = Spread(math.inf, math.inf)
    difficulty, places = even.draw(np.random.default_rng(0), 5)
    assert difficulty == 1.0
    assert places.tolist() == [1.0] * 5


def test_the_extremes_are_exact():
    """Acceptance 1 is certain and 0 impossible, also behind positions that are never reached."""
    spread = Spread(4.0, 0.5)
    for acceptance, expected in (((1.0,), [1.0] * 3), ((0.0,), [0.0] * 3), ((1.0, 0.0), [1.0, 0.0, 0.0])):
        skill = Skill("small", acceptance, 3)
        chances = spread.chances(spread.rates(skill), np.array([1e-12, 3.0]), np.full((2, 3), 1e-12))
        assert chances.tolist() == [expected] * 2


def test_a_bias_moves_confidences_and_keeps_their_order():
    """Logits move by the bias; a calibrated drafter says the chance itself."""
    chances = np.array([0.1, 0.5, 0.9])
    assert confidences(chances, 0.0) is chances
    said = confidences(chances, 2.0)
    logit = np.log(said / (1 - said)) - np.log(chances / (1 - chances))
    assert logit == pytest.approx([2.0] * 3)
    assert np.all(confidences(np.array([0.0, 1.0]), 3.0) == pytest.approx([0.0, 1.0], abs=1e-9))


@pytest.mark.parametrize(("match", "run"), [(0.3, 16.0), (0.5, 4.0), (0.9, 2.0), (0.05, 30.0)])
def test_matches_come_in_stretches_of_the_given_share_and_length(match, run):
    """Over 400,000 tokens: the share within 10 %, the mean stretch within 10 % (of at least what the share allows)."""
    found = stretches(np.random.default_rng(1), match, run, 400_000)
    assert found.mean() == pytest.approx(match, rel=0.1)
    starts = np.count_nonzero(np.diff(found.astype(int)) == 1)
    assert found.sum() / starts == pytest.approx(max(run, match / (1 - match)), rel=0.1)


def test_always_and_never_matching():
    rng = np.random.default_rng(0)
    assert stretches(rng, 1.0, 16, 5).all()
    assert not stretches(rng, 0.0, 16, 5).any()
    assert stretches(rng, 0.944, 16, 2000).any()  # gaps of one token, or a rounding less


def test_what_a_drafting_call_is_paid_for():
    """A serial drafter pays for the pass that told it to stop; a block and a look-up for all they were asked."""
    assert Skill("small", (0.5,)).passes(5, 2) == 3
    assert Skill("small", (0.5,)).passes(5, 5) == 5
    assert Skill("dspark", (0.5,)).passes(5, 2) == 5
    assert Skill("ngram", (0.5,)).passes(5, 0) == 5
    assert [Skill(name, (0.5,)).asks for name in ("small", "eagle3", "dspark", "dflash", "ngram")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert not Skill("small", (0.5,), confident=False).asks


def test_labels_tell_drafters_apart():
    loaded = Loaded((Skill("ngram", (0.8,), match=0.3), Skill("dspark", (0.9, 0.8))))
    assert loaded.label == "ngram:0.8:match=0.3+dspark:0.9,0.8"
    assert loaded.name == "ngram+dspark"
    assert loaded.mean is None
    assert Loaded((Skill("dspark", (0.9, 0.8), 4),)).mean == pytest.approx((0.9 + 3 * 0.8) / 4)
