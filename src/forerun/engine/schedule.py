"""Between the loop and the scheduler: requests, drafts and verdicts as the numbers it reckons with.

Here it is seen to that no token value goes in and that only rounds with a verdict do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from forerun.budget import Room
from forerun.budget.bypass import Reason
from forerun.budget.calibration import CalibrationKey, DraftSampleMethod
from forerun.budget.planning import Ask, Plan
from forerun.budget.policy import Exposure
from forerun.budget.rounds import Drafted, DraftTime, Judged
from forerun.budget.scheduler import Scheduler
from forerun.drafters.base import DraftView, KeepDrafting
from forerun.engine.admission import Work, draft_room
from forerun.engine.drafting import Drafters
from forerun.engine.propose import LoadedDrafter, Proposed
from forerun.engine.request import Request
from forerun.sampling import VerifyMode
from forerun.verify import Draft


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A scheduler, and what of its configuration is asked of it request by request."""

    scheduler: Scheduler
    confidence_threshold: float = 0.0
    """Of requests that set none."""
    calibrated_for: DraftSampleMethod | None = None
    """How drafts are drawn, for the calibration's key; None: no drafter is calibrated."""
    exposed: frozenset[str] = frozenset()
    """Drafters whose drafts must not be sampled and verified by rejection under this policy: it would bias them."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One request's round that reached a verdict."""

    request: Request
    plan: Plan
    draft: Draft
    """All that was drafted, with c_k as the drafter gave them."""
    drafter: str | None
    """Whose it is; None: nothing was drafted."""
    verified: int
    accepted: int
    """Before a stop rule cuts."""
    missed: Sequence[str] = field(default=())
    """Drafters that were asked and had nothing to propose."""


RoundListener = Callable[[RoundReport], None]
"""Called after a step for each of its rounds, while the request is still known to everybody. It must not raise."""


