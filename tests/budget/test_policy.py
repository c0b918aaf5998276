"""`choose` and `keep_drafting`: what each policy answers, and that no answer about a token depends on that token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.budget.policy import POLICIES, DraftRow, Exposure, SlotRule, check_policy, choose, keep_drafting
from forerun.errors import OptionError

LINEAR = 1 + 0.2 * np.arange(40)
COUPLED = Exposure(verify_mode="coupled")
confidence = st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.95, 1.0]) | st.floats(0, 1)


@st.composite
def batches(draw):
    """Rows of up to 4 planned tokens, drafted in part, in coupled mode so that every policy may look."""
    rows = []
    for request in range(draw(st.integers(1, 4))):
        planned = draw(st.integers(0, 4))
        drafted = draw(st.lists(confidence, max_size=planned))
        rows.append(DraftRow(request, planned, drafted, COUPLED, draw(st.sampled_from([0.0, 0.3]))))
    return rows


def past_of(rows, seed) -> np.ndarray:
    """Two earlier rounds, descending along each draft."""
    return -np.sort(-np.random.default_rng(seed).random((2, len(rows), 4)), axis=2)


def staircase(rows, seed) -> np.ndarray:
    steps = np.random.default_rng(seed).choice([0.0, 0.01, 0.5, 1.5], sum(row.planned for row in rows))
    return 1 + np.concatenate(([0.0], np.cumsum(steps)))


@given(batches(), st.integers(0, 9), st.sampled_from(POLICIES))
def test_a_length_is_between_nothing_and_the_draft(rows, seed, policy):
    """Every policy: at most what was drafted, nothing from a c_k below the threshold on."""
    chosen = choose(rows, staircase(rows, seed), policy, past_of(rows, seed))
    for row, n in zip(rows, chosen, strict=True):
        low = (k for k, c in enumerate(row.confidence) if not c >= row.threshold)
        assert 0 <= n <= next(low, len(row.confidence))


def test_fixed_and_threshold():
    rows = [DraftRow(0, 4, [0.9, 0.5, 0.9]), DraftRow(1, 4, [0.9, 0.5, 0.9], threshold=0.6), DraftRow(2, 0, [])]
    for policy in ("fixed", "threshold"):
        assert choose(rows, LINEAR, policy) == [3, 1, 0]
    assert choose([DraftRow(0, 1, [float("nan")], threshold=0.1)], LINEAR, "threshold") == [0]


def test_a_probe_is_verified_whole_under_every_policy():
    rows = [DraftRow(0, 3, [0.01, 0.01, 0.01], COUPLED, whole=True), DraftRow(1, 2, [0.01, 0.01], COUPLED)]
    for policy in ("prefix", "delayed", "global"):
        assert choose(rows, 1 + np.arange(3.0), policy, np.full((1, 2, 3), 0.01)) == [3, 0]


def test_delayed_takes_the_count_from_the_past_and_the_tokens_from_now():
    """Two tokens paid best in the last round, whoever had them; now the best two are elsewhere."""
    rows = [DraftRow(0, 2, [0.3, 0.3]), DraftRow(1, 2, [0.9, 0.9])]
    past = np.array([[[0.9, 0.8], [0.01, 0.01]]])
    assert choose(rows, 1 + 0.2 * np.arange(5), "delayed", past) == [0, 2]
    assert choose(rows, 1 + 0.2 * np.arange(5), "delayed", np.zeros((1, 2, 2))) == [0, 0]


def test_delayed_moves_up_to_a_step_edge_only():
    """The past wants one token at a cost of 1.5; the two after it are free."""
    seconds = np.array([1.0, 1.5, 1.5, 1.5, 4.0])
    row = DraftRow(0, 4, [0.5, 0.5, 0.5, 0.5])
    assert choose([row], seconds, "delayed", np.array([[[0.9, 0.0, 0.0, 0.0]]])) == [3]


def test_delayed_averages_rounds_and_knows_that_one_request_cannot_choose():
    """Rounds of survival 1 and 0 in turn, a draft row at .6 of a plain step: for one request a token is worth .5 on
    average, less than it costs; of many requests half are good at any time, and exactly those are worth verifying."""
    turns = np.array([[[1.0]], [[0.0]]])
    assert choose([DraftRow(0, 1, [1.0])], np.array([1.0, 1.6]), "delayed", turns) == [0]
    many = [DraftRow(r, 1, [1.0 if r % 2 else 0.1]) for r in range(8)]
    past = np.tile(np.array([0.0, 1.0])[:, None], (1, 4, 1)).reshape(1, 8, 1)
    assert choose(many, 8 + 0.6 * np.arange(9), "delayed", past) == [0, 1] * 4


@given(batches(), st.integers(0, 9), st.sampled_from(POLICIES), st.data())
def test_no_decision_about_a_token_depends_on_it(rows, seed, policy, data):
    """Redraw x_k of one row: its later confidences and where its draft ends may change, all other rows held fixed.
    Whether x_k is verified does not change. Only `global` fails this, and is refused unless it does no harm."""
    if policy == "global":
        return
    drafting = [r for r, row in enumerate(rows) if row.confidence]
    if not drafting:
        return
    r = data.draw(st.sampled_from(drafting))
    k = data.draw(st.integers(1, len(rows[r].confidence)))
    later = data.draw(st.lists(confidence, max_size=rows[r].planned - k))
    other = DraftRow(r, rows[r].planned, [*rows[r].confidence[:k], *later], COUPLED, rows[r].threshold)
    seconds, past = staircase(rows, seed), past_of(rows, seed)
    before = choose(rows, seconds, policy, past)[r]
    after = choose([*rows[:r], other, *rows[r + 1 :]], seconds, policy, past)[r]
    assert (before >= k) == (after >= k)


def test_global_fails_the_same_test():
    """The control: redrawing x_1 changes c_2 and with it whether x_1 is verified (appendix A of the DSpark paper)."""
    seconds = np.array([1.0, 2.0, 2.22])
    lengths = [choose([DraftRow(0, 2, [0.8, c], COUPLED)], seconds, "global")[0] for c in (0.9, 0.0)]
    assert lengths == [2, 0]


def test_the_planned_length_decides_where_the_envelope_ends():
    """A draft that ended after x_1 because of c_2, which knows x_1, is treated like one whose c_2 is 0: x_1 is verified
    either way. An envelope over the drafted length would drop it only where it is the token that ends the draft."""
    seconds = np.array([1.0, 2.0, 2.22])
    assert choose([DraftRow(0, 2, [0.8, 0.9])], seconds, "prefix") == [2]
    assert choose([DraftRow(0, 2, [0.8, 0.0])], seconds, "prefix") == [1]
    assert choose([DraftRow(0, 2, [0.8])], seconds, "prefix") == [1]
    assert choose([DraftRow(0, 1, [0.8])], seconds[:2], "prefix") == [0]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_global_is_refused_where_it_would_bias():
    """One row of value-dependent confidences in rejection mode among harmless ones is enough."""
    harmless = [COUPLED, Exposure(point_masses=True), Exposure(blind=True)]
    check_policy("global", harmless)
    with pytest.raises(OptionError, match="delayed"):
        check_policy("global", [*harmless, Exposure()])
    rows = [DraftRow(0, 1, [0.5], COUPLED), DraftRow(1, 1, [0.5])]
    with pytest.raises(OptionError, match="policy"):
        choose(rows, LINEAR, "global")
    assert choose(rows[:1], LINEAR, "global") == [1]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match="fixed, threshold, prefix, delayed, global"):
        check_policy("adaptive")


# ------------------------------------------------------------------------------------------------------ while drafting


def rule(verifying, acceptance=0.8, drafting=0.0, threshold=0.0) -> SlotRule:
    """At a rate of 1 token per second, passes of equal cost."""
    slots = np.arange(len(verifying))
    return SlotRule(1.0, drafting * slots, np.array(verifying), np.full(len(verifying) - 1, acceptance), threshold)


def test_a_slot_is_drafted_while_it_earns_its_time():
    """A row of .3 plain steps needs a survival above .3 where nothing behind it helps."""
    slots = rule([1.0, 1.3, 1.6], acceptance=0.0)
    assert keep_drafting(slots, 1, 1.0, 0.31)
    assert not keep_drafting(slots, 1, 1.0, 0.29)
    assert not keep_drafting(slots, 2, 0.5, 0.59)
    assert keep_drafting(slots, 2, 0.5, 0.61)


def test_a_dear_slot_is_crossed_where_those_behind_it_pay():
    """The first slot costs 1.11 (float32), the next six nothing: alone it never pays, together they do from .3 on."""
    slots = rule([1.0] + [2.11] * 7)
    assert keep_drafting(slots, 1, 1.0, 0.3)
    assert not keep_drafting(slots, 1, 1.0, 0.2)
    assert not keep_drafting(rule([1.0, 2.11]), 1, 1.0, 0.99)


def test_the_pass_that_gave_the_confidence_is_paid_already():
    """A drafting pass of .5 for each slot, rows at .1: the first slot needs .1 by itself; that the second will need
    another pass of .5 keeps a low confidence from counting on it."""
    assert keep_drafting(rule([1.0, 1.1, 1.2], drafting=0.5), 1, 1.0, 0.11)
    assert not keep_drafting(rule([1.0, 1.1, 1.2], drafting=0.5), 1, 1.0, 0.09)
    assert keep_drafting(rule([1.0, 1.9, 1.9], 1.0, drafting=0.5), 1, 1.0, 0.75)  # two at once: 1.5 for 1.4
    assert not keep_drafting(rule([1.0, 1.9, 1.9], 1.0, drafting=0.5), 1, 1.0, 0.65)


def test_a_threshold_and_nan_end_a_draft():
    free = [1.0, 1.0, 1.0]
    assert keep_drafting(rule(free), 1, 1.0, 0.1)
    assert not keep_drafting(rule(free, threshold=0.4), 1, 1.0, 0.1)
    assert not keep_drafting(rule(free), 1, 1.0, float("nan"))


@given(st.integers(1, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_more_confidence_never_ends_a_draft(k, survival, low, high):
    slots = rule([1.0, 1.2, 1.7, 1.75, 2.5, 2.6], acceptance=0.7)
    low, high = sorted((low, high))
    assert keep_drafting(slots, k, survival, low) <= keep_drafting(slots, k, survival, high)
