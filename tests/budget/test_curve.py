"""Cost curves keep what was measured: their steps, their order, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget.world import FLOAT32, INT4
from forerun.budget.curve import CostCurve, free_up_to, lower_envelope
from forerun.errors import OptionError

seconds = st.floats(0.01, 100, allow_nan=False)
samples = st.dictionaries(st.integers(1, 300), seconds, min_size=1, max_size=12)
costs = st.lists(seconds, min_size=1, max_size=40).map(lambda values: np.maximum.accumulate(np.array(values)))


@given(samples)
def test_a_curve_never_falls_and_meets_its_points(points):
    """Monotone over its whole range and beyond; at a measured count it is the greatest median up to there."""
    curve = CostCurve.measured(points)
    values = curve.over(0, 700)
    assert values[0] == 0
    assert np.all(np.diff(values) >= -1e-12)
    for n in points:
        assert curve(n) == pytest.approx(max(s for m, s in points.items() if m <= n))
        assert curve(n) == curve.at(np.array([float(n)]))[0]


def test_one_disturbed_repeat_has_no_influence():
    """The median of the repeats counts, whatever the worst of them is."""
    assert CostCurve.measured({1: [1.0, 1.01, 60.0], 4: [1.2, 1.19, 1.21]}).seconds == (1.01, 1.2)


def test_a_measured_step_is_kept():
    """The jump at 5 rows with int4 weights and the one at 2 rows in float32 stay where they are."""
    assert CostCurve.measured(INT4).over(1, 6).tolist() == pytest.approx([1, 1.1, 1.245, 1.39, 2.38, 2.38])
    assert CostCurve.measured(FLOAT32).over(1, 8).tolist() == [1.0] + [2.11] * 7


def test_a_step_whose_place_is_unknown_is_taken_to_be_near():
    """From 4 to 6 rows the cost grows faster than the rows: 5 rows may cost as much as 6. A ramp is interpolated."""
    curve = CostCurve.measured({4: 1.39, 6: 2.38, 12: 4.0})
    assert curve(5) == 2.38
    assert curve(9) == pytest.approx(3.19)


def test_beyond_the_table_it_goes_on_with_the_slope_of_the_last_octave():
    """A tread at the end of the table must not make all further rows free."""
    curve = CostCurve.measured({1: 1.0, 8: 1.0, 12: 2.0, 16: 2.0})
    assert curve(32) == pytest.approx(2.0 + 16 * (2.0 - 1.0) / (16 - 8))
    assert CostCurve.measured({1: 1.0, 8: 1.0, 16: 1.0})(1000) == 1.0  # no rise was seen
    assert CostCurve.measured({4: 2.0})(8) == 4.0  # nothing is known of a single point: in proportion


def test_measuring_by_bisection_finds_a_step():
    """From 7 points the place of a step among 64 counts is found in 5 more measurements, and then it ends."""

    def truth(n: int) -> float:
        return 1.0 + 0.001 * n + (n >= 37)

    points = {n: truth(n) for n in (1, 2, 4, 8, 16, 32, 64)}
    while (n := CostCurve.measured(points).next_to_measure()) is not None:
        assert n not in points
        points[n] = truth(n)
    assert {36, 37} <= points.keys()
    assert len(points) == 12


@pytest.mark.parametrize(
    ("counts", "values"),
    [
        ((), ()),
        ((0, 1), (1.0, 1.0)),
        ((2, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (float("nan"),)),
        ((1,), (-1.0,)),
    ],
)
def test_a_curve_that_is_none_is_refused(counts, values):
    with pytest.raises(OptionError, match="profile"):
        CostCurve(counts, values)


def test_measurements_that_are_none_are_refused():
    for bad in ({}, {1: []}, {1: [float("inf")]}, {1: -1.0}):
        with pytest.raises(OptionError, match="profile"):
            CostCurve.measured(bad)


# --------------------------------------------------------------------------------------------------- envelope and edges


def envelope_by_force(values: np.ndarray) -> list[float]:
    """At each place the lowest chord over it."""
    out = []
    for i in range(len(values)):
        chords = [
            values[a] + (values[b] - values[a]) * (i - a) / (b - a)
            for a in range(i + 1)
            for b in range(i, len(values))
            if b > a
        ]
        out.append(min([values[i], *chords]))
    return out


@given(costs)
def test_the_envelope_is_the_greatest_convex_function_below(values):
    """Equal to the lowest chords by brute force, convex, and below the curve."""
    envelope = lower_envelope(values)
    assert envelope.tolist() == pytest.approx(envelope_by_force(values))
    assert np.all(np.diff(envelope, 2) >= -1e-9)
    assert np.all(envelope <= values + 1e-9)


def test_the_envelope_of_the_papers_example():
    """Costs 1, 2, 2.22 (appendix A): 1, 1.61, 2.22."""
    assert lower_envelope(np.array([1.0, 2.0, 2.22])).tolist() == pytest.approx([1.0, 1.61, 2.22])


@given(costs, st.data())
def test_rows_up_to_an_edge_are_free_and_the_next_is_not(values, data):
    """`free_up_to` answers upwards only, never beyond half a percent, and as far as that goes."""
    n = data.draw(st.integers(0, len(values) - 1))
    edge = free_up_to(values, n)
    assert edge >= n
    assert values[edge] <= values[n] * 1.005 + 1e-12
    assert edge == len(values) - 1 or values[edge + 1] > values[n] * 1.005
