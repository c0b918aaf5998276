"""Calls of a drafter as the engine makes them, timed: `propose` for requests whose prompts it has really taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from forerun.bench.machine import wait_for
from forerun.bench.profiling.grid import Call
from forerun.bench.profiling.repeats import Clock
from forerun.drafters.base import Accepted, DraftView
from forerun.engine import Engine
from forerun.engine.propose import LoadedDrafter
from forerun.sampling import Noise, Sampling
from forerun.target.base import Batch, Segment
from forerun.target.blocks import blocks_for

if TYPE_CHECKING:
    from torch import Tensor

WALK = 96
"""Tokens that a request goes on before it is cut back to where it began: its context stays what it is said to be."""
FOLLOWERS, FOLLOWED, FOLLOWINGS = 4, 80, 3
"""Requests at most, and tokens of each, over which following is measured, and how often: drafters gather up to 64 rows
before they work, or all until they are asked."""


@dataclass(slots=True)
class _Walker:
    """A request on its way along the text."""

    request_id: int
    start: int
    anchor: int


class DraftCalls:
    """Calls of one drafter of an idle engine. Its requests have negative ids and are released by `close`.

    Every call is followed by what a round is followed by: the target's token is committed, and the request goes on by
    one. So each call finds the rows to catch up with that it finds while decoding.

    Args:
        engine: nothing else may run on it.
        entry: the drafter.
        text: ids that all requests go along.
        sampling: of every request.
        clock: seconds.
    """

    def __init__(self, engine: Engine, entry: LoadedDrafter, text: Sequence[int], sampling: Sampling, clock: Clock):
        self._engine, self._entry, self._clock = engine, entry, clock
        self._text, self._sampling = list(text), sampling
        self._walkers: dict[int, list[_Walker]] = {}  # by context
        self._last_id = 0
        self._features: Tensor | None = None

    def prepare(self, rows: int) -> None:
        """Computes the target's features of so many rows of the text, if the drafter reads them."""
        if not self._entry.drafter.taps:
            return
        core = self._engine.core
        table: list[int] = []
        core.pool.grow(table, rows)
        batch = Batch([Segment(self._text[:rows], 0, table, 0)])
        self._features = core.target.forward(batch, self._entry.drafter.taps).features
        core.pool.shrink(table, 0)

    def fits(self, call: Call) -> bool:
        """Whether target, drafter and storage have room for a call behind its context."""
        windows = [self._engine.target.window, self._entry.drafter.window or self._engine.target.window]
        end = call.context + WALK + call.k + 1
        # The requests of every context stay: half of the storage for those of one.
        blocks = 2 * call.requests * blocks_for(end)
        return end <= min(*windows, len(self._text)) and blocks <= self._engine.core.pool.num_blocks

    # ----------------------------------------------------------------------------------------------------------- calls

    def __call__(self, call: Call) -> float:
        """Seconds of one call."""
        return self._draft(self._at(call.context, call.requests), call.k)

    def _draft(self, walkers: Sequence[_Walker], k: int) -> float:
        """Seconds in which these requests draft K tokens; they go on by one."""
        views = [self._view(walker, k) for walker in walkers]
        wait_for(self._engine.target.device)
        start = self._clock()
        self._entry.drafter.propose(views, _always)
        wait_for(self._engine.target.device)
        seconds = self._clock() - start
        self._go_on(walkers)
        return seconds

    def _at(self, context: int, requests: int) -> list[_Walker]:
        """So many requests on their way behind a context. New ones draft once, which takes their prompts in."""
        own = self._walkers.setdefault(context, [])
        new = [self._new(context) for _ in range(requests - len(own))]
        if new:
            self._draft(new, 1)
        own += new
        return own[:requests]

    def _new(self, context: int) -> _Walker:
        self._last_id -= 1
        self._entry.drafter.commit([self._final(self._last_id, 0, context)])
        return _Walker(self._last_id, context, context)

    def _final(self, request_id: int, start: int, end: int) -> Accepted:
        features = None if self._features is None else self._features[start:end]
        return Accepted(request_id, start, end, features)

    def _view(self, walker: _Walker, k: int) -> DraftView:
        return DraftView(
            request_id=walker.request_id,
            tokens=self._text[: walker.anchor + 1],
            prompt_length=walker.start,
            k=k,
            sampling=self._sampling,
            end_ids=frozenset(),
            noise=Noise.of(-walker.request_id),
            verify_mode=self._engine.options.verify_mode,
            draft_greedily=self._entry.config.draft_sample_method == "greedy",
        )

    def _go_on(self, walkers: Sequence[_Walker]) -> None:
        """Commits the anchor's row of each, and cuts back those that have come to the end of their walk."""
        drafter = self._entry.drafter
        drafter.commit([self._final(w.request_id, w.anchor, w.anchor + 1) for w in walkers])
        for walker in walkers:
            walker.anchor += 1
        self._begin_again([walker for walker in walkers if walker.anchor >= walker.start + WALK])

    def _begin_again(self, walkers: Sequence[_Walker]) -> None:
        """Cuts these requests back to where they began."""
        for walker in walkers:
            self._entry.drafter.commit([Accepted(walker.request_id, walker.start, walker.start, None)])
            walker.anchor = walker.start

    # ------------------------------------------------------------------------------------------------------- following

    def follow(self, context: int) -> float:
        """Seconds per committed token of keeping up with requests that do not draft, over many tokens: as they become
        final, and what is left of it for when the drafter is asked again."""
        able = [n for n in range(1, FOLLOWERS + 1) if self.fits(Call(n, 1, context))]
        walkers = [self._new(context) for _ in range(max(able, default=1))]
        self._draft(walkers, 1)
        seconds = median(self._following(walkers) for _ in range(FOLLOWINGS))
        for walker in walkers:
            self._entry.drafter.release(walker.request_id)
        return seconds / (FOLLOWED * len(walkers))

    def _following(self, walkers: Sequence[_Walker]) -> float:
        """Seconds of following these requests for `FOLLOWED` tokens, from where they began."""
        self._begin_again(walkers)
        wait_for(self._engine.target.device)
        start = self._clock()
        for _ in range(FOLLOWED):
            self._go_on(walkers)
        wait_for(self._engine.target.device)
        seconds = self._clock() - start
        late, usual = self._draft(walkers, 1), self._draft(walkers, 1)
        return seconds + max(0.0, late - usual)

    def close(self) -> None:
        """The drafter forgets all of it."""
        for own in self._walkers.values():
            for walker in own:
                self._entry.drafter.release(walker.request_id)
        self._walkers.clear()


def _always(view: DraftView, k: int, confidence: float) -> bool:  # noqa: ARG001 - `KeepDrafting`
    """Every slot that was planned is drafted."""
    return True


__all__ = ["FOLLOWED", "WALK", "DraftCalls"]
