"""Lines of JSON in a file that only grows: after an interruption a line is there whole, or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

CHUNK = 1 << 16


def whole_lines(path: Path) -> Iterator[bytes]:
    """Lines that were written to their end. A last one without its end was cut by an interruption and is left out."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


class Journal:
    """Appends objects to a file, one a line; an unfinished last line is cut off first.

    Args:
        path: made if it is not there.
        every: seconds between the calls that force lines onto the disk; 0: each line is on disk when `add` returns.

    Raises:
        OSError: here and in every method, as the operating system has it.
    """

    def __init__(self, path: Path, every: float = 0.0):
        self._file = open(path, "ab")  # noqa: SIM115 - closed by `close`
        self._every = every
        self._synced = time.monotonic()
        self._file.truncate(_end_of_lines(path))

    def add(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
        self._file.write(line.encode("utf-8"))
        self._file.flush()
        if time.monotonic() - self._synced >= self._every:
            self.sync()

    def sync(self) -> None:
        """On disk when this returns, whatever was added."""
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_of_lines(path: Path) -> int:
    """The byte behind the last complete line."""
    with open(path, "rb") as file:
        start = file.seek(0, os.SEEK_END)
        while start > 0:
            size = min(CHUNK, start)
            start -= size
            file.seek(start)
            found = file.read(size).rfind(b"\n")
            if found >= 0:
                return start + found + 1
    return 0
