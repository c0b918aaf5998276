"""A prepared dataset: token ids and loss masks of all samples in a few flat files, read in place.

manifest.json     what it was made for and how; bytes and sha256 of the other files
tokens.i32        ids of all samples, one behind the other, little-endian int32
loss_mask.u8      one byte per token: 1 where the target wrote it
offsets.i64       N + 1 int64: sample i is tokens[offsets[i] : offsets[i + 1]]
ids.jsonl         of each sample a line: its id, or [id, group] where its group is another
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.errors import OptionError
from forerun.parsing import json_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from forerun.target.base import Tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
TOKENS, MASK, OFFSETS, IDS = "tokens.i32", "loss_mask.u8", "offsets.i64", "ids.jsonl"
TRAIN, HELD_OUT = "train", "held_out"
"""Folders of a dataset that was split."""
CHUNK = 1 << 22


class Sample(NamedTuple):
    """One sequence."""

    id: str
    token_ids: NDArray[np.int32]
    """[S]"""
    loss_mask: NDArray[np.bool_]
    """[S], True where the target wrote the token."""


class Dataset:
    """A folder that `forerun data prepare` wrote. It can be pickled: a copy opens the same files.

    Args:
        folder: that folder, or `train` or `held_out` in it where it was split.

    Raises:
        OptionError: it is no such folder, or a file of it is missing or was cut.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest: Mapping[str, Any] = read_manifest(self.folder)
        for name, expected in self.manifest["files"].items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else -1
            if size != expected["bytes"]:
                found = f"has {size:,} bytes, {expected['bytes']:,} were written" if size >= 0 else "is missing"
                raise OptionError("--data", f"{path} {found}; prepare the data again")
        self._offsets = np.fromfile(self.folder / OFFSETS, "<i8")
        self._tokens = np.memmap(self.folder / TOKENS, "<i4", mode="r")
        self._mask = np.memmap(self.folder / MASK, np.uint8, mode="r")
        if not (len(self._tokens) == len(self._mask) == self._offsets[-1] and np.all(np.diff(self._offsets) > 0)):
            raise OptionError("--data", f"{self.folder / OFFSETS} does not fit the tokens; prepare the data again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        """A sample, copied out of the files. Negative numbers count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        at = index % len(self)
        part = slice(self._offsets[at], self._offsets[at + 1])
        return Sample(self.ids[at], np.array(self._tokens[part], np.int32), self._mask[part].astype(np.bool_))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        with open(self.folder / IDS, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return [(one, one) if isinstance(one, str) else (one[0], one[1]) for one in lines]

    @cached_property
    def ids(self) -> list[str]:
        return [name for name, _ in self._names]

    @cached_property
    def groups(self) -> list[str]:
        """Of each sample the name it shares with others of the same prompt; to hold out data, hold out groups."""
        return [group for _, group in self._names]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each sample."""
        return np.diff(self._offsets)

    @property
    def chat_template(self) -> str | None:
        """`template_hash` of the template that rendered it; None: it had a part in none of the samples (plain text)."""
        template = self.manifest["template"]
        # Data prepared before samples were counted do not say: they count as rendered, which is checked later on.
        return str(template["hash"]) if template.get("rendered", 1) else None

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max())

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each id occurs under the loss mask. OptionError: an id is not in the vocabulary."""
        import torch

        counts = np.zeros(vocab_size, np.int64)
        for start in range(0, len(self._tokens), CHUNK):
            part = slice(start, start + CHUNK)
            learned = self._tokens[part][self._mask[part].astype(np.bool_)]
            if len(learned) and learned.max() >= vocab_size:
                raise OptionError("--data", f"{self.folder} has token {learned.max()}; the target has {vocab_size}")
            counts += np.bincount(learned, minlength=vocab_size)
        return torch.from_numpy(counts)

    def check_target(self, tokenizer: Tokenizer) -> None:
        """OptionError: the data was made with another tokenizer than this one of a target."""
        from forerun.target.fingerprint import tokenizer_hash

        made, found = self.manifest["tokenizer"]["hash"], tokenizer_hash(tokenizer)
        if made != found:
            raise OptionError(
                "--data",
                f"{self.folder} was prepared for {self.manifest['target']}, whose tokenizer ({made[:12]}) is not the "
                f"target's ({found[:12]}); prepare it with --target of the model to train for",
            )

    def verify(self) -> None:
        """Reads everything once. OptionError: a file is not what was written."""
        for name, expected in self.manifest["files"].items():
            if sha256_of(self.folder / name) != expected["sha256"]:
                raise OptionError("--data", f"{self.folder / name} was changed or damaged; prepare the data again")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a dataset. OptionError: there is none, it is of a split, or of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise OptionError("--data", f"{folder} has no {MANIFEST}; name a folder that `forerun data prepare` wrote")
    try:
        manifest = json_of(path.read_text(encoding="utf-8"))
        version = manifest["forerun_data"]
    except (ValueError, TypeError, KeyError):
        raise OptionError("--data", f"{path} is not the manifest of a prepared dataset") from None
    if version != FORMAT:
        raise OptionError("--data", f"{folder} has format {version}, this version of forerun reads {FORMAT}")
    if "splits" in manifest:
        raise OptionError("--data", f"{folder} is split; name one of {', '.join(manifest['splits'])} in it")
    return dict(manifest)


def open_split(folder: str | Path) -> tuple[Dataset, Dataset | None]:
    """Training and held-out data of what `forerun data prepare` wrote; None if nothing was held out."""
    place = Path(folder)
    if not (place / TRAIN / MANIFEST).is_file():
        return Dataset(place), None
    return Dataset(place / TRAIN), Dataset(place / HELD_OUT)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
