"""Checkpoints to resume from: a folder per checkpoint that is there whole or not at all, with a checksum.

    checkpoints/step-00000400/state.safetensors   weights, moments of the optimiser, average of the weights
    checkpoints/step-00000400/state.json          the numbers of `Progress`, what the run is, sha256 of the other file

`state.json` is written last and the folder then gets its name. Nothing random is in it: what a step draws is made from
the seed and the step (`step.seeded`), so a step that is taken again is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forerun.errors import TrainingFailed
from forerun.parsing import json_of
from forerun.training.metrics import Usage

FORMAT = 1
UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
"""How a checkpoint that is not whole shows."""
TENSORS, NUMBERS = "state.safetensors", "state.json"
NEW, OLD = ".new-", ".old-"
"""Before a folder's name while it is written, and while another takes its place."""


@dataclass
class Progress:
    """How far a run has come: everything that is no tensor."""

    step: int = 0
    """Steps done."""
    place: int = 0
    """In the stream of samples."""
    evaluated: int = -1
    """Step after which the last evaluation was."""
    best_score: float | None = None
    best_step: int | None = None
    evaluation: dict[str, Any] | None = None
    """The last one, as it was recorded."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    loss_scale: float = 1.0
    calm_steps: int = 0
    """Since the loss scale last changed."""
    skipped: int = 0
    """Steps that had nothing to learn."""
    idle: int = 0
    """Samples in the steps that were skipped since the last one that was not."""
    used: Usage = field(default_factory=Usage)

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Progress:
        return cls(**{**numbers, "used": Usage(**numbers["used"])})


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and is whole."""

    folder: Path
    progress: Progress
    run: Mapping[str, Any]
    """What the run is: settings, data, target."""
    tensors: Mapping[str, Tensor]


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: made if need be.
        keep: how many; the oldest ones go when a new one is whole.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep

    def tidy(self) -> None:
        """Puts right what a process left that was killed while it wrote. For the one process that writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"{NEW}*"):
            shutil.rmtree(left)
        for left in self.folder.glob(f"{OLD}*"):
            place = self.folder / left.name.removeprefix(OLD)
            if place.exists():
                shutil.rmtree(left)
            else:
                left.rename(place)

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which are broken ones."""
        for later in (known for known in self.steps() if known > step):
            shutil.rmtree(self._path(later))
        self._prune()

    def steps(self) -> list[int]:
        """Ascending."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def save(self, progress: Progress, run: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes one and drops the oldest. OSError or SafetensorError leave the others as they were."""
        place = self._path(progress.step)
        new, old = (place.with_name(f"{mark}{place.name}") for mark in (NEW, OLD))
        new.mkdir()
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, new / TENSORS)
            numbers = {"format": FORMAT, "progress": asdict(progress), "run": run, "sha256": _sha256(new / TENSORS)}
            (new / NUMBERS).write_text(json.dumps(numbers, indent=1), encoding="utf-8")
            for file in (new / TENSORS, new / NUMBERS, new):
                _to_disk(file)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        if place.exists():  # the same step once more, with an evaluation that was interrupted before
            place.rename(old)
        new.rename(place)
        _to_disk(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        """Keeps the newest; to be called when the newest is known to be whole."""
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def of_step(self, step: int) -> Checkpoint | None:
        """That of a step, if it is still there and whole."""
        try:
            return _read(self._path(step))
        except UNREADABLE:
            return None

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest one that is whole, and what is wrong with those after it.

        Raises:
            TrainingFailed: there are some, and none is whole.
        """
        broken: list[str] = []
        for step in reversed(self.steps()):
            try:
                return _read(self._path(step)), broken
            except UNREADABLE as error:
                broken.append(f"the checkpoint of step {step} is broken ({error})")
        if broken:
            raise TrainingFailed(f"{'; '.join(broken)}; no other is left in {self.folder}: --restart begins anew")
        return None, []


def _read(folder: Path) -> Checkpoint:
    numbers = json_of((folder / NUMBERS).read_text(encoding="utf-8"))
    if numbers["format"] != FORMAT:
        raise ValueError(f"its format is {numbers['format']}, this version reads {FORMAT}")
    if _sha256(folder / TENSORS) != numbers["sha256"]:
        raise ValueError(f"{TENSORS} is not what was written: its checksum differs")
    progress = Progress.from_dict(numbers["progress"])
    return Checkpoint(folder, progress, numbers["run"], load_file(folder / TENSORS))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """The state of a network, each tensor under its first name: a head may be the embedding under a second one."""
    first: dict[tuple[int, torch.Size], str] = {}
    state = network.state_dict()
    return {name: t for name, t in state.items() if first.setdefault((t.data_ptr(), t.shape), name) == name}


def give_weights(network: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """What `weights_of` took, back. ValueError names a tensor that is not the same in both."""
    own = weights_of(network)  # views of the parameters
    names = [*own, *(name for name in saved if name not in own)]
    for name in names:
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            raise ValueError(name)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under `PREFIX.NAME`, on the CPU."""
    return {f"{prefix}.{name}": tensor.detach().cpu() for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `named` put under a prefix."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
