"""What costs are measured for: this target, in this precision, on this machine, and these drafters."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from forerun.budget.profile import ProfileKey
from forerun.drafters.config import WITH_LOOKUP, SpeculativeConfig
from forerun.engine.propose import LoadedDrafter
from forerun.target.base import Target
from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import fingerprint
from forerun.target.hf import HFTarget

_KNOWN: WeakKeyDictionary[Target, str] = WeakKeyDictionary()


def engine_key(target: Target) -> ProfileKey:
    """The key of a loaded target.

    Threads are those torch computes with, 0 where the target is not on the CPU: there they decide little.
    """
    device, threads = target.device, torch.get_num_threads() if target.device.type == "cpu" else 0
    return ProfileKey(_model(target), dtype_name(target.dtype), _device_name(device), threads)


def model_of(config: SpeculativeConfig) -> str:
    """The model of a drafter as a profile names it: a folder by its place, anything else as it was written."""
    if config.model is None:
        return ""
    return str(Path(config.model).resolve()) if Path(config.model).exists() else config.model


def calibrated_as(entry: LoadedDrafter) -> str:
    """A drafter as a calibration beside the profiles names it."""
    name = model_of(entry.config) or entry.name
    return f"{name}{WITH_LOOKUP}" if entry.config.copies else name


def _model(target: Target) -> str:
    """Config and weights, by their hashes: a copy in another folder is the same model. A target without weights of its
    own (tables) goes by its name.

    Kept, since a target whose weights are packed is read once for it.
    """
    if not isinstance(target, HFTarget):
        return target.name
    if target not in _KNOWN:
        found = fingerprint(target)
        _KNOWN[target] = f"{found.config[:16]}-{found.weights[:16]}"
    return _KNOWN[target]


def _device_name(device: torch.device) -> str:
    """The device and the name its maker gave it."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"{device.type} {cpu_name()}"


@cache
def cpu_name() -> str:
    """The CPU's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


__all__ = ["calibrated_as", "cpu_name", "engine_key", "model_of"]
