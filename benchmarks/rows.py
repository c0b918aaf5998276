"""Measured rows on disk: one JSON line each, written when it is whole, so that a run can stop anywhere and go on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

Key = tuple[tuple[int, ...], str, int]
"""Prompt numbers, configuration name, trial."""


class Rows:
    """The rows of one folder. Of two rows of one key the later counts; a line cut short with its process is dropped."""

    def __init__(self, folder: Path, key: Callable[[dict[str, Any]], Hashable] | None = None):
        """`key` of a row; that of a prompt, configuration and trial if not given."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._key = folder / "rows.jsonl", key or key_of
        self._rows: dict[Hashable, dict[str, Any]] = {}
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        whole, cut = self._path.read_bytes(), 0
        for line in whole.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            cut += len(line)
            row = json.loads(line)
            self._rows[self._key(row)] = row
        if cut < len(whole):
            os.truncate(self._path, cut)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    def get(self, key: Hashable) -> dict[str, Any] | None:
        return self._rows.get(key)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows[self._key(row)] = row


def key_of(row: dict[str, Any]) -> Key:
    return tuple(row["prompts"]), row["config"], row["trial"]


def settle_setup(folder: Path, setup: dict[str, Any]) -> None:
    """Writes what a folder's rows were measured with, or holds a continued run to it.

    Raises:
        ValueError: the folder holds rows that were measured otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "setup.json"
    if not path.exists():
        path.write_text(json.dumps(setup, indent=2) + "\n", encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [name for name in setup if before.get(name) != setup[name]]
    if changed:
        lines = "; ".join(f"{name}: {before.get(name)!r} then, {setup[name]!r} now" for name in changed)
        raise ValueError(f"--out: {folder} holds rows measured with another setup ({lines}); name another folder")
