"""Whatever is measured or compared twice is computed whole both times, in an engine that keeps prefixes."""

from __future__ import annotations

import time

import pytest

from engine.conftest import engine_of
from forerun import Engine, Sampling
from forerun.bench.comparison import Comparison, Task
from forerun.bench.load.arrivals import Load
from forerun.bench.load.drive import Task as LoadTask
from forerun.bench.load.drive import WallClock, drive
from forerun.bench.measurement import decode
from forerun.bench.race import Course, race
from forerun.bench.sampled import logits_after
from forerun.target.table import history_model

PROMPT = [(3 * i + i // 4) % 7 for i in range(40)]
GREEDY = Sampling(temperature=0, max_tokens=3)


def _measure(engine: Engine) -> None:
    decode(engine, [PROMPT], [GREEDY], False, time.perf_counter)


def _drive(engine: Engine) -> None:
    drive(engine, [LoadTask(tuple(PROMPT), GREEDY)], Load(concurrency=1), False, WallClock())


def _compare(engine: Engine) -> None:
    Comparison(engine).plain(Task(tuple(PROMPT), GREEDY, "rejection"))


def _race(engine: Engine) -> None:
    race(engine, {}, Course([PROMPT], {"greedy": GREEDY}))


def _laws(engine: Engine) -> None:
    logits_after(engine, [PROMPT])


@pytest.mark.parametrize("way", [_measure, _drive, _compare, _race, _laws])
def test_the_whole_prompt_is_computed_each_time(way) -> None:
    """A pass over all rows of the prompt, though an equal one has been served before."""
    engine = engine_of(history_model(7, seed=3))
    engine.generate([PROMPT], GREEDY)
    for _ in range(2):
        engine.target.passes.clear()
        way(engine)
        assert 40 in engine.target.passes


def test_measuring_rounding_takes_the_cached_rows_with_it() -> None:
    """The measurement writes to the target's storage: nothing that was there before is found afterwards."""
    engine = engine_of(history_model(7, seed=3))
    [before] = engine.generate([PROMPT], GREEDY)
    comparison = Comparison(engine)
    comparison.noise(comparison.plain(Task(tuple(PROMPT), GREEDY, "rejection")), 2)
    [after] = engine.generate([PROMPT], GREEDY)
    assert (after.token_ids, after.stats.cached_tokens) == (before.token_ids, 0)
    engine.audit()
