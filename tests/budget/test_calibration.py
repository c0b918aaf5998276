"""Sequential temperature scaling and the measures it is judged by."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.budget.calibration import (
    GRID,
    Calibration,
    CalibrationKey,
    Table,
    filters_of,
    fit,
    scale,
    sigmoid,
    temperature_bucket,
)
from forerun.budget.reliability import (
    Bin,
    auroc,
    bootstrap,
    brier_score,
    calibration_floor,
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
)
from forerun.errors import OptionError
from forerun.sampling import Sampling

KEY = CalibrationKey("rejection", "probabilistic", "one")


def rounds(temperatures, count, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Drafts whose chances of acceptance are sigmoid(z / T) with these T: raw scores and survival labels [n, K]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.5, 2.0, (count, len(temperatures)))
    accepted = rng.random(logits.shape) < sigmoid(logits / np.array(temperatures))
    return logits, np.cumprod(accepted, axis=1).astype(float)


def test_a_known_temperature_is_recovered():
    """Overconfident, right and underconfident positions: the fitted temperatures are within a fifth of the truth (two
    steps of the grid), and the error falls to near the floor."""
    truth = [2.0, 1.0, 0.6]
    logits, labels = rounds(truth, 20_000)
    found = fit(logits, labels)
    assert found.temperatures == pytest.approx(truth, rel=0.2)
    survival = np.cumprod(sigmoid(logits / np.array(found.temperatures)), axis=1)
    for k in range(3):
        floor = calibration_floor(survival[:, k], draws=50)
        assert found.ece_after[k] < floor + 0.005
    assert found.ece_before[0] > 0.05


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 40))
def test_the_error_on_the_fit_set_is_never_worse(seed, k, count):
    """Position by position, given those before it: the grid holds 1, so not scaling was among the choices."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, k))
    labels = np.cumprod(rng.random((count, k)) < 0.7, axis=1).astype(float)
    assert min(GRID, key=lambda t: abs(t - 1)) == pytest.approx(1.0)
    found = fit(logits, labels)
    before = np.ones(count)
    for j, temperature in enumerate(found.temperatures):
        left = expected_calibration_error(before * sigmoid(logits[:, j]), labels[:, j])
        before = before * sigmoid(logits[:, j] / temperature)
        assert expected_calibration_error(before, labels[:, j]) <= left + 1e-9
        assert found.ece_after[j] == pytest.approx(expected_calibration_error(before, labels[:, j]))


def test_equal_errors_go_to_the_likelier_temperature():
    """With a single bin, scores of +-2 have the mean .5 at every temperature, hence the same error: the likelihood
    decides, not the grid's order. Where that is equal too, the grid's order does."""
    assert fit(np.zeros((2, 1)), np.array([[1.0], [0.0]]), grid=[3.0, 1.0]).temperatures == (3.0,)
    logits = np.array([[2.0], [-2.0]])
    labels = np.array([[1.0], [0.0]])
    grid = [1.0, 0.999]
    errors = [expected_calibration_error(sigmoid(logits[:, 0] / t), labels[:, 0], bins=1) for t in grid]
    assert errors[0] == pytest.approx(errors[1], abs=1e-12)  # one bin: the mean is .5 for every temperature
    likelier = max(grid, key=lambda t: -negative_log_likelihood(sigmoid(logits[:, 0] / t), labels[:, 0]))
    assert likelier == 0.999
    assert fit(logits, labels, grid=grid, bins=1).temperatures == (0.999,)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 10))
def test_scaling_keeps_the_order_within_a_position(low, high, temperature):
    low, high = sorted((low, high))
    assert 0 <= scale(low, temperature) <= scale(high, temperature) <= 1
    assert scale(1.0, temperature) == 1.0
    assert scale(0.0, temperature) == 0.0
    assert math.isnan(scale(math.nan, temperature))


def test_scaling_is_the_sigmoid_of_the_scaled_score():
    for z in (-700.0, -3.0, 0.0, 2.5, 30.0):
        c = float(sigmoid(np.array(z)))
        assert scale(c, 2.0) == pytest.approx(float(sigmoid(np.array(z / 2))), rel=1e-6)


def test_soft_labels_give_the_same_fit_with_less_noise():
    """The chance of acceptance instead of the outcome: over 10 small samples the temperatures scatter less."""
    hard, soft = [], []
    for seed in range(10):
        logits, labels = rounds([2.0], 400, seed)
        hard.append(fit(logits, labels).temperatures[0])
        soft.append(fit(logits, sigmoid(logits / 2.0)).temperatures[0])
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
    with pytest.raises(OptionError, match=message):
        fit(logits, labels)


# ------------------------------------------------------------------------------------------------------------ measures


def test_the_measures_of_a_hand_made_table():
    """Four predictions in two bins: errors .1 and .3 of halves; Brier and AUROC counted by hand."""
    predicted = np.array([0.9, 0.9, 0.2, 0.2])
    labels = np.array([1.0, 1.0, 1.0, 0.0])
    assert expected_calibration_error(predicted, labels) == pytest.approx((0.1 + 0.3) / 2)
    assert brier_score(predicted, labels) == pytest.approx((0.01 + 0.01 + 0.64 + 0.04) / 4)
    assert auroc(predicted, labels) == pytest.approx((2 * 1 + 0.5) / 3)
    assert auroc(predicted, np.ones(4)) is None
    bars = reliability(predicted, labels, bins=10)
    assert [(b.rounds, b.observed) for b in bars if b.rounds] == [(2, 0.5), (2, 1.0)]
    assert bars[2].low == pytest.approx(0.2)
    assert math.isnan(bars[0].predicted)
    assert expected_calibration_error(np.array([1.0]), np.array([1.0])) == 0.0


