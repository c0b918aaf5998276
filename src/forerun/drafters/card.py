"""What the model card beside a trained drafter promises, for whoever compares it with what happens."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

CARD = "README.md"

ACCEPTANCE = re.compile(r"^\| `acceptance_by_position` \|(.*)\|$", re.MULTILINE)
"""The row of the table below it that says how often each position was accepted."""
DECODED = re.compile(r"^Decoding at temperature ([\d.e+-]+), \d+ prompts: mean accepted length ([\d.]+)", re.MULTILINE)
"""The line that `forerun train` writes for each temperature it decoded at."""


def accepted_lengths(folder: Path) -> dict[float, float] | None:
    """What the card of a drafter says of real decoding: temperature -> mean accepted length. None: there is no card."""
    text = _text(folder)
    if text is None:
        return None
    return {float(temperature): float(length) for temperature, length in DECODED.findall(text)}


def acceptances(folder: Path) -> dict[float, list[float]]:
    """Acceptance by position of real decoding, by temperature, as the card of a drafter tells it: up to the first
    position that nothing had reached. Empty: there is no card, or none of that is on it."""
    text = _text(folder) or ""
    found: dict[float, list[float]] = {}
    heads = list(DECODED.finditer(text))
    for head, behind in zip_longest(heads, heads[1:]):
        row = ACCEPTANCE.search(text, head.end(), len(text) if behind is None else behind.start())
        if row is not None:
            found[float(head[1])] = _rates(row[1])
    return {temperature: rates for temperature, rates in found.items() if rates}


def _text(folder: Path) -> str | None:
    """None: there is no card, or none that can be read."""
    try:
        return (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _rates(cells: str) -> list[float]:
    """Numbers up to the first empty cell."""
    rates = []
    for cell in cells.split("|"):
        if not cell.strip():
            break
        rates.append(float(cell))
    return rates


__all__ = ["CARD", "DECODED", "acceptances", "accepted_lengths"]
