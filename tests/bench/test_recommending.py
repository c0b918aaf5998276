"""Expected speed-ups: from costs and acceptance that are known, they are what decoding would come to."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from bench.clocks import VOCAB, engine, target
from budget.world import BFLOAT16, FREE_LOOKUP, INT4, profile, serial
from forerun.bench.recommending.acceptance import Carded, Shown, shown, shown_in_turn
from forerun.bench.recommending.mixture import Mixed, Part, binomial
from forerun.bench.recommending.recommendation import Candidate, by_batch, gains, judge, last_paying
from forerun.bench.recommending.report import (
    FORMULA,
    MIXED_BEATS,
    NOT_WORTH_IT,
    Recommendation,
    Setting,
    by_k,
    sentences,
    table,
)
from forerun.budget.costs import ContextCost, Costs
from forerun.budget.planning import forecast
from forerun.drafters.card import acceptances
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import DecodingStats, Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.stats import total
from forerun.sampling import Sampling

CHEAP = profile(INT4, {"small": serial(0.1, 0.05)}).costs("small")
LOOKUP = profile(BFLOAT16, {"ngram": FREE_LOOKUP}).costs("ngram")
DEAR = profile(BFLOAT16, {"small": serial(9.0, 2.0)}).costs("small")


def seen(survival, rounds=200, match=1.0, prompts=4):
    """What a drafter with this survival shows on equal prompts, without chance."""
    reached = np.array([rounds * match, *(rounds * match * np.array(survival[:-1]))])
    accepted = rounds * match * np.array(survival)
    counts = (np.tile(reached, (prompts, 1)), np.tile(accepted, (prompts, 1)))
    return Shown(*counts, np.full(prompts, rounds * match), np.full(prompts, float(rounds)))


def candidate(costs, shown_, label="small"):
    return Candidate(label, f"--drafter {label}", costs, shown_)


# ---------------------------------------------------------------------------------------------------------------- gain


def test_a_drafter_that_always_proposes_gains_what_forecast_says():
    """m = 1: expected tokens over the cost in plain steps, less 1, at every K and load."""
    survival = np.array([0.8, 0.6, 0.5, 0.3])
    for requests in (1, 4, 16):
        expected = forecast(CHEAP, survival, requests).gains
        assert gains(CHEAP, survival, 1.0, requests, 0).tolist() == pytest.approx(expected)


def test_by_hand():
    """K = 3 at int4 costs: 4 rows cost 1.39, drafting 0.2; 1 + .8 + .64 + .512 tokens."""
    found = gains(CHEAP, np.array([0.8, 0.64, 0.512]), 1.0, 1, 0)
    assert found[0] == pytest.approx(0.0)
    assert found[3] == pytest.approx((1 + 0.8 + 0.64 + 0.512) / (0.1 + 2 * 0.05 + 1.39) - 1)


def test_rounds_without_a_match_are_plain_steps():
    """An n-gram that matches in a quarter of the rounds: a quarter of the drafts, rows and tokens; every round asks."""
    survival = np.array([0.9, 0.8])
    found = gains(LOOKUP, survival, 0.25, 1, 0)
    call = LOOKUP.draft(1, 2)
    tokens = 0.25 * (1 + 0.9 + 0.8) + 0.75
    seconds = 0.25 * LOOKUP.verify.tokens(3) + 0.75 * LOOKUP.verify.tokens(1) + call
    assert found[2] == pytest.approx(tokens / seconds - 1, rel=1e-6)


def test_a_thousand_requests_match_or_not():
    """Chances of so many matches are those of a binomial, also where its coefficients are beyond any float."""
    assert binomial(4, 0.25).tolist() == pytest.approx([81 / 256, 108 / 256, 54 / 256, 12 / 256, 1 / 256])
    many = binomial(3000, 0.3)
    assert many.sum() == pytest.approx(1)
    assert many @ np.arange(3001) == pytest.approx(900)
    assert (binomial(3, 0.0).tolist(), binomial(3, 1.0).tolist()) == ([1, 0, 0, 0], [0, 0, 0, 1])


def test_a_drafter_that_never_proposes_costs_what_asking_costs():
    """No division by zero; the loss is the drafting call."""
    found = gains(CHEAP, np.zeros(3), 0.0, 1, 0)
    assert found[0] == 0.0
    assert found[1] == pytest.approx(1 / 1.1 - 1)


# ---------------------------------------------------------------------------------------------------------- acceptance


def test_survival_is_the_pooled_product_of_conditional_acceptance():
    """With many rounds; the neighbour's weight is then nothing."""
    found = seen([0.8, 0.4, 0.1], rounds=10**6)
    assert found.survival().tolist() == pytest.approx([0.8, 0.4, 0.1], abs=1e-4)
    assert found.match() == 1.0
    assert found.rounds == 4 * 10**6


