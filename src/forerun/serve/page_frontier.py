"""The frontier to expect under load: measured costs, and what drafts have been accepted so far."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from forerun.budget.costs import Costs
from forerun.budget.curve import FloatArray
from forerun.budget.profile import Profile
from forerun.budget.scheduler import Scheduler

MOST_REQUESTS = 64
NOBODY = -1
"""A request that has shown nothing of its own."""


def expected_frontier(
    scheduler: Scheduler, profile: Profile, longest: dict[str, int], requests: int
) -> list[dict[str, Any]]:
    """Tokens a second by drafter, K and load, as planning reckons: at short contexts, nothing in prefill. Loads whose
    drafts would be more rows than were measured are left out.

    Args:
        scheduler: what it has seen accepted; a drafter it has not seen has the credit that planning gives it.
        profile: costs.
        longest: K by drafter.
        requests: most that run at once.
    """
    loads = [2**i for i in range(int(math.log2(min(requests, MOST_REQUESTS))) + 1)]
    points: list[dict[str, Any]] = []
    for drafter, k in longest.items():
        if k < 1 or drafter not in profile.drafts:
            continue
        survival, match = scheduler.history.estimate(drafter, k).mean, scheduler.history.match_rate(drafter, NOBODY)
        for load in loads:
            if load > 1 and load * (1 + k) > profile.verify.tokens.counts[-1]:
                break
            totals = list(_totals(profile.costs(drafter), load, survival, match))
            points += [
                {"drafter": drafter, "policy": policy, "load": str(load), "per_user": total / load, "total": total}
                for policy, total in _ways(totals)
            ]
    return points


def _totals(costs: Costs, load: int, survival: FloatArray, match: float) -> Iterator[float]:
    """Tokens a second of all requests together, at K = 0 .. len(survival)."""
    calls = costs.draft.table(load, len(survival))
    drafting = max(1, round(load * match))
    for k in range(len(survival) + 1):
        rows = load * (1 + match * k)
        seconds = float(calls[k, drafting] + costs.verify.tokens.at(np.array([rows]))[0])
        yield load * (1 + match * float(survival[:k].sum())) / seconds


def _ways(totals: list[float]) -> Iterator[tuple[str, float]]:
    """Plainly, with the longest and half of it, and with the best K of this load."""
    longest = len(totals) - 1
    yield "plain", totals[0]
    for k in sorted({max(1, longest // 2), longest}):
        yield f"fixed:{k}", totals[k]
    yield "best K", max(totals)


__all__ = ["expected_frontier"]
