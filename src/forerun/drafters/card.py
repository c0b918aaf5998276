"""What the model card beside a trained drafter promises, for whoever compares it with what happens."""

from __future__ import annotations

import re
from pathlib import Path

CARD = "README.md"

DECODED = re.compile(r"^Decoding at temperature ([\d.e+-]+), \d+ prompts: mean accepted length ([\d.]+)", re.MULTILINE)
"""The line that `forerun train` writes for each temperature it decoded at."""


def accepted_lengths(folder: Path) -> dict[float, float] | None:
    """What the card of a drafter says of real decoding: temperature -> mean accepted length. None: there is no card."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return {float(temperature): float(length) for temperature, length in DECODED.findall(text)}


__all__ = ["CARD", "DECODED", "accepted_lengths"]
