"""The scheduler: the loop's three questions, and what it learns from how they turned out.

    plan            before drafting    drafters and K of every request; K = 0 is plain decoding
    keep_drafting   while drafting     whether slot k is worth it, asked before its token is drawn
    choose          after drafting     how many tokens of each draft to verify
    record          after the verdict  what was accepted
    observe         after the step     what it cost

It is given numbers only, never a token. An engine has one; the simulator drives the same code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.budget.bypass import Reason
from forerun.budget.calibration import Calibration
from forerun.budget.confidence import Confidences
from forerun.budget.curve import FloatArray
from forerun.budget.drift import LiveCosts
from forerun.budget.history import AcceptanceHistory, Outcome
from forerun.budget.lag import Expected, PastRounds
from forerun.budget.planner import Planner, SchedulerOptions
from forerun.budget.planning import Ask, Choice, Load, Plan
from forerun.budget.policy import DraftRow, SlotRule, check_policy, choose, keep_drafting
from forerun.budget.profile import Profile
from forerun.budget.rounds import Drafted, DraftTime, Judged
from forerun.budget.selection import Promise, Promises


@dataclass(slots=True)
class _Step:
    """The step in progress."""

    load: Load = field(default_factory=lambda: Load(0))
    asks: dict[int, Ask] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    promised: Promises | None = None
    rules: dict[tuple[int, str], SlotRule] = field(default_factory=dict)
    survival: dict[int, float] = field(default_factory=dict)
    """Calibrated c_1 * .. of the slots asked about so far."""
    refused: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)
    """By request and drafter: the slot that was not drafted, and its calibrated confidence."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Draft tokens verified."""
    given: dict[int, list[float]] = field(default_factory=dict)
    """Calibrated confidences of the drafts, as they were chosen by."""


