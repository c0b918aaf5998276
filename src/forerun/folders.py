"""Where forerun keeps what it makes for itself and can make again: converted models, measured costs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`FORERUN_CACHE`, else ~/.cache/forerun."""
    return Path(os.environ.get("FORERUN_CACHE") or Path.home() / ".cache" / "forerun")
