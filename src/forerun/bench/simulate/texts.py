"""What simulated requests are made of: lengths, and a text whose hard places are where they are whoever decodes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.bench.simulate.acceptance import Loaded, Spread, stretches
from forerun.budget.curve import FloatArray
from forerun.errors import OptionError

Range = tuple[int, int]
"""Least and most tokens."""


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths, log-uniform between two bounds each."""

    prompt: Range = (64, 256)
    output: Range = (64, 256)

    def __post_init__(self) -> None:
        for name, (low, high) in (("prompt-tokens", self.prompt), ("output-tokens", self.output)):
            if not 1 <= low <= high:
                raise OptionError(f"--{name}", f"need 1 <= least <= most, got {low}-{high}")

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        return _log_uniform(rng, self.prompt), _log_uniform(rng, self.output)

    @property
    def longest(self) -> int:
        return self.prompt[1] + self.output[1]

    @property
    def mean_output(self) -> float:
        low, high = self.output
        return (high - low) / math.log(high / low) if high > low else float(low)


def _log_uniform(rng: np.random.Generator, bounds: Range) -> int:
    low, high = bounds
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


@dataclass(frozen=True)
class Text:
    """One request's prompt and output. Arrays have an entry for each output token and `margin` more."""

    prompt: int
    output: int
    difficulty: float
    places: FloatArray
    uniforms: FloatArray
    """A draft token at a place is accepted if its chance exceeds this."""
    found: tuple[NDArray[np.bool_], ...]
    """For each drafter, whether it has anything to propose for a place."""


@dataclass(frozen=True)
class Texts:
    """Text number i is a function of the seed and i alone: policies and drafters meet the same ones."""

    loaded: Loaded
    spread: Spread
    lengths: Lengths
    seed: int = 0
    given: Sequence[tuple[int, int]] = ()
    """(prompt, output) of the first texts, in place of drawn ones; they go round."""

    def text(self, number: int) -> Text:
        rng = np.random.default_rng([self.seed, number])
        prompt, output = self.lengths.draw(rng)
        if self.given:
            prompt, output = self.given[number % len(self.given)]
        margin = max(skill.most for skill in self.loaded.skills)
        uniforms = rng.random(output + margin)
        difficulty, places = self.spread.draw(rng, output + margin)
        found = tuple(
            stretches(np.random.default_rng([self.seed, number, 1 + i]), skill.match, skill.run, output + margin)
            for i, skill in enumerate(self.loaded.skills)
        )
        return Text(prompt, output, difficulty, places, uniforms, found)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt included."""
        return max((sum(pair) for pair in self.given), default=self.lengths.longest)


__all__ = ["Lengths", "Range", "Text", "Texts"]
