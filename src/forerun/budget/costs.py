"""What a round costs on this machine: drafting, verifying, and what a long context adds to both.

    plain step   T(R)       = verify(R)
    round        T(R, K, B) = draft(R, K) + verify(B)             R requests, K drafts each, B tokens in the target pass

`verify` is everything of a step that is not drafting: the target's pass, the laws of its rows, the verdict.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from forerun.budget.curve import CostCurve, FloatArray, Samples
from forerun.errors import OptionError

USUAL = 8
"""Draft tokens that every table has room for, so that there are few of them."""


class Extra(NamedTuple):
    """Seconds that contexts add, over the reference context."""

    request: FloatArray
    """[R] once per request: its keys and values are read once (paged attention on a GPU)."""
    row: FloatArray
    """[R] per row of the request: each row reads them again (our attention on a CPU)."""


@dataclass(frozen=True)
class ContextCost:
    """Extra seconds of one request by the length of its context: nothing up to the first length, linear between."""

    contexts: tuple[int, ...] = (0,)
    per_request: tuple[float, ...] = (0.0,)
    per_row: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        same = len(self.contexts) == len(self.per_request) == len(self.per_row) > 0
        rising = all(a < b for a, b in pairwise(self.contexts))
        growing = all(a <= b for values in (self.per_request, self.per_row) for a, b in pairwise(values))
        finite = all(map(math.isfinite, (*self.per_request, *self.per_row)))
        if not (same and rising and growing and finite and self.per_request[0] == self.per_row[0] == 0):
            raise OptionError("profile", f"the cost of a context must ascend from 0: {self}")

    @classmethod
    def measured(cls, samples: Mapping[int, Samples]) -> ContextCost:
        """From {context: {rows of one request: seconds}}: the excess over the shortest context, split into a part per
        request and a part per row by least squares, neither negative. With one number of rows all of it is per row,
        the split that is dearest for drafting."""
        contexts = sorted(samples)
        base = {n: median(_listed(s)) for n, s in samples[contexts[0]].items()}
        parts = [(0.0, 0.0)]
        for context in contexts[1:]:
            excess = {n: median(_listed(s)) - base[n] for n, s in samples[context].items() if n in base}
            parts.append(_split(excess))
        request, row = np.maximum.accumulate(np.array(parts), axis=0).T.tolist()
        return cls(tuple(contexts), tuple(request), tuple(row))

    def at(self, contexts: Sequence[int] | FloatArray) -> Extra:
        """[R] of these contexts."""
        where = np.asarray(contexts, dtype=np.float64)
        if len(self.contexts) == 1:
            return Extra(np.zeros(len(where)), np.zeros(len(where)))
        x, per_request, per_row = self._knots
        extra = Extra(np.interp(where, x, per_request), np.interp(where, x, per_row))
        if where.max(initial=0.0) <= self.contexts[-1]:
            return extra
        beyond = np.maximum(where - x[-1], 0.0)  # the last segment goes on
        request, row = (float((y[-1] - y[-2]) / (x[-1] - x[-2])) * beyond for y in (per_request, per_row))
        return Extra(extra.request + request, extra.row + row)

    @cached_property
    def _knots(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        x, request, row = np.array([self.contexts, self.per_request, self.per_row], dtype=np.float64)
        return x, request, row


def _listed(value: float | Sequence[float]) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value]


def _split(excess: Mapping[int, float]) -> tuple[float, float]:
    """(per request, per row) >= 0 that fit excess seconds by rows best."""
    rows = np.array(list(excess), dtype=np.float64)
    seconds = np.array(list(excess.values()), dtype=np.float64)
    if len(rows) > 1:
        spread = rows - rows.mean()
        row = max(0.0, float(np.dot(spread, seconds) / np.dot(spread, spread)))
        request = float(seconds.mean() - row * rows.mean())
        if request >= 0:
            return request, row
    return 0.0, float(max(0.0, np.dot(rows, seconds) / np.dot(rows, rows))) if len(rows) else 0.0


@dataclass(frozen=True)
class VerifyCost:
    """Seconds of a step without its drafting, by tokens in it and by the contexts of its requests."""

    tokens: CostCurve
    context: ContextCost = field(default_factory=ContextCost)

    def __call__(self, requests: int, tokens: int, context: float = 0) -> float:
        """A step of so many requests with so many tokens together, all behind `context` others."""
        extra = self.context.at([int(context)])
        return self.tokens(tokens) + requests * float(extra.request[0]) + tokens * float(extra.row[0])


@dataclass(frozen=True)
class DraftCost:
    """Seconds of one drafting call, by requests and K, as measured for some K.

    A smaller K than any measured costs what the smallest does (a block is one pass); between them the cost is linear;
    beyond the last it goes on with the last slope, with a single K in proportion.
    """

    lengths: tuple[int, ...]
    """Measured K, ascending."""
    curves: tuple[CostCurve, ...]
    """For each of them, seconds by number of requests."""
    context: ContextCost = field(default_factory=ContextCost)
    """Per request that drafts, and per draft token."""
    follow: float = 0.0
    """Seconds per committed token of keeping up with a request that does not draft."""

    def __post_init__(self) -> None:
        same = len(self.lengths) == len(self.curves) > 0 and self.lengths[0] >= 1
        if not same or any(a >= b for a, b in pairwise(self.lengths)):
            raise OptionError("profile", f"a draft cost needs ascending K with a curve each, got K = {self.lengths}")
        if not 0 <= self.follow < math.inf:
            raise OptionError("profile", f"following a request cannot take {self.follow} seconds a token")

    @classmethod
    def measured(
        cls, samples: Mapping[int, Samples], context: ContextCost | None = None, follow: float = 0.0
    ) -> DraftCost:
        """From {K: {requests: seconds}}."""
        lengths = tuple(sorted(samples))
        curves = tuple(CostCurve.measured(samples[k]) for k in lengths)
        return cls(lengths, curves, context or ContextCost(), follow)

    def __call__(self, requests: int, k: int, context: float = 0) -> float:
        """K tokens for each of so many requests, all behind `context` others; nothing for 0 of either."""
        return self.of([k] * requests, [int(context)] * requests)

    def table(self, requests: int, k: int) -> FloatArray:
        """Seconds [k + 1, requests + 1] of a call by K and requests, never falling; no context's extra. Read only."""
        return self._tables(requests, k)[0][: k + 1, : requests + 1]

    def slots(self, requests: int, k: int) -> FloatArray:
        """Seconds [k, requests + 1] that slot 1 .. k adds where so many requests draft it. Read only.

        Requests may draft different lengths: slot j is a pass over those that go that far.
        """
        return self._tables(requests, k)[1][:k, : requests + 1]

    def _tables(self, requests: int, k: int) -> tuple[FloatArray, FloatArray]:
        """`table` and `slots`, of at least this size: asked at every step, so they are few, and kept."""
        size = 1 << max(requests, 1).bit_length(), 1 << max(k, USUAL).bit_length()
        if size not in self._made:
            table = self._table(*size)
            slots = np.diff(table, axis=0)
            table.flags.writeable = slots.flags.writeable = False
            self._made[size] = table, slots
        return self._made[size]

    @cached_property
    def _made(self) -> dict[tuple[int, int], tuple[FloatArray, FloatArray]]:
        return {}

    def _table(self, requests: int, k: int) -> FloatArray:
        counts = np.arange(requests + 1, dtype=np.float64)
        measured = np.stack([curve.at(counts) for curve in self.curves])  # [measured K, requests + 1]
        lengths = np.array(self.lengths, dtype=np.float64)
        wanted = np.arange(k + 1, dtype=np.float64)
        if len(lengths) == 1:
            rows = np.maximum(wanted / lengths[0], 1.0)[:, None] * measured
        else:
            slopes = np.diff(measured, axis=0) / np.diff(lengths)[:, None]
            inside = np.clip(wanted, lengths[0], lengths[-1])
            at = np.searchsorted(lengths, inside, side="right") - 1
            rows = np.vstack((slopes, 0 * slopes[:1]))[at] * (inside - lengths[at])[:, None] + measured[at]
            rows += np.maximum(wanted - lengths[-1], 0.0)[:, None] * np.maximum(slopes[-1], 0.0)
        rows[0] = 0.0
        table: FloatArray = np.maximum.accumulate(rows, axis=0)
        return table

    def of(self, lengths: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds of a call in which request r drafts lengths[r] tokens behind contexts[r] others."""
        ks = [k for k in lengths if k > 0]
        if not ks:
            return 0.0
        ascending = sorted(ks)
        counts = [len(ks) - bisect_right(ascending, slot) for slot in range(ascending[-1])]  # that go on to each slot
        seconds = self.slots(len(ks), len(counts))[range(len(counts)), counts].sum()
        extra = self.context.at([context for k, context in zip(lengths, contexts, strict=True) if k > 0])
        return float(seconds + extra.request.sum() + extra.row @ np.array(ks, dtype=np.float64))


@dataclass(frozen=True)
class Costs:
    """Target and one drafter."""

    verify: VerifyCost
    draft: DraftCost

    def plain(self, requests: int, context: float = 0) -> float:
        """Seconds of a step that decodes one token of each request."""
        return self.verify(requests, requests, context)

    def round(self, requests: int, k: int, tokens: int, context: float = 0) -> float:
        """Seconds of a round: K drafts for each request, `tokens` (B) in the target's pass, anchors included."""
        return self.draft(requests, k, context) + self.verify(requests, tokens, context)


__all__ = ["ContextCost", "Costs", "DraftCost", "Extra", "VerifyCost"]