def test_a_position_nobody_reached_follows_the_one_before():
    """It is not 0, and not a division by it."""
    nothing = Shown(np.array([[100.0, 0.0]]), np.array([[50.0, 0.0]]), np.array([100.0]), np.array([100.0]))
    assert nothing.survival().tolist() == pytest.approx([0.5, 0.25], abs=0.01)
    none = Shown(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(1), np.array([30.0]))
    assert (none.survival().tolist(), none.match()) == ([0.0, 0.0], 0.0)


def test_counts_come_from_the_engine_prompt_by_prompt():
    """A perfect drafter: all accepted; padded to K where a request never came so far."""
    made, prompts = engine(k=3), [[1, 2, 3], [4, 4, 1]]
    entry = made.core.loaded[0]
    told = []
    found = shown(made, entry, prompts, Sampling(temperature=0, max_tokens=9, ignore_eos=True, seed=0), told.append)
    assert sum(told) == 18
    assert found.reached.shape == (2, 3)
    assert (found.accepted == found.reached).all()
    assert found.match() == 1.0
    short = Shown.of([DecodingStats(drafting_rounds=1, target_steps=2)], 3)
    assert short.reached.tolist() == [[0, 0, 0]]


# ------------------------------------------------------------------------------------------------------------- verdicts


def test_the_best_k_is_that_of_the_greatest_gain():
    """Searched on the staircase: with int4 weights 4 rows are the last cheap ones, so K = 3."""
    verdict = judge(candidate(CHEAP, seen([0.85**k for k in range(1, 9)], 10**6)), 1, 0)
    assert verdict.length == 3
    assert verdict.gain == max(verdict.gains)
    assert verdict.worth_it
    assert verdict.emitted == pytest.approx(1 + 0.85 + 0.85**2 + 0.85**3, abs=1e-3)
    assert verdict.verify_ratio == pytest.approx(1.39)


def test_prompts_that_differ_make_the_answer_less_sure():
    """The same mean acceptance: equal prompts give a point, unequal ones an interval that contains it."""
    even = judge(candidate(CHEAP, seen([0.7, 0.5], 1000, prompts=10)), 1, 0)
    good, bad = seen([0.95, 0.9], 1000, prompts=5), seen([0.45, 0.1], 1000, prompts=5)
    mixed = Shown(*(np.concatenate(pair) for pair in zip(_arrays(good), _arrays(bad), strict=True)))
    uneven = judge(candidate(CHEAP, mixed), 1, 0)
    assert even.interval.high - even.interval.low < 1e-9
    assert uneven.interval.low < uneven.gain < uneven.interval.high
    assert uneven.interval.high - uneven.interval.low > 0.1


def _arrays(one):
    return one.reached, one.accepted, one.drafted, one.steps


def test_a_dear_drafter_is_not_worth_it():
    """Perfect acceptance does not pay for a call of nine plain steps: K = 0, and the loss is shown."""
    verdict = judge(candidate(DEAR, seen([1.0, 1.0])), 1, 0)
    assert not verdict.worth_it
    assert verdict.gain < 0
    assert verdict.as_dict()["num_speculative_tokens"] == 0
    assert verdict.as_dict()["best_drafting_k"] in (1, 2)


def test_a_gain_below_four_per_cent_is_not_worth_it():
    """A gain of 3 % is within what costs are known to."""
    small_gain = Costs(LOOKUP.verify, serial(0.24))
    predicted = gains(small_gain, np.array([0.3]), 1.0, 1, 0)
    assert 0 < gains(Costs(LOOKUP.verify, serial(0.225)), np.array([0.3]), 1.0, 1, 0)[1] < 0.04
    verdict = judge(candidate(Costs(LOOKUP.verify, serial(0.225)), seen([0.3], 10**6)), 1, 0)
    assert not verdict.worth_it
    assert predicted[1] < 0.04


def test_k_falls_with_the_number_of_requests():
    """Ranges are gapless from 1 on, and K is 0 once drafting does not pay."""
    ranges = by_batch(candidate(CHEAP, seen([0.6**k for k in range(1, 7)], 10**6)), 64, 0)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 64
    assert all(low == high + 1 for (_, high, _), (low, _, _) in pairwise(ranges))
    assert ranges[0][2] > ranges[-1][2]


