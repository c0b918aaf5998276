"""Not drafting: gates that do not flutter, probing whose cost is bounded, states that are dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.budget.bypass import Gate, ProbeLedger, Reason, StateKeeper, probe_interval


def test_sp_2_a_gate_does_not_flutter_at_its_border():
    """https://github.com/vllm-project/vllm/issues/49548: gains that wander within the hysteresis around the border
    change the answer at most once, in 1,000 steps."""
    rng = np.random.default_rng(0)
    gate, without = Gate(0.04, 0.02), Gate(0.04, 0.0)
    gains = 0.041 + rng.uniform(-0.009, 0.009, 1000)
    answers, fluttering = ([g.update(x) for x in gains] for g in (gate, without))
    assert np.count_nonzero(np.diff(answers)) <= 1
    assert np.count_nonzero(np.diff(fluttering)) > 300  # the control


def test_a_gate_closes_below_the_minimum_and_opens_beyond_the_hysteresis():
    gate = Gate(0.04, 0.02)
    assert [gate.update(g) for g in (0.04, 0.039, 0.05, 0.059, 0.06, 0.04, 0.0)] == [
        True, False, False, False, True, True, False,
    ]  # fmt: skip


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.0, 20)), min_size=1, max_size=200), st.floats(0.001, 0.1))
def test_probing_never_costs_more_than_its_share(steps, share):
    """At any time, for any mixture of step times and probe costs."""
    ledger, elapsed, spent = ProbeLedger(share), 0.0, 0.0
    for seconds, cost in steps:
        elapsed += seconds
        ledger.earn(seconds)
        if ledger.spend(cost):
            spent += cost
        assert spent <= share * elapsed * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("ratio", [1.2, 2.11, 5.0])
def test_equal_probes_come_at_the_interval(ratio):
    """(rho - 1) / eps plain steps lie between two probes: with 1 %, 111 steps for a round of 2.11."""
    ledger, at = ProbeLedger(0.01), []
    for step in range(3000):
        ledger.earn(1.0)
        if ledger.spend(ratio - 1):
            at.append(step)
    interval = probe_interval(ratio, 0.01)
    assert interval == pytest.approx((ratio - 1) / 0.01, abs=1)
    assert np.abs(np.diff(at) - interval).max() <= 1


def test_at_most_one_probe_is_saved_up():
    ledger = ProbeLedger(0.01)
    ledger.earn(1e6)
    assert [ledger.spend(1.0) for _ in range(4)] == [True, True, False, False]


def test_a_state_is_dropped_after_so_many_tokens_without_use():
    keeper = StateKeeper(10)
    keeper.followed(1, "d", 10)
    assert not keeper.is_dropped(1, "d")
    keeper.used(1, "d")
    keeper.followed(1, "d", 10)
    assert not keeper.is_dropped(1, "d")
    keeper.followed(1, "d", 1)
    assert keeper.is_dropped(1, "d")
    assert not keeper.is_dropped(1, "e")
    keeper.forget(1)
    assert not keeper.is_dropped(1, "d")


def test_the_reasons_are_the_words_of_the_metric():
    assert {str(reason) for reason in Reason} == {"gain", "batch", "request", "context", "fault", "state dropped"}
