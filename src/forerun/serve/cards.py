"""What the cards of loaded drafters promise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from forerun.engine.propose import LoadedDrafter

CARD = "README.md"
LENGTH = re.compile(r"^Decoding at temperature ([\d.e+-]+), .*?\bmean accepted length (\d+\.\d+)", re.MULTILINE)
"""A line that `forerun train` writes into a card for each temperature it evaluated at."""


def expected_lengths(loaded: Sequence[LoadedDrafter]) -> dict[str, float]:
    """Accepted length by drafter, for those whose card has one; the smallest of its temperatures."""
    found = {}
    for entry in loaded:
        length = _of_folder(entry.config.model)
        if length is not None:
            found[entry.name] = length
    return found


def _of_folder(folder: str | None) -> float | None:
    if folder is None:
        return None
    try:
        card = (Path(folder) / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None  # no folder of ours: nothing was promised
    return min((float(length) for _, length in LENGTH.findall(card)), default=None)
