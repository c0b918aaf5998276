"""When a claim about speed has failed: paired ratios, one-sided bounds, Holm's correction over all cells.

"Never slower" is an aim that is measured, not a theorem. Each cell has n pairs of neighbouring runs, each pair one
ratio: speed of the way in question over its rival's. Logarithms of ratios are taken as normal, so their mean over its
standard error has Student's law with n - 1 degrees of freedom. The claim of a cell is "the ratio is at least the bar".
It has failed only where the data contradict it: where the upper bound of the ratio lies below the bar.

With many cells some would fail by chance. Holm (1979): order the p-values; the smallest is held against alpha / m, the
next against alpha / (m - 1), and so on, up to the first that is not below its share. The chance that any true claim
fails is then at most alpha, however the cells depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

ALPHA = 0.05
LEAST_PAIRS = 8
"""Pairs that a cell needs before anything is concluded from it."""
TERMS = 200
"""Of the continued fraction behind Student's law."""

_Cell = TypeVar("_Cell", bound=Hashable)


@dataclass(frozen=True)
class Verdict(Generic[_Cell]):
    """What the data say about the claim of one cell."""

    cell: _Cell
    bar: float
    pairs: int
    ratio: float
    """Geometric mean over pairs."""
    low: float
    """Lower 95 % bound, for information: not corrected."""
    high: float
    """Upper bound at the level that Holm's procedure holds this cell to."""
    p: float
    """Chance of data that speak so clearly against a ratio of at least the bar, if it were just the bar."""
    level: float
    """p below which the claim has failed, given the other cells."""
    failed: bool

    def as_dict(self) -> dict[str, Any]:
        """As JSON types, the cell left to the caller; a bound that is infinite is None."""
        values = {
            name: getattr(self, name) for name in ("bar", "pairs", "ratio", "low", "high", "p", "level", "failed")
        }
        return {name: None if isinstance(v, float) and math.isinf(v) else v for name, v in values.items()}


def judge(ratios: Mapping[_Cell, Sequence[float]], bar: float, alpha: float = ALPHA) -> list[Verdict[_Cell]]:
    """A verdict on every cell, in the order given.

    Args:
        ratios: positive, one for each pair of a cell.
        bar: the claim is that a cell's ratio is at least this.
        alpha: chance of calling any true claim failed.
    """
    p_values = [p_value(values, bar) for values in ratios.values()]
    levels, failed = holm(p_values, alpha)
    return [
        Verdict(cell, bar, len(v), geometric_mean(v), bound(v, alpha, upper=False), bound(v, level), p, level, lost)
        for (cell, v), p, level, lost in zip(ratios.items(), p_values, levels, failed, strict=True)
    ]


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> tuple[list[float], list[bool]]:
    """For each p-value the level it is held against, and whether its hypothesis is rejected.

    Behind the first hypothesis that stands, all stand, at the level of that one.
    """
    count = len(p_values)
    levels, rejected, standing = [alpha] * count, [False] * count, 0.0
    for rank, i in enumerate(sorted(range(count), key=lambda i: (p_values[i], i))):
        levels[i] = standing or alpha / (count - rank)
        rejected[i] = not standing and p_values[i] < levels[i]
        if not rejected[i]:
            standing = levels[i]
    return levels, rejected


def p_value(ratios: Sequence[float], bar: float) -> float:
    """P of a mean of logarithms as low as this one or lower, were the true one log(bar)."""
    mean, error = _location(ratios)
    if math.isinf(error):
        return 1.0
    distance = mean - math.log(bar)
    if error == 0:  # every pair the same: no doubt is left
        return 1.0 if distance >= 0 else 0.0
    return student_tail(-distance / error, len(ratios) - 1)


def bound(ratios: Sequence[float], level: float, upper: bool = True) -> float:
    """One-sided bound of the ratio: the truth lies beyond it with a chance of `level`. A single pair bounds nothing."""
    mean, error = _location(ratios)
    if math.isinf(error):
        return math.inf if upper else 0.0
    reach = student_quantile(level, len(ratios) - 1) * error if error else 0.0
    return math.exp(mean + reach if upper else mean - reach)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _location(ratios: Sequence[float]) -> tuple[float, float]:
    """Mean of the logarithms, and its standard error; infinite for a single one."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = math.fsum(logs) / len(logs)
    if len(logs) < 2:
        return mean, math.inf
    variance = math.fsum((x - mean) ** 2 for x in logs) / (len(logs) - 1)
    return mean, math.sqrt(variance / len(logs))


# -------------------------------------------------------------------------------------------------------- Student's law


def student_tail(t: float, dof: int) -> float:
    """P(T > t) of Student's law: half of I_x(dof / 2, 1 / 2) at x = dof / (dof + t^2), the incomplete beta function."""
    half = incomplete_beta(dof / (dof + t * t), dof / 2, 0.5) / 2
    return half if t >= 0 else 1 - half


@cache
def student_quantile(level: float, dof: int) -> float:
    """t with P(T > t) = level, for a level in (0, 0.5]: by bisection."""
    assert 0 < level <= 0.5, level
    low, high = 0.0, 1.0
    while student_tail(high, dof) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if student_tail(middle, dof) > level:
            low = middle
        else:
            high = middle
    return high


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), which converges quickly for
    x < (a + 1) / (a + b + 2); beyond that by symmetry."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d_1 / (1 + d_2 / (1 + ..))), from its inside out: far more terms than it takes to converge."""
    value = 1.0
    for i in range(TERMS, 0, -1):
        m, odd = divmod(i, 2)
        if odd:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + term / value
    return 1 / value


# ------------------------------------------------------------------------------------------------------ best of several


def best_of_half(costs: Mapping[str, Sequence[float]], rival: str) -> tuple[str, list[float]]:
    """The cheapest of several ways, chosen on every other pair, and how it fares against a rival on the rest.

    Chosen and compared on the same pairs the best would be the luckiest, and look better than it is.

    Args:
        costs: seconds per token by way, one for each pair.
        rival: the way to compare, not a candidate itself.

    Returns:
        The chosen way, and the rival's speed over that way's in each pair that was not used to choose.
    """
    candidates = [way for way in costs if way != rival]
    chosen = min(candidates, key=lambda way: math.fsum(map(math.log, costs[way][::2])))
    pairs = zip(costs[chosen][1::2], costs[rival][1::2], strict=True)
    return chosen, [best / other for best, other in pairs]


__all__ = [
    "ALPHA",
    "LEAST_PAIRS",
    "Verdict",
    "best_of_half",
    "bound",
    "geometric_mean",
    "holm",
    "judge",
    "p_value",
    "student_quantile",
    "student_tail",
]
