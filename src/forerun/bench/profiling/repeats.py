"""Repeated measurements that a disturbance does not spoil.

Points are measured in turns, so that a disturbance hits all of them a little and none of them alone; every other turn
goes backwards, so that a drift of the machine cancels. What counts is the median. Points whose repeats scatter, and
points that are dearer than a bigger one, are measured again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Clock = Callable[[], float]
"""Seconds, monotonic."""

Point = TypeVar("Point", bound=Hashable)

Cheaper = Callable[[Point, Point], bool]
"""`cheaper(a, b)`: whether a can cost no more than b, as b does all that a does."""


@dataclass(frozen=True)
class Effort:
    """How often and how long to measure."""

    seconds: float
    """Time for all of it. The first turn is not counted; what no longer fits into the time after it is left out."""
    repeats: int = 5
    least: int = 3
    """Repeats of every point, whatever the time."""
    again: int = 4
    """Further repeats of a point that scatters."""
    tolerance: float = 0.05
    """Scatter that is left alone: median distance from the median, over the median."""

    def turns(self, points: int) -> int:
        """Measurements of so many points, the first turn included; those of scattering points come on top."""
        return points * (1 + self.repeats)


def scatter(values: Sequence[float]) -> float:
    """Median distance from the median, over the median."""
    middle = median(values)
    return median(abs(v - middle) for v in values) / middle if middle > 0 else 0.0


def measure(
    points: Sequence[Point],
    run: Callable[[Point], float],
    effort: Effort,
    clock: Clock,
    cheaper: Cheaper[Point] = lambda one, other: False,  # noqa: ARG005 - nothing is known
    advance: Callable[[int], object] = lambda steps: None,  # noqa: ARG005
) -> dict[Point, list[float]]:
    """Seconds of every point, repeatedly.

    Args:
        points: cheap ones first.
        run: one measurement of a point, in seconds; it times itself.
        effort: how much.
        clock: for the time limit.
        cheaper: what is known beforehand about two points; a pair that contradicts it is measured again.
        advance: told of measurements that were made, or saved for lack of time.

    Returns:
        {point: seconds of its repeats}, without points for which there was no time: the dear ones.
    """
    end = clock() + effort.seconds
    kept = _warm_up(points, run, effort, clock)
    advance(len(points) + (len(points) - len(kept)) * effort.repeats)
    found: dict[Point, list[float]] = {point: [] for point in kept}
    for turn in range(effort.repeats):
        if turn < effort.least or clock() < end:
            for point in kept if turn % 2 == 0 else reversed(kept):
                found[point].append(run(point))
        advance(len(kept))
    for _ in range(effort.again):
        doubtful = _doubtful(found, effort.tolerance, cheaper)
        if not doubtful or clock() >= end:
            break
        for point in doubtful:
            found[point].append(run(point))
    return found


def _warm_up(points: Sequence[Point], run: Callable[[Point], float], effort: Effort, clock: Clock) -> list[Point]:
    """The points that can be repeated often enough in the time; each has been run once, which is not counted."""
    end, turn, kept = clock() + effort.seconds, 0.0, []
    for point in points:
        turn += run(point)
        kept.append(point)
        if clock() + effort.least * turn > end:
            break
    return kept


def _doubtful(found: Mapping[Point, Sequence[float]], tolerance: float, cheaper: Cheaper[Point]) -> list[Point]:
    """Points that scatter, and both of every pair that is in the wrong order by more than the tolerance."""
    doubtful = {point for point, values in found.items() if scatter(values) > tolerance}
    middle = {point: median(values) for point, values in found.items()}
    for one, other in itertools.permutations(found, 2):
        if cheaper(one, other) and middle[one] > (1 + tolerance) * middle[other]:
            doubtful |= {one, other}
    return [point for point in found if point in doubtful]


__all__ = ["Cheaper", "Clock", "Effort", "Point", "measure", "scatter"]
