"""What past rounds say: acceptance by position, the corrections of confidences, and survivals of earlier rounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.budget.calibration import Calibration, CalibrationKey, Table
from forerun.budget.confidence import Confidences
from forerun.budget.history import ACCEPTANCE, SHARED_MEMORY, AcceptanceHistory, Outcome
from forerun.budget.lag import ROUNDS, Expected, PastRounds
from forerun.budget.online import OnlineCalibration


def shown(acceptance: list[float], rounds: int, seed: int = 0, verified: int | None = None) -> AcceptanceHistory:
    """A history of one request whose drafts are accepted with these chances by position."""
    history, rng = AcceptanceHistory(), np.random.default_rng(seed)
    for _ in range(rounds):
        accepted = next((k for k, a in enumerate(acceptance) if rng.random() >= a), len(acceptance))
        history.record("d", 0, Outcome(verified or len(acceptance), min(accepted, verified or accepted)))
    return history


def test_a_drafter_starts_with_credit_or_with_its_card():
    assert AcceptanceHistory().acceptance("d", 3)[0].tolist() == pytest.approx([ACCEPTANCE] * 3)
    card = AcceptanceHistory({"d": [0.9, 0.6]})
    assert card.acceptance("d", 4)[0].tolist() == pytest.approx([0.9, 0.6, 0.6, 0.6])
    expected = card.survival("d", [5], 2)[0]
    assert 0.9 < expected[0] < 0.96  # and the benefit of the doubt
    assert 0.54 < expected[1] < 0.66


def test_acceptance_by_position_is_found():
    """Within .06 of the truth at every position after 2,000 rounds (fading memory of 500; 3 standard errors)."""
    mean, rounds = shown([0.9, 0.8, 0.5], 2000).acceptance("d", 3)
    assert mean.tolist() == pytest.approx([0.9, 0.8, 0.5], abs=0.06)
    assert rounds[0] > rounds[1] > rounds[2]


def test_the_benefit_of_the_doubt_fades():
    """A new drafter is expected to do better than its credit, one known from 400 rounds within .02 of what it does."""
    assert 0.8 < AcceptanceHistory().survival("d", [0], 1)[0, 0] < 0.9
    history = shown([0.6], 400)
    assert history.survival("d", [1], 1)[0, 0] == pytest.approx(history.acceptance("d", 1)[0][0], abs=0.02)


def test_a_known_drafter_has_no_benefit_of_the_doubt_behind_what_is_drafted():
    """400 rounds of one token each: positions nobody looks at are expected to go on like the first, within .02, and no
    better. With a doubt of its own the second would promise .17 more, and would be drafted for it."""
    history = shown([0.6], 400)
    acceptance = history.acceptance("d", 5)[0]
    assert history.survival("d", [1], 5)[0] == pytest.approx(np.cumprod(acceptance), abs=0.02)


def test_a_useless_drafter_is_found_out_within_ten_rounds():
    history = AcceptanceHistory()
    for _ in range(10):
        history.record("d", 0, Outcome(4, 0))
    assert history.survival("d", [0, 1], 4)[:, 0].max() < 0.2
    assert history.acceptance("d", 4)[0][3] < 0.15  # positions nobody reached follow the one before


def test_requests_share_what_they_show_and_keep_what_is_theirs():
    """A new request starts from what the others have shown; a good one among bad ones rises above them."""
    history = AcceptanceHistory()
    for _ in range(40):
        history.record("d", 1, Outcome(1, 0))
        history.record("d", 2, Outcome(1, 1))
    bad, good, new = history.survival("d", [1, 2, 3], 1)[:, 0]
    assert bad < 0.25
    assert good > 0.75
    assert 0.35 < new < 0.65
    history.forget(2)
    assert history.survival("d", [2], 1)[0, 0] == new


def test_drafters_are_told_apart():
    history = AcceptanceHistory()
    history.record("d", 0, Outcome(1, 1))
    assert history.rounds("d") == 1
    assert history.rounds("e") == 0
    assert history.acceptance("e", 1)[0][0] == pytest.approx(ACCEPTANCE)


def test_old_rounds_fade():
    """What 2,000 bad rounds have shown is gone after 2,000 good ones: below 1 % of the weight."""
    history = shown([0.0], 2000)
    for _ in range(2000):
        history.record("d", 1, Outcome(1, 1))
    assert history.acceptance("d", 1)[0][0] > 0.98
    assert history.acceptance("d", 1)[1][0] < SHARED_MEMORY + 3


def test_slots_that_were_left_out_count_with_their_confidence():
    """Rounds with c_2 = .9 verify two tokens, those with c_2 = .1 only one. Counting verified slots alone would say .9
    at position 2; the truth is .5."""
    biased, honest = AcceptanceHistory(), AcceptanceHistory()
    rng = np.random.default_rng(3)
    for i in range(600):
        c, verified = (0.9, 2) if i % 2 else (0.1, 1)
        accepted = 2 if verified == 2 and rng.random() < c else 1
        biased.record("d", 0, Outcome(verified, accepted))
        honest.record("d", 0, Outcome(verified, accepted, [1.0, c], [1.0, 1.0]))
    assert biased.acceptance("d", 2)[0][1] > 0.85
    assert honest.acceptance("d", 2)[0][1] == pytest.approx(0.5, abs=0.06)


def test_behind_a_rejection_nothing_counts():
    """Confidences behind a rejected token are of a draft that was dead."""
    one, two = AcceptanceHistory(), AcceptanceHistory()
    one.record("d", 0, Outcome(2, 1))
    two.record("d", 0, Outcome(2, 1, [0.9, 0.9, 0.9, 0.9], [1.0] * 4))
    assert one.acceptance("d", 4)[0].tolist() == two.acceptance("d", 4)[0].tolist()


def test_a_match_rate_is_of_lookups():
    """One drafter that matches once in four lookups, seen by the request itself and, less sharply, by others."""
    history = AcceptanceHistory()
    for i in range(200):
        if i % 4 == 0:
            history.record("n", 0, Outcome(1, 1))
        else:
            history.record_miss("n", 0)
    assert history.match_rate("n", 0) == pytest.approx(0.25, abs=0.05)
    assert history.match_rate("n", 9) == pytest.approx(0.25, abs=0.05)
    assert history.match_rate("other", 0) == 1.0
    assert history.rounds("n") == 50


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_estimates_are_probabilities_and_survival_never_rises(rounds):
    history = AcceptanceHistory()
    for verified, accepted in rounds:
        history.record("d", 0, Outcome(max(verified, accepted), accepted))
    survival = history.survival("d", [0, 1], 5)
    estimate = history.estimate("d", 5)
    assert np.all((survival >= 0) & (survival <= 1))
    assert np.all(np.diff(survival, axis=1) <= 0)
    assert np.all((estimate.low <= estimate.mean) & (estimate.mean <= estimate.high) & (estimate.high <= 1))


def test_the_bounds_hold_and_narrow():
    """A 90 % interval holds the true survival in at least 48 of 60 histories of 60 rounds, and narrows with rounds."""
    truth = np.cumprod([0.8, 0.8, 0.8])
    hits = 0
    for seed in range(60):
        estimate = shown([0.8] * 3, 60, seed).estimate("d", 3)
        hits += bool(estimate.low[2] <= truth[2] <= estimate.high[2])
    assert hits >= 48
    few, many = shown([0.8] * 3, 20).estimate("d", 3), shown([0.8] * 3, 400).estimate("d", 3)
    assert many.high[2] - many.low[2] < few.high[2] - few.low[2]


# ----------------------------------------------------------------------------------------------- corrected confidences


def test_an_overconfident_drafter_is_corrected():
    """It says .95 and .8 where .7 and .4 come true: after 600 verdicts the mean of what is said is right within .05,
    and the order is kept."""
    online, rng = OnlineCalibration(), np.random.default_rng(1)
    for i in range(600):
        c, truth = ((0.95, 0.7), (0.8, 0.4))[i % 2]
        online.record("d", 1, c, bool(rng.random() < truth))
    high, low = online.apply("d", 1, 0.95), online.apply("d", 1, 0.8)
    assert (high + low) / 2 == pytest.approx(0.55, abs=0.05)
    assert high > low
    assert 0 < online.apply("d", 2, 0.8) < 0.8  # a position without verdicts follows the drafter's others
    assert online.apply("e", 1, 0.8) == 0.8


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_a_correction_keeps_the_order(verdicts, low, high):
    online = OnlineCalibration()
    for c, accepted in verdicts:
        online.record("d", 1, c, accepted)
    low, high = sorted((low, high))
    assert 0 <= online.apply("d", 1, low) <= online.apply("d", 1, high) <= 1
    assert math.isnan(online.apply("d", 1, math.nan))


def test_confidences_are_scaled_by_the_requests_own_table():
    """The table of the key, nothing under another key, and then what verdicts show."""
    key = CalibrationKey("rejection", "probabilistic", "one")
    made = Confidences({"d": Calibration([Table(key, (2.0, 4.0), "held out", 10)])})
    assert made.calibrated("d", key, 1, 0.9) == pytest.approx(0.75)
    assert made.calibrated("d", None, 1, 0.9) == 0.9
    assert made.calibrated("d", CalibrationKey("coupled", "probabilistic", "one"), 1, 0.9) == 0.9
    assert made.all_of("d", key, [0.9, 0.9]) == pytest.approx([0.75, 0.634], abs=1e-3)
    assert made.trust("d", key, 2) == [1.0, 1.0]
    assert made.trust("d", None, 1) == [0.0]
    for _ in range(50):
        made.record("d", key, [0.9, 0.9], 2, 0)
    assert made.calibrated("d", key, 1, 0.9) < 0.4
    assert 0.5 < made.trust("d", None, 1)[0] < 1


def test_a_draft_is_calibrated_as_its_slots_are_one_by_one():
    """Under any conditions, NaN and certain ones included, to the bit; and anew after every verdict."""
    key = CalibrationKey("rejection", "probabilistic", "one")
    made = Confidences({"d": Calibration([Table(key, (2.0, 0.7), "", 0)])})
    for accepted in range(4):
        for drafter, of, draft in itertools.product("de", (key, None), ([0.9, 0.2, 0.6], [1.0, 0.0], [0.5, math.nan])):
            alone = [made.calibrated(drafter, of, k, c) for k, c in enumerate(draft, 1)]
            np.testing.assert_equal(made.all_of(drafter, of, draft), alone)
        before = [made.all_of(drafter, None, [0.5] * 4) for drafter in "de"]
        made.record("d", None, [0.9, 0.4, 0.7], 3, accepted)
        after = [made.all_of(drafter, None, [0.5] * 4) for drafter in "de"]
        assert (before[0] != after[0], before[1] != after[1]) == (True, False)


def test_several_requests_are_told_what_each_is_told():
    """Whatever they have shown: nothing, less than is asked for, more; and one that came in the place of another."""
    history = AcceptanceHistory()
    for request, verified in ((1, 2), (2, 5), (4, 3)):
        history.record("d", request, Outcome(verified, verified - 1))
        history.record_miss("d", 2)
    history.forget(4)
    many = [0, 1, 2, 3, 4]
    for told in (history.own_rounds, history.match_rates):
        assert told("d", many).tolist() == [told("d", [request])[0] for request in many]
    survival = history.survival("d", many, 3)
    assert survival.tolist() == [history.survival("d", [request], 3)[0].tolist() for request in many]
    assert history.own_rounds("d", many) == pytest.approx([0.0, 1.0, 4.0, 0.0, 0.0], abs=0.1)
    assert len({tuple(own) for own in survival.tolist()}) == 3


# ---------------------------------------------------------------------------------------------------------- past rounds


def test_past_rounds_are_of_the_same_request_and_drafter():
    past = PastRounds()
    past.record(1, "d", [0.5, 0.5])
    past.record(1, "d", [0.9, 0.5])
    past.record(1, "e", [0.1, 0.1])
    rows = [Expected(1, "d", [0.8, 0.4]), Expected(2, "d", [0.7])]
    rounds = past.of(rows)
    assert rounds.shape == (ROUNDS, 2, 2)
    assert rounds[0].tolist() == [[0.9, 0.45], [0.7, 0.0]]
    assert rounds[1].tolist() == [[0.5, 0.25], [0.7, 0.0]]
    assert rounds[2].tolist() == rounds[0].tolist()  # two are known: they are gone through again
    past.forget(1)
    assert past.of(rows)[0].tolist() == [[0.8, 0.4], [0.7, 0.0]]


def test_a_shorter_past_draft_goes_on_as_expected():
    past = PastRounds()
    past.record(1, "d", [0.5])
    assert past.of([Expected(1, "d", [0.8, 0.4, 0.2])])[0].tolist() == [[0.5, 0.25, 0.125]]
    assert past.of([Expected(1, "d", [])]).shape[2] == 0


def test_many_requests_need_one_past_round():
    rows = [Expected(r, "d", [0.5]) for r in range(100)]
    assert PastRounds().of(rows).shape == (1, 100, 1)
