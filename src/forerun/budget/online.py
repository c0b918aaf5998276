"""Confidences corrected while decoding: most drafters say something about the next token, few say it to scale.

A top probability of .9 may mean an acceptance of .6. Temperatures fitted beforehand (`calibration`) are better; this
serves drafters that nobody calibrated, and what changes afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict

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
        self._factors: dict[tuple[str, int], float] = {}

    def apply(self, drafter: str, position: int, confidence: float) -> float:
        """The corrected confidence of this position (from 1); unchanged, to the bit, before any verdict."""
        factor = self._factors.get((drafter, position)) or self._factor(drafter, position)
        if factor == 1.0 or math.isnan(confidence):
            return confidence
        inside = min(max(confidence, EDGE), 1 - EDGE)  # a saturated one counts as one at its edge
        odds = inside / (1 - inside) * factor
        return odds / (1 + odds)

    def _factor(self, drafter: str, position: int) -> float:
        """On the odds; the same until the next verdict."""
        factor = math.exp(_bounded(self._shared[drafter] + self._own[drafter, position]))
        self._factors[drafter, position] = factor
        return factor

    def record(self, drafter: str, position: int, confidence: float, accepted: bool) -> None:
        """The verdict on a position whose predecessors were all accepted; `confidence` as the drafter gave it."""
        if math.isnan(confidence):
            return
        key = drafter, position
        self._verdicts[key] += 1
        step = max(SMALLEST_STEP, STEP / math.sqrt(self._verdicts[key])) / 2
        error = float(accepted) - self.apply(drafter, position, confidence)
        self._shared[drafter] = _bounded(self._shared[drafter] + step * error)
        self._own[key] = _bounded(self._own[key] + step * error)
        self._factors.clear()

    def trust(self, drafter: str, position: int) -> float:
        """How far a corrected confidence of this position may stand in for a verdict, in [0, 1)."""
        seen = self._verdicts[drafter, position]
        return seen / (seen + TRUSTED)


def _bounded(shift: float) -> float:
    return max(-MOST, min(MOST, shift))


__all__ = ["OnlineCalibration"]