def test_the_area_of_soft_labels_is_that_of_their_outcomes():
    """Each label y as y accepted and 1 - y rejected rounds: the same area as 100 outcomes each."""
    predicted, labels = np.array([0.9, 0.6, 0.3]), np.array([0.8, 0.5, 0.1])
    outcomes = np.concatenate([np.r_[np.ones(int(100 * y)), np.zeros(100 - int(100 * y))] for y in labels])
    assert auroc(predicted, labels) == pytest.approx(auroc(np.repeat(predicted, 100), outcomes))


def test_the_floor_is_what_a_perfect_predictor_shows():
    """With 500 rounds a perfectly calibrated predictor shows some 3 %; the floor says so within a third of it, falls
    with the number of rounds, and a repeated call gives the same number."""
    rng = np.random.default_rng(0)
    predicted = rng.random(500)
    shown = np.mean([expected_calibration_error(predicted, (rng.random(500) < predicted) * 1.0) for _ in range(40)])
    floor = calibration_floor(predicted)
    assert floor == pytest.approx(shown, rel=0.33)
    assert calibration_floor(np.tile(predicted, 16)) < floor / 2
    assert calibration_floor(predicted) == floor


def test_the_bootstrap_draws_whole_prompts():
    """Ten prompts of 50 equal rounds each: drawing rounds one by one would make the interval 7 times too narrow."""
    rng = np.random.default_rng(1)
    by_prompt = rng.normal(size=10)
    values, prompts = np.repeat(by_prompt, 50), np.repeat(np.arange(10), 50)
    low, high = bootstrap(prompts.tolist(), lambda rows: float(values[rows].mean()), draws=400)
    alone = bootstrap(list(range(500)), lambda rows: float(values[rows].mean()), draws=400)
    standard_error = by_prompt.std() / math.sqrt(10)
    assert (high - low) / 2 == pytest.approx(1.96 * standard_error, rel=0.25)
    assert alone.high - alone.low < (high - low) / 4
    assert low < values.mean() < high


# ------------------------------------------------------------------------------------------------------------ the file


def tables() -> Calibration:
    made = Calibration()
    made = made.with_table(Table(KEY, (1.5, 2.0), "held out", 10_000, (0.05, 0.07), (0.01, 0.02)))
    other = CalibrationKey("coupled", "greedy", "greedy", "none")
    return made.with_table(Table(other, (1.0,), "held out", 500))


def test_tables_survive_their_file():
    made = tables()
    again = Calibration.loads(made.dumps())
    assert again.dumps() == made.dumps()
    assert again.table(KEY) == made.table(KEY)
    assert again.table(CalibrationKey("coupled", "probabilistic", "one")) is None
    assert set(again.keys) == set(made.keys)


def test_reliability_diagrams_survive_the_file():
    """Bars of every position; a file from before there were any is read as well."""
    bars = ((Bin(0.6, 0.7, 30, 0.65, 0.5), Bin(0.9, 1.0, 2, 0.95, 1.0)), ())
    table = Table(KEY, (1.5, 2.0), "held out", 100, (0.1, 0.2), (0.1, 0.1), bars, bars[::-1])
    made = Calibration([table])
    assert Calibration.loads(made.dumps()).table(KEY) == table
    old = json.loads(made.dumps())
    for name in ("bars_before", "bars_after"):
        del old["tables"][0][name]
    assert Calibration.loads(json.dumps(old)).table(KEY).bars_after == ()


def test_a_table_replaces_the_one_of_its_key():
    made = tables().with_table(Table(KEY, (3.0,), "new", 1))
    assert len(made.keys) == 2
    assert made.table(KEY).temperatures == (3.0,)


def test_a_table_applies_its_last_temperature_beyond_its_end():
    table = tables().table(KEY)
    assert table.apply(2, 0.9) == table.apply(7, 0.9) == pytest.approx(0.75)


def test_the_export_has_sglangs_shape():
    """`temperatures`, `dataset`, `num_samples` and the errors, all lists as long as K."""
    made = tables().table(KEY).sglang()
    assert made == {
        "temperatures": [1.5, 2.0],
        "dataset": "held out",
        "num_samples": 10_000,
        "ece_before": [0.05, 0.07],
        "ece_after": [0.01, 0.02],
    }
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 7}', '{"version": 1}', '{"version": 1, "tables": [{}]}', '{"version": 1, "tables": 3}',
        tables().dumps().replace('"num_samples": 10000', '"num_samples": Infinity'), "[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(text):
    with pytest.raises(OptionError, match="calibration"):
        Calibration.loads(text)


@pytest.mark.parametrize("temperatures", [(), (0.0,), (-1.0,), (math.nan,)])
def test_temperatures_must_be_positive(temperatures):
    with pytest.raises(OptionError, match="positive"):
        Table(KEY, temperatures, "", 1)


def test_the_key_of_a_request():
    """Its mode, method, temperature bucket, and the filters that are on."""
    made = CalibrationKey.of(Sampling(temperature=0.9, top_k=20, top_p=0.8), "rejection", "probabilistic")
    assert made == CalibrationKey("rejection", "probabilistic", "one", "top_k=20 top_p=0.8")
    assert filters_of(Sampling(temperature=0, top_k=5)) == "none"
    assert filters_of(Sampling(min_p=0.05)) == "min_p=0.05"
    buckets = [temperature_bucket(t) for t in (0.0, 1e-6, 0.3, 0.5, 0.7, 1.0, 1.5)]
    assert buckets == ["greedy", "greedy", "low", "medium", "medium", "one", "high"]
