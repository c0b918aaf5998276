"""What a result was made with: versions, hardware, weights, code. A number without it proves nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun.bench.machine import usable_cores, versions
from forerun.drafters.learned import LearnedDrafter
from forerun.engine import Engine
from forerun.engine.profile_key import cpu_name
from forerun.engine.propose import LoadedDrafter
from forerun.target.base import Target
from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import fingerprint, weights_hash
from forerun.target.hf import HFTarget


def provenance(engine: Engine) -> dict[str, Any]:
    """For reports, as JSON types."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "code": code_hash(),
        "hardware": hardware(engine.target.device),
        "target": model(engine.target),
        "drafters": [_drafter(entry) for entry in engine.core.loaded],
    }


def hardware(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {"device": device.type, "name": name, "cores": usable_cores(), "threads": torch.get_num_threads()}


def model(target: Target) -> dict[str, Any]:
    """Name, dtype, and hashes of config, weights, tokenizer and template where it is a transformers model."""
    known: dict[str, Any] = {"name": target.name, "dtype": dtype_name(target.dtype)}
    hashes: Mapping[str, str] = fingerprint(target).to_dict() if isinstance(target, HFTarget) else {}
    return known | {"fingerprint": dict(hashes)}


def _drafter(entry: LoadedDrafter) -> dict[str, Any]:
    known = {"name": entry.label, "config": entry.config.model_dump(exclude_unset=True)}
    if isinstance(entry.drafter, LearnedDrafter):
        return known | {"model": _learned(entry.drafter)}
    own = getattr(entry.drafter, "model", None)
    return known | ({"model": model(own)} if isinstance(own, Target) else {})


def _learned(drafter: LearnedDrafter) -> dict[str, Any]:
    """As `model`; of hashes only that of its weights: the target's are said with the target."""
    dtype = dtype_name(next(drafter.network.parameters()).dtype)
    name = drafter.name if drafter.folder is None else drafter.folder.name
    return {"name": name, "dtype": dtype, "fingerprint": {"weights": weights_hash(drafter.network)}}


@cache
def code_hash() -> str:
    """sha256 over the package's Python files, by name and content."""
    root = Path(forerun.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]
