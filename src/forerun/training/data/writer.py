"""Writing a dataset: in a folder beside its place, which it takes when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forerun.errors import OptionError
from forerun.folders import check_writable
from forerun.parsing import json_of
from forerun.training.data.dataset import FORMAT, HELD_OUT, IDS, MANIFEST, MASK, OFFSETS, TOKENS, TRAIN, Sample


class NothingLeft(Exception):
    """There was no sample to write."""


def write_dataset(
    folder: Path,
    samples: Iterable[tuple[Sample, str]],
    describe: Callable[[], Mapping[str, Any]],
    held_out: float = 0.0,
) -> dict[str, Any]:
    """Writes samples to a folder, or to `train` and `held_out` in it.

    Args:
        folder: an empty one; `new_folder` makes it.
        samples: each with its group: a group lies in one part.
        describe: gives what else the manifest says, when all samples have been written.
        held_out: share of the groups to hold out.

    Returns:
        The manifest; of split data {"splits": {name: manifest}}.

    Raises:
        NothingLeft: no sample came. OptionError: none for one of the parts.
    """
    parts = {TRAIN: folder / TRAIN, HELD_OUT: folder / HELD_OUT} if held_out else {"": folder}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_Writer(path)) for name, path in parts.items()}
        for sample, group in samples:
            name = (HELD_OUT if is_held_out(group, held_out) else TRAIN) if held_out else ""
            writers[name].add(sample, group)
    total = sum(writer.samples for writer in writers.values())
    if not total:
        raise NothingLeft
    for name, writer in writers.items():
        if not writer.samples:
            raise OptionError(
                "--held-out", f"{held_out} of {total} samples puts none into {name}; choose another share"
            )
    more = describe()
    manifests = {name: writer.finish({**more, "split": name or None}) for name, writer in writers.items()}
    if not held_out:
        return manifests[""]
    top = {"forerun_data": FORMAT, "splits": [TRAIN, HELD_OUT], "held_out": held_out}
    _write_json(folder / MANIFEST, top)
    return {**top, "splits": manifests}


def is_held_out(group: str, share: float) -> bool:
    """The same for a group in every run, whatever else is in the data."""
    number = int.from_bytes(hashlib.sha256(f"held out {group}".encode("utf-8", "replace")).digest()[:8], "big")
    return number < share * 2**64


class _Writer:
    """The files of one dataset, written as samples come."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.samples = self.tokens = self.learned = self.longest = 0
        self._files: dict[str, BinaryIO] = {n: open(folder / n, "wb") for n in (TOKENS, MASK, OFFSETS, IDS)}  # noqa: SIM115
        self._hashes = {name: hashlib.sha256() for name in self._files}
        self._put(OFFSETS, np.zeros(1, "<i8").tobytes())

    def _put(self, name: str, data: bytes) -> None:
        self._files[name].write(data)
        self._hashes[name].update(data)

    def add(self, sample: Sample, group: str) -> None:
        length = len(sample.token_ids)
        assert length == len(sample.loss_mask) > 0
        self.samples, self.tokens = self.samples + 1, self.tokens + length
        self.learned, self.longest = self.learned + int(sample.loss_mask.sum()), max(self.longest, length)
        self._put(TOKENS, sample.token_ids.astype("<i4").tobytes())
        self._put(MASK, sample.loss_mask.astype(np.uint8).tobytes())
        self._put(OFFSETS, np.array([self.tokens], "<i8").tobytes())
        name = sample.id if group == sample.id else [sample.id, group]
        self._put(IDS, f"{json.dumps(name)}\n".encode())

    def finish(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the manifest."""
        counts = {"samples": self.samples, "tokens": self.tokens, "learned": self.learned, "longest": self.longest}
        files = {
            name: {"bytes": (self.folder / name).stat().st_size, "sha256": self._hashes[name].hexdigest()}
            for name in self._files
        }
        manifest = {"forerun_data": FORMAT, **more, "counts": counts, "files": files}
        _write_json(self.folder / MANIFEST, manifest)
        return manifest

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------------ folders


def check_place(folder: Path, overwrite: bool) -> None:
    """OptionError if a dataset cannot be written to a folder."""
    if folder.exists() and not folder.is_dir():
        raise OptionError("--out", f"{folder} is a file; name a folder")
    place = folder.resolve()  # what is replaced is what a link leads to
    if os.path.ismount(place):
        raise OptionError("--out", f"{folder} is a mount point, which cannot be replaced; name a new folder in it")
    if place in (here := Path.cwd().resolve(), *here.parents):
        raise OptionError("--out", f"{folder} is the working folder or holds it, and would be replaced; name a new one")
    check_writable("--out", place.parent)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not _is_ours(folder):
        raise OptionError("--out", f"{folder} has other files in it; name a new folder")
    if not overwrite:
        raise OptionError("--out", f"{folder} is a dataset already; --overwrite replaces it")


def _is_ours(folder: Path) -> bool:
    try:
        return "forerun_data" in json_of((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


@contextmanager
def new_folder(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write to, which takes its place when the block ends well and is removed when it does not.

    Raises:
        OptionError: the place is taken, cannot be written, or the disk is full.
    """
    check_place(final, overwrite)
    final = final.resolve()  # a link stays, and what is written lies where it leads
    part = final.with_name(f".{final.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process of this number that was killed
    try:
        part.mkdir()
        yield part
        _put_in_place(part, final)
    except OSError as error:
        raise OptionError("--out", f"cannot write {final}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: Path, final: Path) -> None:
    old = part.with_suffix(".old")
    if final.is_dir():
        final.rename(old)
    part.rename(final)
    shutil.rmtree(old, ignore_errors=True)
