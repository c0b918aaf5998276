"""`plan` answers before anything is drafted, from numbers alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.budget import Room, plan

counts = st.integers(-3, 40)


@given(counts, counts, counts, counts, st.none() | counts)
def test_a_plan_never_exceeds_any_limit_and_is_never_negative(k, tokens, window, rows, drafter):
    """0 <= K <= each of: what was asked, tokens left - 1, window, share of the step, the drafter's own window."""
    planned = plan(k, Room(tokens, window, rows, drafter))
    assert planned >= 0
    bounds = [k, tokens - 1, window, rows, *([] if drafter is None else [drafter])]
    assert planned <= max(0, min(bounds))
    assert planned in {0, *bounds}


def test_the_last_token_is_never_drafted():
    """One token is always the target's own, so with one token left there is nothing to draft."""
    assert plan(5, Room(tokens_left=1, window_left=9, rows_left=9)) == 0
    assert plan(5, Room(tokens_left=3, window_left=9, rows_left=9)) == 2
