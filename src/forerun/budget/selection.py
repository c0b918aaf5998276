"""Which drafters a request should ask, in which order: from what each has shown and what it costs at this load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.budget.bypass import Reason
from forerun.budget.curve import FloatArray
from forerun.budget.history import AcceptanceHistory
from forerun.budget.planning import Ask, Load, Option, Outlook, outlook
from forerun.budget.profile import Profile

ALWAYS = 0.95
"""A drafter that proposes this often needs no other behind it."""

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class Evidence(NamedTuple):
    """What is known of one drafter for the n requests that may use it."""

    drafter: str
    places: IntArray
    """[n] of these requests among all of the step, ascending."""
    most: IntArray
    """[n] largest K."""
    contexts: Sequence[int]
    survival: FloatArray
    """[n, K] expected."""
    match: FloatArray
    """[n] chance that it proposes anything."""
    catch_up: FloatArray | None = None
    """[n] see `planning.outlook`."""

    def outlook(
        self, load: Load, profile: Profile, contexts: Sequence[int] | None = None, reach: float = 1.0
    ) -> Outlook:
        """Its promises at a load, behind other contexts than their own if given, to this share of the requests."""
        where, costs = self.contexts if contexts is None else contexts, profile.costs(self.drafter)
        return outlook(load, costs, self.survival, self.most, where, self.match, reach, self.catch_up)


def evidence(
    asks: Sequence[Ask], history: AcceptanceHistory, catch_up: Callable[[Ask, Option], float] | None = None
) -> list[Evidence]:
    """Of every drafter that some request may use, in the order they are first named; `catch_up`: seconds for each token
    to come, of taking in what the drafter lacks of a request."""
    by_drafter: dict[str, tuple[list[int], list[int], list[float]]] = {}
    for place, ask in enumerate(asks):
        for option in ask.options:
            places, most, late = by_drafter.setdefault(option.drafter, ([], [], []))
            places.append(place)
            most.append(option.most)
            late.append(0.0 if catch_up is None else catch_up(ask, option))
    found = []
    for drafter, (places, most, late) in by_drafter.items():
        ids, contexts = [asks[i].request_id for i in places], [asks[i].context for i in places]
        survival, match = history.survival(drafter, ids, max(most)), history.match_rates(drafter, ids)
        behind = np.array(late) if any(late) else None
        found.append(Evidence(drafter, np.array(places), np.array(most), contexts, survival, match, behind))
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


@dataclass(frozen=True)
class Promises:
    """What D drafters promise the R requests of a step, as columns; `of` is one entry."""

    requests: Sequence[int]
    known: Sequence[Evidence]
    seen: Sequence[Outlook]
    offered: BoolArray
    """[D, R] whether the request may use the drafter; elsewhere the gain is -inf and all else 0."""
    gain: FloatArray
    """[D, R]"""
    match: FloatArray
    """[D, R]"""
    survival: FloatArray
    """[D, R, K] expected, 0 beyond what a request may draft."""
    fallback_length: IntArray
    """[D, R] best K where only those requests come to the drafter for which another had nothing to propose,"""
    fallback_gain: FloatArray
    """[D, R] and the gain of it."""

    @cached_property
    def offered_any(self) -> BoolArray:
        """[R] whether the request may use any drafter."""
        return np.asarray(self.offered.any(axis=0), dtype=np.bool_)

    @cached_property
    def catch_up(self) -> FloatArray:
        """[D, R] see `planning.outlook`."""
        found = np.zeros(self.gain.shape)
        for own, one in zip(found, self.known, strict=True):
            if one.catch_up is not None:
                own[one.places] = one.catch_up
        return found

    @cached_property
    def drafters(self) -> list[str]:
        return [one.drafter for one in self.known]

    @cached_property
    def expected(self) -> list[list[list[float]]]:
        """`survival` as numbers, for what goes by single requests."""
        found: list[list[list[float]]] = self.survival.tolist()
        return found

    @cached_property
    def place(self) -> dict[int, int]:
        """Of each request."""
        return {request: i for i, request in enumerate(self.requests)}

    def of(self, request: int, drafter: str) -> Promise | None:
        """None where the request may not use the drafter."""
        if request not in self.place or drafter not in self.drafters:
            return None
        d, r = self.drafters.index(drafter), self.place[request]
        if not self.offered[d, r]:
            return None
        one, seen, i = self.known[d], self.seen[d], int(np.searchsorted(self.known[d].places, r))
        most = int(one.most[i])
        own = seen.drafting[i, : most + 1], seen.verifying[i, : most + 1], seen.rate[i, : most + 1]
        fallback = int(self.fallback_length[d, r]), float(self.fallback_gain[d, r])
        gain, match = float(self.gain[d, r]), float(self.match[d, r])
        return Promise(drafter, int(seen.length[i]), gain, match, self.survival[d, r, :most], *own, fallback)


def promises(requests: Sequence[int], known: Sequence[Evidence], load: Load, profile: Profile) -> Promises:
    """Every drafter's promise to every request that may use it; `requests` are all of the step, as they were asked."""
    seen = [one.outlook(load, profile) for one in known]
    shape, width = (len(known), len(requests)), max((one.survival.shape[1] for one in known), default=0)
    found = Promises(
        requests, known, seen, np.zeros(shape, dtype=np.bool_), np.full(shape, -np.inf), np.zeros(shape),
        np.zeros((*shape, width)), np.zeros(shape, dtype=np.int64), np.zeros(shape),
    )  # fmt: skip
    for d, (one, own) in enumerate(zip(known, seen, strict=True)):
        here, slots = one.places, np.arange(one.survival.shape[1])
        found.offered[d, here], found.gain[d, here], found.match[d, here] = True, own.gain, one.match
        found.survival[d, here, : len(slots)] = np.where(slots < one.most[:, None], one.survival, 0.0)
        others = [(o, s) for o, s in zip(known, seen, strict=True) if o is not one and o.match.mean() < ALWAYS]
        if others:
            behind = _behind(one, others, load, profile)
            found.fallback_length[d, here], found.fallback_gain[d, here] = behind.length, behind.gain
    return found


