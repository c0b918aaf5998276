"""Whether acceptance decays along a draft: a line through acceptance by position, and how sure its slope is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.bench.recommending.acceptance import Shown
from forerun.budget.curve import FloatArray
from forerun.budget.reliability import Interval, bootstrap

LEAST_ROUNDS = 30
"""Rounds in which a position must have been reached to count: fewer say little about a rate."""
ROUNDING = 1e-9
"""Of sums: a slope no steeper than this is none."""
FALLS, LEVEL, RISES, UNKNOWN = "falls", "level", "rises", "unknown"


class Trend(NamedTuple):
    """How acceptance changes from one position to the next."""

    word: str
    slope: float | None
    """By position: -.05 is five points less at every further one. None: there are not two positions to compare."""
    interval: Interval | None
    """95 %, whole prompts drawn again: rounds of a prompt are dependent."""
    positions: int
    """How many were reached often enough, from the first on."""

    def as_dict(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return {"word": self.word, "slope": self.slope, "interval_95": interval, "positions": self.positions}

    def __str__(self) -> str:
        if self.slope is None or self.interval is None:
            return "too few rounds, positions or prompts to tell whether it decays"
        low, high = (100 * bound for bound in self.interval)
        points = f"{100 * self.slope:+.1f} points a position [{low:+.1f} .. {high:+.1f}]"
        return {
            FALLS: f"decays: {points}",
            RISES: f"does not decay, it rises: {points}",
            LEVEL: f"no decay beyond the spread: {points}",
        }[self.word]


def trend(shown: Shown) -> Trend:
    """Of one drafter, over the positions from the first on that were reached often enough.

    A difference is called one only if the 95 % interval of the slope lies on one side of 0.
    """
    often = shown.reached.sum(axis=0) >= LEAST_ROUNDS
    count = len(often) if often.all() else int(np.argmin(often))
    if count < 2 or shown.prompts < 2:
        return Trend(UNKNOWN, None, None, count)
    reached, accepted = shown.reached[:, :count], shown.accepted[:, :count]
    slope = _slope(reached.sum(axis=0), accepted.sum(axis=0))
    interval = bootstrap(
        range(shown.prompts), lambda rows: _slope(reached[rows].sum(axis=0), accepted[rows].sum(axis=0))
    )
    word = FALLS if interval.high < -ROUNDING else RISES if interval.low > ROUNDING else LEVEL
    return Trend(word, slope, interval, count)


def _slope(reached: FloatArray, accepted: FloatArray) -> float:
    """Of the weighted least-squares line; positions weigh by their rounds. 0 where nothing shows one."""
    where = np.arange(1, len(reached) + 1, dtype=np.float64)
    rate = np.divide(accepted, reached, out=np.zeros(len(reached)), where=reached > 0)
    weight = reached.sum()
    if weight == 0:
        return 0.0
    off = where - float(where @ reached) / weight
    spread = float(reached @ off**2)
    return float(reached @ (off * rate)) / spread if spread else 0.0


def counts_of(shown: Shown) -> dict[str, list[Any]]:
    """What a row keeps of it."""
    names = ("reached", "accepted", "drafted", "steps")
    return {name: getattr(shown, name).tolist() for name in names}


def shown_of(counts: Mapping[str, Sequence[Any]]) -> Shown:
    """From what `counts_of` gave."""
    return Shown(**{name: np.array(values, dtype=np.float64) for name, values in counts.items()})


__all__ = ["FALLS", "LEAST_ROUNDS", "LEVEL", "RISES", "UNKNOWN", "Trend", "counts_of", "shown_of", "trend"]
