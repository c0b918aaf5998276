"""JSON that reads well, progress where nobody watches, files that appear whole."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forerun.cli import console
from forerun.errors import OptionError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
documents = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(documents)
def test_json_is_json(document: object) -> None:
    """Whatever the layout, reading it back gives the document."""
    assert json.loads(console.as_json(document)) == document


def test_json_keeps_plain_arrays_on_one_line() -> None:
    """Token ids do not take a line each; characters stay as they are; NaN is refused, since JSON has none."""
    document = {"ids": [1, 2], "rows": [{"text": "ä"}], "none": []}
    assert console.as_json(document) == (
        '{\n  "ids": [1, 2],\n  "rows": [\n    {\n      "text": "ä"\n    }\n  ],\n  "none": []\n}'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.as_json({"x": float("nan")})


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line after two seconds, then every ten, with the time left at the pace so far; nothing at the end."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("working", 100) as advance:
        for seconds, steps in ((1, 1), (1, 19), (5, 1), (10, 29), (1, 50)):
            now[0] += seconds
            advance(steps)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["working: 20/100, about 8 s left", "working: 50/100, about 17 s left"]


@pytest.mark.parametrize("terminal", [True, False])
def test_waiting_says_for_what_and_goes(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """On a terminal one line without colours that a bar may overwrite, taken away also after an error; else nothing."""
    out = io.StringIO()
    monkeypatch.setattr(console, "notes", lambda: Console(file=out, force_terminal=terminal))
    shown: list[str] = []

    def fails() -> None:
        with console.waiting("loading"):
            shown.append(out.getvalue())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert shown == ["loading ...\r" if terminal else ""]
    assert out.getvalue() == (f"loading ...\r\r{' ' * 11}\r" if terminal else "")


def test_a_file_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the permissions of any new file; a failure leaves the old one and nothing else."""
    path = tmp_path / "out.json"
    console.Output(str(path)).write("new")
    assert path.read_text() == "new\n"
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OptionError, match=r"^--output: cannot write .*No space left on device$"):
        console.Output(str(path)).write("newer")
    assert sorted(tmp_path.iterdir()) == [path, plain]
    assert path.read_text() == "new\n"


def test_an_output_that_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    """A folder, a file in a folder that does not exist, or in what is a file itself; no name at all."""
    (tmp_path / "question.txt").touch()
    for place in (tmp_path, tmp_path / "none" / "x", tmp_path / "question.txt" / "x"):
        with pytest.raises(OptionError, match=r"^--output: "):
            console.Output(str(place))
    with pytest.raises(OptionError, match=r"^--output: is empty; name a file"):
        console.Output("")
