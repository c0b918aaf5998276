"""The tables of calibrations, their file, and the measures they are judged by."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from forerun.budget.calibration import (
    Calibration,
    CalibrationKey,
    Table,
    filters_of,
    temperature_bucket,
)
from forerun.budget.reliability import (
    Bin,
    auroc,
    bootstrap,
    brier_score,
    calibration_floor,
    expected_calibration_error,
    reliability,
)
from forerun.errors import OptionError
from forerun.sampling import Sampling

KEY = CalibrationKey("rejection", "probabilistic", "one")


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
    table = Table(KEY, (1.5, 2.0), "held out", 100, (0.1, 0.2), (0.1, 0.1), bars, bars[::-1], (0.3, -0.2))
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


def test_a_table_applies_its_last_entry_beyond_its_end():
    table = tables().table(KEY)
    assert table.apply(2, 0.9) == table.apply(7, 0.9) == pytest.approx(0.75)
    shifted = replace(table, shifts=(0.0, -math.log(3)))
    assert shifted.apply(2, 0.9) == shifted.apply(7, 0.9) == pytest.approx(0.5)
    assert shifted.apply(1, 0.9) == table.apply(1, 0.9)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 1}', '{"version": 2}', '{"version": 2, "tables": [{}]}', '{"version": 2, "tables": 3}',
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


@pytest.mark.parametrize("shifts", [(0.0,), (0.0, 0.0, 0.0), (0.0, math.inf)])
def test_each_temperature_has_a_shift(shifts):
    with pytest.raises(OptionError, match="shift"):
        Table(KEY, (1.0, 2.0), "", 1, shifts=shifts)


def test_the_key_of_a_request():
    """Its mode, method, temperature bucket, and the filters that are on."""
    made = CalibrationKey.of(Sampling(temperature=0.9, top_k=20, top_p=0.8), "rejection", "probabilistic")
    assert made == CalibrationKey("rejection", "probabilistic", "one", "top_k=20 top_p=0.8")
    assert filters_of(Sampling(temperature=0, top_k=5)) == "none"
    assert filters_of(Sampling(min_p=0.05)) == "min_p=0.05"
    buckets = [temperature_bucket(t) for t in (0.0, 1e-6, 0.3, 0.5, 0.7, 1.0, 1.5)]
    assert buckets == ["greedy", "greedy", "low", "medium", "medium", "one", "high"]
