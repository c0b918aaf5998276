"""Randomness as a pure function of its key: nothing is rewound, and what is stored changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

DRAFT, ACCEPT, FINAL, GUMBEL = range(4)
"""What a number is for. It is part of the key, so that no two uses ever read the same number."""

FIRST = 32
"""Numbers of a stream that are made at once: a serial drafter asks for one slot after the other."""


@dataclass(frozen=True, slots=True)
class Noise:
    """All randomness of one sample of one request: a pure function of (seed, anchor or position, slot, purpose).

    Philox4x64-10 as numpy ships it: the 32-bit Philox of the GPU libraries yields 32 bits a word, which tie at large
    vocabularies and cut the tail of a Gumbel variable; the 64-bit one gives 53 bits a draw, in C, for the same keys.

    `uniforms` are keyed by the *anchor* position, never by the token's own: what lies behind a rejection is drafted
    again at the same positions, and must not meet noise that confidences have already looked at (docs/lossless.md).
    `gumbel` is keyed by the absolute position, since there the output does not depend on what was drafted.
    """

    seed: int
    _drafted: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Gumbel rows that drafts have read, by position and vocabulary size, until the target has read them."""

    @classmethod
    def of(cls, seed: int, sample: int = 0) -> Noise:
        """Sample 0 of a request uses the seed itself, so that a returned seed reproduces its sample with n = 1."""
        seed = int(seed) % 2**64
        return cls(seed if sample == 0 else _mix(seed, sample))

    def uniforms(self, anchor: int, purpose: int, count: int) -> np.ndarray:
        """[count] numbers in [0, 1) of 53 bits, element k belonging to slot k."""
        if count <= FIRST:
            return _first_numbers(self.seed, anchor, purpose)[:count].copy()
        return _stream(self.seed, anchor, purpose).random(count)

    def gumbel(self, position: int, vocab_size: int) -> np.ndarray:
        """[V] standard Gumbel variables in float64, element v belonging to token id v; always finite."""
        import numpy as np

        # random() is k * 2**-53. The half step keeps 0 out. Small numbers, where it is exact, become the large values:
        # those win an argmax. The largest k would round up to 1, and its logarithm to infinity, hence the minimum.
        uniform = np.minimum(_stream(self.seed, position, GUMBEL).random(vocab_size) + 2.0**-54, 1 - 2.0**-53)
        return -np.log(-np.log1p(-uniform))

    def gumbel_for_draft(self, position: int, vocab_size: int) -> np.ndarray:
        """`gumbel` [V], kept for the target's row of this position: a large row takes longer than a draw. Read only."""
        key = position, vocab_size
        if key not in self._drafted:
            self._drafted[key] = self.gumbel(position, vocab_size)
        return self._drafted[key]

    def gumbel_for_target(self, positions: Sequence[int], vocab_size: int) -> list[np.ndarray]:
        """`gumbel` [V] at each position of a verify block, made where no draft has read it. All that was kept goes."""
        rows = [self._drafted.get((position, vocab_size)) for position in positions]
        self._drafted.clear()
        return [self.gumbel(p, vocab_size) if row is None else row for p, row in zip(positions, rows, strict=True)]


@lru_cache(maxsize=4096)
def _first_numbers(seed: int, place: int, purpose: int) -> np.ndarray:
    return _stream(seed, place, purpose).random(FIRST)


def _stream(seed: int, place: int, purpose: int) -> np.random.Generator:
    import numpy as np

    # As arrays: from a list of Python integers numpy makes floats beyond 2**63, and neighbouring seeds become one.
    # It counts up in the first word, so every (place, purpose) has 2**64 numbers of its own.
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([0, place, purpose, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _mix(seed: int, sample: int) -> int:
    """SplitMix64 (Steele et al., 2014) of seed and sample index: a bijection of the seed for each sample."""
    z = (seed + sample * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
