"""Scalings of confidences: temperatures as published, and with shifts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.bench.calibrating.recorder import logit
from forerun.budget.reliability import (
    calibration_floor,
    expected_calibration_error,
    negative_log_likelihood,
)
from forerun.budget.scaling import (
    EDGES,
    GRID,
    WIDEST,
    Scaling,
    _likeliest,
    _loss,
    fit,
    fit_temperatures,
    scale,
    sigmoid,
)
from forerun.errors import OptionError


def rounds(temperatures, count, seed=0, shifts=0.0) -> tuple[np.ndarray, np.ndarray]:
    """Drafts whose chances of acceptance are sigmoid(z / T + b) with these T, b: raw scores and survival labels
    [n, K]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.5, 2.0, (count, len(temperatures)))
    accepted = rng.random(logits.shape) < sigmoid(logits / np.array(temperatures) + np.array(shifts))
    return logits, np.cumprod(accepted, axis=1).astype(float)


def test_a_known_temperature_is_recovered():
    """Overconfident, right and underconfident positions: the fitted temperatures are within a fifth of the truth (two
    steps of the grid), and the error falls to near the floor."""
    truth = [2.0, 1.0, 0.6]
    logits, labels = rounds(truth, 20_000)
    found = fit_temperatures(logits, labels)
    assert found == pytest.approx(truth, rel=0.2)
    excess = excesses(Scaling.of(found), logits, labels)
    assert max(excess) < 0.005
    assert excesses(Scaling.of([1.0]), logits, labels)[0] > 0.05


def excesses(scaling, logits, labels) -> list[float]:
    """The calibration error of each position above that of a perfect predictor."""
    pairs = list(zip(scaling.survival(logits).T, labels.T, strict=True))
    return [expected_calibration_error(p, label) - calibration_floor(p, draws=50) for p, label in pairs]


def test_known_shifts_are_recovered():
    """Scores that say too much or too little whatever they say: a temperature alone leaves the error, as a score of 0
    stays one half under it; with shifts it falls to near the floor, late positions included."""
    truth, shifts = [1.5, 1.0, 0.7], [-1.0, 0.0, 0.8]
    logits, labels = rounds(truth, 20_000, shifts=shifts)
    found = fit(logits, labels)
    assert found.temperatures == pytest.approx(truth, rel=0.1)
    assert found.shifts == pytest.approx(shifts, abs=0.15)
    assert max(excesses(found, logits, labels)) < 0.005
    assert max(excesses(Scaling.of(fit_temperatures(logits, labels)), logits, labels)) > 0.03


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 40))
def test_the_fit_is_likelier_than_none(seed, k, count):
    """Position by position, given those before it, up to the weight of its prior, which holds for no scaling at all."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, k))
    labels = np.cumprod(rng.random((count, k)) < 0.7, axis=1).astype(float)
    before = np.ones(count)
    for z, label, t, b in zip(logits.T, labels.T, *fit(logits, labels), strict=True):
        left = negative_log_likelihood(before * sigmoid(z), label)
        before = before * sigmoid(z / t + b)
        assert negative_log_likelihood(before, label) <= left + 1e-12


def saturated(share, mean, spread, count=2000) -> np.ndarray:
    """Scores of which a share is at the edge of what a dtype can say, the others normal."""
    rng = np.random.default_rng(3)
    return np.where(rng.random(count) < share, 16.6355, rng.normal(mean, spread, count))


@pytest.mark.parametrize(
    ("z", "chance"),
    [
        (saturated(0, 6, 2), 0.3),
        (saturated(0, 10, 1), 0.5),
        (saturated(0.95, 2, 2), 0.7),
        (saturated(0.6, 1, 2), 0.4),
        (saturated(0, 1, 3), 0.5),
    ],
)
@pytest.mark.parametrize("first", [None, 0.5])
def test_scores_that_say_nothing_are_moved_to_what_is_true(z, chance, first):
    """T is at its bound or all scores are saturated: the shift still is the best there is, at the first position and
    behind another one."""
    rng = np.random.default_rng(5)
    alive = np.ones(len(z)) if first is None else sigmoid(rng.normal(first, 1, len(z)))
    labels = (rng.random(len(z)) < alive * chance).astype(float)
    t, b = _likeliest(alive, z, labels)
    grid = np.stack(np.meshgrid(np.linspace(-EDGES[0], EDGES[0], 41), np.linspace(-EDGES[1], EDGES[1], 81)), -1)
    best = min(_loss(at, alive, z, labels) for at in grid.reshape(-1, 2))
    assert _loss(np.array([-math.log(t), b]), alive, z, labels) <= best + 1e-6
    left = expected_calibration_error(alive * sigmoid(z / t + b), labels)
    assert left < expected_calibration_error(alive * sigmoid(z), labels) / 2


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("z", [0.0, 1e-6, 30.0, -700.0])
def test_a_fit_stays_finite_where_all_drafts_went_one_way(label, z):
    """Nothing but the prior bounds the likelihood there, at any scale."""
    found = fit(np.array([[z], [z], [z + 1]]), np.full((3, 1), label))
    assert min(GRID) - 1e-9 <= found.temperatures[0] <= max(GRID) + 1e-9
    assert abs(found.shifts[0]) <= WIDEST
    assert (found.shifts[0] > 0) == (label > 0) or abs(z) >= 30


def test_a_fit_stays_finite_where_scores_part_perfectly():
    found = fit(np.array([[-2.0], [-1.0], [1.0], [2.0]] * 50), np.array([[0.0], [0.0], [1.0], [1.0]] * 50))
    assert min(GRID) <= found.temperatures[0] < 0.3
    assert abs(found.shifts[0]) < 0.1


def test_survival_is_the_product_and_the_last_pair_goes_on():
    scaling = Scaling((1.0, 2.0), (0.0, 0.5))
    survival = scaling.survival(np.array([[0.0, 1.0, -1.0]]))
    expected = np.cumprod([0.5, float(sigmoid(np.array(1.0))), float(sigmoid(np.array(0.0)))])
    assert survival[0] == pytest.approx(expected)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 40))
def test_the_error_on_the_fit_set_is_never_worse(seed, k, count):
    """Position by position, given those before it: the grid holds 1, so not scaling was among the choices."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, k))
    labels = np.cumprod(rng.random((count, k)) < 0.7, axis=1).astype(float)
    assert min(GRID, key=lambda t: abs(t - 1)) == pytest.approx(1.0)
    found = fit_temperatures(logits, labels)
    before = np.ones(count)
    for j, temperature in enumerate(found):
        left = expected_calibration_error(before * sigmoid(logits[:, j]), labels[:, j])
        before = before * sigmoid(logits[:, j] / temperature)
        assert expected_calibration_error(before, labels[:, j]) <= left + 1e-9


