"""What the cards of loaded drafters promise."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from forerun.drafters.card import acceptances, accepted_lengths
from forerun.engine import DecodingStats
from forerun.engine.propose import LoadedDrafter


@dataclass(frozen=True)
class Promise:
    """What the card of a drafter says of real decoding."""

    length: float
    """Mean accepted length, bonus included."""
    survival: tuple[float, ...] = ()
    """How often a draft was accepted up to each position; empty: the card does not say."""

    def accepted(self, stats: DecodingStats) -> float:
        """Draft tokens that should have been accepted in these rounds, given how many were verified in each."""
        if not self.survival:
            return (self.length - 1) * stats.drafting_rounds
        return sum(count * rate for count, rate in zip(stats.verified_by_position, self.survival, strict=False))


def promises(loaded: Sequence[LoadedDrafter]) -> dict[str, Promise]:
    """By drafter, for those whose card has one: of the temperature at which it promises least."""
    found = {}
    for entry in loaded:
        folder = None if entry.config.model is None else Path(entry.config.model)
        lengths = None if folder is None else accepted_lengths(folder)
        if folder is not None and lengths:
            least = min(lengths, key=lengths.__getitem__)
            rates = acceptances(folder).get(least, [])
            found[entry.name] = Promise(lengths[least], tuple(accumulate(rates, operator.mul)))
    return found
