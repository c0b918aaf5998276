"""Folders: where forerun keeps what it can make again (converted models, costs), and whether files can be written.

The checks are made before the work whose result goes there, and make nothing themselves: what they miss (a disk that
fills up) is found when the result is written.
"""

from __future__ import annotations

import os
from pathlib import Path

from forerun.errors import OptionError


def cache_folder() -> Path:
    """`FORERUN_CACHE`, else ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE") or Path.home() / ".cache" / "forerun")


def check_writable(option: str, folder: str | Path) -> None:
    """OptionError if no file can be made in a folder, which must be there."""
    _check_named(option, folder)
    if not _takes_files(Path(folder)):
        raise OptionError(option, f"the folder {folder} does not exist or cannot be written")


def check_folder(option: str, folder: str | Path, otherwise: str = "name another folder") -> None:
    """OptionError if no file could be made in a folder, which will be made where it is missing.

    Args:
        option: that names it.
        folder: as it was given.
        otherwise: what else the user can do.
    """
    _check_named(option, folder)
    path = Path(folder).absolute()
    place = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not _takes_files(place):
        raise OptionError(option, f"cannot write to {folder}: {place} is no folder that can be written; {otherwise}")


def check_file(option: str, path: str | Path, *, grows: bool = False, otherwise: str = "name another file") -> None:
    """OptionError if a file could not be written, in a folder that must be there.

    Args:
        option: that names it.
        path: as it was given.
        grows: what it has is read and added to, else it is replaced.
        otherwise: what else the user can do.
    """
    _check_named(option, path, "file")
    if os.path.isdir(path):
        raise OptionError(option, f"{path} is a folder; {otherwise}")
    if os.path.exists(path) and not os.path.isfile(path):
        why = "whose rows cannot be read again" if grows else "which would be replaced"
        raise OptionError(option, f"{path} is a device or a pipe, {why}; {otherwise}")
    check_writable(option, Path(path).absolute().parent)
    if grows and os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
        raise OptionError(option, f"{path} cannot be read and written; {otherwise}")


def _check_named(option: str, path: str | Path, kind: str = "folder") -> None:
    if path == "":  # to Path it is the working folder
        raise OptionError(option, f"is empty; name a {kind}")


def _takes_files(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
