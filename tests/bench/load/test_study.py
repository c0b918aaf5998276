"""Ways interleaved in pairs, rows that survive an interruption, and the verdicts over them."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from bench.clocks import PASS, ROW
from bench.load.clocks import PassClock, three_engines
from bench.simulate.worlds import profile
from forerun.bench.load import study as module
from forerun.bench.load import trial
from forerun.bench.load.arrivals import Load
from forerun.bench.load.drive import LoadRun
from forerun.bench.load.plots import cells_of, draw
from forerun.bench.load.report import show
from forerun.bench.load.study import Study, Subject, verdicts
from forerun.bench.load.trial import Traffic
from forerun.bench.screen import text_of
from forerun.budget.calibration import Calibration, CalibrationKey, Table
from forerun.budget.costs import DraftCost
from forerun.errors import OptionError
from forerun.sampling import Sampling

FREE = DraftCost.measured({1: {1: 0.0}, 8: {1: 0.0}})
COSTS = profile({n: PASS + ROW * n for n in (1, 2, 64)}, {"small": FREE, "ngram": FREE})
PROMPTS = [[1, 2, 3], [4, 4, 1], [0, 6, 2]]
TRAFFIC = Traffic(PROMPTS, max_tokens=(6, 12), requests=4, pairs=3, ignore_eos=True)
LOADS = [Load(concurrency=2), Load(rate=0.01)]


def study(path=None, loads=LOADS, traffic=TRAFFIC, names=("small",)):
    engines = three_engines(COSTS, names)
    subjects = [Subject(name, engines.ways([name], (1, 4))) for name in names]
    return Study(engines.scheduled, subjects, loads, traffic, PassClock(engines.all), path)


def test_a_row_has_every_way_with_its_rates():
    """Perfect drafts: every way decodes the same text, the longest K fastest, and the scheduled way nearly so."""
    result = study().run()
    assert [(row["drafter"], row["load"], row["concurrency"], row["rate"]) for row in result.rows] == [
        ("small", "closed", 2, None),
        ("small", "open", None, 0.01),
    ]
    ways = result.rows[0]["ways"]
    assert list(ways) == ["plain", "fixed:1", "fixed:4", "delayed"]
    speeds = [ways[way]["tokens_per_second"] for way in ("plain", "fixed:1", "fixed:4")]
    assert speeds == sorted(speeds)
    assert ways["delayed"]["tokens_per_second"] > 0.95 * speeds[-1]
    for way in ways.values():
        assert way["outputs_identical"] == way["outputs"] == 12
        assert way["tokens"] == ways["plain"]["tokens"]
    assert ways["plain"]["drafted"] == 0
    assert ways["fixed:4"]["verify_budget"] > ways["fixed:1"]["verify_budget"] > 0
    lengths = result.rows[0]["workload"]["lengths"]
    assert len(lengths) == 12
    assert all(prompt == 3 and 6 <= output <= 12 for prompt, output in lengths)
    json.dumps(result.as_dict(), allow_nan=False)


def test_every_way_decodes_the_same_requests_in_a_seeded_order(monkeypatch):
    """In each turn all four ways get the same tasks, one after another; the order varies, the same way every time; the
    first turn is a warm-up and leaves no trace."""
    calls = []
    real = trial.drive

    def spy(engine, tasks, load, speculative, clock, seed):
        calls.append((repr(speculative), tuple(task.sampling.seed for task in tasks)))
        return real(engine, tasks, load, speculative, clock, seed)

    monkeypatch.setattr(trial, "drive", spy)
    rows = study(loads=LOADS[:1]).run().rows
    once, calls[:] = list(calls), []
    study(loads=LOADS[:1]).run()
    assert calls == once
    turns = [once[i : i + 4] for i in range(0, len(once), 4)]
    assert len(turns) == 1 + TRAFFIC.pairs
    assert all(len({seeds for _, seeds in turn}) == 1 and len({way for way, _ in turn}) == 4 for turn in turns)
    assert len({tuple(way for way, _ in turn) for turn in turns}) > 1
    assert len({turn[0][1] for turn in turns}) == len(turns), "every turn has requests of its own"
    assert all(len(costs) == TRAFFIC.pairs for costs in rows[0]["seconds_per_token"].values())


def test_an_interrupted_study_goes_on(monkeypatch, tmp_path):
    """Interrupted in the second cell: the first is kept, and the result is that of a whole run, but for its time."""
    path, real, begun = tmp_path / "rows.jsonl", module.measure, []

    def measure(ways, drafter, load, *rest):
        begun.append(str(load))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(ways, drafter, load, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(module, "measure", measure)
        with pytest.raises(KeyboardInterrupt):
            study(path).run()
        again = study(path)
        assert "1 finished rows" in again.note
        assert again.total == 4 * (1 + TRAFFIC.pairs)
        resumed = again.run()
    assert begun == ["2", "0.01/s", "0.01/s"]
    whole = study(tmp_path / "other.jsonl").run()
    assert resumed.rows[0] == whole.rows[0]
    assert resumed.options == whole.options


def test_other_costs_are_another_study(tmp_path):
    """A file's rows belong to one profile: with other costs they are set aside."""
    path = tmp_path / "rows.jsonl"
    study(path, LOADS[:1]).run()
    engines = three_engines(profile({1: 1.0, 64: 3.0}, COSTS.drafts), ["small"])
    subjects = [Subject("small", engines.ways(["small"], (1, 4)))]
    other = Study(engines.scheduled, subjects, LOADS[:1], TRAFFIC, PassClock(engines.all), path)
    assert "rows.jsonl.old" in other.note
    assert other.total > 0


