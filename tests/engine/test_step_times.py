"""Every second of a step belongs to one phase; steps that fail do not count."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from budget.world import BFLOAT16, profile, serial
from engine.conftest import engine_of
from engine.scheduled import Named, cycle, right, timed
from forerun import Sampling
from forerun.engine.step_times import BOUNDS, PHASES, StepTimes
from forerun.target.table import history_model


def test_phases_share_out_a_step():
    """A phase may come twice; buckets count by upper bound, as Prometheus does."""
    now = [0.0]
    times = StepTimes(lambda: now[0])
    times.start()
    for phase, seconds in (("schedule", 0.25), ("draft", 0.5), ("schedule", 0.25), ("verify", 2.0), ("commit", 20.0)):
        now[0] += seconds
        times.mark(phase)
    times.end()
    assert times.sums == {"schedule": 0.5, "draft": 0.5, "verify": 2.0, "sample": 0.0, "commit": 20.0}
    assert all(sum(counts) == 1 for counts in times.counts.values())
    assert times.counts["schedule"][BOUNDS.index(0.5)] == 1  # at a bound: below it
    assert times.counts["verify"][bisect_left(BOUNDS, 2.0)] == 1
    assert times.counts["commit"][-1] == 1


def test_the_engine_tells_where_its_time_goes():
    """Under a clock that only passes of the target and calls of the drafter move: verify and draft have it all, to the
    last tick, and every step is counted in every phase."""
    costs = profile(BFLOAT16, {"script": serial(0.125, 0.125)})
    engine = timed(cycle(), [Named("script", right)], costs, config={"num_speculative_tokens": 3})
    clock = engine.core._clock
    engine.core.times = times = StepTimes(clock)
    engine.generate([[0], [1]], Sampling(temperature=0, max_tokens=40))
    assert times.sums["draft"] > 0 < times.sums["verify"]
    assert times.sums["draft"] + times.sums["verify"] == pytest.approx(clock.now)
    assert times.sums["schedule"] == times.sums["sample"] == times.sums["commit"] == 0
    assert {sum(times.counts[phase]) for phase in PHASES} == {len(engine.target.passes)}


def test_a_step_that_fails_does_not_count():
    """Its phases are cut off somewhere."""
    target = history_model(7)
    engine = engine_of(target)
    request = engine.submit([[1]], Sampling(temperature=0, max_tokens=5))
    engine.step()
    target.forward = lambda *_: 1 / 0
    engine.step()
    assert isinstance(request[0].error, ZeroDivisionError)
    assert {sum(counts) for counts in engine.core.times.counts.values()} == {1}
