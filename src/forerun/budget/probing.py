"""Trying again what does not seem to pay: at most one request a step, within a bounded share of the time.

A probe tells about all requests, as acceptance is shared. It goes to new or short requests, whose state costs little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from forerun.budget.bypass import PROBING_SHARE, TRIALS, ProbeLedger
from forerun.budget.costs import Costs
from forerun.budget.history import AcceptanceHistory
from forerun.budget.planning import Load, forecast, probe_length
from forerun.budget.profile import Profile
from forerun.budget.selection import Promise, Promises

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
    """The step as planned so far."""

    load: Load
    contexts: Mapping[int, int]
    """By request."""
    drafting: Mapping[int, str]
    """First drafter of the requests that draft."""
    draft_rows: int


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
        self._judged_by: Profile | None = None
        self._hopeful: dict[tuple[str, int, int], bool] = {}

    def pick(self, current: Current, promised: Promises, profile: Profile, history: AcceptanceHistory) -> Probe | None:
        """A probe for this step, if there is something to learn and time to pay for it."""
        self._step += 1
        drafters = {promise.drafter for own in promised.values() for promise in own}
        unknown = {d for d in drafters if history.rounds(d) < self._trials and self._tried.get(d, 0) < self._trials}
        asking = [
            (self._urgency(current, request, promise, history, unknown), request, promise)
            for request, own in promised.items()
            for promise in own
            if self._worth_asking(current, request, promise.drafter, unknown)
            and self._is_hopeful(promise, current.load.requests, profile)
        ]
        if not asking:
            return None
        _, request, promise = min(asking, key=lambda entry: entry[0])
        return self._afford(current, request, promise, profile, promise.drafter in unknown)

    def earn(self, seconds: float) -> None:
        """A step of so many seconds was planned."""
        self._ledger.earn(seconds)

    def _is_hopeful(self, promise: Promise, requests: int, profile: Profile) -> bool:
        """Whether the drafter would pay at this load if every token were accepted."""
        if profile is not self._judged_by:
            self._judged_by, self._hopeful = profile, {}
        key = promise.drafter, requests, len(promise.survival)
        if key not in self._hopeful:
            best = forecast(profile.costs(promise.drafter), np.ones(len(promise.survival)), requests)
            self._hopeful[key] = best.gain >= self._minimum
        return self._hopeful[key]

    def _worth_asking(self, current: Current, request: int, drafter: str, unknown: set[str]) -> bool:
        """Hardly known drafters, requests that do not draft, and drafters that were not looked at for long."""
        if request not in current.drafting:
            return True
        since = self._step - self._last_probe.get(drafter, 0)
        if drafter in unknown:
            return current.drafting[request] == drafter or since >= TRIAL_INTERVAL
        return since > STALE

    def _urgency(
        self, current: Current, request: int, promise: Promise, history: AcceptanceHistory, unknown: set[str]
    ) -> tuple[float, ...]:
        """Smallest first: hardly known drafters, requests that do not draft, what was probed long ago, short ones."""
        return (
            promise.drafter not in unknown,
            request in current.drafting,
            self._last_probe.get(promise.drafter, 0),
            history.own_rounds(promise.drafter, request),
            current.contexts[request],
            request,
        )

    def _afford(self, current: Current, request: int, promise: Promise, profile: Profile, free: bool) -> Probe | None:
        costs, drafter = profile.costs(promise.drafter), promise.drafter
        length = max(promise.length, probe_length(costs, current.load, promise.survival))
        lost = _excess(costs, current, length, current.contexts[request])
        if current.drafting.get(request, drafter) != drafter:  # at worst all that its own drafter would have brought
            lost += float(promise.verifying[0]) * len(promise.survival)
        if not (free or self._ledger.spend(lost)):
            return None
        self._tried[drafter] = self._tried.get(drafter, 0) + 1
        self._last_probe[drafter] = self._step
        return Probe(request, drafter, length)


def _excess(costs: Costs, current: Current, length: int, context: int) -> float:
    """Seconds that a probe adds to the step."""
    rows = current.load.other_rows + current.load.requests + current.draft_rows
    verifying = costs.verify.tokens(rows + length) - costs.verify.tokens(rows)
    further = length * float(costs.verify.context.at([context]).row[0])
    return verifying + further + costs.draft(1, length, context)


__all__ = ["STALE", "TRIAL_INTERVAL", "Current", "Probe", "Prober"]
