"""What was measured is predicted from its costs: a real engine whose seconds are scripted, and the JSON it leaves."""

from __future__ import annotations

import pytest

from bench.clocks import PASS, ROW, VOCAB, engine, pass_clock, target
from bench.load.clocks import PassClock, three_engines
from bench.simulate.worlds import profile
from forerun.bench.benchmark import Benchmark, Grid
from forerun.bench.load.arrivals import Load
from forerun.bench.load.study import Study, Subject
from forerun.bench.load.trial import Traffic
from forerun.bench.measurement import Workload
from forerun.bench.simulate.predict import measured_ways, predictions
from forerun.bench.simulate.systems import System
from forerun.budget.costs import DraftCost
from forerun.errors import OptionError

FREE = DraftCost.measured({1: {1: 0.0}, 8: {1: 0.0}})
COSTS = profile({n: PASS + ROW * n for n in (1, 2, 64)}, {"small": FREE, "ngram": FREE})
SYSTEM = System("scripted", COSTS, modelled=False)
PROMPTS = [[1, 2, 3], [4, 4, 1], [0, 6, 2], [5, 5, 5]]


def test_a_benchmark_is_predicted_from_scripted_costs():
    """Perfect drafts, where every round is known: each row of `bench`, plain and drafted, to within a percent."""
    made = engine()
    grid = Grid(["small"], [1, 3], [1, 4])
    result = Benchmark(made, grid, Workload(PROMPTS, max_tokens=41, rounds=1), None, pass_clock(made)).run()
    rows = predictions(SYSTEM, measured_ways(result.as_dict(), prompt_tokens=3))
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["predicted_tokens_per_second"] == pytest.approx(row["measured_tokens_per_second"], rel=0.01), row


@pytest.mark.parametrize(
    "load", [pytest.param(Load(concurrency=1), marks=pytest.mark.slow), Load(concurrency=4)], ids=str
)
def test_a_load_study_is_predicted_within_ten_percent(load):
    """The bar of the whole project, on scripted costs: n-grams that match now and then and are right now and then, with
    outputs of mixed lengths, plainly, with fixed K and as scheduled."""
    engines = three_engines(COSTS, ["ngram"])
    subject = Subject("ngram", engines.ways(["ngram"], (4,)))
    traffic = Traffic(PROMPTS, max_tokens=(15, 35), requests=8, pairs=3)
    result = Study(engines.scheduled, [subject], [load], traffic, PassClock(engines.all)).run()
    rows = predictions(SYSTEM, measured_ways(result.as_dict()))
    assert [row["policy"] for row in rows] == ["plain", "fixed:4", "delayed"]
    for row in rows:
        assert abs(row["error"]) < 0.1, rows


def test_what_is_no_benchmark_is_refused():
    with pytest.raises(OptionError, match="--predict"):
        measured_ways({"answers": 3})
    document = {"rows": [{"drafter": "small"}], "options": {"max_num_seqs": 4, "max_num_batched_tokens": 64}}
    with pytest.raises(OptionError, match="--prompt-tokens"):
        measured_ways(document)
    with pytest.raises(OptionError, match="--predict"):
        measured_ways(document, prompt_tokens=4)


def test_the_scripted_target_is_the_one_of_the_engines():
    """The costs above are those of the clock: the cases compare the same thing."""
    made = target()
    assert made.vocab_size == VOCAB
    assert COSTS.verify(1, 17) == PASS + ROW * 17
