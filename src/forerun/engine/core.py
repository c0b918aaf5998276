"""The loop: choose, propose, run, settle. One thread owns a core; nothing here waits or talks to callers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forerun.drafters.base import Accepted
from forerun.engine.admission import Admission, Limits, Work
from forerun.engine.judge import Outcome, Round, judge
from forerun.engine.propose import LoadedDrafter, follow, forget, logger, plan_length, propose
from forerun.engine.request import Request
from forerun.sampling import NOTHING, logprobs, undrawable
from forerun.target.base import Batch, Forward, Segment, Target
from forerun.target.blocks import BlockPool
from forerun.verify import Draft

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Progress:
    """What a step did to one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)


class EngineCore:
    """Target, drafters and the requests between them.

    Args:
        target: already allocated for `num_blocks`, like every drafter.
        loaded: drafters in the order they are asked; empty: plain decoding.
        num_blocks: KV blocks of the target and of every drafter.
    """

    def __init__(self, target: Target, loaded: Sequence[LoadedDrafter], limits: Limits, num_blocks: int):
        self.target = target
        self.loaded = list(loaded)
        self.pool = BlockPool(num_blocks)
        self.kept: dict[int, list[int]] = {}  # block tables that idle conversations hold, by their request id
        self.admission = Admission(limits, self.pool, self._on_preempt, self._reclaim)
        self._taps = tuple(sorted({h for entry in loaded for h in entry.drafter.taps}))

    @property
    def busy(self) -> bool:
        return bool(self.admission.running or self.admission.waiting)

    def add(self, request: Request) -> None:
        self.admission.waiting.append(request)

    def step(self) -> list[Progress]:
        """One pass of the target over whatever can run; what it did to each request that reached a token.

        If the target itself raises, the requests of this step fail with that error and the others go on.
        """
        works = self.admission.choose(self._draft_length)
        if not works:
            return []
        now = time.perf_counter()
        for work in works:
            work.request.started = work.request.started or now
        drafts = propose(self.loaded, works, len(self.admission.running), self.target)
        try:
            forward = self._run(works, drafts)
            verdicts = self._judge(works, drafts, forward.logits)
        except Exception as error:
            logger.error("a step failed; its %d requests fail with it", len(works), exc_info=True)
            return [self.fail(work.request, error) for work in works]
        return self._settle(works, drafts, forward, verdicts)

    def _draft_length(self, request: Request, batch_size: int, rows_left: int) -> int:
        return plan_length(self.loaded, request, batch_size, self.target.window, rows_left)

    def _run(self, works: Sequence[Work], drafts: Sequence[Draft]) -> Forward:
        segments = []
        for work, draft in zip(works, drafts, strict=True):
            request = work.request
            tokens = [*request.tokens[request.rows : request.rows + work.count], *draft.tokens]
            logit_rows = len(draft.tokens) + 1 if work.is_round else 0
            segments.append(Segment(tokens, request.rows, request.blocks, logit_rows))
        return self.target.forward(Batch(segments), self._taps)

    def _judge(self, works: Sequence[Work], drafts: Sequence[Draft], logits: Tensor) -> list[Outcome | None]:
        """The outcome of each work; None where a prefill goes on."""
        rounds, row = [], 0
        for work, draft in zip(works, drafts, strict=True):
            if work.is_round:
                rounds.append(Round(work.request, draft, row))
                row += len(draft.tokens) + 1
        judged = iter(judge(rounds, logits) if rounds else ())
        return [next(judged) if work.is_round else None for work in works]

    def _settle(
        self,
        works: Sequence[Work],
        drafts: Sequence[Draft],
        forward: Forward,
        verdicts: Sequence[Outcome | None],
    ) -> list[Progress]:
        progress, final, logit_row, packed_row = [], [], 0, 0
        for work, draft, verdict in zip(works, drafts, verdicts, strict=True):
            request, start = work.request, work.request.rows
            if verdict is None:
                request.rows += work.count
            else:
                rows = forward.logits[logit_row : logit_row + len(draft.tokens) + 1]
                progress.append(self._try_commit(work, draft, verdict, rows))
                logit_row += len(draft.tokens) + 1
            final.append((request.id, start, request.rows, packed_row))
            packed_row += work.count + len(draft.tokens)
        self._inform(final, forward.features)
        for done in progress:
            if done.request.error is not None:
                self.drop(done.request)
            elif done.request.finish_reason is not None:
                self.release(done.request)
        return progress

    def _try_commit(self, work: Work, draft: Draft, verdict: Outcome, logits: Tensor) -> Progress:
        """An error on the way to a verdict, text or log-probabilities is this request's own; its batch-mates go on."""
        try:
            if isinstance(verdict, Exception):
                raise verdict
            return self._commit(work, draft, verdict, logits)
        except Exception as error:
            work.request.error, work.request.finish_reason = error, "abort"
            return Progress(work.request)

    def _commit(self, work: Work, draft: Draft, verdict: tuple[int, int], logits: Tensor) -> Progress:
        """Commits what was emitted until a stop rule fires, then cuts everything back to the kept prefix."""
        request, (accepted, token) = work.request, verdict
        run = draft.tokens[:accepted] + ([] if token == NOTHING else [token])
        before = len(request.from_draft)
        kept = request.commit(run, accepted)
        if token == NOTHING and request.finish_reason is None:
            request.error, request.finish_reason = undrawable(request.sampling), "abort"
        if before > 0:
            request.stats.record(len(draft.tokens), len(draft.tokens), accepted)
        request.stats.discarded += len(run) - kept
        if request.sampling.logprobs is not None and kept:
            request.logprobs += logprobs(logits[:kept], run[:kept], request.sampling.logprobs)
        request.rows = len(request.tokens) - 1
        self.pool.shrink(request.blocks, request.rows)
        return Progress(request, run[:kept], request.from_draft[before:], draft.tokens[min(accepted, kept) :])

    def _inform(self, final: Sequence[tuple[int, int, int, int]], features: Tensor | None) -> None:
        """Tells every drafter which rows became final, with the features it asked for."""
        for entry in self.loaded:
            accepted = [
                Accepted(request_id, start, end, self._columns(entry, features, row, end - start))
                for request_id, start, end, row in final
            ]
            follow(entry, accepted)

    def _columns(self, entry: LoadedDrafter, features: Tensor | None, row: int, count: int) -> Tensor | None:
        """[count, m * H] of the taps this drafter asked for, out of the union that was computed."""
        if features is None or not entry.drafter.taps:
            return None
        mine = features[row : row + count]
        if entry.drafter.taps == self._taps:
            return mine
        hidden = self.target.hidden_size
        where = [self._taps.index(h) for h in entry.drafter.taps]
        return mine.reshape(count, len(self._taps), hidden)[:, where].flatten(1)

    def release(self, request: Request) -> None:
        """A finished request leaves. A kept conversation holds on to its rows and the drafters' state."""
        request.ended = time.perf_counter()
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
        request.ended = time.perf_counter()
        self.admission.remove(request)
        self.kept.pop(request.id, None)
        self._forget(request.id)

    def drop_kept(self, conversation: int) -> None:
        """Frees the rows of an idle conversation."""
        blocks = self.kept.pop(conversation, None)
        if blocks is not None:
            self.pool.shrink(blocks, 0)
            self._forget(conversation)

    def cut_drafters(self, rows: Accepted) -> None:
        """Tells the drafters that a request goes on from fewer rows than they may hold."""
        for entry in self.loaded:
            follow(entry, [rows])

    def _reclaim(self) -> bool:
        idle = next((number for number, blocks in self.kept.items() if blocks), None)
        if idle is None:
            return False
        self.pool.shrink(self.kept[idle], 0)
        self._forget(idle)
        return True

    def _on_preempt(self, request: Request) -> None:
        self._forget(request.id)

    def _forget(self, request_id: int) -> None:
        for entry in self.loaded:
            forget(entry, request_id)

    def audit(self) -> None:
        """Asserts that all books balance: free + used = total here and in every drafter."""
        self.admission.audit(list(self.kept.values()))
        for entry in self.loaded:
            entry.drafter.audit()
