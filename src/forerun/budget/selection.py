"""Which drafters a request should ask, in which order: from what each has shown and what it costs at this load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from forerun.budget.bypass import Reason
from forerun.budget.curve import FloatArray
from forerun.budget.history import AcceptanceHistory
from forerun.budget.planning import Ask, Load, Option, Outlook, outlook
from forerun.budget.profile import Profile

ALWAYS = 0.95
"""A drafter that proposes this often needs no other behind it."""


class Evidence(NamedTuple):
    """What is known of one drafter for the requests that may use it."""

    drafter: str
    requests: list[int]
    most: list[int]
    contexts: list[int]
    survival: FloatArray
    """[n, K] expected."""
    match: FloatArray
    """[n] chance that it proposes anything."""

    def outlook(
        self, load: Load, profile: Profile, contexts: Sequence[int] | None = None, reach: float = 1.0
    ) -> Outlook:
        """Its promises at a load, behind other contexts than their own if given, to this share of the requests."""
        where = self.contexts if contexts is None else contexts
        return outlook(load, profile.costs(self.drafter), self.survival, self.most, where, self.match, reach)


def evidence(asks: Sequence[Ask], history: AcceptanceHistory) -> list[Evidence]:
    """Of every drafter that some request may use, in the order they are first named."""
    by_drafter: dict[str, list[tuple[Ask, Option]]] = {}
    for ask in asks:
        for option in ask.options:
            by_drafter.setdefault(option.drafter, []).append((ask, option))
    found = []
    for drafter, pairs in by_drafter.items():
        ids, most = [ask.request_id for ask, _ in pairs], [option.most for _, option in pairs]
        survival = history.survival(drafter, ids, max(most))
        match = np.array([history.match_rate(drafter, request) for request in ids])
        found.append(Evidence(drafter, ids, most, [ask.context for ask, _ in pairs], survival, match))
    return found


class Promise(NamedTuple):
    """One drafter's outlook for one request."""

    drafter: str
    length: int
    """Best K."""
    gain: float
    match: float
    survival: FloatArray
    """[most] expected."""
    drafting: FloatArray
    """[most + 1] the request's share of a round, in seconds: of drafting,"""
    verifying: FloatArray
    """[most + 1] and of everything else."""
    rate: FloatArray
    """[most + 1] tokens per second."""
    fallback: tuple[int, float] = (0, 0.0)
    """Best K and gain where only the requests come to it for which another had nothing to propose."""

    def acceptance(self, k: int) -> FloatArray:
        """[k] conditional acceptance by position."""
        survival = self.survival[:k]
        before = np.concatenate(([1.0], survival[:-1]))
        return np.divide(survival, before, out=np.zeros(len(survival)), where=before > 0)


Promises = Mapping[int, Sequence[Promise]]
"""By request, in the order of its options."""


def promises(known: Sequence[Evidence], load: Load, profile: Profile) -> dict[int, list[Promise]]:
    """Every drafter's promise to every request that may use it."""
    outlooks = [one.outlook(load, profile) for one in known]
    found: dict[int, list[Promise]] = {}
    for one, seen in zip(known, outlooks, strict=True):
        others = [(o, s) for o, s in zip(known, outlooks, strict=True) if o is not one and o.match.mean() < ALWAYS]
        behind = _fallbacks(one, others, load, profile)
        lengths, gains, match = seen.length.tolist(), seen.gain.tolist(), one.match.tolist()
        for i, (request, most) in enumerate(zip(one.requests, one.most, strict=True)):
            own = seen.drafting[i, : most + 1], seen.verifying[i, : most + 1], seen.rate[i, : most + 1]
            made = Promise(one.drafter, lengths[i], gains[i], match[i], one.survival[i, :most], *own, behind[i])
            found.setdefault(request, []).append(made)
    return found


def _fallbacks(
    one: Evidence, others: Sequence[tuple[Evidence, Outlook]], load: Load, profile: Profile
) -> Sequence[tuple[int, float]]:
    """[n] (K, gain) of a drafter that is asked behind those which do not always propose; their rows are there too."""
    if not others:
        return [(0, 0.0)] * len(one.requests)
    reach = math.prod(1 - float(other.match.mean()) for other, _ in others)
    rest = 1 - 1 / load.requests  # this request has no rows of theirs
    rows = rest * sum(float(other.match @ seen.length) for other, seen in others)
    tokens = rest * sum(float(other.match @ seen.drafted) for other, seen in others)
    beside = load._replace(other_rows=load.other_rows + round(rows), other_tokens=load.other_tokens + tokens)
    seen = one.outlook(beside, profile, reach=reach)
    return list(zip(seen.length.tolist(), seen.gain.tolist(), strict=True))


def order(promised: Sequence[Promise], minimum: float, current: str | None, stickiness: float) -> list[Promise]:
    """The drafters to ask, best first: a request goes on to the next where one has nothing to propose.

    Ends with the first that always proposes. Those behind the first must be worth it by themselves. The one in use
    stays unless another is better by `stickiness`: a switch makes the other catch up.
    """
    ranked = sorted(promised, key=lambda p: -(p.gain + stickiness * (p.drafter == current)))
    chain = [p for i, p in enumerate(ranked) if i == 0 or (p.fallback[0] > 0 and p.fallback[1] >= minimum)]
    end = next((i for i, p in enumerate(chain) if p.match >= ALWAYS), len(chain))
    return chain[: end + 1]


def why_not(known: Sequence[Evidence], requests: Set[int], profile: Profile, minimum: float) -> dict[int, Reason]:
    """Why drafting does not pay for these requests: the load, their context, or what their drafts are worth."""
    reasons = dict.fromkeys(requests, Reason.GAIN)
    for one in known:
        alone = one.outlook(Load(1), profile).gain
        near = one.outlook(Load(1), profile, [0] * len(one.requests)).gain
        for i, request in enumerate(one.requests):
            if request in requests and reasons[request] is not Reason.BATCH:
                if alone[i] >= minimum:
                    reasons[request] = Reason.BATCH
                elif near[i] >= minimum:
                    reasons[request] = Reason.CONTEXT
    return reasons


__all__ = ["Evidence", "Promise", "Promises", "evidence", "order", "promises", "why_not"]
