"""Which file holds the calibration of a drafter: the one that decoding reads."""

from __future__ import annotations

from pathlib import Path

from forerun.budget.stored import calibration_path
from forerun.drafters.small.record import RECORD
from forerun.engine.profile_key import calibrated_as, engine_key
from forerun.engine.propose import LoadedDrafter
from forerun.parsing import json_of
from forerun.target.base import Target


def calibration_file(target: Target, entry: LoadedDrafter, folder: Path | None) -> Path | None:
    """The drafter's own folder if `forerun train` wrote it; else beside the profiles in `folder`. None without that."""
    own, name = entry.config.model, entry.config.calibration_name
    if own is not None and (_is_ours(Path(own)) or (Path(own) / name).is_file()):
        return Path(own) / name
    if folder is None:
        return None
    return calibration_path(engine_key(target), calibrated_as(entry), folder)


def _is_ours(folder: Path) -> bool:
    if (folder / RECORD).is_file():
        return True
    try:
        config = json_of((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "forerun_format" in config


__all__ = ["calibration_file"]
