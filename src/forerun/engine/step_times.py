"""How long the phases of a step take: a histogram of each, counted where the step runs, read whenever somebody asks."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

PHASES = ("schedule", "draft", "verify", "sample", "commit")
"""What runs and how much is drafted and verified; the drafters' proposals; the target's pass; verdicts; what follows
from them, drafters included."""

BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
    10.0,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds; behind them is one more without a bound."""


class StepTimes:
    """The time of whole steps, each second of which belongs to one phase.

    A GPU computes while the host goes on: there `verify` ends when the pass has been queued, and `sample`, the first to
    need its result, waits for it. Only their sum says something about the pass.

    Args:
        clock: seconds, monotonic. Not the engine's: a scripted one must not be asked more often than its script says.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._at = 0.0
        self._spent = dict.fromkeys(PHASES, 0.0)
        self.counts = {phase: [0] * (len(BOUNDS) + 1) for phase in PHASES}
        """Steps by bucket; each whole step counts once in every phase, if only with nothing."""
        self.sums = dict.fromkeys(PHASES, 0.0)
        """Seconds."""

    def start(self) -> None:
        """A step begins. One that never ends, because it failed, does not count."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._at = self._clock()

    def mark(self, phase: str) -> None:
        """What has passed since the last mark belongs to this phase."""
        now = self._clock()
        self._spent[phase] += now - self._at
        self._at = now

    def end(self) -> None:
        """The step is over."""
        for phase, seconds in self._spent.items():
            self.counts[phase][bisect_left(BOUNDS, seconds)] += 1
            self.sums[phase] += seconds


__all__ = ["BOUNDS", "PHASES", "StepTimes"]
