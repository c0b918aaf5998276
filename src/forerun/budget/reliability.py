"""How good predicted probabilities are: calibration error with its finite-sample floor, Brier score, AUROC, bins.

Labels may be probabilities too (in rejection mode the chance of acceptance is known, which has the outcome's mean and
less noise; methods, 8.1). They count with their value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from forerun.budget.curve import FloatArray
from forerun.errors import OptionError

BINS = 15
"""Of equal width, as in the fit of SGLang's temperature scaling."""
FLOOR_SEED = 20260627
"""Of the simulations and bootstraps: a report repeated on the same data has the same numbers."""


class Bin(NamedTuple):
    """One bar of a reliability diagram."""

    low: float
    high: float
    rounds: int
    predicted: float
    """Mean prediction; NaN in an empty bin."""
    observed: float
    """Mean label; NaN in an empty bin."""


class Interval(NamedTuple):
    low: float
    high: float


def expected_calibration_error(predicted: FloatArray, labels: FloatArray, bins: int = BINS) -> float:
    """Mean over predictions [n] of |mean prediction - mean label| of their bin."""
    _check(predicted, labels)
    gaps = np.bincount(_bin_of(predicted, bins), weights=predicted - labels, minlength=bins)
    return float(np.abs(gaps).sum() / len(predicted))


def calibration_floor(predicted: FloatArray, bins: int = BINS, draws: int = 200, seed: int = FLOOR_SEED) -> float:
    """The error that a perfectly calibrated predictor shows with these very predictions: its mean over simulated
    outcomes. With finitely many rounds no predictor shows 0."""
    where, rng = _bin_of(predicted, bins), np.random.default_rng(seed)
    total = 0.0
    for _ in range(draws):
        labels = rng.random(len(predicted)) < predicted
        total += float(np.abs(np.bincount(where, weights=predicted - labels, minlength=bins)).sum())
    return total / (draws * len(predicted))


def brier_score(predicted: FloatArray, labels: FloatArray) -> float:
    """Mean squared error of predictions [n]."""
    _check(predicted, labels)
    return float(np.mean((predicted - labels) ** 2))


def negative_log_likelihood(predicted: FloatArray, labels: FloatArray) -> float:
    """Mean of -log of the probability given to what happened, in nats, at most that of a float's last bit."""
    _check(predicted, labels)
    inside = np.clip(predicted, 2.0**-52, 1 - 2.0**-52)
    return float(-np.mean(labels * np.log(inside) + (1 - labels) * np.log1p(-inside)))


def auroc(predicted: FloatArray, labels: FloatArray) -> float | None:
    """Chance that an accepted one was given more than a rejected one, ties half. None if all went the same way."""
    _check(predicted, labels)
    values, where = np.unique(predicted, return_inverse=True)
    accepted = np.bincount(where, weights=labels, minlength=len(values))
    rejected = np.bincount(where, weights=1 - labels, minlength=len(values))
    pairs = accepted.sum() * rejected.sum()
    below = np.concatenate(([0.0], np.cumsum(rejected)[:-1]))
    return float(accepted @ (below + rejected / 2) / pairs) if pairs > 0 else None


def reliability(predicted: FloatArray, labels: FloatArray, bins: int = BINS) -> list[Bin]:
    """The bars of a reliability diagram."""
    _check(predicted, labels)
    where = _bin_of(predicted, bins)
    counts = np.bincount(where, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(where, weights=v, minlength=bins) / counts for v in (predicted, labels)]
    edges = np.linspace(0, 1, bins + 1)
    return [
        Bin(float(edges[i]), float(edges[i + 1]), int(counts[i]), float(means[0][i]), float(means[1][i]))
        for i in range(bins)
    ]


def bootstrap(
    prompts: Sequence[Hashable],
    statistic: Callable[[np.ndarray[tuple[int], np.dtype[np.intp]]], float],
    draws: int = 200,
    level: float = 0.95,
    seed: int = FLOOR_SEED,
) -> Interval:
    """Percentile interval of a statistic, by drawing whole prompts with replacement: rounds of a prompt are dependent.

    Args:
        prompts: [n] the prompt of each round.
        statistic: of the indices of the rounds in a sample.
        draws: resamples.
        level: coverage.
        seed: of the resampling.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    rows = [np.array(group, dtype=np.intp) for group in groups.values()]
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(rows), size=(draws, len(rows)))
    values = [statistic(np.concatenate([rows[g] for g in pick])) for pick in picks]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def _bin_of(predicted: FloatArray, bins: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.minimum((predicted * bins).astype(np.int64), bins - 1)


def _check(predicted: FloatArray, labels: FloatArray) -> None:
    if predicted.shape != labels.shape or predicted.ndim != 1 or len(predicted) == 0:
        raise OptionError("labels", f"need as many as predictions, at least one: {labels.shape}, {predicted.shape}")
    for name, values in (("predictions", predicted), ("labels", labels)):
        if not bool(np.all((values >= 0) & (values <= 1))):
            raise OptionError(name, "must be probabilities: in [0, 1]")


__all__ = [
    "BINS",
    "Bin",
    "Interval",
    "auroc",
    "bootstrap",
    "brier_score",
    "calibration_floor",
    "expected_calibration_error",
    "negative_log_likelihood",
    "reliability",
]
