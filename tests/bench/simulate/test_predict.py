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


def load_document(row, lengths, most_rows=64):
    """What `bench load` leaves of a single request at a time."""
    rest = {"draft_tokens": 1, **Load(concurrency=1).as_dict(), "requests": 1, "workload": {"lengths": lengths}}
    return {"rows": [row | rest], "options": {"max_num_seqs": 4, "max_num_batched_tokens": most_rows}}


def test_drafters_that_take_turns_are_predicted_with_what_each_got_right():
    """An n-gram that matches now and then before a drafter that is never wrong: neither has the other's acceptance, and
    a call of the second, which costs more than a step, is paid only where the first has nothing."""
    dear = DraftCost.measured({1: {1: 40.0}, 8: {1: 40.0}})
    costs = profile({n: PASS + ROW * n for n in (1, 2, 64)}, {"ngram": FREE, "small": dear})
    first = {"target_steps": 100, "drafting_rounds": 30, "acceptance_by_position": [0.5]}
    other = {"target_steps": 70, "drafting_rounds": 70, "acceptance_by_position": [1.0]}
    both = {"target_steps": 100, "drafting_rounds": 100, "acceptance_by_position": [0.85]}
    way = {"draft_tokens": 1, "tokens_per_second": 1.0, **both, "by_drafter": {"ngram": first, "small": other}}
    document = load_document({"drafter": "ngram+small", "ways": {"fixed:1": way}}, [[4, 400]])
    [found] = predictions(System("scripted", costs, modelled=False), measured_ways(document))
    seconds = 0.3 * 12 + 0.7 * (12 + 40)
    assert found["predicted_tokens_per_second"] == pytest.approx((1 + 0.3 * 0.5 + 0.7) / seconds, rel=0.05)


def test_a_drafter_that_copies_keeps_its_name_and_its_acceptance():
    """It is another drafter than the same one without; costs are of the kind, as the profile and the scheduler have."""
    costs = profile({n: PASS + ROW * n for n in (1, 2, 64)}, {"ngram": FREE, "dspark": FREE})
    first = {"target_steps": 100, "drafting_rounds": 0, "acceptance_by_position": [0.0]}
    other = {"target_steps": 100, "drafting_rounds": 100, "acceptance_by_position": [1.0]}
    way = {"draft_tokens": 1, "tokens_per_second": 1.0, **other, "by_drafter": {"ngram": first, "dspark": other}}
    plain = {"draft_tokens": 0, "tokens_per_second": 1.0, "acceptance_by_position": []}
    ways = {"plain": plain, "fixed:1": way}
    for label in ("dspark+lookup", "ngram+dspark+lookup"):
        document = load_document({"drafter": label, "ways": ways}, [[4, 400]])
        undrafted, found = predictions(System("scripted", costs, modelled=False), measured_ways(document))
        assert (undrafted["drafter"], found["drafter"]) == ("plain", label)
        assert found["predicted_tokens_per_second"] == pytest.approx(2 / (PASS + 2 * ROW), rel=0.05)
    row = {"drafter": "dspark+lookup", "k": 1, "batch": 1, "tokens": 40, "outputs": 1, "acceptance_by_position": [1.0]}
    rows = [row | {"plain_tokens_per_second": 1.0, "tokens_per_second": 1.0}]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    ways = measured_ways({"rows": rows, "options": options}, prompt_tokens=4)
    assert [one.drafter for one in ways] == ["plain", "dspark+lookup"]


def test_a_look_up_matches_in_as_many_rounds_as_it_did():
    """Half of the rounds have a draft, nearly all of it right: 1 + .5 * 3.5 tokens a round. Were half of the *tokens*
    behind a match, it would be a third less."""
    shown = {"target_steps": 100, "drafting_rounds": 50, "acceptance_by_position": [0.95] * 4}
    way = {"draft_tokens": 4, "tokens_per_second": 1.0, **shown}
    document = load_document({"drafter": "ngram", "ways": {"fixed:4": way}}, [[4, 400]])
    document["rows"][0]["draft_tokens"] = 4
    flat = System("flat", profile({1: 1.0, 64: 1.0}, {"ngram": FREE}), modelled=False)
    [found] = predictions(flat, measured_ways(document))
    tokens = 1 + 0.5 * sum(0.95**k for k in range(1, 5))
    assert found["predicted_tokens_per_second"] == pytest.approx(tokens, rel=0.05)


def test_every_run_is_predicted_with_its_own_lengths():
    """A short output and a long one behind prefills that dwarf both: not the first one over and over."""
    way = {"draft_tokens": 0, "tokens_per_second": 1.0, "acceptance_by_position": []}
    document = load_document({"drafter": "ngram", "ways": {"plain": way}}, [[200, 3], [200, 30]], most_rows=256)
    [found] = predictions(SYSTEM, measured_ways(document))
    seconds = 2 * (PASS + ROW * 200) + 31 * (PASS + ROW)
    assert found["predicted_tokens_per_second"] == pytest.approx(33 / seconds, rel=0.02)


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