def test_the_end_of_what_pays_is_found_by_load_and_context():
    """The last that pays, whatever lies before it."""
    context = ContextCost((0, 1000), (0.0, 2.0), (0.0, 0.0))
    far = Costs(CHEAP.verify, serial(0.1, 0.05, context=context))
    one = candidate(far, seen([0.8, 0.6], 10**6))
    assert last_paying(one, [(1, 0), (1, 100), (1, 10**5)]) == (1, 100)
    assert last_paying(one, [(1, 10**5), (1, 0)]) == (1, 0)
    assert last_paying(one, [(1, 10**5)]) is None


# -------------------------------------------------------------------------------------------------------------- reports


def _recommendation(*candidates, concurrency=(1, 32)):
    return Recommendation.of(list(candidates), Setting(concurrency, 100, 64, 2048))


def test_the_best_choice_is_named_with_its_command():
    """And the one that is not worth it as such."""
    good, bad = candidate(CHEAP, seen([0.8, 0.6, 0.5])), candidate(DEAR, seen([0.9, 0.8, 0.7]), "other")
    made = _recommendation(good, bad)
    assert made.best(1).label == "small"
    lines = list(sentences(made))
    assert any("small with K = " in line for line in lines)
    commands = [line.strip() for line in lines if line.strip().startswith("forerun generate --drafter small")]
    assert (
        commands[0] == f"forerun generate --drafter small --num-speculative-tokens {made.best(1).length} --policy fixed"
    )
    assert not any("other with K" in line for line in lines)
    assert any("num_speculative_tokens_per_batch_size" in line for line in lines)
    assert table(made).row_count == by_k(made).row_count == 4
    assert len(by_k(made).columns) == 2 + 3
    assert json.loads(json.dumps(made.as_dict(), allow_nan=False))["best"]["1"] == "small"


def test_nothing_pays_and_that_is_said():
    """Plain decoding is the recommendation."""
    made = _recommendation(candidate(DEAR, seen([0.9, 0.8])), concurrency=(1,))
    assert made.best(1) is None
    assert NOT_WORTH_IT in next(iter(sentences(made)))
    assert made.as_dict()["best"] == {"1": "vanilla"}
    assert "(1 - a^(K+1)) / (1 - a)" in FORMULA


# ------------------------------------------------------------------------------------------------------------ mixtures

BOTH = profile(INT4, {"ngram": FREE_LOOKUP, "small": serial(0.1, 0.05)})


def part(name, shown_):
    return Part(name, BOTH.costs(name), shown_, {"method": name})


def mixed(first, other):
    return Mixed("ngram, else small", "--target t", part("ngram", first), part("small", other))


def test_a_mixture_by_hand():
    """One request: half of the rounds verify 2 looked-up tokens, the other half 3 drafted ones."""
    found = mixed(seen([0.9, 0.8], match=0.5, rounds=10**6), seen([0.7, 0.5, 0.3], rounds=10**6))
    tokens = 1 + 0.5 * (0.9 + 0.8) + 0.5 * (0.7 + 0.5 + 0.3)
    call = BOTH.costs("ngram").draft(1, 2)
    seconds = call + 0.5 * 1.245 + 0.5 * (0.1 + 2 * 0.05 + 1.39)  # 3 rows lie half-way between 1.1 and 1.39
    assert found._gain((2, 3), 1, 0, slice(None)) == pytest.approx(tokens / seconds - 1, rel=1e-4)
    verdict = found.verdict(1, 0)
    assert verdict.gain == max(found._gain((a, b), 1, 0, slice(None)) for a in (1, 2) for b in (1, 2, 3))
    assert verdict.interval.low == pytest.approx(verdict.gain)
    assert verdict.emitted > 1


def test_a_mixture_whose_other_part_never_proposes_is_the_first_alone():
    """The gain of a single request is that of `gains`, but for what asking the other one costs."""
    first = seen([0.9, 0.8], match=0.4, rounds=10**6)
    nothing = Shown(np.zeros((4, 1)), np.zeros((4, 1)), np.zeros(4), np.full(4, 100.0))
    free = profile(INT4, {"ngram": FREE_LOOKUP, "small": serial(1e-9)})
    both = Mixed(
        "x", "", Part("ngram", free.costs("ngram"), first, {}), Part("small", free.costs("small"), nothing, {})
    )
    alone = gains(free.costs("ngram"), first.survival(), first.match(), 1, 0)
    assert both._gain((2, 1), 1, 0, slice(None)) == pytest.approx(float(alone[2]), rel=1e-6)


def test_requests_match_by_themselves():
    """Of many requests about a share m does: the expected pass lies between those of none and of all."""
    found = mixed(seen([0.9], match=0.5, rounds=10**6), seen([0.7, 0.5], rounds=10**6))
    weights = found._weights(8, slice(None))
    assert weights.sum() == pytest.approx(1)
    assert weights.argmax() == 4
    passes = found._verify((1, 2), 8, 0, slice(None))
    assert passes[0] > passes[-1]
    assert found.best_gain(1, 0) > found.best_gain(64, 0) >= 0


