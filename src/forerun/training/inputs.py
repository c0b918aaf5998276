"""What a run learns from and what it is judged on: prepared samples, split, cut to length and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.errors import OptionError
from forerun.training.data import Dataset, Sample, open_split
from forerun.training.data.writer import is_held_out

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.target.base import Target

SHARE = 0.05
"""Held out where nothing is said: DeepSpec's."""
COUNTED_AT_ONCE = 1024
"""Samples."""


class View(Sequence[Sample]):
    """Some samples of a data set, cut to a length.

    Args:
        dataset: prepared.
        indices: [N] which of its samples, in this order; None: all.
        max_length: tokens a sample keeps; None: all.
    """

    def __init__(self, dataset: Dataset, indices: np.ndarray | None = None, max_length: int | None = None):
        self.dataset, self.max_length = dataset, max_length
        self.indices = np.arange(len(dataset)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        name, ids, mask = self.dataset[int(self.indices[index])]
        return Sample(name, ids[: self.max_length], mask[: self.max_length])

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    @property
    def ids(self) -> list[str]:
        names = self.dataset.ids
        return [names[i] for i in self.indices]

    @property
    def lengths(self) -> np.ndarray:
        """[N] tokens of each."""
        whole = self.dataset.lengths[self.indices]
        return whole if self.max_length is None else np.minimum(whole, self.max_length)

    def cut(self, max_length: int) -> tuple[View, int, int]:
        """At that length: the view without the samples in which nothing is then learned, how many samples were cut,
        and how many of those were left out."""
        long = np.flatnonzero(self.lengths > max_length)
        empty = [i for i in long if not self[i].loss_mask[:max_length].any()]
        return View(self.dataset, np.delete(self.indices, empty), max_length), len(long), len(empty)

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] how often each id is to be predicted."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, len(self), COUNTED_AT_ONCE):
            some = [self[i] for i in range(start, min(start + COUNTED_AT_ONCE, len(self)))]
            learned = np.concatenate([sample.token_ids[sample.loss_mask] for sample in some])
            if len(learned) and learned.max() >= vocab_size:
                raise OptionError("--data", f"has token {learned.max()}; the target's vocabulary has {vocab_size}")
            counts += np.bincount(learned, minlength=vocab_size)
        return torch.from_numpy(counts)

    def digest(self) -> str:
        """Of which samples these are and what is in them."""
        hasher = hashlib.sha256(json.dumps(self.dataset.manifest["files"], sort_keys=True).encode())
        hasher.update(f"{self.max_length}".encode() + self.indices.astype("<i8").tobytes())
        return hasher.hexdigest()[:32]


@dataclass(frozen=True)
class Inputs:
    """Samples for training and for evaluation, no id in both."""

    train: View
    held_out: View | None
    kept_by: float | str
    """What is held out: a share, or a folder."""
    reason: str
    """Why these are held out."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Of the training data, as prepared."""
        return self.train.dataset.manifest

    @property
    def held_out_count(self) -> int:
        return 0 if self.held_out is None else len(self.held_out)


def open_inputs(data: Path, held_out: float | str | None, target: Target) -> Inputs:
    """Prepared data and what is held out of it.

    Args:
        data: what `forerun data prepare` wrote.
        held_out: another such folder, or a share of the data; None: what was held out when it was prepared, else
            SHARE of it.
        target: whose tokenizer the data must have been prepared with.

    Raises:
        OptionError: no prepared data, another tokenizer, nothing to learn, samples in both parts.
    """
    whole, kept = open_split(data)
    whole.check_target(target.tokenizer)
    train = View(whole)
    if held_out is None and kept is not None:
        inputs = Inputs(train, View(kept), f"{data}/held_out", "held out when the data was prepared")
    elif isinstance(held_out, str):
        inputs = Inputs(train, View(_other(held_out)), held_out, "as asked")
    else:
        share, reason = (SHARE, "default") if held_out is None else (held_out, "as asked")
        rest, out = _divided(train, share)
        inputs = Inputs(rest, out if len(out) else None, share, reason)
    if inputs.held_out is not None:
        inputs.held_out.dataset.check_target(target.tokenizer)
        _refuse_overlap(inputs.train, inputs.held_out)
    if not len(inputs.train):
        raise OptionError("--held-out", f"leaves no sample of {data} to train on")
    if not any(sample.loss_mask.any() for sample in inputs.train):
        raise OptionError("--data", f"nothing is to be learned in {data}: the loss mask of every sample is empty")
    return inputs


def _other(folder: str) -> Dataset:
    try:
        return open_split(folder)[0]
    except OptionError as error:
        raise OptionError("--held-out", str(error).removeprefix("--data: ")) from error


def _divided(whole: View, share: float) -> tuple[View, View]:
    """(for training, held out): by the hash of a sample's group, so that a sample stays where it is when others come,
    and all answers to one prompt are on one side."""
    groups = whole.dataset.groups
    out = np.array([is_held_out(groups[i], share) for i in whole.indices], dtype=bool)
    if share > 0 and not out.any() and len(whole) > 1:
        out[0] = True  # of a few samples one
    return View(whole.dataset, whole.indices[~out]), View(whole.dataset, whole.indices[out])


def chosen_for_evaluation(held_out: View | None, most: int) -> list[Sample]:
    """Up to `most` samples: the first by the hashes of their ids, so that they are of all sources alike."""
    if held_out is None:
        return []
    hashes = [hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest() for name in held_out.ids]
    return [held_out[i] for i in sorted(range(len(held_out)), key=lambda i: hashes[i])[:most]]


def _refuse_overlap(train: View, held_out: View) -> None:
    both = set(train.ids) & set(held_out.ids)
    if both:
        raise OptionError(
            "--held-out", f"{len(both)} of its samples are trained on as well, such as {min(both)!r}; numbers would lie"
        )
