"""GGUF files: dequantised once through transformers; the converted folder is kept and shared by all processes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch

from forerun.errors import ModelError, not_imported
from forerun.folders import cache_folder
from forerun.target.checkpoint import GIB, Checkpoint, check_fits
from forerun.target.dtypes import dtype_name
from forerun.target.pretrained import counted, pretrained, progress_bar, quiet

MAGIC = b"GGUF"
CHUNK = 1 << 22
CONVERTING = 2.2
"""Times the weights' size that a conversion takes: 2.9 GiB at its peak for 1.2 GiB (measured, Qwen2.5 0.5B, bf16)."""


def converted(path: Path, dtype: torch.dtype) -> Path:
    """The safetensors folder of a GGUF file in a dtype, converted now if nobody did so before.

    Processes that ask at the same time wait for the first one; a folder appears whole or not at all.

    Raises:
        ModelError: not a GGUF file, truncated, of an architecture transformers cannot read, or no room on the disk.
        DoesNotFit: not enough memory to convert it.
    """
    from filelock import FileLock

    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"--target: cannot read {path}: {error.strerror or error}") from error
    if magic != MAGIC:
        raise ModelError(f"--target: {path} is not a GGUF file (it does not begin with {MAGIC.decode()})")
    root = cache_folder() / "gguf"
    name = f"{sha256_of(path)[:32]}-{dtype_name(dtype)}"
    final = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not final.is_dir():
                part = root / f"{name}.part"
                # Left by a process that died in the middle: we hold the lock, so nobody is writing it.
                shutil.rmtree(part, ignore_errors=True)
                _check_room(path, root, dtype)
                _convert(path, part, dtype)
                part.rename(final)
    except OSError as error:
        raise ModelError(
            f"--target: the converted copy of {path.name} cannot be kept in {root} ({error.strerror or error}); set "
            "FORERUN_CACHE to a folder that can be written"
        ) from error
    return final


def kept(path: Path) -> Path | None:
    """A folder that a GGUF file was converted to before, in any dtype; None: it never was."""
    root = cache_folder() / "gguf"
    found = root.is_dir() and sorted(one for one in root.glob(f"{sha256_of(path)[:32]}-*") if one.suffix == "")
    return found[0] if found else None


def sha256_of(path: Path) -> str:
    """Hash of a file, with a progress bar."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress_bar() as progress:
        task = progress.add_task(f"hashing {path.name}", total=path.stat().st_size)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()


def _check_room(path: Path, root: Path, dtype: torch.dtype) -> None:
    """ModelError if the file ends before its last tensor does, or if memory or disk cannot hold the converted model."""
    elements = _elements(path)
    check_fits(Checkpoint(path, {}, elements, 0), dtype, torch.device("cpu"), CONVERTING)
    need, free = elements * dtype.itemsize, shutil.disk_usage(root).free
    if need > free:
        raise ModelError(
            f"--target: converting {path.name} takes {need / GIB:.2f} GiB in {root}, {free / GIB:.2f} GiB are free; "
            "set FORERUN_CACHE to a folder with more room"
        )


def _elements(path: Path) -> int:
    """Numbers in all tensors of a complete file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"--target: {path} {not_imported(error, 'gguf', 'gguf')}") from error
    try:
        tensors = GGUFReader(path).tensors
    except Exception as error:  # The reader lets through what its parsing meets: IndexError, ValueError, KeyError, ..
        raise ModelError(f"--target: {path} is truncated or damaged ({type(error).__name__}: {error})") from error
    size = path.stat().st_size
    end = max((t.data_offset + t.n_bytes for t in tensors), default=size + 1)
    if end > size:
        raise ModelError(f"--target: {path} is truncated: {end:,} bytes expected, it has {size:,}")
    return sum(int(t.n_elements) for t in tensors)


def _convert(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Writes model and tokenizer of a GGUF file as a safetensors folder, with a bar for each loop of the conversion."""
    from transformers import GgufConfig

    with progress_bar() as progress, quiet(), counted(progress, f"converting {path.name} (once; the copy is kept)"):
        options = {"gguf_file": path.name}
        dense = GgufConfig(dequantize=True)
        model, tokenizer = pretrained(str(path), path.parent, dtype, options, quantization_config=dense)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
