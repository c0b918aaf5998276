"""Algorithm 1 and the search over counts, against brute force; their order, their books, their edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget.world import FLOAT32
from forerun.budget.curve import CostCurve, lower_envelope
from forerun.budget.prefix import best_count, lengths, rank, scan, stop_early, survivals, throughput

confidence = st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]) | st.floats(0, 1)
batches = st.lists(st.lists(confidence, max_size=4), min_size=1, max_size=4)
rises = st.lists(st.floats(0, 3), min_size=17, max_size=17)


def step_costs(steps, count) -> np.ndarray:
    """[count + 1] positive seconds that never fall."""
    return 1 + np.cumsum([0.0, *steps[:count]])


def theta_of(batch, chosen, seconds) -> float:
    tokens = len(batch) + sum(np.prod(row[: k + 1]) for row, n in zip(batch, chosen, strict=True) for k in range(n))
    return tokens / seconds[sum(chosen)]


def best_by_force(batch, seconds) -> float:
    """The greatest theta over all lengths of all rows."""
    every = itertools.product(*(range(len(row) + 1) for row in batch))
    return max(theta_of(batch, chosen, seconds) for chosen in every)


@given(batches, rises)
def test_the_search_over_counts_equals_brute_force_on_any_costs(batch, steps):
    """The best of all lengths of all rows is a count of the order, whatever the costs."""
    seconds = step_costs(steps, sum(map(len, batch)))
    ranking = rank(survivals(batch), range(len(batch)))
    count = best_count(throughput(len(batch), ranking.survival, seconds))
    assert theta_of(batch, lengths(ranking, count, len(batch)), seconds) == pytest.approx(best_by_force(batch, seconds))


@given(batches, rises)
def test_the_early_stop_equals_brute_force_on_convex_costs(batch, steps):
    """On the envelope of any staircase the first non-improvement is the global optimum."""
    seconds = lower_envelope(step_costs(steps, sum(map(len, batch))))
    ranking = rank(survivals(batch), range(len(batch)))
    count = stop_early(throughput(len(batch), ranking.survival, seconds))
    assert theta_of(batch, lengths(ranking, count, len(batch)), seconds) == pytest.approx(best_by_force(batch, seconds))


def test_on_a_raw_staircase_the_early_stop_gives_up():
    """0.5B in float32 costs 1 and 2.11 at two rows: at an acceptance of .85 the stop on the raw costs never drafts,
    on their envelope it drafts all seven tokens, which are worth 4.85 tokens at a cost of 2.11."""
    seconds = CostCurve.measured(FLOAT32).over(1, 8)
    ranking = rank(survivals([[0.85] * 7]), [0])
    theta = throughput(1, ranking.survival, seconds)
    assert theta[1] == pytest.approx(0.88, abs=0.005)
    assert stop_early(theta) == 0
    assert scan(1, ranking, seconds) == 7
    assert theta[7] == pytest.approx(4.85 / 2.11, rel=0.001)


def test_the_scan_goes_on_to_the_step_edge():
    """Rows up to the edge are free, so a stop before it moves up to it; the candidates follow in their order."""
    seconds = np.array([1.0, 1.5, 1.5, 1.5, 4.0, 4.0])
    ranking = rank(survivals([[0.9, 0.2, 0.05, 0.05, 0.05]]), [0])
    envelope = lower_envelope(seconds)
    assert stop_early(throughput(1, ranking.survival, envelope)) == 1
    assert scan(1, ranking, seconds) == 3


@given(batches, rises)
def test_lengths_are_prefixes_of_the_order(batch, steps):
    """Every count admits the best survivals, never a token without those before it, and books each once."""
    ranking = rank(survivals(batch), range(len(batch)))
    every = sorted((float(np.prod(row[: k + 1])) for row in batch for k in range(len(row))), reverse=True)
    positive = [a for a in every if a > 0]
    assert ranking.survival.tolist() == pytest.approx(positive)
    for count in range(len(positive) + 1):
        chosen = lengths(ranking, count, len(batch))
        assert sum(chosen) == count
        admitted = [float(np.prod(row[: k + 1])) for row, n in zip(batch, chosen, strict=True) for k in range(n)]
        assert sorted(admitted, reverse=True) == pytest.approx(positive[:count])


@given(batches, rises, st.randoms(use_true_random=False))
def test_the_order_of_the_batch_means_nothing(batch, steps, random):
    """The same requests in another order get the same lengths, ties included."""
    seconds = step_costs(steps, sum(map(len, batch)))
    ids = list(range(10, 10 + len(batch)))
    order = list(range(len(batch)))
    random.shuffle(order)

    def by_request(places):
        ranking = rank(survivals([batch[i] for i in places]), [ids[i] for i in places])
        chosen = lengths(ranking, scan(len(batch), ranking, seconds), len(batch))
        return {ids[i]: n for i, n in zip(places, chosen, strict=True)}

    assert by_request(order) == by_request(range(len(batch)))


def test_saturated_confidences_tie_by_position_then_request():
    """Survivals of exactly 1 are ordered by what depends on no token: all first positions, then all second ones."""
    ranking = rank(survivals([[1.0, 1.0], [1.0, 1.0], [1.0]]), [7, 3, 5])
    assert [int(r) for r in ranking.rows] == [1, 2, 0, 1, 0]


def test_a_survival_of_zero_is_never_verified_and_nan_ends_a_row():
    ranking = rank(survivals([[0.0, 1.0], [0.5, float("nan"), 1.0], []]), [0, 1, 2])
    assert lengths(ranking, 10, 3) == [0, 1, 0]


@pytest.mark.parametrize("requests", [0, 1])
def test_no_drafts_no_rows(requests):
    """R = 0 and R = 1 without drafts: the empty plan."""
    ranking = rank(survivals([[]] * requests), range(requests))
    assert scan(requests, ranking, np.array([1.0])) == 0
    assert lengths(ranking, 0, requests) == [0] * requests


def test_beyond_the_measured_costs_the_search_goes_on():
    """12 draft rows where 8 were measured: costs are extrapolated, and rows that pay there are taken."""
    curve = CostCurve.measured({1: 1.0, 4: 1.1, 8: 1.2})
    ranking = rank(survivals([[0.99] * 12]), [0])
    assert scan(1, ranking, curve.over(1, 13)) == 12
