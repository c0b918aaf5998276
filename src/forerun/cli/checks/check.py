"""One finding of `forerun doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]
EXIT: dict[Status, int] = {"ok": 0, "warning": 1, "error": 2}
_INDENT = 30


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, what was expected, and what to do about it."""

    name: str
    status: Status
    found: str
    expected: str = ""
    advice: str = ""

    @classmethod
    def of(cls, name: str, fine: bool, found: str, expected: str, advice: str, otherwise: Status = "warning") -> Check:
        """`ok` if it is fine; else `otherwise`, with what was expected and the advice."""
        return cls(name, "ok", found) if fine else cls(name, otherwise, found, expected, advice)

    def lines(self) -> list[str]:
        """The finding, and below it what was expected and what to do."""
        lines = [f"{self.status:<8}{self.name:<22}{self.found}"]
        lines += [f"{'':{_INDENT}}expected: {self.expected}"] if self.expected else []
        return lines + ([f"{'':{_INDENT}}do: {self.advice}"] if self.advice else [])


def worst(checks: list[Check]) -> Status:
    return max((check.status for check in checks), key=lambda status: EXIT[status])
