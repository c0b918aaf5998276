"""The loop: choose, propose, run, settle. One thread owns a core; nothing here waits or talks to callers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.budget.planner import SchedulerOptions
from forerun.budget.planning import Plan
from forerun.budget.rounds import DraftTime
from forerun.budget.scheduler import Scheduler
from forerun.engine.admission import Admission, Limits, Work
from forerun.engine.drafting import Drafters, FinalRows
from forerun.engine.judge import Outcome, Round, committed_logprobs, judge
from forerun.engine.prefix_cache import PrefixCache
from forerun.engine.propose import Clock, LoadedDrafter, Proposed, logger
from forerun.engine.request import Progress, Request
from forerun.engine.schedule import RoundListener, RoundReport, Schedule, Scheduling
from forerun.engine.step_times import StepTimes
from forerun.sampling import NOTHING, undrawable
from forerun.target.base import Batch, Forward, Segment, Target
from forerun.target.blocks import BlockPool
from forerun.verify import Draft

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Part:
    """One request's part of a step."""

    work: Work
    proposed: Proposed
    draft: Draft
    """What is verified: the chosen beginning of what was proposed."""
    outcome: Outcome | None = None
    """None before the verdict, and where a prefill goes on."""


class EngineCore:
    """Target, drafters and the requests between them.

    Args:
        target: already allocated for `num_blocks`, like every drafter.
        loaded: drafters in the order they were configured; empty: plain decoding.
        num_blocks: KV blocks of the target and of every drafter.
        scheduling: who decides how much is drafted and verified; None: all of it, as configured.
        clock: seconds, monotonic.
        prefix_caching: keep blocks for requests that begin alike.
    """

    def __init__(
        self,
        target: Target,
        loaded: Sequence[LoadedDrafter],
        limits: Limits,
        num_blocks: int,
        scheduling: Scheduling | None = None,
        clock: Clock | None = None,
        prefix_caching: bool = True,
    ):
        self.target = target
        self._clock = clock or time.perf_counter
        self.drafters = Drafters(loaded, target, self._clock)
        fixed = Scheduling(Scheduler(options=SchedulerOptions(policy="fixed")))
        self.schedule = Schedule(scheduling or fixed, self.drafters, target.window)
        self.on_round: RoundListener | None = None
        self.times = StepTimes()
        self.pool = BlockPool(num_blocks)
        self.kept: dict[int, list[int]] = {}  # block tables that idle conversations hold, by their request id
        self.prefix_cache = PrefixCache(self.pool, self.drafters, prefix_caching)
        self.admission = Admission(limits, self.pool, self._on_preempt, self.reclaim, self.prefix_cache)

    @property
    def loaded(self) -> list[LoadedDrafter]:
        return self.drafters.loaded

    @property
    def busy(self) -> bool:
        return bool(self.admission.running or self.admission.waiting)

    def add(self, request: Request) -> None:
        """Behind every waiting request of its own priority."""
        waiting = self.admission.waiting
        later = (place for place, other in enumerate(waiting) if other.priority > request.priority)
        waiting.insert(next(later, len(waiting)), request)

    def step(self) -> list[Progress]:
        """One pass of the target over whatever can run; what it did to each request that reached a token.

        If the target itself raises, the requests of this step fail with that error and the others go on.
        """
        self.times.start()
        works = self.admission.choose(self._plan)
        if not works:
            return []
        now = self._clock()
        for work in works:
            if work.request.started is None:
                work.request.started = now
        self.times.mark("schedule")
        proposed, calls = self.drafters.propose(works, self.schedule.keep_drafting)
        self.times.mark("draft")
        try:
            lengths = self.schedule.choose(works, proposed)
            parts = [
                Part(work, one, one.draft.truncate(length))
                for work, one, length in zip(works, proposed, lengths, strict=True)
            ]
            start = self._clock()
            self.times.mark("schedule")
            forward = self._run(parts)
            self.times.mark("verify")
            self._judge(parts, forward.logits)
            self.times.mark("sample")
            # Verdicts are ints on the host (`tolist` of accepted and next token), so a GPU is done with the pass. What
            # drafters compute to follow it is not waited for: it lands in the next call that waits.
            seconds = self._clock() - start
        except Exception as error:
            logger.error("a step failed; its %d requests fail with it", len(works), exc_info=True)
            return [self.fail(work.request, error) for work in works]
        progress = self._settle(parts, forward, calls, seconds)
        self.times.mark("commit")
        self.times.end()
        return progress

    def _plan(self, requests: Sequence[Request], rows_left: int, other_rows: int) -> list[Plan]:
        batch_size = len(self.admission.running) + self.admission.joining
        return self.schedule.plan(requests, batch_size, rows_left, other_rows)

    def _run(self, parts: Sequence[Part]) -> Forward:
        segments = []
        for part in parts:
            request, drafts = part.work.request, part.draft.tokens
            tokens = [*request.tokens[request.rows : request.rows + part.work.count], *drafts]
            logit_rows = len(drafts) + 1 if part.work.is_round else 0
            segments.append(Segment(tokens, request.rows, request.blocks, logit_rows))
        return self.target.forward(Batch(segments), self.drafters.taps)

    def _judge(self, parts: Sequence[Part], logits: Tensor) -> None:
        """Fills in the outcome of each part that reaches a token."""
        reached = [part for part in parts if part.work.is_round]
        rounds, row = [], 0
        for part in reached:
            drafter = part.proposed.drafter
            drawn = drafter is not None and self.drafters.named(drafter).draws
            rounds.append(Round(part.work.request, part.draft, row, drawn))
            row += len(part.draft.tokens) + 1
        for part, outcome in zip(reached, judge(rounds, logits) if rounds else (), strict=True):
            part.outcome = outcome

    def _settle(
        self, parts: Sequence[Part], forward: Forward, calls: Sequence[DraftTime], seconds: float
    ) -> list[Progress]:
        progress, final, logit_row, packed_row = [], [], 0, 0
        for part in parts:
            request, start, count = part.work.request, part.work.request.rows, len(part.draft.tokens)
            if part.outcome is None:
                request.rows += part.work.count
            else:
                progress.append(self._try_commit(part, forward.logits[logit_row : logit_row + count + 1]))
                logit_row += count + 1
            final.append(FinalRows(request.id, start, request.rows, packed_row))
            packed_row += part.work.count + count
        self._report(parts, calls, seconds)
        self.drafters.inform(final, forward.features)
        self._publish(parts)
        for done in progress:
            if done.request.error is not None:
                self.drop(done.request)
            elif done.request.finish_reason is not None:
                self.release(done.request)
        return progress

    def _try_commit(self, part: Part, logits: Tensor) -> Progress:
        """An error on the way to a verdict, text or log-probabilities is this request's own; its batch-mates go on."""
        try:
            assert part.outcome is not None
            if isinstance(part.outcome, Exception):
                raise part.outcome
            return self._commit(part, part.outcome, logits)
        except Exception as error:
            part.work.request.error, part.work.request.finish_reason = error, "abort"
            return Progress(part.work.request)

    def _commit(self, part: Part, verdict: tuple[int, int], logits: Tensor) -> Progress:
        """Commits what was emitted until a stop rule fires, then cuts everything back to the kept prefix."""
        request, drafted, (accepted, token) = part.work.request, part.proposed.draft.tokens, verdict
        run = part.draft.tokens[:accepted] + ([] if token == NOTHING else [token])
        before = len(request.from_draft)
        kept = request.commit(run, accepted)
        if token == NOTHING and request.finish_reason is None:
            request.error, request.finish_reason = undrawable(request.sampling), "abort"
        if part.work.plan is not None:
            request.stats.record(len(drafted), len(part.draft.tokens), accepted)
            request.stats.record_plan(part.work.plan)
        request.stats.predicted_accepted += min(part.draft.predicted, accepted, kept)
        request.stats.predicted_rejected += max(0, part.draft.predicted - accepted)
        request.stats.discarded += len(run) - kept
        if request.sampling.logprobs is not None and kept:
            request.logprobs += committed_logprobs(request, logits[:kept])
        request.rows = len(request.tokens) - 1
        self.pool.shrink(request.blocks, request.rows)
        return Progress(
            request,
            run[:kept],
            request.from_draft[before:],
            drafted[min(accepted, kept) :],
            len(part.draft.tokens),
            accepted,
            part.draft.confidence,
        )

    def _publish(self, parts: Sequence[Part]) -> None:
        """A prompt can be found as soon as it is computed, an output when it is whole: nobody asks for half of one, and
        drafters go on taking in decoded rows in larger pieces."""
        for part in parts:
            request = part.work.request
            if request.error is None and (part.work.plan is None or request.finish_reason is not None):
                self.prefix_cache.publish(request)

    def _report(self, parts: Sequence[Part], calls: Sequence[DraftTime], seconds: float) -> None:
        """Tells the scheduler what came of its plans. A round whose request failed on the way stays out."""
        reports = [
            RoundReport(
                part.work.request, part.work.plan, part.proposed.draft, part.proposed.drafter,
                len(part.draft.tokens), part.outcome[0], part.proposed.missed,
            )
            for part in parts
            if part.work.plan is not None and isinstance(part.outcome, tuple) and part.work.request.error is None
        ]  # fmt: skip
        alone = all(part.work.plan is not None for part in parts)
        self.schedule.settle(reports, calls, seconds if alone else None)
        if self.on_round is not None:
            for report in reports:
                self.on_round(report)

    def release(self, request: Request) -> None:
        """A finished request leaves. A kept conversation holds on to its rows and the drafters' state."""
        request.ended = self._clock()
        if request.id in self.kept:
            self.kept[request.id] = request.blocks
            request.blocks = []
            self.admission.remove(request)
            return
        self.admission.remove(request)
        self._forget(request.id)

    def fail(self, request: Request, error: Exception) -> Progress:
        """Ends a request with an error."""
        request.error, request.finish_reason = error, "abort"
        self.drop(request)
        return Progress(request)

    def cancel(self, request: Request) -> None:
        """Takes a request out between two steps; its blocks are free at once."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Removes a request with everything that was kept for it."""
        request.ended = self._clock()
        self.admission.remove(request)
        self.kept.pop(request.id, None)
        self._forget(request.id)

    def drop_kept(self, conversation: int) -> None:
        """Frees the rows of an idle conversation."""
        blocks = self.kept.pop(conversation, None)
        if blocks is not None:
            self.pool.shrink(blocks, 0)
            self._forget(conversation)

    def cut_drafters(self, request_id: int, rows: int) -> None:
        """Tells the drafters that a request goes on from fewer rows than they may hold."""
        self.drafters.cut(request_id, rows)
        if rows == 0:
            self.schedule.restart(request_id)

    def reclaim(self, since: int = 0) -> bool:
        """Takes the rows of something idle that began behind `since`, by its number; False if nothing idle has any."""
        idle = next((number for number, blocks in self.kept.items() if blocks and number > since), None)
        if idle is None:
            return False
        self.pool.shrink(self.kept[idle], 0)
        self._forget(idle)
        return True

    def _on_preempt(self, request: Request) -> None:
        """Its drafts and what their confidences knew are forgotten; what it has shown of its drafters stays."""
        self.drafters.forget(request.id)
        self.schedule.restart(request.id)

    def _forget(self, request_id: int) -> None:
        self.drafters.forget(request_id)
        self.schedule.forget(request_id)

    def audit(self) -> None:
        """Asserts that all books balance: free + used = total here and in every drafter."""
        self.admission.audit(list(self.kept.values()))
        self.prefix_cache.audit()
        self.drafters.audit()
