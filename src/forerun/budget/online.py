"""Confidences corrected while decoding: most drafters say something about the next token, few say it to scale.

A top probability of .9 may mean an acceptance of .6. Temperatures fitted beforehand (`calibration`) are better; this
serves drafters that nobody calibrated, and what changes afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

STEP = 0.5
"""First step of the stochastic gradient, in logits per unit of error; it falls with 1 / sqrt(verdicts)."""
SMALLEST_STEP = 0.02
MOST = 4.0
"""A shift stays within +-4 logits: .5 becomes .98 or .02."""
EDGE = 1e-4
"""How near to 0 and 1 a confidence is believed (a sigmoid in bfloat16 gives exactly 1 from 6.2 on)."""
TRUSTED = 16.0
"""Verdicts on a position after which its confidences are half trusted."""


class OnlineCalibration:
    """A shift in logits for each drafter, and one on top for each position, learnt from judged rounds by gradient steps
    of the log loss. A position nobody has verified yet follows the drafter's.

    A shift keeps the order of confidences at a position. It is a function of past verdicts, so a corrected confidence
    depends on nothing that the confidence itself did not depend on.
    """

    def __init__(self) -> None:
        self._shared: defaultdict[str, float] = defaultdict(float)
        self._own: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._verdicts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._factors: defaultdict[str, list[float]] = defaultdict(list)
        """On the odds, from position 1: kept until the next verdict."""

    def apply(self, drafter: str, position: int, confidence: float) -> float:
        """The corrected confidence of this position (from 1); unchanged, to the bit, before any verdict."""
        return _corrected(confidence, self._factors_to(drafter, position)[position - 1])

    def apply_all(self, drafter: str, confidence: Sequence[float]) -> list[float]:
        """The same of positions 1 .. ."""
        return [*map(_corrected, confidence, self._factors_to(drafter, len(confidence)))]

    def _factors_to(self, drafter: str, position: int) -> list[float]:
        factors = self._factors[drafter]
        while len(factors) < position:
            factors.append(self._factor(drafter, len(factors) + 1))
        return factors

    def _factor(self, drafter: str, position: int) -> float:
        return math.exp(_bounded(self._shared[drafter] + self._own[drafter, position]))

    def record(self, drafter: str, position: int, confidence: float, accepted: bool) -> None:
        """The verdict on a position whose predecessors were all accepted; `confidence` as the drafter gave it."""
        if math.isnan(confidence):
            return
        key = drafter, position
        self._verdicts[key] += 1
        step = max(SMALLEST_STEP, STEP / math.sqrt(self._verdicts[key])) / 2
        error = float(accepted) - _corrected(confidence, self._factor(drafter, position))
        self._shared[drafter] = _bounded(self._shared[drafter] + step * error)
        self._own[key] = _bounded(self._own[key] + step * error)
        self._factors.pop(drafter, None)

    def trust(self, drafter: str, count: int) -> list[float]:
        """[count] how far corrected confidences of positions 1 .. may stand in for a verdict, in [0, 1)."""
        seen = [self._verdicts[drafter, k] for k in range(1, count + 1)]
        return [n / (n + TRUSTED) for n in seen]


def _corrected(confidence: float, factor: float) -> float:
    if factor == 1.0 or confidence != confidence:  # NaN stays
        return confidence
    # A saturated one counts as one at its edge.
    inside = confidence if EDGE < confidence < 1 - EDGE else min(max(confidence, EDGE), 1 - EDGE)
    odds = inside / (1 - inside) * factor
    return odds / (1 + odds)


def _bounded(shift: float) -> float:
    return shift if -MOST < shift < MOST else math.copysign(MOST, shift)


__all__ = ["OnlineCalibration"]