class Scheduler:
    """Decides how much to draft and to verify.

    Args:
        profile: measured costs of the target and of every drafter that will be named; None: nothing is known, so every
            request drafts what it may and all of it is verified.
        options: see there. Under `fixed` nothing adapts: every request drafts what it may, and seeds repeat.
        calibrations: fitted tables by drafter.
        priors: acceptance by position of a drafter, from its card.
    """

    def __init__(
        self,
        profile: Profile | None = None,
        options: SchedulerOptions | None = None,
        calibrations: Mapping[str, Calibration] | None = None,
        priors: Mapping[str, Sequence[float]] | None = None,
    ):
        self.options = options or SchedulerOptions()
        self.calibrations = dict(calibrations or {})
        self.history = AcceptanceHistory(priors)
        self._costs = None if profile is None else LiveCosts(profile)
        self._confidences = Confidences(self.calibrations)
        self._past = PastRounds()
        self._planner = Planner(self.options, self.history)
        self._step = _Step()

    @property
    def adapts(self) -> bool:
        return self._costs is not None and self.options.policy != "fixed"

    @property
    def profile(self) -> Profile | None:
        """The costs it reckons with, corrected by what steps really took."""
        return None if self._costs is None else self._costs.now

    # ------------------------------------------------------------------------------------------------- before drafting

    def plan(self, asks: Sequence[Ask], other_rows: int = 0) -> list[Plan]:
        """One plan for every request that decodes in the next step, in the order asked.

        Args:
            asks: each request once; those that cannot draft belong to the load too.
            other_rows: rows of prefill chunks in the same pass.

        Raises:
            OptionError: a drafter of which the profile has no costs.
        """
        load = Load(len(asks), other_rows, prefill_rows=other_rows)
        step = self._step = _Step(load, {ask.request_id: ask for ask in asks})
        if self._costs is None or not self.adapts:
            plans = [_as_configured(ask) for ask in asks]
        else:
            plans, step.promised = self._planner.plan(asks, step.load, self._costs.now)
        step.plans = {plan.request_id: plan for plan in plans}
        return plans

    # -------------------------------------------------------------------------------------------------- while drafting

    def keep_drafting(self, request_id: int, drafter: str, k: int, confidence: float) -> bool:
        """Whether slot k (from 1) is worth drafting; `confidence` is c_k as the drafter gives it, before x_k is drawn.

        Asked for k = 1, 2, .. in order. NaN ends the draft.
        """
        step = self._step
        c = self._confidences.calibrated(drafter, step.asks[request_id].calibration, k, confidence)
        before = 1.0 if k == 1 else step.survival[request_id]
        step.survival[request_id] = before * c
        kept = self._keeps(request_id, drafter, k, before, c)
        if not kept and not math.isnan(c):
            step.refused[request_id, drafter] = k, c
        return kept

    def _keeps(self, request_id: int, drafter: str, k: int, survival: float, confidence: float) -> bool:
        plan, threshold = self._step.plans[request_id], self._step.asks[request_id].confidence_threshold
        if not self.adapts or plan.probe:
            return confidence >= threshold
        rule = self._step.rules.get((request_id, drafter))
        if rule is None:
            promise, most = self._promise(request_id, drafter), _planned(plan, drafter)
            assert promise is not None, f"{drafter!r} promised request {request_id} nothing"
            rate, until = float(promise.rate[: most + 1].max()), most + 1
            seconds = promise.drafting[:until], promise.verifying[:until]
            rule = SlotRule(rate, *seconds, promise.acceptance(most), threshold)
            self._step.rules[request_id, drafter] = rule
        return keep_drafting(rule, k, survival, confidence)

    # -------------------------------------------------------------------------------------------------- after drafting

    def choose(self, drafts: Sequence[Drafted]) -> list[int]:
        """[R] draft tokens to verify, for all requests of the step, also those without a draft.

        Raises:
            OptionError: policy `global` on drafts it would bias.
        """
        check_policy(self.options.policy, [draft.exposure for draft in drafts if draft.drafter is not None])
        rows = [self._row(draft) for draft in drafts]
        if not self.adapts or not any(row.planned for row in rows):
            lengths = choose(rows, np.zeros(1), "fixed")
        else:
            past = self._past.of(self._expected(drafts, rows)) if self.options.policy == "delayed" else None
            lengths = choose(rows, self._seconds(drafts, rows), self.options.policy, past)
        self._step.lengths = {row.request_id: n for row, n in zip(rows, lengths, strict=True)}
        return lengths

    def _row(self, draft: Drafted) -> DraftRow:
        step, request, drafter = self._step, draft.request_id, draft.drafter
        if drafter is None:
            return DraftRow(request, 0, (), draft.exposure)
        ask, plan = step.asks[request], step.plans[request]
        given = step.given[request] = self._confidences.all_of(drafter, ask.calibration, draft.confidence)
        confidence = given or self._by_history(request, drafter, draft.count)
        planned = _planned(plan, drafter)
        assert len(confidence) <= planned, f"{len(confidence)} drafts where {planned} were planned"
        return DraftRow(request, planned, confidence, draft.exposure, ask.confidence_threshold, plan.probe)

    def _by_history(self, request_id: int, drafter: str, count: int) -> list[float]:
        promise = self._promise(request_id, drafter)
        return [1.0] * count if promise is None else promise.acceptance(count).tolist()

    def _promise(self, request_id: int, drafter: str) -> Promise | None:
        return None if self._step.promised is None else self._step.promised.of(request_id, drafter)

    def _expected(self, drafts: Sequence[Drafted], rows: Sequence[DraftRow]) -> list[Expected]:
        promised = self._step.promised
        assert promised is not None
        survival = dict(zip(promised.drafters, promised.expected, strict=True))
        found = []
        for draft, row in zip(drafts, rows, strict=True):
            own = survival[draft.drafter][promised.place[row.request_id]] if draft.drafter is not None else []
            found.append(Expected(row.request_id, draft.drafter, own[: row.planned]))
        return found

    def _seconds(self, drafts: Sequence[Drafted], rows: Sequence[DraftRow]) -> FloatArray:
        """[N + 1] of the step with 0 .. N draft rows, without its prefill. Of the planned lengths: the drafted ones may
        know tokens."""
        assert self._costs is not None
        profile, contexts = self._costs.now, [self._step.asks[row.request_id].context for row in rows]
        drafting = 0.0
        for name, mine in sorted(_by_drafter(drafts).items()):
            drafting += profile.drafts[name].of([rows[i].planned for i in mine], [contexts[i] for i in mine])
        fixed = len(rows) + sum(row.planned for row in rows if row.whole)
        most = sum(row.planned for row in rows if not row.whole)
        extra = profile.verify.context.at(contexts)
        per_row = float(extra.row.sum()) / len(rows)
        first = self._step.load.other_rows + fixed
        passes = profile.verify.tokens.over(first, first + most) - self._step.load.prefill_seconds(profile.verify)
        return drafting + passes + float(extra.request.sum()) + per_row * np.arange(fixed, fixed + most + 1)

    # -------------------------------------------------------------------------------------------------- after the step

    def record(self, rounds: Sequence[Judged]) -> None:
        """The verdicts of the step, of every request that got one, plain rounds included.

        A round without a verdict (preempted, failed) stays out: its confidences know tokens that are still to come.
        """
        for judged in rounds:
            draft, request = judged.draft, judged.draft.request_id
            for name in judged.missed:
                self._learn_of_nothing(request, name)
            if draft.drafter is not None:
                self._learn(judged, draft.drafter)
            ask, plan = self._step.asks[request], self._step.plans[request]
            self._planner.record(ask, plan, draft.drafter, judged.accepted + 1, judged.missed)

    def _learn_of_nothing(self, request: int, drafter: str) -> None:
        """It proposed nothing: because it had nothing, or because its first slot was not worth drafting."""
        if (request, drafter) in self._step.refused:
            self.history.record(drafter, request, self._outcome(request, drafter, [], 0, 0))
        else:
            self.history.record_miss(drafter, request)

    def _learn(self, judged: Judged, drafter: str) -> None:
        draft, request = judged.draft, judged.draft.request_id
        key, given = self._step.asks[request].calibration, self._step.given.get(request)
        if given is None:  # nobody asked how much of it to verify
            given = self._confidences.all_of(drafter, key, draft.confidence)
        given = [*itertools.takewhile(lambda c: not math.isnan(c), given)]  # nothing is known from a NaN on
        outcome = self._outcome(request, drafter, given, judged.verified, judged.accepted)
        self.history.record(drafter, request, outcome)
        if given:
            self._past.record(request, drafter, given)
        self._confidences.record(drafter, key, draft.confidence, judged.verified, judged.accepted)

    def _outcome(self, request: int, drafter: str, given: list[float], verified: int, accepted: int) -> Outcome:
        """With the slot that was refused behind those drafted, if there is one."""
        slot, confidence = self._step.refused.get((request, drafter), (0, 0.0))
        seen = [*given, confidence] if slot == len(given) + 1 else given
        key = self._step.asks[request].calibration
        return Outcome(verified, accepted, seen, self._confidences.trust(drafter, key, len(seen)))

    def observe(self, target_seconds: float, calls: Sequence[DraftTime] = ()) -> None:
        """What the step took: everything but drafting, and each drafting call. After `choose`, before the next `plan`.

        A step with prefill rows says nothing about decoding and is left out. A step that failed must be left out by the
        caller, like its rounds: how long a draft took tells how far it got, and its noise will be read again.
        """
        if self._costs is None:
            return
        profile, step = self._costs.now, self._step
        for call in calls:
            predicted = profile.costs(call.drafter).draft.of(call.lengths, call.contexts)
            self._costs.observe_draft(call.drafter, max(call.lengths, default=0), predicted, call.seconds)
        if step.load.other_rows == 0 and step.load.requests > 0:
            rows = np.array([1 + step.lengths.get(request, 0) for request in step.asks])
            extra = profile.verify.context.at([ask.context for ask in step.asks.values()])
            predicted = profile.verify.tokens(int(rows.sum())) + float(extra.request.sum() + extra.row @ rows)
            self._costs.observe_target(int(rows.sum()), predicted, target_seconds)

    def restart(self, request_id: int) -> None:
        """The request lost its rows (preempted) and is computed again: the drafters' states will be fresh."""
        self._planner.restart(request_id)

    def forget(self, request_id: int) -> None:
        """The request is gone; what it has shown of its drafters stays."""
        self.history.forget(request_id)
        self._past.forget(request_id)
        self._planner.forget(request_id)


def _as_configured(ask: Ask) -> Plan:
    """Everything it may draft, drafters in their order."""
    if not ask.options:
        return Plan(ask.request_id, reason=ask.reason or Reason.REQUEST)
    return Plan(ask.request_id, tuple(Choice(option.drafter, option.most) for option in ask.options))


def _by_drafter(drafts: Sequence[Drafted]) -> dict[str, list[int]]:
    """Places of the drafts that each drafter made."""
    found: dict[str, list[int]] = {}
    for i, draft in enumerate(drafts):
        if draft.drafter is not None:
            found.setdefault(draft.drafter, []).append(i)
    return found


def _planned(plan: Plan, drafter: str) -> int:
    for choice in plan.choices:
        if choice.drafter == drafter:
            return choice.k
    raise AssertionError(f"{drafter!r} was not to draft for request {plan.request_id}: {plan.choices}")


__all__ = ["Scheduler"]
