"""What a round costs on this machine: drafting, verifying, and what a long context adds to both.

    plain step   T(R)       = verify(R)
    round        T(R, K, B) = draft(R, K) + verify(B)             R requests, K drafts each, B tokens in the target pass

`verify` is everything of a step that is not drafting: the target's pass, the laws of its rows, the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from forerun.budget.curve import CostCurve, FloatArray, Samples
from forerun.errors import OptionError


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
        if not (same and rising and growing and self.per_request[0] == self.per_row[0] == 0):
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
        return Extra(self._along(where, self.per_request), self._along(where, self.per_row))

    def _along(self, contexts: FloatArray, values: tuple[float, ...]) -> FloatArray:
        slope = (values[-1] - values[-2]) / (self.contexts[-1] - self.contexts[-2])
        return np.interp(contexts, self.contexts, values) + slope * np.maximum(contexts - self.contexts[-1], 0.0)


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
        if not same or any(a >= b for a, b in pairwise(self.lengths)) or self.follow < 0:
            raise OptionError("profile", f"a draft cost needs ascending K with a curve each, got K = {self.lengths}")

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
        size = 1 << max(requests, 1).bit_length(), 1 << max(k, 1).bit_length()  # asked at every step: few, and kept
        if size not in self._tables:
            self._tables[size] = self._table(*size)
            self._tables[size].flags.writeable = False
        return self._tables[size][: k + 1, : requests + 1]

    @cached_property
    def _tables(self) -> dict[tuple[int, int], FloatArray]:
        return {}

    def _table(self, requests: int, k: int) -> FloatArray:
        measured = np.stack([curve.over(0, requests) for curve in self.curves])  # [measured K, requests + 1]
        lengths = np.array(self.lengths, dtype=np.float64)
        wanted = np.arange(k + 1, dtype=np.float64)
        if len(lengths) == 1:
            rows = np.maximum(wanted / lengths[0], 1.0)[:, None] * measured
        else:
            rows = np.stack([np.interp(wanted, lengths, column) for column in measured.T], axis=1)
            slope = np.maximum(measured[-1] - measured[-2], 0.0) / (lengths[-1] - lengths[-2])
            rows += np.maximum(wanted - lengths[-1], 0.0)[:, None] * slope
        rows[0] = 0.0
        table: FloatArray = np.maximum.accumulate(rows, axis=0)
        return table

    def slots(self, requests: int, k: int) -> FloatArray:
        """Seconds [k, requests + 1] that slot 1 .. k adds where so many requests draft it.

        Requests may draft different lengths: slot j is a pass over those that go that far.
        """
        return np.diff(self.table(requests, k), axis=0)

    def of(self, lengths: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds of a call in which request r drafts lengths[r] tokens behind contexts[r] others."""
        mine = [(k, c) for k, c in zip(lengths, contexts, strict=True) if k > 0]
        if not mine:
            return 0.0
        counts = [sum(k > slot for k, _ in mine) for slot in range(max(k for k, _ in mine))]
        slots = self.slots(len(mine), len(counts))
        extra = self.context.at([c for _, c in mine])
        rows = extra.row @ np.array([k for k, _ in mine], dtype=np.float64)
        return float(slots[range(len(counts)), counts].sum() + extra.request.sum() + rows)


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
