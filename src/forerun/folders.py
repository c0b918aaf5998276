"""Folders: where forerun keeps what it can make again (converted models, costs), and whether one takes files."""

from __future__ import annotations

import os
from pathlib import Path

from forerun.errors import OptionError


def cache_folder() -> Path:
    """`FORERUN_CACHE`, else ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE") or Path.home() / ".cache" / "forerun")


def check_writable(option: str, folder: Path) -> None:
    """OptionError if no file can be made in a folder: found before the work whose result goes there."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(option, f"the folder {folder} does not exist or cannot be written")
