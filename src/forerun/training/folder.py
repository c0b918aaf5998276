"""The folder of a run: what lies where, whose it is, and whether a run may go on in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import forerun
from forerun.errors import OptionError
from forerun.parsing import json_of
from forerun.training.config import Chosen, as_yaml, is_free
from forerun.training.stops import writing

MARKER = "run.json"
"""Written first, into a new or empty folder: what lies beside it is the run's. No other file proves that."""
FORMAT = 1
SETTINGS = "config.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LAST, BEST = "last", "best"
DATA = "data"
"""What was prepared here because --data named a file."""
LOCK = ".lock"
TRACKERS = "trackers"


class RunFolder:
    """The folder given as --out.

    Args:
        path: made if need be. It must be empty or the folder of a run.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = FileLock(path / LOCK, timeout=0)

    def check(self) -> None:
        """OptionError: there is something else at this place. Nothing is written."""
        if self.path.exists() and not self.path.is_dir():
            raise OptionError("--out", f"{self.path} is a file")
        there = {file.name for file in self.path.iterdir()} if self.path.exists() else set()
        if there - {LOCK, f"{LOCK}.new"} and self._mark() is None:
            raise OptionError(
                "--out", f"{self.path} is not empty and holds no run (it has no {MARKER} of one); name another folder"
            )

    def open(self, restart: bool) -> None:
        """Takes the folder for this process. OptionError: it holds something else, or another run is using it."""
        with writing(str(self.path), "name another --out"):
            self.check()
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise OptionError("--out", f"{self.path} is in use by another run") from None
            if self._mark() is None:
                self._write_mark(prepared=False)
            if restart:
                self._clear()

    def claim_data(self) -> Path:
        """The place of samples that this run prepares. OptionError: a dataset is there that no run made."""
        mark = self._mark() or {}
        if self.data.exists() and not mark.get("prepared"):
            raise OptionError(
                "--out", f"{self.data} was not made by this run and would be replaced; move it, or name it as --data"
            )
        with writing(str(self.path / MARKER), "name another --out"):
            self._write_mark(prepared=True)
        return self.data

    def _mark(self) -> dict[str, Any] | None:
        """What the marker says; None: there is none, or it is a file of somebody else."""
        try:
            mark = json_of((self.path / MARKER).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None
        return mark if isinstance(mark, dict) and "forerun_run" in mark else None

    def _write_mark(self, prepared: bool) -> None:
        mark = {"forerun_run": FORMAT, "version": forerun.__version__, "prepared": prepared}
        new = self.path / f"{LOCK}.new"  # a name that is ours: a half-written marker would shut the run out
        new.write_text(json.dumps(mark) + "\n", encoding="utf-8")
        new.replace(self.path / MARKER)

    def _clear(self) -> None:
        """Removes what a run writes, and nothing else. Prepared data stays: it does not depend on the run."""
        for name in (CHECKPOINTS, LAST, BEST, TRACKERS):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (METRICS, SETTINGS):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.release()

    def write_settings(self, chosen: Chosen) -> None:
        with writing(str(self.path / SETTINGS)):
            (self.path / SETTINGS).write_text(as_yaml(chosen), encoding="utf-8")

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def data(self) -> Path:
        return self.path / DATA

    @property
    def last(self) -> Path:
        return self.path / LAST

    @property
    def best(self) -> Path:
        return self.path / BEST


def identity(chosen: Chosen, parts: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change between the parts of a run: settings that change its result, and other `parts`."""
    own = {name: value for name, value in chosen.config.model_dump(mode="json").items() if name != "draft"}
    settings = {name: value for name, value in own.items() if name == "kind" or not is_free(name)}
    # Stored features are rounded: having a store changes the result in the last bits, where it lies does not.
    stored = chosen.config.store_dtype if chosen.config.feature_store else None
    drafts = {f"draft.{name}": value for name, value in chosen.config.draft.items()}
    return {"settings": {**settings, "store_dtype": stored, **drafts}, **parts}


def refuse_changes(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """OptionError names the first thing that differs from what the run was begun with."""
    for name in now:
        if name != "settings" and saved.get(name) != now[name]:
            advice = f"it is not what the run in {folder} was begun with; --restart begins anew"
            raise OptionError(f"--{name}", f"{_differing(saved.get(name), now[name])}{advice}")
    before, after = saved["settings"], now["settings"]
    for name in [*after, *(name for name in before if name not in after)]:
        if before.get(name) != after.get(name):
            flag = "KIND" if name == "kind" else f"--{name.replace('_', '-')}"
            raise OptionError(
                flag,
                f"is {after.get(name)!r}, the run in {folder} was begun with {before.get(name)!r}; it changes the "
                "result, so --restart begins anew",
            )


def _differing(before: Any, after: Any) -> str:
    """`weights, dtype differ: `: which parts of a mapping do."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return ""
    parts = [name for name in after if before.get(name) != after[name]]
    return f"{', '.join(parts)} differ: "
