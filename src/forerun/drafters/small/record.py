"""What a distilled model remembers of its target, in a file of its own: to everybody else the folder is a model's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from forerun.drafters.checkpoint import put_in_place
from forerun.errors import ModelError
from forerun.parsing import json_of
from forerun.target.base import Target
from forerun.target.fingerprint import Fingerprint, differences, fingerprint
from forerun.target.hf import HFTarget

logger = logging.getLogger("forerun")

RECORD = "forerun.json"


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    new = folder / f"{RECORD}.new"
    new.write_text(json.dumps({"forerun_format": 1, **record}, indent=2) + "\n", encoding="utf-8")
    put_in_place(new, folder / RECORD)


def warn_of_another_target(folder: Path, target: Target) -> None:
    """Says so if the model in a folder was distilled from another target. It can be used all the same: what it drafts
    is verified, and its vocabulary is checked by itself.

    Raises:
        ModelError: there is a record, and it cannot be read.
    """
    name, different = made_from(folder, target) or ("", [])
    if different:
        logger.warning("the drafter was distilled from %s; this target differs in %s", name, ", ".join(different))


def made_from(folder: Path, target: Target) -> tuple[str, list[str]] | None:
    """The target that the model in a folder was distilled from, and the parts in which this one differs from it; None:
    there is no record of one, or this one is a table. ModelError: there is a record, and it cannot be read."""
    file = folder / RECORD
    if not isinstance(target, HFTarget) or not file.is_file():
        return None
    try:
        record = json_of(file.read_text(encoding="utf-8"))
        name, parts = record["target_name"], record["target_fingerprint"]
        made_for = Fingerprint.from_dict(parts) if parts else None  # a table has none
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"--drafter: {file} cannot be read ({error!r}); remove it if the model is not ours") from error
    return str(name), [] if made_for is None else differences(made_for, fingerprint(target))
