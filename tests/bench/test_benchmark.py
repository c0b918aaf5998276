"""A benchmark that is interrupted goes on where it was, and ends with the rows of one that was not."""

from __future__ import annotations

import json

import pytest

from bench.clocks import VOCAB, engine, pass_clock, target
from forerun.bench import benchmark as module
from forerun.bench.benchmark import Benchmark, Grid
from forerun.bench.measurement import Cell, Workload
from forerun.bench.report import as_csv, as_text
from forerun.bench.rows import RowFile, key_of
from forerun.drafters.small import Small
from forerun.drafters.vanilla import Vanilla
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.errors import OptionError

GRID = Grid(["small", "ngram"], [1, 3], [1, 2], [0.0])
WORKLOAD = Workload([[1, 2, 3], [4, 4, 1]], max_tokens=8, rounds=2)


def _benchmark(path=None, grid=GRID, workload=WORKLOAD, **options):
    made = engine(**options)
    return Benchmark(made, grid, workload, path, pass_clock(made))


def _interrupt_at(monkeypatch, count):
    """The measurement of cell number `count` (from 0) is interrupted; the cells that were begun."""
    begun, real = [], module.measure

    def measure(made, cell, *args):
        begun.append(cell)
        if len(begun) > count:
            raise KeyboardInterrupt
        return real(made, cell, *args)

    monkeypatch.setattr(module, "measure", measure)
    return begun


def test_an_interrupted_run_goes_on_without_redoing_rows(monkeypatch, tmp_path):
    """Interrupted in the fourth of eight cells: the next run begins there, and the result is that of a whole run."""
    path = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patched:
        _interrupt_at(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            _benchmark(path).run()
    with monkeypatch.context() as patched:
        begun = _interrupt_at(patched, 100)
        again = _benchmark(path)
        assert "3 finished rows" in again.note
        assert again.total == sum(module.pairs_of(cell, WORKLOAD) for cell in GRID.cells()[3:])
        resumed = again.run()
    assert begun == GRID.cells()[3:]
    whole = _benchmark(tmp_path / "other.jsonl").run()
    assert resumed.rows == whole.rows
    assert json.dumps(resumed.as_dict()) == json.dumps(whole.as_dict() | {"created": resumed.made_with["created"]})


def test_a_finished_run_measures_nothing_again(monkeypatch, tmp_path):
    """The same JSON, made with the versions and time of the rows and not of the reading."""
    path = tmp_path / "rows.jsonl"
    first = _benchmark(path).run()
    begun = _interrupt_at(monkeypatch, 0)
    again = _benchmark(path)
    assert again.total == 0
    assert again.run().as_dict() == first.as_dict()
    assert begun == []


def test_more_cells_can_be_added_to_a_file(monkeypatch, tmp_path):
    """Cells are no part of the key: rows of another K are added to those that are there."""
    path = tmp_path / "rows.jsonl"
    _benchmark(path, Grid(["small"], [1])).run()
    begun = _interrupt_at(monkeypatch, 100)
    result = _benchmark(path, Grid(["small"], [1, 2])).run()
    assert begun == [Cell("small", 2, 1, 0.0)]
    assert [row["k"] for row in result.rows] == [1, 2]


def test_a_row_cut_short_is_measured_again(tmp_path):
    """A line without its end was being written at the interruption; the file is whole again afterwards."""
    path = tmp_path / "rows.jsonl"
    whole = _benchmark(path).run()
    path.write_bytes(path.read_bytes()[:-20])
    again = _benchmark(path)
    assert again.open_cells == GRID.cells()[-1:]
    assert again.run().rows == whole.rows
    assert len(path.read_text().splitlines()) == 1 + len(GRID.cells())


def test_a_changed_option_starts_anew_and_keeps_the_old_rows(tmp_path):
    """Another prompt set, option or model: no old row is used, none is lost, and the user is told."""
    path = tmp_path / "rows.jsonl"
    _benchmark(path).run()
    before = path.read_text()
    changed = Workload([[1, 2, 3]], max_tokens=8, rounds=2)
    again = _benchmark(path, workload=changed)
    assert "rows of another model, prompt set or option" in again.note
    assert again.open_cells == GRID.cells()
    assert (tmp_path / "rows.jsonl.old").read_text() == before


def test_what_is_no_file_of_rows_is_refused_and_left_alone(tmp_path):
    """A wrong path must not cost a user's file."""
    path = tmp_path / "notes.txt"
    path.write_text("milk\neggs\n")
    with pytest.raises(OptionError, match="--rows"):
        RowFile(path, "key", {})
    assert path.read_text() == "milk\neggs\n"


def test_the_key_is_everything_but_the_time():
    """The same run later has the same key; another prompt, option or model another one."""
    made, prompts, options = {"created": "now", "target": {"name": "a"}}, [[1, 2]], {"max_tokens": 8}
    key = key_of(made, prompts, options)
    assert key == key_of(made | {"created": "later"}, [(1, 2)], options)
    others = [
        key_of(made | {"target": {"name": "b"}}, prompts, options),
        key_of(made, [[1, 3]], options),
        key_of(made, prompts, {"max_tokens": 9}),
    ]
    assert len({key, *others}) == 4


def test_a_k_that_would_be_lowered_in_silence_is_refused():
    """K = 3 is configured; asking for 5 would measure 3 and call it 5."""
    with pytest.raises(OptionError, match="--k"):
        _benchmark(grid=Grid(["small"], [5]), k=3)


def test_a_drafter_that_drafts_nothing_is_left_out_and_refuses_no_k():
    """`vanilla` beside others: no row of K = 5 that drafted nothing, and none of its own limits on K."""
    big, options = target(), EngineOptions(num_speculative_tokens=5)
    made = Engine(big, load_drafters([Vanilla(), Small(target(), VOCAB), "ngram"], big, options), options)
    found = Benchmark(made, Grid(["vanilla", "small", "ngram"], [1, 5]), WORKLOAD, clock=pass_clock(made))
    assert found.cells == Grid(["small", "ngram"], [1, 5]).cells()
    assert [(row["drafter"], row["k"]) for row in found.run().rows[:2]] == [("small", 1), ("small", 5)]


def test_the_table_never_shows_a_speed_without_its_baseline():
    """Both rates, the ratio with its interval, the setting and the definitions."""
    text = as_text(_benchmark(grid=Grid(["small"], [3])).run())
    lines = text.splitlines()
    assert {"tok/s", "plain", "speed-up"} <= set(lines[0].split())
    assert "2 prompts, up to 8 tokens" in text
    assert "plain seconds per token / speculative seconds per token" in text


def test_csv_has_the_union_of_columns():
    """Missing values are empty."""
    assert as_csv([{"a": 1}, {"a": 2, "b": 3}]) == "a,b\n1,\n2,3\n"
