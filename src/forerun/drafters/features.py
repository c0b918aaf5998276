"""Target features between the step that computed them and the draft that reads them: consecutive rows per request."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _Held:
    """Rows start .. end - 1 of one request, in pieces as they came."""

    start: int
    end: int
    pieces: list[Tensor] = field(default_factory=list)

    def cut(self, end: int) -> None:
        """Forgets the rows from `end` on."""
        while self.pieces and self.end > end:
            last = self.pieces.pop()
            self.end -= len(last)
            if self.end < end:
                self.pieces.append(last[: end - self.end])
                self.end = end
        self.start, self.end = min(self.start, end), min(self.end, end)


class FeatureBuffer:
    """Features of committed rows that a drafter has not read yet.

    A request's rows are consecutive. What was taken is remembered as a length only, so that a gap behind it shows.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def add(self, request_id: int, start: int, features: Tensor) -> None:
        """Appends features [n, F] of rows start .. start + n - 1. A start below what is held cuts back to it first."""
        held = self._held.setdefault(request_id, _Held(start, start))
        held.cut(start)
        assert held.end == start, f"rows {held.end} .. {start - 1} of request {request_id} have no features"
        if len(features):
            # A copy: a view would keep the features of the whole step's batch alive.
            held.pieces.append(features.clone())
            held.end = start + len(features)

    def cut(self, request_id: int, rows: int) -> None:
        """Forgets what lies at position `rows` or beyond."""
        if request_id in self._held:
            self._held[request_id].cut(rows)

    def take(self, request_id: int) -> tuple[int, Tensor]:
        """Position of the first row and the features [n, F] of a request that has some; none are held afterwards."""
        held = self._held[request_id]
        assert held.pieces, f"request {request_id} has no features to take"
        start, pieces = held.start, held.pieces
        held.start, held.pieces = held.end, []
        return start, pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rows(self, request_id: int) -> int:
        """How many rows are held of a request."""
        held = self._held.get(request_id)
        return 0 if held is None else held.end - held.start

    def release(self, request_id: int) -> None:
        """Forgets a request."""
        self._held.pop(request_id, None)
