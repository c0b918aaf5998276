"""Survivals of earlier rounds, for a budget that must not look at the current ones (methods, 8.4).

The delay is a barrier because no round reads noise that an earlier one has read: draft noise is keyed by the anchor.
Only rounds that reached a verdict are kept.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.budget.curve import FloatArray

ROUNDS = 8
"""Rounds of a request that are kept."""
SAMPLES = 64
"""Drafts that suffice to know how survivals spread: with many requests in a step their last round is enough."""


class Expected(NamedTuple):
    """What a row of the current step may draft."""

    request_id: int
    drafter: str | None
    """None: it has no draft."""
    survival: Sequence[float]
    """[planned] by the history."""


class PastRounds:
    """The last survivals of each request with each drafter."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str | None, deque[list[float]]]] = {}

    def record(self, request_id: int, drafter: str, confidence: Sequence[float]) -> None:
        """The calibrated confidences of a draft that got its verdict, whatever of it was verified."""
        own = self._kept.setdefault(request_id, {})
        own.setdefault(drafter, deque(maxlen=ROUNDS)).appendleft([*itertools.accumulate(confidence, operator.mul)])

    def forget(self, request_id: int) -> None:
        self._kept.pop(request_id, None)

    def of(self, rows: Sequence[Expected]) -> FloatArray:
        """Survivals [M, R, K] of these requests in as many past rounds as are needed, the latest first.

        A request without past rounds counts as the history expects it. Where an earlier draft was shorter than the
        current plan it goes on as the history expects.
        """
        width = max((len(row.survival) for row in rows), default=0)
        rounds, nothing = max(1, min(ROUNDS, SAMPLES // max(1, len(rows)))), [0.0] * width
        out = []
        for request, drafter, expected in rows:
            seen = itertools.islice(self._kept.get(request, {}).get(drafter, ()), rounds)
            behind = nothing[len(expected) :]
            kept = [[*_extended(survival, expected), *behind] for survival in seen] or [[*expected, *behind]]
            out.append((kept * rounds)[:rounds])
        return np.array(out, dtype=np.float64).reshape(len(rows), rounds, width).swapaxes(0, 1)


def _extended(seen: Sequence[float], expected: Sequence[float]) -> Sequence[float]:
    """[len(expected)] the survivals seen, continued in proportion to the expected ones."""
    have, size = len(seen), len(expected)
    if have >= size:
        return seen[:size]
    if have == 0:
        return expected
    last, at = seen[-1], expected[have - 1]
    return [*seen, *(last * (later / at if at > 0 else 0.0) for later in expected[have:])]


__all__ = ["Expected", "PastRounds"]
