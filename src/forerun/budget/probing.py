"""Trying again what does not seem to pay: at most one request a step, within a bounded share of the time.

A probe tells about all requests, as acceptance is shared. It goes to new or short requests, whose state costs little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from forerun.budget.bypass import PROBING_SHARE, TRIALS, ProbeLedger
from forerun.budget.costs import Costs
from forerun.budget.history import AcceptanceHistory
from forerun.budget.planning import Load, outlook, probe_length
from forerun.budget.profile import Profile
from forerun.budget.selection import BoolArray, Evidence, IntArray, Promises

TRIAL_INTERVAL = 8
"""Steps between two trials of a hardly known drafter that take the place of another's draft: else a short answer would
be all trials, and the drafter in use is there because it promises at least as much."""
STALE = 256
"""Steps after which a drafter is looked at again, although another is in use or its doubtful tokens are left out."""


class Probe(NamedTuple):
    """One request drafts although that is not predicted to pay best."""

    request_id: int
    drafter: str
    length: int


class Current(NamedTuple):
    """The step as planned so far, its R requests in the order of their promises."""

    load: Load
    promised: Promises
    contexts: Sequence[int]
    """[R]"""
    drafting: IntArray
    """[R] first drafter of each request, by its place among the promises; -1: it does not draft."""
    draft_rows: int
    behind: Callable[[int, str], int] = lambda _request, _drafter: 0
    """Tokens of a request that a drafter has to take in before it can draft for it."""


class Prober:
    """Picks probes and keeps their books.

    Args:
        minimum: predicted gain below which nothing is drafted.
        share: of the time, for probing.
        trials: probes of a drafter that are not charged while it is hardly known.
    """

    def __init__(self, minimum: float, share: float = PROBING_SHARE, trials: int = TRIALS):
        self._minimum = minimum
        self._trials = trials
        self._ledger = ProbeLedger(share)
        self._step = 0
        self._last_probe: dict[str, int] = {}
        self._tried: dict[str, int] = {}

    def pick(self, current: Current, profile: Profile, history: AcceptanceHistory) -> Probe | None:
        """A probe for this step, if there is something to learn and time to pay for it."""
        self._step += 1
        drafters = current.promised.drafters
        unknown = {d for d in drafters if history.rounds(d) < self._trials and self._tried.get(d, 0) < self._trials}
        if not (unknown or self._has_time(drafters, profile)):
            return None
        asking = []
        for d, one in enumerate(current.promised.known):
            places = self._worth_asking(current, d, one.drafter in unknown)
            if len(places):
                places = places[self._is_hopeful(one, current.load, profile)[np.searchsorted(one.places, places)]]
            if len(places):
                asking.append((self._urgency(current, d, places, history, one.drafter in unknown), d))
        if not asking:
            return None
        urgency, d = min(asking)
        return self._afford(current, current.promised.place[int(urgency[-1])], d, profile, drafters[d] in unknown)

    def earn(self, seconds: float) -> None:
        """A step of so many seconds was planned."""
        self._ledger.earn(seconds)

    def _has_time(self, drafters: Sequence[str], profile: Profile) -> bool:
        """Whether one token of the cheapest drafter could be paid for. Mostly it could not, and that is all."""
        cheapest = min((float(profile.drafts[d].table(1, 1)[1, 1]) for d in drafters), default=math.inf)
        return self._ledger.credit >= cheapest * (1 - 1e-9)  # sums elsewhere may round the other way

    def _is_hopeful(self, one: Evidence, load: Load, profile: Profile) -> BoolArray:
        """[n] whether the drafter would pay at this load and context if every token were accepted."""
        certain, costs = np.ones_like(one.survival), profile.costs(one.drafter)
        return outlook(Load(load.requests), costs, certain, one.most, one.contexts).gain >= self._minimum

    def _worth_asking(self, current: Current, drafter: int, unknown: bool) -> IntArray:
        """Places of requests to try a drafter on: if it is hardly known, those that do not draft, and any if it was not
        looked at for long."""
        one = current.promised.known[drafter]
        busy_with = current.drafting[one.places]
        since = self._step - self._last_probe.get(one.drafter, 0)
        again = (busy_with == drafter) | (since >= TRIAL_INTERVAL) if unknown else since > STALE
        return one.places[(busy_with < 0) | again]

    def _urgency(
        self, current: Current, drafter: int, places: IntArray, history: AcceptanceHistory, unknown: bool
    ) -> tuple[float, ...]:
        """Of the most urgent request of these, which is the last entry. Smallest first: hardly known drafters, requests
        that do not draft, what was probed long ago, short ones."""
        name, drafts = current.promised.drafters[drafter], current.drafting[places] >= 0
        requests = [current.promised.requests[i] for i in places]
        contexts, shown = [current.contexts[i] for i in places], history.own_rounds(name, requests)
        first = np.lexsort((requests, contexts, shown, drafts))[0]
        last = self._last_probe.get(name, 0)
        return not unknown, bool(drafts[first]), last, float(shown[first]), contexts[first], requests[first]

    def _afford(self, current: Current, place: int, drafter: int, profile: Profile, free: bool) -> Probe | None:
        request, name = current.promised.requests[place], current.promised.drafters[drafter]
        promise, costs = current.promised.of(request, name), profile.costs(name)
        assert promise is not None, f"{name!r} promised request {request} nothing"
        length = max(promise.length, probe_length(costs, current.load, promise.survival))
        lost = _excess(costs, current, length, current.contexts[place])
        lost += costs.draft.follow * current.behind(request, name)
        if current.drafting[place] not in (-1, drafter):  # at worst all that its own drafter would have brought
            lost += float(promise.verifying[0]) * len(promise.survival)
        if not (free or self._ledger.spend(lost)):
            return None
        self._tried[name] = self._tried.get(name, 0) + 1
        self._last_probe[name] = self._step
        return Probe(request, name, length)


def _excess(costs: Costs, current: Current, length: int, context: int) -> float:
    """Seconds that a probe adds to the step."""
    rows = current.load.other_rows + current.load.requests + current.draft_rows
    verifying = costs.verify.tokens(rows + length) - costs.verify.tokens(rows)
    further = length * float(costs.verify.context.at([context]).row[0])
    return verifying + further + costs.draft(1, length, context)


__all__ = ["STALE", "TRIAL_INTERVAL", "Current", "Probe", "Prober"]
