"""Who asks whom in a step, and for how much: chains of drafters for every request, fitted to each other.

A drafting pass is shared by the requests that make it. Two requests that each have a favourite may be better off with
the same drafter than with two passes, so besides everyone's own order the step is also planned with one dear drafter
for all, and the best plan is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.budget.planning import Bids, Load, share
from forerun.budget.profile import Profile
from forerun.budget.selection import BoolArray, Chains, IntArray, Preference, Promises, chains

CHEAP = 0.02
"""A drafter whose first token costs at most this share of a plain step (a look-up) takes part in any plan."""


class Assignment(NamedTuple):
    """A plan of the step."""

    order: IntArray
    """[D, R] drafters of each request, the first to be asked first."""
    lengths: IntArray
    """[D, R] K of each of them; 0: it is not asked."""
    gain: float
    """Predicted gain of the step over plain decoding: the mean of that with the first choices and that behind them."""
    drafting: int
    """Requests whose first choice drafts."""


def assign(
    promised: Promises,
    contexts: Sequence[int],
    opened: BoolArray,
    preference: Preference,
    load: Load,
    profile: Profile,
    current: str | None,
) -> Assignment:
    """The best plan; of equals everyone's own order, then one that goes on with `current`.

    Args:
        promised: by every drafter.
        contexts: [R] of the requests.
        opened: [R] requests that draft.
        preference: between drafters.
        load: of the step.
        profile: costs.
        current: the drafter that was used last.
    """
    own = chains(promised, opened, preference)
    plans = [_shared(promised, contexts, own, load, profile)]
    named = {promised.drafters[i] for i in own.order[own.asked].tolist()}
    dear = [d for d in named if _is_dear(d, load, profile)] if len(named) > 1 else []
    if len(dear) > 1:
        for drafter in sorted(dear, key=lambda d: (d != current, d)):
            alone = chains(promised, opened, preference, [d for d in dear if d != drafter])
            plans.append(_shared(promised, contexts, alone, load, profile))
    return max(plans, key=lambda plan: plan.gain)


def _is_dear(drafter: str, load: Load, profile: Profile) -> bool:
    step = profile.verify.tokens(load.other_rows + load.requests)
    return float(profile.drafts[drafter].table(1, 1)[1, 1]) > CHEAP * step


def _shared(promised: Promises, contexts: Sequence[int], chosen: Chains, load: Load, profile: Profile) -> Assignment:
    shares = share(load, profile.verify, profile.drafts, _bids(promised, contexts, chosen, load))
    lengths, drafting, gain = np.array([shares.lengths]), sum(k > 0 for k in shares.lengths), shares.gain
    if len(chosen.order) > 1:
        later = chosen.order[1:], np.arange(len(contexts))
        lengths = np.vstack((lengths, np.where(chosen.asked[1:], promised.fallback_length[later], 0)))
        behind: list[float] = promised.fallback_gain[later].T[chosen.asked[1:].T].tolist()
        gain = (gain + sum(behind) / len(behind)) / 2 if behind else gain
    return Assignment(chosen.order, lengths, gain, drafting)


def _bids(promised: Promises, contexts: Sequence[int], chosen: Chains, load: Load) -> Bids:
    first, drafts = chosen.order[0], chosen.asked[0]
    places, requests = np.arange(len(contexts)), load.requests
    survival = np.where(drafts[:, None], promised.survival[first, places], 0.0)
    # Alone in a step its rows are there or it does not matter; among many they are there in a share of the steps.
    alone = chosen.asked.sum(axis=0) == 1
    weight = np.where(alone, (1 + (requests - 1) * promised.match[first, places]) / requests, 1.0)
    late = np.where(drafts, promised.catch_up[first, places], 0.0)
    return Bids(promised.requests, contexts, promised.drafters, np.where(drafts, first, -1), survival, weight, late)


__all__ = ["Assignment", "assign"]
