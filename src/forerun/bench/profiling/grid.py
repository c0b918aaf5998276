"""Which points are measured: small numbers of rows one by one, as a step may lie anywhere among them, and then ever
fewer; requests; contexts; for drafters requests and K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from forerun.budget.curve import CostCurve

EVERY_COUNT = 17
"""Up to here each number of rows is measured: one request with K = 16. The steps of int4 and float32 kernels that were
seen lie at 2, 5 and 9 rows."""
ROWS_EACH = 8
"""Rows of one request in a step of many rows: an anchor and 7 drafts."""
FASTER = 1.05
"""A cost that grows faster than the count by more than this hides a step; less is noise."""
CONTEXT_REQUESTS = 4
CONTEXT_ROWS = (1, 4)
"""What a context costs is measured with so many requests of so many rows: one alone is lost in the noise."""


class Step(NamedTuple):
    """A step of the target: requests that decode behind the same number of tokens."""

    requests: int
    rows: int
    """Of all requests together, at least one each."""
    context: int

    @property
    def spread(self) -> list[int]:
        """Rows of each request, as equal as can be."""
        each, more = divmod(self.rows, self.requests)
        return [each + (i < more) for i in range(self.requests)]


class Call(NamedTuple):
    """A call of a drafter: requests that all draft K tokens behind the same number of tokens."""

    requests: int
    k: int
    context: int


def cheaper(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Whether a step (or a call) can cost no more than another one, which does more of everything."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def counts(limit: int) -> list[int]:
    """1 .. 17, then two an octave, up to and with the limit."""
    spaced = [n for power in range(4, 32) for n in (1 << power, 3 << (power - 1)) if EVERY_COUNT < n < limit]
    return [*range(1, min(EVERY_COUNT, limit) + 1), *spaced, *([limit] if limit > EVERY_COUNT else [])]


def doubling(limit: int) -> list[int]:
    """1, 2, 4, .. and the limit."""
    return sorted({*(1 << power for power in range(limit.bit_length()) if 1 << power <= limit), limit})


@dataclass(frozen=True)
class TargetGrid:
    """Points of the target.

    Args:
        rows: the most in a step.
        requests: the most that decode together.
        contexts: ascending; the first is the one that all numbers of rows are measured at.
    """

    rows: int
    requests: int
    contexts: Sequence[int]

    def of_rows(self, rows: int) -> Step:
        """The step that stands for this number of rows: as few requests as have `ROWS_EACH` of them each."""
        return Step(min(-(-rows // ROWS_EACH), self.requests), rows, self.contexts[0])

    @property
    def by_rows(self) -> list[Step]:
        return [self.of_rows(n) for n in counts(self.rows)]

    @property
    def by_requests(self) -> list[Step]:
        """One row for each request: steps of plain decoding."""
        return [Step(r, r, self.contexts[0]) for r in doubling(min(self.requests, self.rows)) if r > 1]

    @property
    def by_context(self) -> list[Step]:
        r = min(CONTEXT_REQUESTS, self.requests)
        if len(self.contexts) == 1:
            return []
        return [Step(r, r * n, c) for c in self.contexts for n in CONTEXT_ROWS if r * n <= self.rows]

    def points(self) -> list[Step]:
        """All of them, once each, cheap ones first."""
        every = {*self.by_rows, *self.by_requests, *self.by_context}
        return sorted(every, key=lambda step: (step.rows, step.context, step.requests))


@dataclass(frozen=True)
class DrafterGrid:
    """Points of a drafter.

    Args:
        k: the most it drafts.
        requests: the most that draft together.
        contexts: ascending; all but the first only with one request.
    """

    k: int
    requests: int
    contexts: Sequence[int]

    @property
    def by_context(self) -> list[Call]:
        return [Call(1, k, c) for c in self.contexts for k in sorted({1, self.k})] if len(self.contexts) > 1 else []

    def points(self) -> list[Call]:
        """All of them, once each, cheap ones first."""
        first = self.contexts[0]
        every = {Call(r, k, first) for r in doubling(self.requests) for k in doubling(self.k)}
        return sorted({*every, *self.by_context}, key=lambda call: (call.requests * call.k, call.context, call.k))


def unplaced_step(curve: CostCurve) -> int | None:
    """The count to measure next so that a step of the curve is placed; None where all are.

    Between two measured counts the cost cannot grow faster than the count does, unless there is a step in between.
    """
    points = zip(curve.counts, curve.seconds, strict=True)
    gaps = [
        (after / before, (low + high) // 2)
        for (low, before), (high, after) in pairwise(points)
        if high > low + 1 and after * low > FASTER * before * high
    ]
    return max(gaps)[1] if gaps else None


__all__ = [
    "Call",
    "DrafterGrid",
    "Step",
    "TargetGrid",
    "cheaper",
    "counts",
    "doubling",
    "unplaced_step",
]
