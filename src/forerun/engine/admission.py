"""Which requests run in a step, with how many rows each: continuous batching, chunked prefill, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from forerun import budget
from forerun.engine.request import Request
from forerun.errors import OptionError
from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockPool, blocks_for


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine; names are vLLM's."""

    max_num_seqs: int = 64
    """Requests decoded at once."""
    max_num_batched_tokens: int = 1024
    """Rows of one step, prefill and draft rows included."""
    kv_cache_memory_bytes: int | None = None
    """Memory of all KV storage, the drafters' included; None: what the requests of one full batch could use, at most a
    quarter of the free memory."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise OptionError("max_num_seqs", f"must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), got {self.max_num_batched_tokens}",
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise OptionError("kv_cache_memory_bytes", f"must be positive, got {self.kv_cache_memory_bytes}")


@dataclass(slots=True)
class Work:
    """One request's share of a step: feed `count` pending tokens and, if they are the last ones, up to k drafts."""

    request: Request
    count: int
    k: int = 0

    @property
    def is_round(self) -> bool:
        """Whether the step reaches the anchor, so that a token is emitted."""
        return self.count == self.request.pending


DraftLength = Callable[[Request, int, int], int]
"""(request, running requests, rows left to it) -> K that policy, request and window allow."""


class Admission:
    """Queues of waiting and running requests over one block pool. It moves integers only."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        on_preempt: Callable[[Request], None],
        reclaim: Callable[[], bool] = lambda: False,
    ):
        """`reclaim` frees the blocks of something idle and says whether it found any; asked before a preemption."""
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._on_preempt = on_preempt
        self._reclaim = reclaim

    def choose(self, draft_length: DraftLength) -> list[Work]:
        """The work of the next step. Decoding requests come first, then running prefills, then new requests.

        A request that needs a block when none is free takes those of the latest admitted request, which is preempted:
        it goes back to the front of the queue and its rows are computed again, with nothing sampled on the way.
        """
        works = self._decodes(draft_length)
        left = self.limits.max_num_batched_tokens - sum(work.count + work.k for work in works)
        for request in [r for r in self.running if r.prefill > 0]:
            if left > 0 and request in self.running and self._make_room(request, request.rows + 1, works):
                works.append(self._prefill(request, left))
                left -= works[-1].count
        while left > 0 and self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if not self._can_admit(request, left):
                break
            self.running.append(self.waiting.popleft())
            works.append(self._prefill(request, left))
            left -= works[-1].count
        assert works or not self.running, "running requests but nothing to do"
        return works

    def _can_admit(self, request: Request, left: int) -> bool:
        """Whether its first chunk fits and leaves every running request its next block: else it would be preempted."""
        rows = request.rows + min(request.prefill, left)
        return self._can_grow(request, rows + len(self.running) * BLOCK_SIZE) or (
            not self.running and self._can_grow(request, rows)
        )

    def _can_grow(self, request: Request, rows: int) -> bool:
        while not self.pool.can_grow(request.blocks, rows):
            if not (self._reclaim() or self._take_back(request)):
                return False
        return True

    def _take_back(self, asking: Request) -> bool:
        """Frees the kept rows that a turn of a conversation holds while it waits; its prompt is then computed whole."""
        holder = next((r for r in reversed(self.waiting) if r.blocks and r is not asking), None)
        if holder is None:
            return False
        self.free(holder)
        self._on_preempt(holder)
        return True

    def _decodes(self, draft_length: DraftLength) -> list[Work]:
        decoding = [request for request in self.running if request.prefill == 0]
        works: list[Work] = []
        if not decoding:
            return works
        share = self._row_share(len(decoding))
        for request in decoding:
            if request in self.running:
                # Room for the drafts as well: a K cut to what is free would make the text depend on batch-mates.
                k = draft_length(request, len(self.running), share - 1)
                if self._make_room(request, request.rows + 1 + k, works):
                    works.append(Work(request, 1, k))
        return works

    def _row_share(self, decoding: int) -> int:
        """Rows each decoding request may use; a quarter of the step is kept for prefill while some is waiting."""
        rows = self.limits.max_num_batched_tokens
        if self.waiting or len(self.running) > decoding:
            rows = max(decoding, rows * 3 // 4)
        return rows // decoding

    def _make_room(self, request: Request, rows: int, works: list[Work]) -> bool:
        """Gets blocks for so many rows of a request, preempting the latest one if need be; False: it was itself."""
        while not self._can_grow(request, rows):
            victim = self.running[-1]
            self.preempt(victim)
            works[:] = [work for work in works if work.request is not victim]
            if victim is request:
                return False
        self.pool.grow(request.blocks, rows)
        return True

    def _prefill(self, request: Request, left: int) -> Work:
        count = min(request.prefill, left)
        while not self.pool.can_grow(request.blocks, request.rows + count):
            count = (blocks_for(request.rows + count) - 1) * BLOCK_SIZE - request.rows
        self.pool.grow(request.blocks, request.rows + count)
        return Work(request, count)

    def preempt(self, request: Request) -> None:
        """Back to the front of the queue with nothing but its tokens."""
        self.running.remove(request)
        self.free(request)
        request.stats.preemptions += 1
        self.waiting.appendleft(request)
        self._on_preempt(request)

    def remove(self, request: Request) -> None:
        """A finished, cancelled or failed request leaves; its blocks are free at once."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.free(request)

    def free(self, request: Request) -> None:
        self.pool.shrink(request.blocks, 0)
        request.rows = 0

    def audit(self, kept: list[list[int]]) -> None:
        """Asserts that free + used is the total and every used block belongs to a request or a kept conversation."""
        self.pool.audit([r.blocks for r in (*self.running, *self.waiting)] + kept)


def draft_room(request: Request, window: int, rows_left: int, drafter_window: int | None) -> budget.Room:
    """What the request could use in this step, for `budget.plan`."""
    return budget.Room(
        tokens_left=request.limit - len(request.tokens),
        window_left=window - 1 - request.anchor,
        rows_left=rows_left,
        drafter_window_left=None if drafter_window is None else drafter_window - request.anchor,
    )
