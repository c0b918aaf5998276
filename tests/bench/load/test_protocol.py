"""The statistical protocol against references: Student's law, bounds, Holm's correction."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.load.protocol import (
    best_of_half,
    bound,
    geometric_mean,
    holm,
    incomplete_beta,
    judge,
    p_value,
    student_quantile,
    student_tail,
)


@pytest.mark.parametrize("dof", [1, 2, 3, 7, 15, 30, 100, 1000])
def test_students_law_is_scipys(dof):
    """Tails to twelve digits, quantiles to ten, from the centre to far out."""
    stats = pytest.importorskip("scipy.stats")
    for t in (-40.0, -3.0, -0.5, 0.0, 0.1, 1.0, 2.5, 12.0, 300.0):
        assert student_tail(t, dof) == pytest.approx(stats.t.sf(t, dof), rel=1e-11, abs=1e-300)
    for level in (0.5, 0.3, 0.05, 0.05 / 7, 1e-4, 1e-8):
        assert student_quantile(level, dof) == pytest.approx(stats.t.isf(level, dof), rel=1e-9, abs=1e-9)


@given(st.floats(0, 1), st.floats(0.5, 50), st.floats(0.5, 50))
def test_the_incomplete_beta_function_is_scipys(x, a, b):
    special = pytest.importorskip("scipy.special")
    assert incomplete_beta(x, a, b) == pytest.approx(special.betainc(a, b, x), rel=1e-9, abs=1e-12)


def test_bounds_and_p_values_are_those_of_a_t_test():
    """One cell: the p-value of scipy's one-sided t-test of the logarithms, and the bound that goes with it."""
    stats = pytest.importorskip("scipy.stats")
    ratios = [0.95, 1.01, 0.97, 0.93, 0.99, 0.96, 1.0, 0.94]
    logs = [math.log(ratio) for ratio in ratios]
    for bar in (0.9, 0.97, 1.0):
        expected = stats.ttest_1samp(logs, math.log(bar), alternative="less").pvalue
        assert p_value(ratios, bar) == pytest.approx(expected, rel=1e-10)
    interval = stats.ttest_1samp(logs, 0, alternative="less").confidence_interval(0.95)
    assert math.log(bound(ratios, 0.05)) == pytest.approx(interval.high, rel=1e-10)
    assert geometric_mean(ratios) == pytest.approx(stats.gmean(ratios))


def test_holms_procedure_on_the_textbook_case():
    """Four p-values at 5 %: .005 against .05 / 4, .01 against .05 / 3, then .03 against .05 / 2 stands, and with it
    .04."""
    levels, rejected = holm([0.01, 0.04, 0.03, 0.005])
    assert rejected == [True, False, False, True]
    assert levels == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_the_definition_rejects(values):
    """Hypothesis i is rejected if and only if every p as small as its own, the j-th smallest of m, is below
    alpha / (m - j + 1)."""
    ordered = sorted(range(len(values)), key=lambda i: (values[i], i))
    expected = [False] * len(values)
    for place, i in enumerate(ordered):
        passing = all(values[ordered[j]] < 0.05 / (len(values) - j) for j in range(place + 1))
        expected[i] = passing
    assert holm(values)[1] == expected


def test_a_cell_fails_only_if_its_bound_is_below_the_bar():
    """The verdict and the bound that is reported are the same statement, cell by cell."""
    rng = random.Random(3)
    cells = {i: [math.exp(rng.gauss(0.0 - 0.02 * i, 0.02)) for _ in range(8)] for i in range(8)}
    found = judge(cells, 0.97)
    assert {verdict.failed for verdict in found} == {True, False}
    for verdict in found:
        assert verdict.failed == (verdict.high < 0.97)
        assert verdict.low < verdict.ratio < verdict.high
        assert verdict.pairs == 8


def test_true_claims_rarely_fail():
    """300 studies of 10 cells whose true ratio is just the bar: any cell fails in at most 5 % of them, which is 15; 26
    would be three standard deviations more. Without the correction it would be 40 %."""
    rng = random.Random(0)
    failures = uncorrected = 0
    for _ in range(300):
        cells = {i: [math.exp(rng.gauss(math.log(0.97), 0.03)) for _ in range(8)] for i in range(10)}
        failures += any(verdict.failed for verdict in judge(cells, 0.97))
        uncorrected += any(p_value(values, 0.97) < 0.05 for values in cells.values())
    assert failures <= 26
    assert uncorrected > 75


def test_false_claims_are_found():
    """A cell at .9 of plain with a scatter of 3 % fails among nine others that hold."""
    rng = random.Random(1)
    cells = {i: [math.exp(rng.gauss(0.05, 0.03)) for _ in range(8)] for i in range(9)}
    cells[9] = [0.9 * math.exp(rng.gauss(0, 0.03)) for _ in range(8)]
    assert [verdict.cell for verdict in judge(cells, 0.97) if verdict.failed] == [9]


def test_no_scatter_and_a_single_pair():
    """Pairs that are all the same leave no doubt; a single pair bounds nothing and fails nothing."""
    assert p_value([0.96] * 4, 0.97) == 0.0
    assert p_value([0.97] * 4, 0.97) == 1.0
    [verdict] = judge({"one": [0.5]}, 0.97)
    assert not verdict.failed
    assert math.isinf(verdict.high)
    assert verdict.as_dict()["high"] is None
    assert judge({}, 0.97) == []


def test_the_best_is_chosen_on_other_pairs_than_it_is_compared_on():
    """`b` is cheaper on the even pairs and is chosen, though `a` is cheaper over all; the ratios are of odd pairs."""
    costs = {"a": [2.0, 1.0, 2.0, 1.0], "b": [1.0, 8.0, 1.0, 8.0], "own": [4.0, 2.0, 4.0, 4.0]}
    assert best_of_half(costs, "own") == ("b", [8.0 / 2.0, 8.0 / 4.0])
