"""What a checkpoint folder holds, before any of it is loaded: its files, their completeness, the memory they need."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from forerun.errors import DoesNotFit, ModelError

GIB = 1 << 30
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LOADING = 1.1
"""Times the weights' size: buffers, the largest tensor while it is converted, the activations of a short pass. Assumed,
not measured; KV storage is sized by the engine afterwards."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete safetensors folder."""

    folder: Path
    config: dict[str, Any]
    parameters: int
    """Numbers in all floating tensors."""
    other_bytes: int
    """Bytes of tensors that keep their type (packed integers of a quantized checkpoint)."""

    def bytes_as(self, dtype: torch.dtype) -> int:
        return self.parameters * dtype.itemsize + self.other_bytes


def inspect_folder(folder: Path) -> Checkpoint:
    """Reads the config and every safetensors header.

    Raises:
        ModelError: no config, no safetensors weights, a missing shard, a truncated or damaged file.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"--target: {folder} has no config.json; expected a Hugging Face model folder")
    config = _read_json(config_file)
    parameters = other = 0
    for path in _weight_files(folder):
        for dtype, shape in _tensors(path):
            if dtype.startswith(("F", "BF")):
                parameters += prod(shape)
            else:
                other += prod(shape) * _itemsize(dtype)
    return Checkpoint(folder, config, parameters, other)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"--target: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"--target: {path} holds no JSON object")
    return content


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"--target: {folder} lacks {missing[0]}, which {index.name} lists ({len(missing)} missing)"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickled:
        raise ModelError(
            f"--target: {folder} has its weights as a pickle ({pickled[0]}), which can run code when it is loaded; "
            "convert it to safetensors"
        )
    raise ModelError(f"--target: {folder} has no model.safetensors")


def _tensors(path: Path) -> list[tuple[str, list[int]]]:
    """(dtype, shape) of every tensor of a safetensors file, whose length is checked against its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= size - 8:
            raise ModelError(f"--target: {path} is truncated or not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"--target: {path} is not a safetensors file: {error}") from error
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
    if size != expected:
        raise ModelError(f"--target: {path} is truncated or damaged: {expected:,} bytes expected, it has {size:,}")
    return [(entry["dtype"], entry["shape"]) for entry in entries]


def _itemsize(name: str) -> int:
    """Bytes of a safetensors type such as I64, U8 or BOOL."""
    bits = "".join(c for c in name if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


# ------------------------------------------------------------------------------------------------------------ memory


def check_fits(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, times: float = LOADING, purpose: str = "to load"
) -> None:
    """DoesNotFit, with the arithmetic, if so many times the weights are more than what is free on the device."""
    need = int(checkpoint.bytes_as(dtype) * times)
    free = available_memory(device)
    if need > free:
        raise DoesNotFit(
            f"--target: {checkpoint.parameters:,} parameters x {dtype.itemsize} bytes "
            f"({str(dtype).removeprefix('torch.')}) x {times} {purpose} = {need / GIB:.2f} GiB, "
            f"but {free / GIB:.2f} GiB are free on {device}; "
            "choose a smaller model, another --dtype or another --device"
        )


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now: of the GPU, or of the machine within its container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    free: int = psutil.virtual_memory().available
    return min(free, _container_memory(Path("/sys/fs/cgroup"), free))


def _container_memory(group: Path, unlimited: int) -> int:
    """What a cgroup (version 2) still allows. Cached pages of files count as used there, but give way."""
    limit = group / "memory.max"
    if not limit.is_file() or not (text := limit.read_text().strip()).isdigit():
        return unlimited
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(text) - int((group / "memory.current").read_text()) + int(statistics["file"])
