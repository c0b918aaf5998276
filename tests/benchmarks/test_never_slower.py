"""The grid of "never slower": which runs a cell is made of, going on, what is refused, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CELL = ["--effort", "0.01", "--requests", "1", "--drafters", "ngram", "--curves", "int4", "--acceptances", "0.5"]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is simulated, run by run."""
    import never_slower_grid as grid

    simulated: list[str] = []
    run = grid.run
    monkeypatch.setattr(grid, "run", lambda *args: simulated.append(str(args[3])) or run(*args))
    grid._plain_speed.cache_clear()
    return simulated


def test_a_cell_is_simulated_once_with_its_baselines(tmp_path: Path, ways: list[str]) -> None:
    """One run for every way; the second policy takes the baselines of the first; again, and after a line that was cut
    off, only what is missing is simulated, with the same numbers."""
    from never_slower import main

    path = tmp_path / "rows.jsonl"
    run = ["run", "--out", str(tmp_path), *CELL]
    assert main([*run, "--policies", "delayed"]) == 0
    assert sorted(ways) == ["delayed", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "plain"]
    ways.clear()
    assert main(run) == 0
    assert ways == ["prefix"]
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["baselines"] == second["baselines"]
    assert main(run) == 0
    assert ways == ["prefix"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert main(run) == 0
    assert ways == ["prefix", "prefix"]
    assert path.read_bytes() == whole


def test_the_page_of_one_cell(tmp_path: Path) -> None:
    """Both ratios are of the cell's own baselines; the page says how little was looked at, and how to do it again."""
    from never_slower import main

    out, page, data = tmp_path / "out", tmp_path / "docs" / "page.md", tmp_path / "docs" / "rows.json"
    main(["run", "--out", str(out), *CELL, "--policies", "prefix"])
    assert main(["report", "--out", str(out), "--page", str(page), "--json", str(data)]) == 0
    row, found = json.loads((out / "rows.jsonl").read_text()), json.loads(data.read_text())
    best = max(rate for way, rate in row["baselines"].items() if way != "plain")
    [shown] = found["rows"]
    assert shown["over_plain"] == round(row["tokens_per_second"] / row["baselines"]["plain"], 4)
    assert shown["over_best_fixed"] == round(row["tokens_per_second"] / best, 4)
    assert shown["margin"] == min(shown["over_plain"], shown["over_best_fixed"])
    text = page.read_text()
    assert "1 of 720 cells" in text
    assert f"| `prefix` | `ngram` | {shown['margin']:.3f} |" in text
    assert "--effort 0.01 --seeds 0 --policies prefix --drafters ngram --requests 1 --curves int4" in text
    assert "](rows.json)" in text
    assert str(tmp_path) not in text + data.read_text()


def _row(acceptance: float, own: float, **changed: Any) -> dict[str, Any]:
    """A made-up row: plain decoding has a speed of 1, the best fixed K of .99."""
    fixed = {"fixed:1": 0.99, "fixed:2": 0.9, "fixed:3": 0.8, "fixed:5": 0.7}
    place = {
        "curve": "int4",
        "drafter": "small",
        "acceptance": acceptance,
        "requests": 4,
        "policy": "delayed",
        "seed": 0,
    }
    found = {"tokens_per_second": own, "baselines": {"plain": 1.0} | fixed, "bypass_share": 0.5, "verify_budget": 1.0}
    return place | found | changed


def test_a_cell_below_its_bar_is_told(tmp_path: Path) -> None:
    """Where nothing is accepted the bar is another one; two seeds of a cell are two rows of one cell."""
    import never_slower_grid as grid
    from never_slower_page import collect, markdown
    from rows import Rows

    (tmp_path / "setup.json").write_text(json.dumps({"effort": 1, "numpy": "2", "code": "ab"}))
    rows = Rows(tmp_path, grid.cell_of)
    for row in (_row(0.0, 0.96), _row(0.5, 0.98), _row(0.9, 0.975, seed=1)):
        rows.append(row)
    assert "No row lies below its bar." in markdown(collect(tmp_path), "data.json")
    rows.append(_row(0.9, 0.965))
    found = collect(tmp_path)
    assert found["cells"] == 3
    assert {name: (one["ratio"], one["below"]) for name, one in found["worst"].items()} == {
        "over_plain": (0.965, 1),
        "over_plain_always_wrong": (0.96, 0),
        "over_best_fixed": (round(0.96 / 0.99, 4), 1),
    }
    text = markdown(found, "data.json")
    assert "| int4, `small`, acceptance 0.9, 4 requests, `delayed`, seed 0 | 0.965 | 0.975 | fixed:1 |" in text
    assert "No row lies below its bar." not in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policies", "delayed,fixed"], "--policies: 'fixed' is none of delayed, prefix"),
        (["--effort", "0"], "--effort: must be positive, got 0.0"),
        (["--processes", "0"], "--processes: must be positive, got 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its option, before anything is written."""
    from never_slower import main

    out = tmp_path / "out"
    try:
        code = main(["run", "--out", str(out), *flags])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_rows_of_one_folder_are_of_one_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed scheduler, like another effort, needs another folder; a page of nothing says what to run."""
    import never_slower

    run = ["run", "--out", str(tmp_path), *CELL]
    monkeypatch.setattr(never_slower.grid, "cells", lambda *_: iter(()))
    assert never_slower.main(run) == 0
    assert never_slower.main([*run, "--effort", "1"]) == 2
    assert "effort: 0.01 then, 1.0 now" in capsys.readouterr().err
    monkeypatch.setattr(never_slower, "_code", lambda: "another")
    assert never_slower.main(run) == 2
    assert "code: " in capsys.readouterr().err
    assert never_slower.main(["report", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 2
    assert "never_slower.py run" in capsys.readouterr().err
