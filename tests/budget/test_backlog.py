"""What a drafter has to take in before it can draft, and for how long a request is expected to make up for it."""

from __future__ import annotations

import numpy as np
import pytest

from budget.world import BFLOAT16, profile, serial
from forerun.budget.backlog import MEMORY, PRIOR, TOKENS, Backlog
from forerun.budget.costs import VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.history import Outcome
from forerun.budget.planning import Ask, Bids, Load, Option, outlook, share
from forerun.budget.rounds import Drafted, Judged
from forerun.budget.scheduler import Scheduler


def test_a_drafter_is_behind_by_what_came_since_it_was_asked():
    """The whole context the first time, and again once its state is computed anew."""
    backlog = Backlog()
    backlog.saw(0, 100)
    assert backlog.behind(0, "small") == 100
    backlog.took_in(0, "small", 103)
    backlog.saw(0, 110)
    assert (backlog.behind(0, "small"), backlog.behind(0, "other")) == (7, 110)
    backlog.took_in(0, "small", 110)
    backlog.restart(0)
    assert backlog.behind(0, "small") == 110


def test_requests_are_expected_to_go_on_as_others_did():
    """All tokens over all ends, those of running requests included, until traffic changes; a request that goes on for
    longer is expected to go on as long again; never longer than it may."""
    backlog = Backlog()
    backlog.saw(0, 10)
    assert backlog.ahead(0) == TOKENS
    backlog.saw(0, 10 + 4 * int(TOKENS))
    assert backlog.ahead(0) == 4 * TOKENS
    backlog.saw(0, 10 + 4 * int(TOKENS), left=5)
    assert backlog.ahead(0) == 5
    backlog.saw(0, 10 + 4 * int(TOKENS), left=0)
    assert backlog.ahead(0) == 1
    for request in range(1, 6 * int(MEMORY)):
        backlog.saw(request, 50)
        backlog.saw(request, 80)
        backlog.forget(request)
    backlog.saw(-1, 50)
    assert backlog.ahead(-1) == pytest.approx(30, rel=0.1)
    assert PRIOR < MEMORY


def test_what_has_to_be_taken_in_counts_for_gain_and_k_and_for_no_round():
    """Half a plain step for each token to come: a draft of .9 a token does not win that back at once; the seconds of a
    round and its tokens per second are as they were."""
    costs = profile(BFLOAT16, {"d": serial(0.01)}).costs("d")
    args = Load(1), costs, np.array([[0.9, 0.81]]), [2], [0]
    free, late = outlook(*args), outlook(*args, catch_up=np.array([0.5]))
    assert (free.rate == late.rate).all()
    assert (free.drafting == late.drafting).all()
    seconds = free.drafting[0, 2] + free.verifying[0, 2]
    assert free.gain[0] == pytest.approx(2.71 / seconds - 1)
    assert late.gain[0] == pytest.approx(2.71 / (seconds + 0.5 * 2.71) - 1)
    assert outlook(*args, catch_up=np.array([2.0])).length[0] == 0


def test_rows_go_to_whom_they_cost_less():
    """Of two equal requests the one whose drafter has nothing to take in."""
    verify = VerifyCost(CostCurve.measured({1: 1.0, 2: 1.0, 3: 1.1, 4: 1.2}))
    survival, both = np.full((2, 1), 0.5), np.zeros(2, dtype=np.int64)
    for late, lengths in (([0.0, 0.0], [1, 1]), ([0.0, 0.3], [1, 0]), ([0.3, 0.0], [0, 1])):
        bids = Bids([0, 1], [0, 0], ["d"], both, survival, np.ones(2), np.array(late))
        assert share(Load(2), verify, {"d": serial(1e-6)}, bids).lengths == lengths


def knowing() -> Scheduler:
    """One that has seen a drafter be right nine times of ten, whose catching up takes .03 plain steps a token."""
    scheduler = Scheduler(profile(BFLOAT16, {"small": serial(0.1, 0.1, follow=0.03)}))
    for accepted in (4, 4, 4, 4, 1) * 4:
        scheduler.history.record("small", -1, Outcome(4, accepted))
    return scheduler


def asked(scheduler: Scheduler, left: int | None, rebuilds: bool = True, context: int = 600) -> int:
    """K of a request, probes left out."""
    [plan] = scheduler.plan([Ask(0, context, (Option("small", 4, rebuilds),), left=left)])
    return 0 if plan.probe else plan.k


def test_a_request_that_ends_soon_is_not_worth_its_prompt():
    """A good drafter that would have to take in 600 tokens: for 2,000 tokens to come it does, for 20 it does not. One
    that follows every step has them; so has one that was asked, whether it proposed anything or not."""
    assert asked(knowing(), left=20) == 0
    assert asked(knowing(), left=20, rebuilds=False) > 0
    scheduler = knowing()
    k = asked(scheduler, left=2000)
    assert k > 0
    draft = Drafted(0, "small", k)
    scheduler.choose([draft])
    scheduler.record([Judged(draft, k, k)])
    for step in range(10):  # an answer is kept for some steps
        later = asked(scheduler, left=20, context=601 + k + step)
        scheduler.record([Judged(Drafted(0), missed=("small",))])
    assert later > 0