class Schedule:
    """Asks one scheduler, for one engine. Without a drafter there is nothing to ask and nothing is computed.

    Args:
        scheduling: the scheduler and defaults of requests.
        drafters: what can be asked.
        window: positions of the target.
    """

    def __init__(self, scheduling: Scheduling, drafters: Drafters, window: int):
        self.scheduling = scheduling
        self._drafters = drafters
        self._window = window
        self._asked = 0
        """Requests of the step that was planned last."""
        self._drafts: dict[int, Drafted] = {}
        """What was drafted for them, for those of a step in which anything was."""
        self.predicted_gain: float | None = None
        """Plain time over speculative time of the last step that was planned by costs, one that plans nothing counting
        as 1; the mean over its requests. None: no step was."""

    @property
    def scheduler(self) -> Scheduler:
        return self.scheduling.scheduler

    # ------------------------------------------------------------------------------------------------- before drafting

    def plan(self, requests: Sequence[Request], batch_size: int, rows_left: int, other_rows: int) -> list[Plan]:
        """A plan for each request that decodes in this step.

        Args:
            requests: in the order of the batch.
            batch_size: running requests, those in prefill and those that join in this step included.
            rows_left: draft rows each may use.
            other_rows: rows of prefill in the same pass.
        """
        self._asked = len(requests)
        if not self._drafters.loaded:
            return [Plan(request.id) for request in requests]
        asks = [self._ask(request, batch_size, rows_left) for request in requests]
        plans = [self._fit(plan) for plan in self.scheduler.plan(asks, other_rows)]
        if plans and self.scheduler.adapts:
            self.predicted_gain = 1 + sum(plan.gain for plan in plans if plan.choices) / len(plans)
        return plans

    def _ask(self, request: Request, batch_size: int, rows_left: int) -> Ask:
        lost, room = self._drafters.lost(request.id), draft_room(request, self._window, rows_left, None)
        options = tuple(
            option
            for entry in self._drafters.loaded
            if entry.serves(request) and entry.name not in lost
            if (option := entry.option(request, batch_size, room)) is not None
        )
        own, default = request.speculative.confidence_threshold, self.scheduling.confidence_threshold
        return Ask(
            request.id,
            len(request.tokens),
            options,
            None if options else self._reason(request, batch_size, room),
            default if own is None else own,
            self._calibration(request),
            room.tokens_left,
        )

    def _calibration(self, request: Request) -> CalibrationKey | None:
        method = self.scheduling.calibrated_for
        return None if method is None else CalibrationKey.of(request.sampling, request.verify_mode, method)

    def _reason(self, request: Request, batch_size: int, room: Room) -> Reason:
        """Why nothing can be drafted for a request, whatever it would gain."""
        allowed = [entry for entry in self._drafters.loaded if entry.allowed(request)]
        wanted = [entry for entry in allowed if entry.draft_length(request, 1) > 0]
        if not wanted or room.tokens_left <= 1:
            return Reason.REQUEST
        working = [entry for entry in wanted if entry.serves(request)]
        if not working:
            return Reason.FAULT
        kept = [entry for entry in working if entry.name not in self._drafters.lost(request.id)]
        if not kept:
            return Reason.STATE_DROPPED
        if room.rows_left < 1 or not any(entry.draft_length(request, batch_size) for entry in kept):
            return Reason.BATCH
        return Reason.CONTEXT if self._at_the_window(request, kept) else Reason.REQUEST

    def _at_the_window(self, request: Request, entries: Sequence[LoadedDrafter]) -> bool:
        """Whether target or drafters have no position left for a draft."""
        windows = [self._window - 1] + [w for entry in entries if (w := entry.drafter.window) is not None]
        everyone = all(entry.drafter.window is not None for entry in entries)
        return windows[0] <= request.anchor or (everyone and max(windows[1:]) <= request.anchor)

    def _fit(self, plan: Plan) -> Plan:
        """Without choices below their drafter's `min_draft`. Nothing has been drafted yet, so leaving out is exact."""
        kept = tuple(c for c in plan.choices if c.k >= self._drafters.named(c.drafter).config.min_draft)
        if len(kept) == len(plan.choices):
            return plan
        return replace(plan, choices=kept, reason=None if kept else Reason.GAIN, probe=plan.probe and bool(kept))

    # -------------------------------------------------------------------------------------------------- while drafting

    def keep_drafting(self, drafter: str) -> KeepDrafting:
        """What a drafter asks before it draws slot k."""
        scheduler = self.scheduler

        def keep(view: DraftView, k: int, confidence: float) -> bool:
            return scheduler.keep_drafting(view.request_id, drafter, k, confidence)

        return keep

    # -------------------------------------------------------------------------------------------------- after drafting

    def choose(self, works: Sequence[Work], proposed: Sequence[Proposed]) -> list[int]:
        """How many draft tokens of each work to verify; 0 for a prefill. Sees no token."""
        if not any(one.drafter for one in proposed):
            return [0] * len(works)
        rounds = [i for i, work in enumerate(works) if work.plan is not None]
        drafts = [self._drafted(works[i].request, proposed[i]) for i in rounds]
        self._drafts = {draft.request_id: draft for draft in drafts}
        lengths = dict(zip(rounds, self.scheduler.choose(drafts), strict=True))
        return [lengths.get(i, 0) for i in range(len(works))]

    def _drafted(self, request: Request, proposed: Proposed) -> Drafted:
        drafter, draft = proposed.drafter, proposed.draft
        if drafter is None:
            return Drafted(request.id)
        # A reported point mass is verified as one, whatever chose its token, so any length is exact (methods, 8.3).
        exposure = _exposure(request.verify_mode, draft.probs is None, self._drafters.named(drafter).drafter.blind)
        return Drafted(request.id, drafter, len(draft.tokens), draft.confidence, exposure)

    # -------------------------------------------------------------------------------------------------- after the step

    def settle(self, reports: Sequence[RoundReport], calls: Sequence[DraftTime], target_seconds: float | None) -> None:
        """The rounds of a step that reached a verdict, and what it took.

        `target_seconds` is None where they say nothing about decoding alone: prefill rows, a request that dropped out.
        """
        asked, self._asked = self._asked, 0
        drafts, self._drafts = self._drafts, {}
        if not self._drafters.loaded or asked == 0 or self.scheduler.options.policy == "fixed":
            return  # nothing would come of it
        told = [(drafts.get(r.request.id) or Drafted(r.request.id), r) for r in reports]
        self.scheduler.record([Judged(draft, r.verified, r.accepted, tuple(r.missed)) for draft, r in told])
        alone = target_seconds if len(reports) == asked else None
        self.scheduler.observe(alone or 0.0, calls)  # no time teaches nothing

    def restart(self, request_id: int) -> None:
        """Its rows are computed again, so what the drafters hold will be fresh."""
        self.scheduler.restart(request_id)

    def forget(self, request_id: int) -> None:
        self.scheduler.forget(request_id)


@cache
def _exposure(verify_mode: VerifyMode, point_masses: bool, blind: bool) -> Exposure:
    return Exposure(verify_mode, point_masses, blind)


__all__ = ["RoundListener", "RoundReport", "Schedule", "Scheduling"]
