"""What the cards of loaded drafters promise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.drafters.card import accepted_lengths
from forerun.engine.propose import LoadedDrafter


def expected_lengths(loaded: Sequence[LoadedDrafter]) -> dict[str, float]:
    """Accepted length by drafter, for those whose card has one; the smallest of its temperatures."""
    found = {}
    for entry in loaded:
        promised = None if entry.config.model is None else accepted_lengths(Path(entry.config.model))
        if promised:
            found[entry.name] = min(promised.values())
    return found
