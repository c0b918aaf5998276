"""Chi-square tests with their power stated: p-values, sample sizes, and the smallest difference a test would find.

A test may allow for a known error of the expected probabilities (rounding of a half-precision model): its null is then
the noncentral chi-square law with that error as noncentrality, so that only what exceeds it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

LEAST_EXPECTED = 5.0
"""Cells expected less often are counted together: below it the chi-square law is no good approximation (Cochran)."""

_T = TypeVar("_T")


def tail(x: float, dof: int, noncentrality: float = 0.0) -> float:
    """P(X > x) for X chi-square with `dof` degrees of freedom: a Poisson mixture of central laws."""
    if x <= 0 or dof < 1 or math.isinf(noncentrality):
        return 1.0
    mean = noncentrality / 2
    reach = 12 * math.sqrt(mean) + 30  # beyond this the Poisson weights are below 1e-15
    j = torch.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach) + 1, dtype=torch.float64)
    log_weight = j.xlogy(torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(j + 1)
    tails = torch.special.gammaincc(dof / 2 + j, torch.full_like(j, x / 2))
    return float((log_weight.exp() * tails).sum().clamp(0, 1))


def critical(alarm: float, dof: int, noncentrality: float = 0.0) -> float:
    """x with P(X > x) = alarm."""
    high = 1.0
    while tail(high, dof, noncentrality) > alarm:
        high *= 2
    return _bisect(lambda x: tail(x, dof, noncentrality) <= alarm, high)


def needed_noncentrality(power: float, alarm: float, dof: int, allowed: float = 0.0) -> float:
    """Noncentrality that a test at this false-alarm rate finds with this power, `allowed` belonging to its null."""
    limit, high = critical(alarm, dof, allowed), 1.0 + allowed
    while tail(limit, dof, high) < power:
        high *= 2
    return _bisect(lambda x: tail(limit, dof, x) >= power, high)


def _bisect(reached: Callable[[float], bool], high: float) -> float:
    """Smallest x in [0, high] with reached(x), reached being monotone."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def sample_size(total_variation: float, power: float, alarm: float, dof: int) -> int:
    """Samples that find a law off by this total variation, wherever it lies: n sum(d^2 / p) is at least 4 n TV^2."""
    return math.ceil(needed_noncentrality(power, alarm, dof) / (4 * total_variation**2))


def detectable(samples: int, power: float, alarm: float, dof: int, allowed: float = 0.0) -> float:
    """The smallest total variation that so many samples find with this power, whatever its shape (at most 1)."""
    return min(1.0, math.sqrt(needed_noncentrality(power, alarm, dof, allowed) / (4 * samples)))


@dataclass(frozen=True, slots=True)
class Tested:
    """The outcome of one test."""

    statistic: float
    dof: int
    p_value: float
    samples: int
    allowed: float = 0.0
    """Noncentrality that the error of the expected probabilities may cause."""


def chi_square(groups: Sequence[tuple[Mapping[_T, int], Mapping[_T, float]]], relative_error: float = 0.0) -> Tested:
    """Counts against probabilities, summed over groups, each a conditional law of its own.

    Args:
        groups: (count per outcome, probability per outcome); an outcome without probability must not occur.
        relative_error: bound of the relative error of every probability; 0: they are exact.

    Returns:
        p_value 0 where something impossible occurred. Groups of fewer than two testable cells say nothing.
    """
    statistic, dof, samples, allowed = 0.0, 0, 0, 0.0
    for counts, law in groups:
        n = sum(counts.values())
        if any(count and law.get(outcome, 0.0) == 0.0 for outcome, count in counts.items()):
            return Tested(math.inf, max(dof, 1), 0.0, n)
        cells = _cells(counts, law, n)
        if len(cells) > 1:
            statistic += sum((observed - expected) ** 2 / expected for observed, expected in cells)
            dof += len(cells) - 1
            samples += n
            allowed += n * relative_error**2
    return Tested(statistic, dof, tail(statistic, dof, allowed) if dof else 1.0, samples, allowed)


def _cells(counts: Mapping[_T, int], law: Mapping[_T, float], n: int) -> list[tuple[float, float]]:
    """(observed, expected) of each cell, rare ones put together; one that stays rare joins the smallest other."""
    cells = sorted(((float(counts.get(x, 0)), n * p) for x, p in law.items() if p > 0), key=lambda cell: -cell[1])
    while len(cells) > 1 and cells[-1][1] < LEAST_EXPECTED:
        (o1, e1), (o2, e2) = cells.pop(), cells.pop()
        cells.append((o1 + o2, e1 + e2))
        cells.sort(key=lambda cell: -cell[1])
    return cells


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): below `alarm` is a rejection, with at most `alarm` false ones in the family."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
