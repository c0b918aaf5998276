"""Which requests run in a step, with how many rows each: continuous batching, chunked prefill, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from forerun import budget
from forerun.budget.planning import Plan
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
    plan: Plan | None = None
    """Which drafters it asks, for how much; None: a prefill, which asks none."""

    @property
    def k(self) -> int:
        """The longest draft it may make."""
        return 0 if self.plan is None else self.plan.k

    @property
    def is_round(self) -> bool:
        """Whether the step reaches the anchor, so that a token is emitted."""
        return self.count == self.request.pending


PlanStep = Callable[[Sequence[Request], int, int], Sequence[Plan]]
"""`plan(requests, rows_left, other_rows)`: a plan for each of the decoding requests of a step, of which each may use so
many rows beside its anchor, while so many rows of prefill are expected in the same pass."""


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
        self.joining = 0
        """Requests that will be admitted in the step that is planned, as far as can be told."""
        self._on_preempt = on_preempt
        self._reclaim = reclaim

    def choose(self, plan: PlanStep) -> list[Work]:
        """The work of the next step. Decoding requests come first, then running prefills, then new requests.

        A request that needs a block when none is free takes those of the latest admitted request, which is preempted:
        it goes back to the front of the queue and its rows are computed again, with nothing sampled on the way.
        """
        works = self._decodes(plan)
        left = self.limits.max_num_batched_tokens - sum(work.count + work.k for work in works)
        prefills = [r for r in self.running if r.prefill > 0]
        for place, request in enumerate(prefills, 1):
            others = place < len(prefills) or self._seats(1)
            if left > 0 and request in self.running and self._make_room(request, request.rows + 1, works):
                works.append(self._prefill(request, _share(left, others)))
                left -= works[-1].count
        while left > 0 and self._seats(1):
            request, share = self.waiting[0], _share(left, self._seats(2))
            if not self._can_admit(request, share):
                break
            self.running.append(self.waiting.popleft())
            works.append(self._prefill(request, share))
            left -= works[-1].count
        assert works or not self.running, "running requests but nothing to do"
        return works

    def _seats(self, place: int) -> bool:
        """Whether there is a request at this place of the queue, from 1, and a seat for it."""
        return min(len(self.waiting), self.limits.max_num_seqs - len(self.running)) >= place

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

    def _decodes(self, plan: PlanStep) -> list[Work]:
        decoding = [request for request in self.running if request.prefill == 0]
        works: list[Work] = []
        if not decoding:
            return works
        rows_left = self._row_share(len(decoding)) - 1
        # All of them before any gets its room: who drafts how much is decided for the step as a whole.
        plans = plan(decoding, rows_left, self._look_ahead(len(decoding)))
        for request, own in zip(decoding, plans, strict=True):
            # Room for the drafts as well: a K cut to what is free would make the text depend on batch-mates.
            if request in self.running and self._make_room(request, request.rows + 1 + own.k, works):
                works.append(Work(request, 1, own))
        return works

    def _look_ahead(self, decoding: int) -> int:
        """Rows of prefill to expect beside so many decoding requests, and in `joining` the new requests among them; how
        many rows the drafts will leave is not known yet."""
        left = most = self.limits.max_num_batched_tokens - decoding
        left -= min(left, sum(request.prefill for request in self.running))
        self.joining = 0
        for request in islice(self.waiting, self.limits.max_num_seqs - len(self.running)):
            rows = request.rows + min(request.prefill, left) + (len(self.running) + self.joining) * BLOCK_SIZE
            if left == 0 or not self.pool.can_grow(request.blocks, rows):
                break  # it waits for its turn, or for memory
            left -= min(request.prefill, left)
            self.joining += 1
        return most - left

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


def _share(left: int, others: bool) -> int:
    """Rows that one prompt may take of a step: a quarter is for those behind it, so that a long one starves nobody."""
    return max(1, left * 3 // 4) if others else left


def draft_room(request: Request, window: int, rows_left: int, drafter_window: int | None) -> budget.Room:
    """What the request could use in this step, for `budget.plan`."""
    return budget.Room(
        tokens_left=request.limit - len(request.tokens),
        window_left=window - 1 - request.anchor,
        rows_left=rows_left,
        drafter_window_left=None if drafter_window is None else drafter_window - request.anchor,
    )
