"""Which requests run in a step, with how many rows each: continuous batching, chunked prefill, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING

from forerun import budget
from forerun.budget.planning import Plan
from forerun.engine.request import Request
from forerun.errors import OptionError
from forerun.sampling.options import check_whole
from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockPool, blocks_for

if TYPE_CHECKING:
    from forerun.engine.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine; names are vLLM's."""

    max_num_seqs: int = 64
    """Requests decoded at once."""
    max_num_batched_tokens: int = 1024
    """Rows of one step, prefill and draft rows included."""
    kv_cache_memory_bytes: int | None = None
    """Memory of all KV storage, the drafters' included; None: what the requests of one full batch could use, at most a
    quarter of the free memory. What running requests leave of it holds the prefix cache."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None:
                check_whole(limit.name, value)
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
        cache: PrefixCache | None = None,
    ):
        """`reclaim` frees the blocks of something idle and says whether it found any; asked before a preemption.
        `cache` is over the same pool; None: nothing is shared."""
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.joining = 0
        """Requests that will be admitted in the step that is planned, as far as can be told."""
        self._full = False  # nobody more is admitted in this step, for want of memory
        self._on_preempt = on_preempt
        self._reclaim = reclaim
        self._cache = cache

    def choose(self, plan: PlanStep) -> list[Work]:
        """The work of the next step. Decoding requests come first, then prompts.

        A request that needs a block when none is free takes those of the latest admitted request, which is preempted:
        it goes back to the front of the queue and its rows are computed again, with nothing sampled on the way.
        """
        self._full = False
        works = self._decodes(plan)
        left = self.limits.max_num_batched_tokens - sum(work.count + work.k for work in works)
        if left > 0:
            self._feed(works, left)
        assert works or not self.running, "running requests but nothing to do"
        return works

    def _feed(self, works: list[Work], left: int) -> None:
        """Prompts, into so many rows of the step.

        The oldest leaves a quarter of them to the others. Of these come first those that fit as a whole, then the first
        one in line, then the shortest of those that run: no number of long prompts keeps a short one waiting. A long
        one is passed by no other long one until it runs, and so is the oldest in time. A lower `priority` goes first.
        """
        prefills = [request for request in self.running if request.prefill > 0]
        oldest = _share(left, len(prefills) > 1 or self._seats(1 if prefills else 2))
        fed = False
        late: list[Request] = []
        for request in [*prefills, *self._next_in_line()]:
            if fed and (self._unknown(request) > left or any(one.priority < request.priority for one in late)):
                late.append(request)
                continue
            count = self._compute(request, left if fed else oldest, works)
            left, fed = left - count, fed or count > 0
        for request in sorted(late, key=lambda one: (one.priority, one.prefill if one in prefills else 0)):
            if left > 0:
                left -= self._compute(request, left, works)

    def _next_in_line(self) -> list[Request]:
        """Those that may be admitted. No more are looked at than could ever run."""
        most = self.limits.max_num_seqs
        return list(islice(self._ready(), most)) if len(self.running) < most else []

    def _unknown(self, request: Request) -> int:
        """Rows that it would compute, if it were admitted now, before it reaches a token."""
        if request.blocks or self._cache is None:
            return request.prefill
        return request.prefill - self._cache.found(request) * BLOCK_SIZE

    def _compute(self, request: Request, most: int, works: list[Work]) -> int:
        """Makes at most so many rows of a prompt work of this step; how many: 0 where there is no room for it."""
        if request in self.running:
            if not self._make_room(request, request.rows + 1, works):
                return 0
        elif self._full or len(self.running) >= self.limits.max_num_seqs:
            return 0
        elif not self._admit(request, most):
            self._full = True  # for all that wait: what is small would pass by what is large for ever
            return 0
        works.append(self._prefill(request, most))
        return works[-1].count

    def _ready(self) -> Iterator[Request]:
        """Waiting requests in their order. Further samples of a prompt stand back until it has been computed for the
        first one: then they find it in the cache."""
        return (request for request in self.waiting if not self._stands_back(request))

    def _stands_back(self, request: Request) -> bool:
        first, cache = request.first_sample, self._cache
        if first is None or cache is None or not cache.enabled or first.finish_reason is not None:
            return False
        return len(first.tokens) == first.prompt_length > BLOCK_SIZE

    def _seats(self, place: int) -> bool:
        """Whether there is a request at this place of those that are ready, from 1, and a seat for it."""
        seats = self.limits.max_num_seqs - len(self.running)
        return seats >= place and next(islice(self._ready(), place - 1, None), None) is not None

    def _admit(self, request: Request, left: int) -> bool:
        """Lets a waiting request run, if its first chunk fits and leaves every running one its next block: else it
        would be preempted. What the cache has of it is not computed."""
        cache = None if request.blocks else self._cache
        if cache is not None:
            cache.attach(request)
        rows = request.rows + min(request.prefill, left)
        fits = self._can_grow(request, rows + len(self.running) * BLOCK_SIZE) or (
            not self.running and self._can_grow(request, rows)
        )
        if fits:
            self.waiting.remove(request)
            self.running.append(request)
            if request.stats.preemptions == 0:
                request.stats.cached_tokens = request.rows
            if cache is not None:
                cache.begin(request)
        elif cache is not None:
            self.free(request)
        return fits

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
        for request in islice(self._ready(), self.limits.max_num_seqs - len(self.running)):
            unknown = self._unknown(request)
            count = min(unknown, left)
            rows = request.rows + request.prefill - unknown + count + (len(self.running) + self.joining) * BLOCK_SIZE
            if left == 0 or not self.pool.can_grow(request.blocks, rows):
                break  # it waits for its turn, or for memory
            left -= count
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
        """Back to the front of the queue with nothing but its tokens, and what the cache still has of them by then."""
        self.running.remove(request)
        self._full = True
        if self._cache is not None:
            self._cache.publish(request)
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
        """Asserts that free + used is the total, and that every used block belongs to requests, a kept conversation or,
        if it is used by nobody, to the cache."""
        tables = [r.blocks for r in (*self.running, *self.waiting)] + kept
        self.pool.audit(tables, () if self._cache is None else self._cache.blocks)


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
