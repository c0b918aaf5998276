"""What a checkpoint folder holds, before any of it is loaded: its files, their completeness, the memory they need."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.errors import DoesNotFit, ModelError
from forerun.parsing import json_of
from forerun.target.dtypes import dtype_name, dtype_named

GIB = 1 << 30
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
LOADING = 1.1
"""Times the weights' size: buffers, the largest tensor while it is converted, the activations of a short pass. Assumed,
not measured; KV storage is sized by the engine afterwards."""


FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of what a model can be loaded in."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete safetensors folder."""

    folder: Path
    config: dict[str, Any]
    parameters: int
    """Numbers in all floating tensors."""
    other_bytes: int
    """Bytes of tensors that keep their type (packed integers of a quantized checkpoint)."""
    stored: torch.dtype = torch.float32
    """What most of the floating numbers are stored in."""
    shared_head: int = 0
    """Numbers of an embedding that is the head as well; 0 where the head has weights of its own."""

    def bytes_as(self, dtype: torch.dtype) -> int:
        return self.parameters * dtype.itemsize + self.other_bytes

    @property
    def dtype(self) -> torch.dtype:
        """The one its config names, else the one it is stored in. ModelError: it names none that torch has."""
        text = self.config.get("text_config")
        places = [text, self.config] if isinstance(text, dict) else [self.config]
        named = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
        name = next((one for one in named if one not in (None, "", "auto")), None)
        if name is None:
            return self.stored
        try:
            return dtype_named(str(name))
        except ValueError:
            message = f"--target: {self.folder / 'config.json'} names the dtype {name!r}, which torch has not"
            raise ModelError(message) from None


class _Stored(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    end: int


def inspect_folder(folder: Path) -> Checkpoint:
    """Reads the configs and every safetensors header.

    Raises:
        ModelError: no config, no safetensors weights, a missing shard, a truncated, damaged or unreadable file.
    """
    try:
        return _inspect(folder)
    except OSError as error:
        raise ModelError(f"--target: cannot read {error.filename or folder}: {error.strerror or error}") from error


def _inspect(folder: Path) -> Checkpoint:
    config_file, generation_file = folder / "config.json", folder / "generation_config.json"
    if not config_file.is_file():
        raise ModelError(f"--target: {folder} has no config.json; expected a Hugging Face model folder")
    config = _read_json(config_file)
    if generation_file.is_file():
        # transformers goes on without one that it cannot read, and the text would run past its end-of-sequence ids.
        _read_json(generation_file)
    tensors = _stored(folder)
    numbers: Counter[str] = Counter()
    other = 0
    for stored in tensors.values():
        if stored.dtype.startswith(("F", "BF")):
            numbers[stored.dtype] += prod(stored.shape)
        else:
            other += prod(stored.shape) * _itemsize(stored.dtype)
    most = max(FLOATING, key=lambda name: numbers[name])
    own = FLOATING[most] if numbers[most] else torch.float32
    return Checkpoint(folder, config, numbers.total(), other, own, _shared_head(tensors))


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by name. Raises what `inspect_folder` does of the weights; also OSError."""
    return {name: stored.shape for name, stored in _stored(folder).items()}


def _stored(folder: Path) -> dict[str, _Stored]:
    return {name: stored for path in _weight_files(folder) for name, stored in _tensors(path).items()}


def _shared_head(tensors: Mapping[str, _Stored]) -> int:
    if any(name.endswith("lm_head.weight") for name in tensors):
        return 0
    return next((prod(t.shape) for name, t in tensors.items() if name.endswith("embed_tokens.weight")), 0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json_of(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"--target: {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"--target: {path} holds no JSON object")
    return content


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"--target: {index} lists no files of weights")
        names = sorted(set(shards.values()))
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


def _tensors(path: Path) -> dict[str, _Stored]:
    """Every tensor of a safetensors file by name; the file's length is checked against its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= size - 8:
            raise ModelError(f"--target: {path} is truncated or not a safetensors file")
        content = file.read(length)
    try:
        tensors = dict(_described(json_of(content)))
    except (ValueError, AttributeError, LookupError, TypeError) as error:  # no JSON, or another shape
        raise ModelError(f"--target: {path} is not a safetensors file ({type(error).__name__}: {error})") from error
    expected = 8 + length + max((stored.end for stored in tensors.values()), default=0)
    if size != expected:
        raise ModelError(f"--target: {path} is truncated or damaged: {expected:,} bytes expected, it has {size:,}")
    return tensors


def _described(header: Any) -> Iterator[tuple[str, _Stored]]:
    """What a header says, in types that can be counted with; one of those errors where it is no header."""
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape, end = entry["dtype"], entry["shape"], entry["data_offsets"][1]
            if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, end)):
                raise ValueError(f"{name} has no dtype, shape and place")
            yield name, _Stored(dtype, tuple(shape), end)


def _itemsize(name: str) -> int:
    """Bytes of a safetensors type such as I64, U8 or BOOL."""
    bits = "".join(c for c in name if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


# ------------------------------------------------------------------------------------------------------------ memory


def check_fits(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    times: float = LOADING,
    purpose: str = "to load",
    head_copy: int = 0,
) -> None:
    """DoesNotFit, with the arithmetic, if so many times the weights are more than what is free on the device.

    `head_copy`: bytes of a second copy of a head that is also the embedding.
    """
    need = int(checkpoint.bytes_as(dtype) * times) + head_copy
    free = available_memory(device)
    if need > free:
        second = f" + {head_copy / GIB:.2f} GiB for a packed copy of the head" if head_copy else ""
        raise DoesNotFit(
            f"--target: {checkpoint.parameters:,} parameters x {dtype.itemsize} bytes "
            f"({dtype_name(dtype)}) x {times} {purpose}{second} = {need / GIB:.2f} GiB, "
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
