"""From raw scores to confidences that mean what they say, fitted position by position.

Predicted *survival*, the product of the confidences of all positions so far, has to agree with how often a draft
survives that far. `fit_temperatures` is sequential temperature scaling as published (methods, 8.1; section 3.2.1 of the
DSpark paper, arXiv 2607.05147); `fit` adds a shift to each temperature (Platt, 1999). A temperature leaves a score of 0
at one half, so it can spread scores or draw them together, but not move them. They do need moving: a confidence head
meets drafts in training that are better than those of text it has not learned from, and evidence that is counted, not
learned, leans to its prior.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.budget.curve import FloatArray
from forerun.budget.reliability import BINS, expected_calibration_error, negative_log_likelihood
from forerun.errors import OptionError

GRID: tuple[float, ...] = tuple(float(t) for t in np.logspace(-1, 1, 41))
"""Temperatures tried at each position (SGLang's grid)."""
PRIOR = 1.0
"""Of log T and of the shift, in rounds: enough to keep a fit finite where all drafts went one way, nothing against
hundreds of rounds."""
WIDEST = 4.0
"""The largest shift; as an odds ratio 55."""
EDGES: FloatArray = np.array([math.log(max(GRID)), WIDEST])
"""Of |log T| and of the shift."""
STARTS: tuple[FloatArray, ...] = tuple(
    EDGES * np.array(share) for share in itertools.product((-1.0, -0.5, 0.0, 0.5, 1.0), repeat=2)
)
"""(-log T, b) to begin a search at."""
STEPS, ENOUGH = 100, 1e-9
"""Of the search, at most; and the gain in nats a round below which it ends."""


SATURATED = 2.0**-24
"""Confidences are taken at most this near to 0 and 1: a saturated one says no more than its dtype can."""


class Scaling(NamedTuple):
    """c_k = sigmoid(z_k / T_k + b_k)."""

    temperatures: tuple[float, ...]
    """T, positive."""
    shifts: tuple[float, ...]
    """b, in logits."""

    @classmethod
    def of(cls, temperatures: Sequence[float]) -> Scaling:
        """Without shifts."""
        return cls(tuple(temperatures), (0.0,) * len(temperatures))

    def at(self, position: int) -> tuple[float, float]:
        """(T, b) of a position (from 1); beyond the last the last holds."""
        last = min(position, len(self.temperatures)) - 1
        return self.temperatures[last], self.shifts[last]

    def survival(self, logits: FloatArray) -> FloatArray:
        """[n, K] predicted chance that drafts 1 .. k are all accepted, of raw scores [n, K]."""
        pairs = np.array([self.at(k + 1) for k in range(logits.shape[1])])  # [K, 2]
        return np.minimum(1.0, np.multiply.accumulate(sigmoid(logits / pairs[:, 0] + pairs[:, 1]), axis=1))


def fit_temperatures(
    logits: FloatArray, labels: FloatArray, grid: Sequence[float] = GRID, bins: int = BINS
) -> tuple[float, ...]:
    """Sequential temperature scaling, as SGLang fits it.

    For k = 1 .. K the temperature that minimises the calibration error of the survival of tokens 1 .. k, earlier ones
    fixed. The error is piecewise constant in it, so ties are broken by the likelihood, then by the grid's order.

    Args:
        logits: [n, K] raw scores of drafts that were verified whole (a cut draft has no labels behind the cut).
        labels: [n, K] 1 where tokens 1 .. k were accepted, 0 from the first rejection on; or the chance of it.
        grid: temperatures to try, positive.
        bins: of the calibration error.

    Raises:
        OptionError: shapes or ranges do not fit, or labels that rise along a draft.
    """
    _check_rounds(logits, labels)
    temperatures, alive = [], np.ones(len(logits))
    for z, label in zip(logits.T, labels.T, strict=True):
        misfits = [_misfit(alive * sigmoid(z / t), label, bins) for t in grid]
        temperatures.append(float(grid[misfits.index(min(misfits))]))
        alive = alive * sigmoid(z / temperatures[-1])
    return tuple(temperatures)


def fit(logits: FloatArray, labels: FloatArray) -> Scaling:
    """A temperature and a shift for each position.

    For k = 1 .. K the pair under which the outcomes of tokens 1 .. k are likeliest (with `PRIOR`), earlier pairs fixed.
    The likelihood is smooth, so nothing is fitted to the edges of bins.

    Args:
        logits: [n, K] as for `fit_temperatures`.
        labels: [n, K] as for `fit_temperatures`.

    Raises:
        OptionError: shapes or ranges do not fit, or labels that rise along a draft.
    """
    _check_rounds(logits, labels)
    pairs, alive = [], np.ones(len(logits))
    for z, label in zip(logits.T, labels.T, strict=True):
        temperature, shift = _likeliest(alive, z, label)
        pairs.append((temperature, shift))
        alive = alive * sigmoid(z / temperature + shift)
    temperatures, shifts = zip(*pairs, strict=True)
    return Scaling(temperatures, shifts)


def _likeliest(alive: FloatArray, z: FloatArray, label: FloatArray) -> tuple[float, float]:
    """(T, b) by Fisher's scoring over (-log T, b), within `EDGES`: of each step the length that gains most.

    It begins at the likeliest of `STARTS`: where scores are saturated, nothing at T = 1 says which way to go.
    """
    at = min(STARTS, key=lambda one: _loss(one, alive, z, label))
    loss = _loss(at, alive, z, label)
    for _ in range(STEPS):
        step = _fisher_step(at, alive, z, label)
        tried = [np.clip(at + step * 0.5**halvings, -EDGES, EDGES) for halvings in range(12)]
        losses = [_loss(one, alive, z, label) for one in tried]
        best = int(np.argmin(losses))
        if losses[best] > loss - ENOUGH:
            break
        at, loss = tried[best], losses[best]
    return math.exp(-at[0]), float(at[1])


def _loss(at: FloatArray, alive: FloatArray, z: FloatArray, label: FloatArray) -> float:
    predicted = alive * sigmoid(z * math.exp(at[0]) + at[1])
    return negative_log_likelihood(predicted, label) + PRIOR * float(at @ at) / (2 * len(z))


def _fisher_step(at: FloatArray, alive: FloatArray, z: FloatArray, label: FloatArray) -> FloatArray:
    """Of the numbers that are free: one at its edge that is pushed outwards stays, and the other goes where it is best
    beside it."""
    slope = math.exp(at[0])
    passed = sigmoid(z * slope + at[1])
    predicted = np.clip(alive * passed, 1e-12, 1 - 1e-12)
    by_score = alive * passed * (1 - passed)
    rise = by_score[:, None] * np.stack([z * slope, np.ones_like(z)], axis=1)  # [n, 2]
    weight = 1 / (predicted * (1 - predicted))
    gradient = rise.T @ ((label - predicted) * weight) - PRIOR * at
    information = (rise * weight[:, None]).T @ rise + PRIOR * np.eye(2)
    free = (np.abs(at) < EDGES) | (gradient * at < 0)
    step = np.zeros(2)
    step[free] = np.linalg.solve(information[np.ix_(free, free)], gradient[free])
    return step


def _misfit(survival: FloatArray, label: FloatArray, bins: int) -> tuple[float, float]:
    # Rounded, so that sums in another order are still a tie.
    return round(expected_calibration_error(survival, label, bins), 12), negative_log_likelihood(survival, label)


def _check_rounds(logits: FloatArray, labels: FloatArray) -> None:
    if logits.ndim != 2 or logits.shape != labels.shape or 0 in logits.shape:
        raise OptionError("labels", f"need [rounds, K] like the logits: {labels.shape}, {logits.shape}")
    if not bool(np.isfinite(logits).all()):
        raise OptionError("logits", "must be finite")
    if bool((np.diff(labels, axis=1) > 1e-9).any()):
        raise OptionError("labels", "rise along a draft: they must be survivals (0 from the first rejection on)")


def sigmoid(z: FloatArray) -> FloatArray:
    """1 / (1 + exp(-z)) without overflow."""
    small = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, small) / (1 + small), dtype=np.float64)


def scale(confidence: float, temperature: float, shift: float = 0.0) -> float:
    """sigmoid(logit(confidence) / temperature + shift): keeps the order, and NaN. What is saturated is scaled as the
    fit has seen it."""
    if math.isnan(confidence):
        return confidence
    held = min(max(confidence, SATURATED), 1 - SATURATED)
    z = math.log(held / (1 - held)) / temperature + shift
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


__all__ = ["GRID", "SATURATED", "Scaling", "fit", "fit_temperatures", "scale", "sigmoid"]
