"""Rows of a benchmark in a file that survives an interruption: one line each, on disk before the next is begun."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.measurement import Cell, Row
from forerun.errors import OptionError
from forerun.journal import Journal, whole_lines
from forerun.parsing import json_of


def key_of(made_with: Mapping[str, Any], prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> str:
    """Rows belong together if models, code, hardware, prompts and options are the same; the time does not count."""
    fixed = {name: value for name, value in made_with.items() if name != "created"}
    content = json.dumps([fixed, [list(p) for p in prompts], dict(options)], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class RowFile:
    """Finished rows under one key.

    The first line holds the key and what the rows were made with; every further line is a row. A last line without its
    end was being written when the run was interrupted: it is dropped.

    Args:
        path: made if it is not there. Rows of another key are kept beside it, in `PATH.old`.
        key: of this run.
        made_with: written into a new file; `made_with` is what the file has.
        cell_of: what a row has measured, by which it is found again.

    Raises:
        OptionError: it cannot be read or written, or is no file of rows.
    """

    def __init__(
        self, path: Path, key: str, made_with: Mapping[str, Any], cell_of: Callable[[Row], Hashable] | None = None
    ):
        self.path = path
        self.note: str | None = None
        """What the user should know about the file as it was found."""
        self.made_with = dict(made_with)
        self._cell = cell_of or _cell
        self._rows: dict[Hashable, Row] = {}
        try:
            if not self._continue(key):
                self._begin(key)
        except OSError as error:
            raise OptionError("--rows", f"{path}: {error.strerror or error}") from error

    def _continue(self, key: str) -> bool:
        """Takes over the rows of a file with this key."""
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        header, *rows = self._parsed(list(whole_lines(self.path)))
        if header.get("key") != key:
            old = self.path.with_name(f"{self.path.name}.old")
            os.replace(self.path, old)
            self.note = f"{self.path} has rows of another model, prompt set or option; they are now in {old}"
            return False
        self.made_with = header["made_with"]
        self._rows = {self._cell(row): row for row in rows}
        if rows:
            self.note = f"{self.path}: {len(rows)} finished rows are kept"
        return True

    def _parsed(self, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        try:
            parsed = [json_of(line) for line in lines]
            if parsed and all(isinstance(one, dict) for one in parsed) and "key" in parsed[0]:
                return parsed
        except ValueError:  # no JSON, or no UTF-8
            pass
        raise OptionError("--rows", f"{self.path} is not a file of rows; name another one or remove it")

    def _begin(self, key: str) -> None:
        self.path.unlink(missing_ok=True)
        self._write({"key": key, "made_with": self.made_with})

    def get(self, cell: Hashable) -> Row | None:
        return self._rows.get(cell)

    def add(self, row: Row) -> None:
        """On disk when this returns."""
        self._write(row)
        self._rows[self._cell(row)] = row

    def _write(self, content: Mapping[str, Any]) -> None:
        with Journal(self.path) as journal:
            journal.add(content)


def _cell(row: Row) -> Cell:
    return Cell(row["drafter"], row["k"], row["batch"], row["temperature"])
