"""Survivals of earlier rounds, for a budget that must not look at the current ones (methods, 8.4).

The delay is a barrier because no round reads noise that an earlier one has read: draft noise is keyed by the anchor.
Only rounds that reached a verdict are kept.
"""

from __future__ import annotations

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
    drafter: str
    survival: FloatArray
    """[planned] by the history."""


class PastRounds:
    """The last survivals of each request with each drafter."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, deque[FloatArray]]] = {}

    def record(self, request_id: int, drafter: str, confidence: Sequence[float]) -> None:
        """The calibrated confidences of a draft that got its verdict, whatever of it was verified."""
        survival: FloatArray = np.multiply.accumulate(np.array(confidence, dtype=np.float64))
        own = self._kept.setdefault(request_id, {})
        own.setdefault(drafter, deque(maxlen=ROUNDS)).appendleft(survival)

    def forget(self, request_id: int) -> None:
        self._kept.pop(request_id, None)

    def of(self, rows: Sequence[Expected]) -> FloatArray:
        """Survivals [M, R, K] of these requests in as many past rounds as are needed, the latest first.

        A request without past rounds counts as the history expects it. Where an earlier draft was shorter than the
        current plan it goes on as the history expects.
        """
        width = max((len(row.survival) for row in rows), default=0)
        rounds = max(1, min(ROUNDS, SAMPLES // max(1, len(rows))))
        out = np.zeros((rounds, len(rows), width))
        for r, row in enumerate(rows):
            seen = self._kept.get(row.request_id, {}).get(row.drafter, ())
            kept = [_extended(s, row.survival) for s in seen] or [row.survival]
            for i in range(rounds):
                out[i, r, : len(row.survival)] = kept[i % len(kept)]
        return out


def _extended(seen: FloatArray, expected: FloatArray) -> FloatArray:
    """[len(expected)] the survivals seen, continued in proportion to the expected ones."""
    size = len(expected)
    if len(seen) >= size:
        return seen[:size]
    if len(seen) == 0:
        return expected
    at = expected[len(seen) - 1]
    ratio = expected[len(seen) :] / at if at > 0 else np.zeros(size - len(seen))
    return np.concatenate((seen, seen[-1] * ratio))


__all__ = ["Expected", "PastRounds"]
