"""Cost curves: seconds of a pass by the number of tokens (or requests) in it, as measured, with their steps.

Whether a few more rows are free differs by model, dtype and machine (a jump at 5 rows with int4 weights, at 2 rows in
float32), so nothing here assumes a shape beyond "more is never cheaper".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from forerun.errors import OptionError

FloatArray = NDArray[np.float64]

FREE = 0.005
"""Rows that together cost at most this fraction more are free: below what a measurement can tell."""

Samples = Mapping[int, float | Sequence[float]]
"""Count -> seconds: one number (a median) or repeated measurements."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds by count: measured points, never falling, linear in between, with the measured steps kept.

    Between two points the cost is linear, unless it grows faster than the count does. Fixed plus proportional cost
    cannot grow like that, so there is a step, and where it lies is unknown: the dearer side is taken. Beyond the last
    point the cost goes on with the slope of the last octave (one segment could be a tread); with a single point, in
    proportion. Counts below the first point cost what the first one costs, and nothing costs nothing.

    Raises:
        OptionError: counts that do not ascend from 1, or seconds that fall, are negative or not finite.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.counts)) and all(a <= b for a, b in pairwise(self.seconds))
        whole = len(self.counts) == len(self.seconds) > 0 and self.counts[0] >= 1
        if not (whole and rising and self.seconds[0] >= 0 and all(map(math.isfinite, self.seconds))):
            raise OptionError("profile", f"a cost curve must ascend: counts {self.counts}, seconds {self.seconds}")

    @classmethod
    def measured(cls, samples: Samples) -> CostCurve:
        """From measurements: the median of each count, so that a disturbed repeat has no influence, then the running
        maximum (vLLM does the same), so that noise never makes a longer pass look cheaper."""
        if not samples:
            raise OptionError("profile", "a cost curve needs at least one measured point")
        counts = sorted(samples)
        medians = [_median(samples[n]) for n in counts]
        return cls(tuple(counts), tuple(float(s) for s in np.maximum.accumulate(medians)))

    def __call__(self, count: int) -> float:
        """Seconds at one count >= 0."""
        return float(self.over(count, count)[0])

    def over(self, first: int, last: int) -> FloatArray:
        """Seconds [last - first + 1] at first, first + 1, .., last. Read only."""
        if last < len(self._dense):
            return self._dense[first : last + 1]
        return self.at(np.arange(first, last + 1, dtype=np.float64))

    def at(self, counts: FloatArray) -> FloatArray:
        """Seconds at each of these counts."""
        x, y = self._knots
        beyond = np.maximum(counts - x[-1], 0.0) * self._last_slope
        return np.where(counts > 0, np.interp(counts, x, y) + beyond, 0.0)

    def scaled(self, factors: Sequence[float]) -> CostCurve:
        """Each point times its own factor, and never falling again."""
        scaled = (s * f for s, f in zip(self.seconds, factors, strict=True))
        return CostCurve(self.counts, tuple(itertools.accumulate(scaled, max)))

    def nearest(self, count: int) -> int:
        """Index of the measured point nearest to a count, by ratio."""
        return min(range(len(self.counts)), key=lambda i: abs(math.log(max(count, 1) / self.counts[i])))

    def next_to_measure(self, tolerance: float = 0.1) -> int | None:
        """The count to measure next so that steps are found: the middle of the unmeasured gap that rises the most.

        None once no gap rises by more than `tolerance` of the cost before it. Bisection, so a step among n counts is
        found in log2(n) measurements.
        """
        gaps = [
            (after - before, (low + high) // 2)
            for (low, high), (before, after) in zip(pairwise(self.counts), pairwise(self.seconds), strict=True)
            if high > low + 1 and after - before > tolerance * before
        ]
        return max(gaps)[1] if gaps else None

    @cached_property
    def _dense(self) -> FloatArray:
        """At 0 .. the last measured count: asked at every step."""
        seconds = self.at(np.arange(self.counts[-1] + 1, dtype=np.float64))
        seconds.flags.writeable = False
        return seconds

    @cached_property
    def _knots(self) -> tuple[FloatArray, FloatArray]:
        x, y = [self.counts[0]], [self.seconds[0]]
        for n, s in zip(self.counts[1:], self.seconds[1:], strict=True):
            if n > x[-1] + 1 and s * x[-1] > y[-1] * n:  # faster than in proportion: a step somewhere in between
                x.append(x[-1] + 1)
                y.append(s)
            x.append(n)
            y.append(s)
        return np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)

    @cached_property
    def _last_slope(self) -> float:
        n, s = self.counts[-1], self.seconds[-1]
        if len(self.counts) == 1:
            return s / n
        start = max((i for i, m in enumerate(self.counts) if 2 * m <= n), default=0)
        return (s - self.seconds[start]) / (n - self.counts[start])


def _median(value: float | Sequence[float]) -> float:
    values = list(value) if isinstance(value, Sequence) else [value]
    if not values or not all(math.isfinite(v) and v >= 0 for v in values):
        raise OptionError("profile", f"measured seconds must be finite and not negative, got {value!r}")
    return float(median(values))


def lower_envelope(costs: FloatArray) -> FloatArray:
    """The greatest convex function below costs [n] of consecutive counts (methods, 8.2), by Andrew's monotone chain."""
    last = len(costs) - 1
    if last < 2:
        return costs.copy()
    bends = np.flatnonzero(np.diff(costs, 2) > 0) + 1  # a corner of the envelope is a convex bend of the curve
    corners: list[int] = []
    for i in (0, *bends.tolist(), last):
        while len(corners) > 1 and not _is_corner(costs, corners[-2], corners[-1], i):
            corners.pop()
        corners.append(i)
    return np.interp(np.arange(last + 1), corners, costs[corners])


def _is_corner(costs: FloatArray, left: int, middle: int, right: int) -> bool:
    """Whether the middle point lies below the chord of the other two."""
    return bool((costs[middle] - costs[left]) * (right - left) < (costs[right] - costs[left]) * (middle - left))


def free_up_to(costs: FloatArray, n: int) -> int:
    """The largest index m >= n whose cost is that of n, within `FREE`: rows up to the next step edge are free.

    A function of n and the curve alone, and only upwards: cutting a length *down* to an edge would bias (methods, 8.3).
    """
    return max(n, int(np.searchsorted(costs, costs[n] * (1 + FREE), side="right")) - 1)


__all__ = ["FREE", "CostCurve", "FloatArray", "Samples", "free_up_to", "lower_envelope"]
