"""How far the drafters' confidences can be believed, by the rounds that were served."""

from __future__ import annotations

from typing import Any

from forerun.engine.schedule import RoundReport

BARS = 10
"""Of the diagram."""


class Reliability:
    """Confidences against verdicts of all rounds since the start: of drafts that were given 0.8, are 80 % accepted?

    Counted are the positions that verification came to: those behind a refused one have no verdict of their own. It is
    told by the engine's thread and read by others; a reader may miss the round that is being counted.
    """

    def __init__(self) -> None:
        self._bars: dict[str, list[list[float]]] = {}

    def add(self, report: RoundReport) -> None:
        """One round, with c_k as the drafter gave them."""
        confidence = report.draft.confidence
        if report.drafter is None or not confidence:
            return
        bars = self._bars.get(report.drafter)
        if bars is None:
            bars = self._bars[report.drafter] = [[0, 0.0, 0] for _ in range(BARS)]
        for place in range(min(report.verified, report.accepted + 1)):
            c = confidence[place]
            if 0 <= c <= 1:  # NaN is none
                bar = bars[min(int(c * BARS), BARS - 1)]
                bar[0] += 1
                bar[1] += c
                bar[2] += place < report.accepted

    def as_list(self) -> list[dict[str, Any]]:
        """By drafter: how many drafts each bar has, what they were given and what became of them."""
        return [{"drafter": name, "bars": _bars(counts)} for name, counts in sorted(dict(self._bars).items())]


def _bars(counts: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {"low": i / BARS, "high": (i + 1) / BARS, "drafts": n, "predicted": given / n, "observed": kept / n}
        for i, (n, given, kept) in enumerate(counts)
        if n
    ]


__all__ = ["Reliability"]
