"""What a round costs, the file it is kept in, and how real step times correct it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget.world import BFLOAT16, KEY, profile, serial
from forerun.budget.costs import ContextCost, Costs, DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.drift import CLIP, MOST, RATE, REFRESH, Drift, LiveCosts
from forerun.budget.profile import Profile
from forerun.errors import OptionError

CONTEXT = ContextCost((256, 1024, 4096), (0.0, 0.1, 0.4), (0.0, 0.01, 0.05))


def test_a_round_is_its_drafting_and_its_pass():
    """round(R, K, B) = draft(R, K) + verify(B); plain(R) is verify(R); both grow with the context."""
    costs = Costs(VerifyCost(CostCurve.measured(BFLOAT16), CONTEXT), serial(0.1, 0.1))
    assert costs.plain(1) == 1.0
    assert costs.plain(4) == 1.09
    assert costs.round(1, 3, 4) == pytest.approx(0.3 + 1.09)
    assert costs.round(4, 3, 16, 4096) == pytest.approx(costs.round(4, 3, 16) + 4 * 0.4 + 16 * 0.05)
    assert costs.round(2, 0, 2) == costs.plain(2)


def test_nothing_to_draft_costs_nothing():
    draft = serial(0.2, 0.1)
    assert draft(0, 5) == draft(5, 0) == draft.of([0, 0], [10, 10]) == 0.0


def test_drafts_of_different_lengths_share_the_passes_they_have_in_common():
    """Slot k is a pass over those that go that far: (3, 1, 1) costs one pass over three and two over one."""
    draft = DraftCost.measured({1: {1: 1.0, 3: 1.4}, 2: {1: 2.0, 3: 2.8}, 3: {1: 3.0, 3: 4.2}})
    assert draft.of([3, 1, 0, 1], [0] * 4) == pytest.approx(1.4 + 1.0 + 1.0)
    assert draft.of([3, 3, 3], [0] * 3) == pytest.approx(draft(3, 3))


def test_what_was_not_measured_of_a_drafter_is_taken_to_be_dear():
    """Below the shortest K it costs that K (a block is one pass); beyond a single measured K, in proportion."""
    block = DraftCost.measured({7: {1: 1.0, 8: 1.2}})
    assert block(1, 1) == block(1, 7) == 1.0
    assert block(1, 14) == pytest.approx(2.0)
    line = DraftCost.measured({2: {1: 1.0, 8: 1.0}, 4: {1: 1.5, 8: 1.5}})
    assert line(1, 3) == pytest.approx(1.25)
    assert line(1, 8) == pytest.approx(2.5)


def test_a_longer_draft_never_costs_less():
    noisy = DraftCost.measured({2: {1: 1.0, 2: 1.0}, 4: {1: 0.9, 2: 0.9}})
    assert np.all(np.diff(noisy.table(2, 6), axis=0) >= 0)


@given(st.floats(0, 5), st.floats(0, 1), st.integers(2, 9))
def test_the_excess_of_a_context_is_split_into_request_and_rows(request_part, row_part, rows):
    """Measured with 1 and n rows, both parts come out; nothing is extra at the shortest context or below it."""
    measured = {
        256: {1: 1.0, rows: 1.5},
        1024: {1: 1.0 + request_part + row_part, rows: 1.5 + request_part + rows * row_part},
    }
    cost = ContextCost.measured(measured)
    extra = cost.at([0, 256, 1024, 1792])
    assert extra.request.tolist() == pytest.approx([0, 0, request_part, 2 * request_part], abs=1e-9)
    assert extra.row.tolist() == pytest.approx([0, 0, row_part, 2 * row_part], abs=1e-9)


def test_with_one_number_of_rows_a_context_is_charged_to_rows():
    assert ContextCost.measured({256: {2: 1.0}, 512: {2: 1.5}}).per_row == (0.0, 0.25)


def test_neither_part_of_a_contexts_cost_is_negative():
    """Noise that would give a request a negative share is given to the rows."""
    cost = ContextCost.measured({256: {1: 1.0, 5: 1.0}, 512: {1: 1.0, 5: 2.0}})
    assert cost.per_request[1] >= 0
    assert cost.per_row[1] > 0


# ------------------------------------------------------------------------------------------------------------- the file


def measured_profile() -> Profile:
    drafts = {"small": serial(0.1, 0.2, follow=0.03, context=CONTEXT), "ngram": serial(1e-5)}
    return profile(BFLOAT16, drafts, CONTEXT)


def test_a_profile_survives_its_file():
    """Equal after the round trip, and the text is the same again."""
    known = measured_profile()
    again = Profile.loads(known.dumps(), KEY)
    assert again == known
    assert again.dumps() == known.dumps()
    report = {"profile": json.loads(known.dumps()), "path": None}  # of `forerun profile --json`
    assert Profile.loads(json.dumps(report), KEY).dumps() == known.dumps()


@pytest.mark.parametrize("field", ["model", "dtype", "device", "threads"])
def test_a_profile_of_something_else_is_refused_by_name(field):
    other = replace(KEY, **{field: 2 if field == "threads" else "other"})
    with pytest.raises(OptionError, match=f"measured with {field}"):
        Profile.loads(measured_profile().dumps(), other)


def test_another_version_and_damage_are_refused():
    known = measured_profile()
    data = json.loads(known.dumps())
    for text, message in [
        (json.dumps(data | {"version": 99}), "version 99"),
        ("{", "not JSON"),
        ("[]", "version None"),
        (json.dumps({k: v for k, v in data.items() if k != "verify"}), "damaged"),
        (json.dumps(data | {"key": {"model": "m"}}), "damaged"),
        (json.dumps(data | {"verify": {"tokens": {"counts": [2, 1], "seconds": [1, 1]}, "context": {}}}), "ascend"),
        (known.dumps().replace('"follow": 0.03', '"follow": NaN'), "nan seconds"),
        (known.dumps().replace("0.4\n", "Infinity\n"), "context must ascend"),
        (known.dumps().replace("512\n", "Infinity\n"), "damaged"),
        (known.dumps().replace("512\n", "5" * 5000 + "\n"), "not JSON"),
        ("[" * 100_000, "not JSON"),
    ]:
        with pytest.raises(OptionError, match=message):
            Profile.loads(text)


def test_a_drafter_that_was_not_measured_is_named():
    with pytest.raises(OptionError, match="no costs of the drafter 'smal'"):
        measured_profile().costs("smal")


# ------------------------------------------------------------------------------------------------------------ the drift


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_one_step_moves_a_cost_by_little(predicted, seconds):
    """Whatever a single observation says, a factor moves by at most exp(RATE * CLIP), 2.3 %."""
    drift = Drift()
    drift.observe(3, predicted, seconds)
    assert abs(math.log(drift.factor(3))) <= RATE * CLIP + 1e-12


def test_a_lasting_change_is_learnt_and_a_passing_one_forgotten():
    """A machine that is twice as slow is known within 5 % after 60 steps; ten wild steps among 200 leave under 10 %."""
    slow, shaken = Drift(), Drift()
    for _ in range(60):
        slow.observe(0, slow.factor(0), 2.0)
    assert slow.factor(0) == pytest.approx(2.0, rel=0.05)
    for step in range(200):
        shaken.observe(0, shaken.factor(0), 50.0 if step % 20 == 7 else 1.0)
        assert shaken.factor(0) < 1.1


def test_a_region_nobody_visits_follows_the_others():
    drift = Drift()
    for _ in range(200):
        drift.observe(0, drift.factor(0), 2.0)
    assert 1.3 < drift.factor(5) < 2.0


def test_a_factor_is_bounded():
    drift = Drift()
    for _ in range(2000):
        drift.observe(0, 1e-9, 1e9)
    assert drift.factor(0) == pytest.approx(math.exp(MOST))


def test_what_cannot_be_a_time_teaches_nothing():
    drift = Drift()
    for predicted, seconds in [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)]:
        drift.observe(0, predicted, seconds)
    assert drift.factor(0) == 1.0


def test_live_costs_follow_the_machine_and_stay_in_order():
    """Passes of 8 rows get 1.5 times as slow: the curve says so there, never falls, and 1 row follows in part."""
    live = LiveCosts(measured_profile())
    before = live.now
    for _ in range(REFRESH * 12):
        live.observe_target(8, live.now.verify.tokens(8), 1.5 * before.verify.tokens(8))
        live.observe_draft("small", 8, live.now.drafts["small"](1, 8), 3 * before.drafts["small"](1, 8))
    after = live.now
    assert after.verify.tokens(8) == pytest.approx(1.5 * before.verify.tokens(8), rel=0.05)
    assert 1.1 < after.verify.tokens(1) < 1.5
    assert np.all(np.diff(after.verify.tokens.over(1, 64)) >= 0)
    assert after.drafts["small"](1, 8) == pytest.approx(3 * before.drafts["small"](1, 8), rel=0.05)
    assert after.drafts["ngram"] == before.drafts["ngram"]
    assert live.measured == before


def test_live_costs_settle_where_the_machine_is():
    """Plain steps of a machine that is 5 % slower: known within 1 % at every step behind the first 200, however seldom
    the result is looked at. A correction made again until it is seen would swing to both sides."""
    live = LiveCosts(measured_profile())
    truth = 1.05 * live.measured.verify.tokens(1)
    errors = []
    for _ in range(REFRESH * 20):
        predicted = live.now.verify.tokens(1)
        live.observe_target(1, predicted, truth)
        errors.append(abs(predicted / truth - 1))
    assert max(errors[200:]) < 0.01


def test_a_pass_cheaper_than_a_smaller_one_makes_no_others_cheap():
    """8 rows take 4/5 of what 1 row takes, which no curve can say. Passes of 1 row are known, and those of 64, which
    nobody makes, stay near what was measured."""
    live = LiveCosts(measured_profile())
    before = live.now.verify.tokens
    for _ in range(REFRESH * 20):
        live.observe_target(8, live.now.verify.tokens(8), 0.8 * before(1))
        live.observe_target(1, live.now.verify.tokens(1), before(1))
    after = live.now.verify.tokens
    assert after(1) == pytest.approx(before(1), rel=0.05)
    assert after(64) > 0.7 * before(64)
