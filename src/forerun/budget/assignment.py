"""Who asks whom in a step, and for how much: chains of drafters for every request, fitted to each other.

A drafting pass is shared by the requests that make it. Two requests that each have a favourite may be better off with
the same drafter than with two passes, so besides everyone's own order the step is also planned with one dear drafter
for all, and the best plan is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from forerun.budget.planning import Ask, Bid, Load, share
from forerun.budget.profile import Profile
from forerun.budget.selection import Promise

CHEAP = 0.02
"""A drafter whose first token costs at most this share of a plain step (a look-up) takes part in any plan."""

ChainOf = Callable[[int, Collection[str]], list[Promise]]
"""`chain_of(request, without)`: drafters to ask, best first, without some; empty where it does not draft."""


class Assignment(NamedTuple):
    """A plan of the step."""

    chains: Mapping[int, Sequence[Promise]]
    lengths: Mapping[int, Sequence[int]]
    """K of each drafter of each chain."""
    gain: float
    """Predicted gain of the step over plain decoding: the mean of that with the first choices and that behind them."""
    drafting: int
    """Requests whose first choice drafts."""


def assign(asks: Sequence[Ask], load: Load, profile: Profile, chain_of: ChainOf, current: str | None) -> Assignment:
    """The best plan; of equals everyone's own order, then one that goes on with `current`."""
    own = {ask.request_id: chain_of(ask.request_id, ()) for ask in asks}
    named = {promise.drafter for chain in own.values() for promise in chain}
    dear = sorted(d for d in named if _is_dear(d, load, profile))
    plans = [_shared(asks, own, load, profile)]
    if len(dear) > 1:
        for drafter in sorted(dear, key=lambda d: (d != current, d)):
            others = [d for d in dear if d != drafter]
            chains = {ask.request_id: chain_of(ask.request_id, others) for ask in asks}
            plans.append(_shared(asks, chains, load, profile))
    return max(plans, key=lambda plan: plan.gain)


def _is_dear(drafter: str, load: Load, profile: Profile) -> bool:
    step = profile.verify.tokens(load.other_rows + load.requests)
    return float(profile.drafts[drafter].table(1, 1)[1, 1]) > CHEAP * step


def _shared(asks: Sequence[Ask], chains: Mapping[int, Sequence[Promise]], load: Load, profile: Profile) -> Assignment:
    shares = share(load, profile.verify, profile.drafts, [_bid(ask, chains[ask.request_id], load) for ask in asks])
    lengths: dict[int, list[int]] = {}
    for ask, k in zip(asks, shares.lengths, strict=True):
        chain = chains[ask.request_id]
        lengths[ask.request_id] = [k, *(promise.fallback[0] for promise in chain[1:])] if chain else []
    behind = [promise.fallback[1] for chain in chains.values() for promise in chain[1:]]
    gain = (shares.gain + sum(behind) / len(behind)) / 2 if behind else shares.gain
    return Assignment(chains, lengths, gain, sum(k > 0 for k in shares.lengths))


def _bid(ask: Ask, chain: Sequence[Promise], load: Load) -> Bid:
    if not chain:
        return Bid(ask.request_id, ask.context, None, np.zeros(0))
    promise, requests = chain[0], load.requests
    # Alone in a step its rows are there or it does not matter; among many they are there in a share of the steps.
    weight = (1 + (requests - 1) * promise.match) / requests if len(chain) == 1 else 1.0
    return Bid(ask.request_id, ask.context, promise.drafter, promise.survival, weight)


__all__ = ["Assignment", "ChainOf", "assign"]
