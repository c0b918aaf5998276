"""Lines in a file that only grows: whole after any interruption."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forerun import journal
from forerun.journal import Journal, whole_lines


def test_every_line_is_an_object(tmp_path: Path) -> None:
    """Any text within one line, what JSON cannot say is refused before anything is written."""
    path = tmp_path / "lines"
    with Journal(path) as lines:
        lines.add({"text": "a\nb\u2028c"})
        with pytest.raises(ValueError, match="not JSON compliant"):
            lines.add({"x": float("nan")})
        lines.add({"n": 2})
    assert [json.loads(line) for line in whole_lines(path)] == [{"text": "a\nb\u2028c"}, {"n": 2}]


@pytest.mark.parametrize("chunk", [1, 4, 1 << 16])
def test_a_line_that_was_cut_anywhere_is_dropped_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """For every byte at which the writer may have been killed: the lines before it stay, the next one follows them."""
    monkeypatch.setattr(journal, "CHUNK", chunk)
    path = tmp_path / "lines"
    data = b'{"n": 1}\n{"n": 22}\n{"n": 333}\n'
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        kept = data[:size].count(b"\n")
        assert len(list(whole_lines(path))) == kept
        with Journal(path) as lines:
            lines.add({"n": 4})
        assert path.read_bytes() == b"".join(data.splitlines(keepends=True)[:kept]) + b'{"n": 4}\n'


def test_lines_are_on_disk_when_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every line; or at most once in so many seconds, and at the end. The file itself has each line at once."""
    synced: list[int] = []
    now = [0.0]
    monkeypatch.setattr(journal.os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    with Journal(tmp_path / "a") as lines:
        for _ in range(2):
            lines.add({})
    assert synced == [3, 6, 6]
    synced.clear()
    with Journal(tmp_path / "b", every=1.0) as lines:
        for now[0] in (0.2, 0.9, 1.1, 1.5, 2.2):
            lines.add({})
        assert (tmp_path / "b").read_bytes() == b"{}\n" * 5
    assert synced == [9, 15, 15]
