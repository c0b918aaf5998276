"""Steps of the target as the engine makes them, timed: the pass over packed rows, the laws of its rows, the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.bench.machine import wait_for
from forerun.bench.profiling.grid import Step
from forerun.bench.profiling.repeats import Clock
from forerun.engine import Engine
from forerun.engine.intake import Ask
from forerun.engine.judge import Round, judge
from forerun.engine.request import Request
from forerun.sampling import Sampling
from forerun.target.base import BLOCK_SIZE, Batch, Segment
from forerun.target.blocks import blocks_for
from forerun.verify import Draft

CHUNK = 256
"""Rows of one prefill pass."""
TEXTS = 4
"""Contexts that differ: requests beyond these read the rows of another one. Computing a context for each of many
requests would take longer than all that is measured, and that few are more than a CPU's caches hold."""


class TargetPasses:
    """Steps of an idle engine's target. Holds blocks of its pool until `close`.

    Args:
        engine: nothing else may run on it.
        text: ids, at least one context and a row long.
        sampling: of every request.
        clock: seconds.
    """

    def __init__(self, engine: Engine, text: Sequence[int], sampling: Sampling, clock: Clock):
        self._engine, self._text, self._clock = engine, list(text), clock
        self._sampling = sampling
        self._prefixes: list[list[int]] = []  # block tables of computed contexts
        self._reach: list[int] = []  # rows computed of each
        self._tails: list[list[int]] = []  # block tables of the rows behind a context, one per request
        self._requests: list[Request] = []

    # -------------------------------------------------------------------------------------------------------- contexts

    def prepare(self, context: int, longest: int, seconds: float) -> int:
        """Computes `context` rows of a few texts, and one of them on to `longest` rows while there is time.

        Returns how long that one got. Both lengths are multiples of the block size.
        """
        end = self._clock() + seconds
        for _ in range(TEXTS):
            self._prefixes.append([])
            self._reach.append(0)
            if not self._extend(len(self._prefixes) - 1, context):
                break
        while self._reach[0] < longest and self._clock() < end:
            if not self._extend(0, min(self._reach[0] + CHUNK, longest)):
                break
        return self._reach[0]

    def _extend(self, number: int, rows: int) -> bool:
        """Computes a text up to so many rows; False if there are no blocks for them."""
        table, pool = self._prefixes[number], self._engine.core.pool
        if not pool.can_grow(table, rows):
            return False
        pool.grow(table, rows)
        for start in range(self._reach[number], rows, CHUNK):
            tokens = self._text[start : min(start + CHUNK, rows)]
            self._engine.target.forward(Batch([Segment(tokens, start, table, 0)]))
        self._reach[number] = rows
        return True

    # ----------------------------------------------------------------------------------------------------------- steps

    def fits(self, step: Step) -> bool:
        """Whether there are blocks for a step, and a context computed for it."""
        rows = max(step.spread)
        held = [len(tail) for tail in self._tails[: step.requests]]
        held += [0] * (step.requests - len(held))
        missing = sum(max(0, blocks_for(rows) - blocks) for blocks in held)
        within = step.context + rows <= self._engine.target.window
        return within and step.context <= max(self._reach) and missing <= self._engine.core.pool.free

    def __call__(self, step: Step) -> float:
        """Seconds of one step."""
        target = self._engine.target
        segments = [self._segment(i, step.context, rows) for i, rows in enumerate(step.spread)]
        rounds, row = [], 0
        for request, segment in zip(self._asked(step), segments, strict=True):
            rounds.append(Round(request, Draft(list(segment.tokens[1:])), row))
            row += len(segment.tokens)
        wait_for(target.device)
        start = self._clock()
        logits = target.forward(Batch(segments), self._engine.core.drafters.taps).logits
        for outcome in judge(rounds, logits):
            if isinstance(outcome, Exception):
                raise outcome
        wait_for(target.device)
        return self._clock() - start

    def _segment(self, number: int, context: int, rows: int) -> Segment:
        """The anchor and the drafts of a request, behind a context that others may read as well."""
        while len(self._tails) <= number:
            self._tails.append([])
        tail = self._tails[number]
        self._engine.core.pool.grow(tail, rows)
        able = [i for i, reach in enumerate(self._reach) if reach >= context]
        prefix = self._prefixes[able[number % len(able)]][: context // BLOCK_SIZE]
        return Segment(self._text[context : context + rows], context, [*prefix, *tail], rows)

    def _asked(self, step: Step) -> list[Request]:
        """Requests that are at the anchor of this step."""
        missing = step.requests - len(self._requests)
        if missing > 0:
            ids = [self._text[:1]] * missing
            self._requests += self._engine.intake.requests(ids, self._sampling, Ask())
        asked = self._requests[: step.requests]
        for request in asked:
            request.tokens = self._text[: step.context + 1]
        return asked

    def close(self) -> None:
        """Gives the blocks back."""
        for table in (*self._prefixes, *self._tails):
            self._engine.core.pool.shrink(table, 0)


__all__ = ["TargetPasses"]