def _behind(one: Evidence, others: Sequence[tuple[Evidence, Outlook]], load: Load, profile: Profile) -> Outlook:
    """Of a drafter that is asked behind those which do not always propose; their rows are there too."""
    reach = math.prod(1 - float(other.match.mean()) for other, _ in others)
    rest = 1 - 1 / load.requests  # this request has no rows of theirs
    rows = rest * sum(float(other.match @ seen.length) for other, seen in others)
    tokens = rest * sum(float(other.match @ seen.drafted) for other, seen in others)
    beside = load._replace(other_rows=load.other_rows + round(rows), other_tokens=load.other_tokens + tokens)
    return one.outlook(beside, profile, reach=reach)


class Chains(NamedTuple):
    """The drafters that each of R requests asks: a request goes on to the next where one has nothing to propose."""

    order: IntArray
    """[D, R] drafters, best first."""
    asked: BoolArray
    """[D, R] whether the request comes to that one."""


class Preference(NamedTuple):
    """What decides between drafters, beside their promises."""

    minimum: float
    """Gain that those behind the first must be worth by themselves."""
    current: IntArray
    """[R] the one in use, by place; -1: none."""
    stickiness: float
    """It stays unless another is better by so much: a switch makes the other catch up."""


def chains(promised: Promises, opened: BoolArray, preference: Preference, without: Sequence[str] = ()) -> Chains:
    """The drafters to ask, best first, up to the first that always proposes.

    Args:
        promised: of all drafters.
        opened: [R] requests that draft.
        preference: see there.
        without: drafters nobody asks.
    """
    places, requests = np.arange(len(promised.known)), np.arange(len(opened))
    value = promised.gain + preference.stickiness * (places[:, None] == preference.current)
    value[[place for place, name in enumerate(promised.drafters) if name in without]] = -np.inf
    order = (-value).argsort(axis=0, kind="stable")
    asked, going = np.zeros(order.shape, dtype=np.bool_), opened
    for i, drafter in enumerate(order):
        asked[i] = going & (value[drafter, requests] > -np.inf)
        if i > 0:
            worth = promised.fallback_gain[drafter, requests] >= preference.minimum
            asked[i] &= worth & (promised.fallback_length[drafter, requests] > 0)
        going = going & ~(asked[i] & (promised.match[drafter, requests] >= ALWAYS))
    return Chains(order, asked)


def why_not(asked: BoolArray, known: Sequence[Evidence], profile: Profile, minimum: float) -> list[Reason]:
    """[R] why drafting does not pay: the load, the context, or what drafts are worth. Of those asked about, [R]."""
    batch, context = np.zeros_like(asked), np.zeros_like(asked)
    for one in known:
        if asked[one.places].any():
            batch[one.places] |= one.outlook(Load(1), profile).gain >= minimum
            context[one.places] |= one.outlook(Load(1), profile, [0] * len(one.places)).gain >= minimum
    return [Reason.BATCH if b else Reason.CONTEXT if c else Reason.GAIN for b, c in zip(batch, context, strict=True)]


__all__ = ["Chains", "Evidence", "Preference", "Promise", "Promises", "chains", "evidence", "promises", "why_not"]