def test_costs_of_other_drafters_are_no_other_study(tmp_path):
    """Measured in between for another drafter: rows of hours stay. A calibration that is there now makes other rows."""
    path, alone = tmp_path / "rows.jsonl", profile({n: PASS + ROW * n for n in (1, 2, 64)}, {"small": FREE})

    def again(costs, calibrations=()):
        engines = three_engines(costs, ["small"])
        engines.scheduled.core.schedule.scheduler.calibrations.update(calibrations)
        subjects = [Subject("small", engines.ways(["small"], (1, 4)))]
        return Study(engines.scheduled, subjects, LOADS[:1], TRAFFIC, PassClock(engines.all), path)

    again(alone).run()
    assert "1 finished rows" in again(COSTS).note
    key = CalibrationKey.of(Sampling(temperature=0), "rejection", "probabilistic")
    assert "rows.jsonl.old" in again(COSTS, {"small": Calibration([Table(key, (2.0,), "some", 1)])}).note


def test_drafters_in_turn_are_told_apart():
    """Of a mixture each drafter has its own rounds: an n-gram first, and a perfect one where that has nothing."""
    engines = three_engines(COSTS, ["ngram", "small"])
    subject = Subject("ngram+small", engines.ways(["ngram", "small"]))
    result = Study(engines.scheduled, [subject], LOADS[:1], TRAFFIC, PassClock(engines.all)).run()
    way = result.rows[0]["ways"]["fixed:4"]
    first, other = (way["by_drafter"][name] for name in ("ngram", "small"))
    assert first["drafting_rounds"] + other["drafting_rounds"] == way["drafting_rounds"]
    assert first["target_steps"] == first["drafting_rounds"] + other["target_steps"]
    assert first["accepted"] + other["accepted"] == way["accepted"]
    assert set(other["acceptance_by_position"]) == {1.0} != set(first["acceptance_by_position"])
    assert result.rows[0]["ways"]["plain"]["by_drafter"] == {}


def test_users_who_wait_for_nothing_are_no_measure():
    """An open loop whose outputs end with their first token: refused by name, not a logarithm of 0."""
    one = LoadRun(1.0, [SimpleNamespace(token_ids=[5])], [SimpleNamespace(emissions=[(0.5, 1)])])
    with pytest.raises(OptionError, match="--ignore-eos"):
        trial._cost(one, Load(rate=1.0))
    assert trial._cost(one, Load(concurrency=1)) == 1.0


def test_verdicts_are_over_plain_and_over_the_best_fixed_length():
    """Two families of claims. A scheduled way that is slower than plain fails; one that is not does not."""

    def row(load, plain, fixed, own):
        costs = {"plain": plain, "fixed:2": fixed, "fixed:4": [9.0] * 8, "delayed": own}
        return {"drafter": "small", "load": "closed", "concurrency": load, "rate": None, "seconds_per_token": costs}

    wobble = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98, 1.0]
    rows = [row(1, wobble, [0.5 * w for w in wobble], [0.5] * 8), row(4, wobble, wobble, [1.2] * 8)]
    found = {(v.cell.load, v.cell.rival): v for v in verdicts(rows)}
    assert set(found) == {("1", "plain"), ("4", "plain"), ("1", "fixed:2"), ("4", "fixed:2")}
    assert {cell for cell, verdict in found.items() if verdict.failed} == {("4", "plain"), ("4", "fixed:2")}
    assert found["1", "plain"].pairs == 8
    assert found["1", "fixed:2"].pairs == 4
    assert found["1", "plain"].ratio == pytest.approx(2, rel=0.01)


def test_the_report_says_what_was_tested_and_pictures_have_their_data(tmp_path):
    result = study(traffic=TRAFFIC, loads=LOADS).run()
    text = text_of(lambda console: show(result, console))
    assert "small at load 2: delayed" in text
    assert "too few pairs" in text
    assert "Holm" in text
    written = {path.name for path in draw(result.rows, tmp_path, "forerun bench load")}
    assert {"frontier-small-closed.png", "frontier-small-open.png", "tokens-small-2.png"} <= written
    assert all((tmp_path / name).with_suffix(".csv").exists() for name in written)


def test_the_token_grid_tells_four_fates():
    """Four drafted, three verified, one accepted: accepted, rejected, behind it, not verified; then nothing."""
    assert cells_of([[4, 3, 1], [2, 2, 2], [0, 0, 0], [1, 0, 0]], 5) == [
        [1, 2, 3, 4, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [4, 0, 0, 0, 0],
    ]


def test_traffic_mixes_prompts_lengths_and_domains():
    """Prompts go round from turn to turn, lengths lie in their range, domains come with their prompts."""
    traffic = Traffic(PROMPTS, ["code", "chat", "code"], (4, 64), requests=6, seed=1)
    tasks = [task for turn in range(-1, 20) for task in traffic.tasks(turn)]
    assert [list(task.prompt) for task in tasks[:6]] == PROMPTS * 2
    assert Counter(task.domain for task in tasks) == {"code": 2 * len(tasks) / 3, "chat": len(tasks) / 3}
    lengths = [task.sampling.max_tokens for task in tasks]
    assert min(lengths) >= 4
    assert max(lengths) <= 64
    assert sum(n <= 16 for n in lengths) / len(lengths) == pytest.approx(0.5, abs=0.15)
    assert traffic.tasks(3) == traffic.tasks(3) != traffic.tasks(4)


def test_a_run_has_as_many_requests_as_suit_its_load():
    assert Traffic(PROMPTS).under(Load(concurrency=16)).requests == 32
    assert Traffic(PROMPTS).under(Load(concurrency=1)).requests == 8
    assert Traffic(PROMPTS, requests=5).under(Load(concurrency=16)).requests == 5
