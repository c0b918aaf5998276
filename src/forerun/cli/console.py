"""What goes where: results on stdout, everything else on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun.errors import OptionError
from forerun.folders import check_file

PATIENCE = 2.0
"""Seconds after which a wait is shown."""
LINE_EVERY = 10.0
"""Seconds between progress lines where stderr is not a terminal."""


def screen() -> Console:
    """stdout, for results. Colours only on a terminal, none with NO_COLOR."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def notes() -> Console:
    """stderr, for progress, summaries and notes."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Counts to `total` with an estimate of the time left; yields `advance(steps=1, note="")`.

    A bar on a terminal, gone when done; elsewhere a line on stderr every ten seconds, the first after two.
    """
    console = notes()
    if not console.is_terminal:
        yield _Lines(what, total).advance
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    columns = (*count, TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)


class _Lines:
    def __init__(self, what: str, total: int):
        self._what, self._total, self._done = what, total, 0
        self._start = time.monotonic()
        self._next = self._start + PATIENCE

    def advance(self, steps: int = 1, note: str = "") -> None:
        self._done += steps
        now = time.monotonic()
        if now < self._next or self._done >= self._total:
            return
        left = (now - self._start) / self._done * (self._total - self._done)
        more = f", {note}" if note else ""
        notes().print(f"{self._what}: {self._done}/{self._total}, about {left:.0f} s left{more}")
        self._next = now + LINE_EVERY


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Something of unknown length: its name on a terminal, gone when done; nothing elsewhere.

    It is written once and never drawn again: a bar of what is waited for may take its place.
    """
    console = notes()
    line = f"{what} ..." if console.is_terminal else ""
    console.file.write(f"{line}\r" if line else "")
    console.file.flush()
    try:
        yield
    finally:
        console.file.write(f"\r{' ' * len(line)}\r" if line else "")
        console.file.flush()


def as_json(document: Any, indent: str = "") -> str:
    """The JSON of a command: readable, arrays of plain values on one line, characters as they are, no NaN."""
    deeper = indent + "  "
    if isinstance(document, dict) and document:
        items = [f"{json.dumps(key)}: {as_json(value, deeper)}" for key, value in document.items()]
        return _block("{", items, "}", indent)
    if isinstance(document, list) and any(isinstance(item, (dict, list)) for item in document):
        return _block("[", [as_json(item, deeper) for item in document], "]", indent)
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def _block(left: str, items: Sequence[str], right: str, indent: str) -> str:
    lines = ",\n".join(f"{indent}  {item}" for item in items)
    return f"{left}\n{lines}\n{indent}{right}"


class Output:
    """Where a result goes: stdout, or a file that appears only when it is complete."""

    def __init__(self, path: str | None = None, option: str = "--output"):
        """OptionError, of the option that names the file, if it could not be written; nothing is created yet."""
        self.path = None if path is None else Path(path)
        self._option = option
        if path is not None:
            check_file(option, path)

    def write(self, text: str) -> None:
        """The whole result, at once."""
        text = text if text.endswith("\n") else text + "\n"
        if self.path is None:
            sys.stdout.write(text)
            return
        try:
            write_whole(self.path, text)
        except OSError as error:
            raise OptionError(self._option, f"cannot write {self.path}: {error.strerror or error}") from None


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
