"""Where a command writes at its end is tried before it loads or measures anything, and nothing is made by trying."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from cli.conftest import Run
from forerun.budget.calibration import Calibration
from forerun.budget.stored import CALIBRATION, check_kept
from forerun.cli.main import COMMANDS, _app, _known_options
from forerun.errors import OptionError
from forerun.folders import check_file

Refused = Callable[..., str]

PLACES = ("--output", "--out", "--rows", "--plots", "--export-sglang")
ARGUMENTS: dict[str, tuple[str, ...]] = {name: (name,) for name in COMMANDS if name not in ("data", "train")} | {
    "bench load": ("bench", "load"),
    "data prepare": ("data", "prepare", "x"),
    "data regenerate": ("data", "regenerate", "x"),
}
"""How each command is called; `train` takes its folder before it loads, and has tests of its own."""
NO_PLACE = {("profile", "--rows")}
"""There it is a number."""


def places() -> list[tuple[str, str]]:
    """Every option of every command that names a place to write to."""
    found = []
    for name, args in ARGUMENTS.items():
        known = _known_options(typer.main.get_command(_app(args)), args)
        found += [(name, option) for option in PLACES if option in known]
    return [one for one in found if one not in NO_PLACE]


@pytest.mark.parametrize(("command", "option"), places(), ids=lambda text: text)
def test_a_place_that_cannot_be_is_told_before_anything_is_loaded(
    refused: Refused, tmp_path: Path, command: str, option: str
) -> None:
    """Below a file; and no name at all, which the file system takes for the working folder."""
    (tmp_path / "taken").touch()
    for place in (tmp_path / "taken" / "below", ""):
        line = refused(*ARGUMENTS[command], *_target(command), option, place)
        assert line.startswith(f"{option}: "), line
    assert os.listdir(tmp_path) == ["taken"]


def _target(command: str) -> tuple[str, ...]:
    """One that would be missed if it were looked for."""
    return () if command == "simulate" else ("--target", "does-not-exist-anywhere")


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody else. (To whoever runs the tests as root every folder is writable.)"""
    folder, access = tmp_path / "theirs", os.access
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
    return folder


@pytest.mark.parametrize("command", ["profile", "recommend", "calibrate"])
def test_where_costs_and_tables_cannot_be_kept_is_told_before_they_are_measured(
    run: Run, tiny_qwen3_dir: Path, unwritable: Path, command: str
) -> None:
    """The folder of --calibration-cache is there, and takes no files."""
    ran = run(command, tiny_qwen3_dir, "--drafter", "ngram", "--calibration-cache", unwritable)
    assert ran.code == 2
    assert ran.err == (
        f"error: --calibration-cache: cannot write to {unwritable}: {unwritable} is no folder that can be written; "
        "name another folder, or off\n"
    )


def test_a_drafters_own_folder_is_tried_before_its_confidences_are_recorded(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, unwritable: Path
) -> None:
    """The option that names another place is --out."""
    shutil.copytree(tiny_small_dir, unwritable, dirs_exist_ok=True)
    (unwritable / CALIBRATION).write_text(Calibration().dumps())
    ran = run("calibrate", tiny_qwen3_dir, "--drafter", unwritable)
    assert ran.code == 2
    assert ran.err.startswith(f"error: --out: cannot write to {unwritable}: "), ran.err


def test_files_that_grow_and_files_that_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may not be written can still be replaced; a device is neither, as replacing it would be its end."""
    (tmp_path / "rows").touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) == tmp_path)
    check_file("--output", tmp_path / "rows")
    check_file("--rows", tmp_path / "new", grows=True)
    with pytest.raises(OptionError, match=r"^--rows: .*rows cannot be read and written; name another file"):
        check_file("--rows", tmp_path / "rows", grows=True)
    monkeypatch.undo()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match=r"^--output: .*pipe is a device or a pipe, which would be replaced"):
        check_file("--output", str(tmp_path / "pipe"))
    with pytest.raises(OptionError, match=r"^--rows: /dev/null is a device or a pipe, whose rows cannot be read again"):
        check_file("--rows", "/dev/null", grows=True)


def test_the_lock_of_another_user_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared cache its folder is writable and the lock beside the file may not be; nothing is made by looking."""
    check_kept(tmp_path / "new" / "costs.json")
    lock = tmp_path / ".costs.json.lock"
    check_kept(tmp_path / "costs.json")
    assert os.listdir(tmp_path) == []
    lock.touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != lock and access(path, mode))
    with pytest.raises(
        OptionError, match=r"^--calibration-cache: .*\.lock cannot be read and written; name another folder"
    ):
        check_kept(tmp_path / "costs.json")
