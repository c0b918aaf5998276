"""Where each drafter is the best choice, and why: rules over what was measured, stated with every answer.

speed    plain seconds per token over this way's, in pairs of neighbouring runs: geometric mean, and a 95 %
         interval of it over the pairs (logarithms taken as normal)
faster   the whole interval lies above 1
best     the greatest mean of those that are faster than plain decoding; if none is, plain decoding
a tie    an interval that reaches the lower end of the best one's: this measurement does not tell them apart
memory   bytes on top of the target at that load; a drafter is worth its memory if no other is as fast, or ties
         with it, for less
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.comparing.facts import Facts
from forerun.bench.load.arrivals import Load
from forerun.bench.load.protocol import bound, geometric_mean
from forerun.bench.load.trial import PLAIN
from forerun.bench.measurement import Row

LEVEL = 0.025
"""Of each side of an interval."""
RULES = (
    "speed-up: plain seconds per token over this way's, geometric mean over pairs of neighbouring runs; [95 %] of that "
    "mean; (min - max) over pairs",
    "best: the greatest mean of those whose whole interval lies above 1; plain decoding where there is none",
    "a tie: its interval reaches the lower end of the best one's, so that this measurement does not tell them apart",
    "worth its memory: no other is as fast, or ties with it, for less memory on top of the target",
)


@dataclass(frozen=True)
class Speed:
    """One way of one drafter under one load."""

    drafter: str
    way: str
    load: str
    pairs: Sequence[float]
    """Speed-up of each."""
    tokens_per_step: float | None
    memory: float
    """Bytes on top of the target."""
    plain_tokens_per_second: float
    tokens_per_second: float

    @property
    def mean(self) -> float:
        return geometric_mean(self.pairs)

    @property
    def median(self) -> float:
        return statistics.median(self.pairs)

    @property
    def low(self) -> float:
        return bound(self.pairs, LEVEL, upper=False)

    @property
    def high(self) -> float:
        return bound(self.pairs, LEVEL)

    @property
    def faster(self) -> bool:
        return self.low > 1

    @property
    def round_cost(self) -> float | None:
        """What a round takes, in steps of plain decoding: tokens it brings over the speed-up."""
        return None if self.tokens_per_step is None else self.tokens_per_step / self.mean

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.way}"

    def ties_with(self, best: Speed) -> bool:
        return self.high >= best.low

    def as_dict(self) -> dict[str, Any]:
        """As JSON types; the bounds of a single pair are None."""
        several = len(self.pairs) > 1
        return {
            "drafter": self.drafter,
            "way": self.way,
            "concurrency": self.load,
            "speedup": self.mean,
            "speedup_spread": {"median": self.median, "min": min(self.pairs), "max": max(self.pairs)},
            "interval_95": [self.low, self.high] if several else None,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
            "round_in_plain_steps": self.round_cost,
            "memory_bytes": self.memory,
        }


def speeds_of(row: Row, facts: Facts) -> list[Speed]:
    """Every way of a row but plain decoding."""
    costs: Mapping[str, Sequence[float]] = row["seconds_per_token"]
    memory = facts.memory(row["concurrency"], context_of(row))
    return [
        Speed(
            row["drafter"], way, str(Load.of(row)),
            [plain / own for plain, own in zip(costs[PLAIN], costs[way], strict=True)],
            row["ways"][way].get("tokens_per_step"), memory,
            row["ways"][PLAIN]["tokens_per_second"], row["ways"][way]["tokens_per_second"],
        )
        for way in costs
        if way != PLAIN
    ]  # fmt: skip


def context_of(row: Row) -> float:
    """Tokens of a request at its end, on average."""
    lengths: Sequence[tuple[int, int]] = row["workload"]["lengths"]
    return sum(prompt + output for prompt, output in lengths) / len(lengths)


@dataclass(frozen=True)
class Choice:
    """The best of several at one load."""

    load: str
    best: Speed | None
    """None: plain decoding."""
    ties: Sequence[Speed]
    """With the best one; other ways of the same drafter too."""
    nearest: Speed | None
    """The fastest way, where none is faster than plain decoding beyond the spread."""

    def as_dict(self) -> dict[str, Any]:
        best = None if self.best is None else {"drafter": self.best.drafter, "way": self.best.way}
        ties = [{"drafter": one.drafter, "way": one.way} for one in self.ties]
        return {"concurrency": self.load, "best": best, "ties": ties}


def choose(speeds: Sequence[Speed], load: str) -> Choice:
    """By the rules at the head of this file."""
    here = [speed for speed in speeds if speed.load == load]
    faster = [speed for speed in here if speed.faster]
    if not faster:
        return Choice(load, None, (), max(here, key=lambda speed: speed.mean, default=None))
    best = max(faster, key=lambda speed: speed.mean)
    ties = [speed for speed in faster if speed is not best and speed.ties_with(best)]
    return Choice(load, best, sorted(ties, key=lambda speed: -speed.mean), best)


def best_of_each(speeds: Sequence[Speed], load: str) -> list[Speed]:
    """The fastest way of every drafter at a load, in the order of the drafters."""
    best: dict[str, Speed] = {}
    for speed in speeds:
        if speed.load == load and (speed.drafter not in best or speed.mean > best[speed.drafter].mean):
            best[speed.drafter] = speed
    return list(best.values())


def worth_their_memory(speeds: Sequence[Speed], load: str) -> list[Speed]:
    """Drafters that are faster than plain decoding, and for which no cheaper one is as fast; cheapest first."""
    kept: list[Speed] = []
    faster = [speed for speed in best_of_each(speeds, load) if speed.faster]
    for speed in sorted(faster, key=lambda speed: (speed.memory, -speed.mean)):
        if all(cheaper.mean < speed.mean and not cheaper.ties_with(speed) for cheaper in kept):
            kept.append(speed)
    return kept


__all__ = [
    "RULES",
    "Choice",
    "Speed",
    "best_of_each",
    "choose",
    "context_of",
    "speeds_of",
    "worth_their_memory",
]
