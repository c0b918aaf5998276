"""What was left out, and why: counted by reason, with an example of each."""

from __future__ import annotations

from typing import Any


class Dropped(Exception):
    """A record that will not be learned from; nothing is wrong with the run. `detail` is of this record alone."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


class Tally:
    """Counts by reason. Of each reason the first example is kept: where it was, or its id, and the detail."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, reason: str, example: str, detail: str = "") -> None:
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._examples.setdefault(reason, f"{example}: {detail}" if detail else example)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """reason -> {count, example}, the most frequent first."""
        order = sorted(self._counts, key=lambda reason: (-self._counts[reason], reason))
        return {reason: {"count": self._counts[reason], "example": self._examples[reason]} for reason in order}

    def lines(self) -> list[str]:
        """For people, one reason a line."""
        return [f"{one['count']:>8} {reason} (as {one['example']})" for reason, one in self.as_dict().items()]