def test_equal_errors_go_to_the_likelier_temperature():
    """With a single bin, scores of +-2 have the mean .5 at every temperature, hence the same error: the likelihood
    decides, not the grid's order. Where that is equal too, the grid's order does."""
    assert fit_temperatures(np.zeros((2, 1)), np.array([[1.0], [0.0]]), grid=[3.0, 1.0]) == (3.0,)
    logits = np.array([[2.0], [-2.0]])
    labels = np.array([[1.0], [0.0]])
    grid = [1.0, 0.999]
    errors = [expected_calibration_error(sigmoid(logits[:, 0] / t), labels[:, 0], bins=1) for t in grid]
    assert errors[0] == pytest.approx(errors[1], abs=1e-12)  # one bin: the mean is .5 for every temperature
    likelier = max(grid, key=lambda t: -negative_log_likelihood(sigmoid(logits[:, 0] / t), labels[:, 0]))
    assert likelier == 0.999
    assert fit_temperatures(logits, labels, grid=grid, bins=1) == (0.999,)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 10), st.floats(-4, 4))
def test_scaling_keeps_the_order_within_a_position(low, high, temperature, shift):
    low, high = sorted((low, high))
    assert 0 <= scale(low, temperature, shift) <= scale(high, temperature, shift) <= 1
    assert math.isnan(scale(math.nan, temperature, shift))


def test_scaling_is_the_sigmoid_of_the_scaled_score():
    for z in (-16.0, -3.0, 0.0, 2.5, 16.0):
        c = float(sigmoid(np.array(z)))
        assert scale(c, 2.0) == pytest.approx(float(sigmoid(np.array(z / 2))), rel=1e-6)
        assert scale(c, 2.0, -1.5) == pytest.approx(float(sigmoid(np.array(z / 2 - 1.5))), rel=1e-6)


@pytest.mark.parametrize("certain", [0.0, 1.0])
def test_what_is_saturated_is_scaled_as_it_was_recorded(certain):
    """The calibration that was judged is the one that decides: it saw such a confidence as `logit` keeps it."""
    assert scale(certain, 5.0, -2.0) == pytest.approx(float(sigmoid(np.array(logit(certain) / 5 - 2))), rel=1e-6)


def test_soft_labels_give_the_same_fit_with_less_noise():
    """The chance of acceptance instead of the outcome: over 10 small samples the temperatures scatter less."""
    hard, soft = [], []
    for seed in range(10):
        logits, labels = rounds([2.0], 400, seed)
        hard.append(fit_temperatures(logits, labels)[0])
        soft.append(fit_temperatures(logits, sigmoid(logits / 2.0))[0])
    assert np.std(soft) < np.std(hard)
    assert np.mean(soft) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((3, 2)), np.zeros((3, 1)), "labels"),
        (np.zeros((0, 2)), np.zeros((0, 2)), "labels"),
        (np.full((2, 1), np.nan), np.zeros((2, 1)), "finite"),
        (np.zeros((1, 2)), np.array([[0.0, 1.0]]), "survivals"),
        (np.zeros((1, 1)), np.array([[2.0]]), "probabilities"),
    ],
)
def test_rounds_that_are_none_are_refused(logits, labels, message):
    for way in (fit, fit_temperatures):
        with pytest.raises(OptionError, match=message):
            way(logits, labels)