def test_what_two_drafters_get_right_is_counted_in_their_turns():
    """The n-gram is asked in every round, the model only where that had nothing; together they explain every round."""
    options = EngineOptions(num_speculative_tokens=2)
    over = target()
    made = Engine(over, load_drafters([Ngram(3, 1), Small(target(), VOCAB)], over, options), options)
    prompts = [[1, 2, 3, 1, 2, 3], [4, 4, 1]]
    sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True, seed=0)
    told = []
    first, other = shown_in_turn(made, prompts, sampling, told.append)
    assert sum(told) == 40
    assert 0 < first.match() < 1
    assert other.match() == 1.0
    assert other.steps.sum() == first.steps.sum() - first.drafted.sum()
    assert (other.accepted == other.reached).all(), "the model is the target's twin"
    stats = total(c.stats for c in made.generate(prompts, sampling))
    assert first.accepted.sum() + other.accepted.sum() == stats.accepted
    assert made.core.on_round is None


def test_two_in_turn_are_recommended_where_they_beat_either_alone():
    """By more than a second model is worth; the command asks them in this order, each with its own K."""
    lookup, model = seen([0.95, 0.9], match=0.5), seen([0.8, 0.6, 0.5])
    singles = [
        Candidate("ngram", "--drafter ngram", BOTH.costs("ngram"), lookup),
        candidate(BOTH.costs("small"), model),
    ]
    both = mixed(lookup, model)
    made = Recommendation.of([*singles, both], Setting((1,), 100, 8, 256))
    best = made.best(1)
    assert best.label == "ngram, else small"
    assert best.gain > MIXED_BEATS + max(v.gain for v in made.verdicts if v.label != best.label)
    lines = list(sentences(made))
    k, other = best.lengths
    assert f"K = {k}, else {other}" in lines[0]
    fixed = f"""forerun generate --target t --drafter '{{"method": "ngram", "num_speculative_tokens": {k}}}' """
    assert lines[1].strip().startswith(fixed)
    assert lines[1].endswith("--policy fixed")
    assert lines[2].strip().startswith("forerun generate --target t --drafter ngram --drafter small    adapts")
    document = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert document["best"] == {"1": "ngram, else small"}
    assert set(document["choices"][2]["acceptance"]) == {"ngram", "small"}
    assert table(made).row_count == 3
    assert by_k(made).row_count == 2


def test_a_mixture_that_is_hardly_better_is_not_recommended():
    """A look-up that almost never matches leaves the model alone."""
    model = seen([0.8, 0.6, 0.5])
    both = mixed(seen([0.9], match=0.02), model)
    made = Recommendation.of([candidate(BOTH.costs("small"), model), both], Setting((1,), 100, 8, 256))
    assert made.best(1).label == "small"


# --------------------------------------------------------------------------------------------------------------- cards

CARD = """# `dspark` drafter

Decoding at temperature 0, 8 prompts: mean accepted length 3.100, tokens per step 2.900.

| position | 1 | 2 | 3 |
|---|---|---|---|
| `acceptance_by_position` | 0.800 | 0.750 |  |
| `prefix_survival` | 0.800 | 0.600 |  |

Decoding at temperature 1, 8 prompts: mean accepted length 2.100.

Over the held-out text as given, nothing sampled:

| position | 1 |
|---|---|
| `teacher_forced_acceptance` | 0.700 |
"""


def test_a_card_tells_acceptance_by_position(tmp_path):
    """Of each temperature that it has a table for, up to the first position that nothing had reached."""
    assert acceptances(tmp_path) == {}
    (tmp_path / "README.md").write_text("# Somebody's model\n")
    assert acceptances(tmp_path) == {}
    (tmp_path / "README.md").write_text(CARD)
    assert acceptances(tmp_path) == {0.0: [0.8, 0.75]}


def test_what_a_card_tells_is_a_guess_with_wide_bounds():
    """Survival is the product of its rates; the interval is wider than that of as many measured rounds would be."""
    card = Carded([0.8, 0.75, 0.7])
    assert card.survival().tolist() == pytest.approx([0.8, 0.6, 0.42])
    guessed = judge(Candidate("small", "", CHEAP, card), 1, 0)
    sure = judge(candidate(CHEAP, seen([0.8, 0.6, 0.42], 10**6)), 1, 0)
    assert guessed.gain == pytest.approx(sure.gain, abs=1e-3)
    assert guessed.interval.low < guessed.gain < guessed.interval.high
    assert guessed.interval.high - guessed.interval.low > 0.2
    assert "card" in Candidate("small", "", CHEAP, card).remarks()[0]
