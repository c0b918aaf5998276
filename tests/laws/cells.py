"""Cutting the unit interval where theory says that a draw changes its outcome, and asking the real function there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.sampling import draw

EDGE = 2.0**-48
"""How far from the end of a cell it is probed, 32 units in the last place of 1: the error of a width at most."""

EXACT = 1e-12
"""Laws that agree to this are called equal."""


class Cell(NamedTuple):
    """A part of [0, 1) on which an outcome is said to be constant."""

    low: float
    high: float

    @property
    def weight(self) -> float:
        return self.high - self.low

    def ends(self, share: float = 1.0) -> tuple[float, float]:
        """Just inside both ends.

        `share`: the mass of a residual. All cells of its draw together count with this much, and rounding moves its
        cuts by the inverse of it.
        """
        edge = EDGE / share
        if self.weight < 4 * edge:
            return (self.low + self.high) / 2, (self.low + self.high) / 2
        return self.low + edge, self.high - edge


def cells(cuts: Sequence[float]) -> list[Cell]:
    inner = sorted({min(max(c, 0.0), 1.0) for c in cuts} | {0.0, 1.0})
    return [Cell(a, b) for a, b in itertools.pairwise(inner)]


def inversion_cuts(law: Sequence[float]) -> list[float]:
    """Where inversion goes from one token to the next."""
    total = math.fsum(law)
    return [math.fsum(law[: i + 1]) / total for i in range(len(law))]


def measured(laws: Sequence[Tensor] | Tensor) -> list[list[float]]:
    """Probability of each token [V] under the real `draw` from each law."""
    calls = [(n, cell) for n, law in enumerate(laws) for cell in cells(inversion_cuts(shares(law)))]
    ends = torch.tensor([end for _, cell in calls for end in cell.ends()], dtype=torch.float64)
    tokens = draw(torch.stack([laws[n] for n, _ in calls for _ in range(2)]), ends).tolist()
    out = [[0.0] * len(law) for law in laws]
    for (n, cell), low, high in zip(calls, tokens[::2], tokens[1::2], strict=True):
        assert low == high, f"draw is not constant on {cell}: {low}, {high}"
        out[n][low] += cell.weight
    return out


def shares(law: Tensor) -> list[float]:
    """The law that is drawn from: a float32 softmax sums to 1 only within 1e-7."""
    values = law.double().tolist()
    total = math.fsum(values)
    return [x / total for x in values]
