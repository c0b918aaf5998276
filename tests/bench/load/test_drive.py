"""One engine under load, with a clock that counts passes: who is in when, and how long it took."""

from __future__ import annotations

import pytest

from bench.clocks import cost, engine
from bench.load.clocks import PassClock
from forerun.bench.load.arrivals import Load, arrival_times
from forerun.bench.load.drive import Task, drive
from forerun.errors import OptionError
from forerun.sampling import Sampling


def tasks(*lengths: int) -> list[Task]:
    return [
        Task([1, 2, 3], Sampling(temperature=0, max_tokens=n, ignore_eos=True, seed=i)) for i, n in enumerate(lengths)
    ]


def test_a_closed_loop_keeps_so_many_requests():
    """Three requests, two at once: the third enters when the shorter one is done, in the next step."""
    made = engine()
    run = drive(made, tasks(2, 4, 3), Load(concurrency=2), False, PassClock([made]))
    assert made.target.passes == [3 + 3, 2, 1 + 3, 2, 1]
    assert run.tokens == 9
    assert run.seconds == sum(map(cost, made.target.passes))
    assert [len(c.token_ids) for c in run.completions] == [2, 4, 3]


def test_decoding_seconds_are_those_behind_the_first_token():
    """One request of 5 tokens: four passes of one row."""
    made = engine()
    run = drive(made, tasks(5), Load(concurrency=1), False, PassClock([made]))
    assert run.decoding_seconds == 4 * cost(1)
    assert run.seconds_per_token_per_user == cost(1)
    assert run.seconds_per_token == (cost(3) + 4 * cost(1)) / 5


def test_an_open_loop_waits_for_arrivals():
    """Far apart: every request is alone, and its wait counts from its arrival, not from the step that saw it."""
    made, load = engine(), Load(rate=1e-4)
    run = drive(made, tasks(3, 3, 3), load, False, clock := PassClock([made]), seed=1)
    times = arrival_times(load, 3, 1)
    assert times[1] - times[0] > 100
    assert [line.start for line in run.timelines] == pytest.approx(times)
    assert [line.time_to_first_token for line in run.timelines] == pytest.approx([cost(3)] * 3)
    assert clock() == pytest.approx(times[-1] + cost(3) + 2 * cost(1))


def test_an_open_loop_under_pressure_lets_everyone_in_at_their_time():
    """A rate beyond what can be decoded: all are in the batch together, and first tokens wait."""
    made, load = engine(), Load(rate=10.0)
    run = drive(made, tasks(*[6] * 5), load, False, PassClock([made]), seed=1)
    assert [len(c.token_ids) for c in run.completions] == [6] * 5
    assert max(made.target.passes[1:]) > 1
    assert run.timelines[-1].time_to_first_token > cost(3)


def test_the_grid_is_a_step_in_the_middle():
    """K = 3, perfect drafts, two requests: three drafted, verified and accepted by both."""
    made = engine()
    run = drive(made, tasks(13, 13), Load(concurrency=2), {"method": "small", "max_draft": 3}, PassClock([made]))
    assert run.grid == [[3, 3, 3], [3, 3, 3]]
    assert run.stats.drafted == run.stats.accepted == 18


def test_plain_runs_have_a_grid_without_drafts():
    made = engine()
    run = drive(made, tasks(4, 4), Load(concurrency=2), False, PassClock([made]))
    assert run.grid == [[0, 0, 0], [0, 0, 0]]


def test_arrivals_are_a_poisson_stream_that_scales():
    """The same seed gives the same pattern, twice as fast at twice the rate; gaps average to 1 / rate."""
    slow, fast = (arrival_times(Load(rate=rate), 4000, 7) for rate in (1.0, 2.0))
    assert slow == pytest.approx([2 * time for time in fast])
    assert slow == arrival_times(Load(rate=1.0), 4000, 7)
    assert slow[-1] / 4000 == pytest.approx(1.0, rel=0.07)  # four standard errors
    assert slow == sorted(slow)


@pytest.mark.parametrize(
    "given", [{}, {"concurrency": 1, "rate": 1.0}, {"concurrency": 0}, {"rate": 0.0}, {"rate": float("nan")}]
)
def test_what_is_no_load_is_refused(given):
    with pytest.raises(OptionError):
        Load(**given)
