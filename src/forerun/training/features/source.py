"""Where training batches come from: computed by the target, or read from a store in front of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.learned import TrainingBatch, check_taps
from forerun.errors import ModelError, OptionError
from forerun.target.base import Target
from forerun.training.features.layout import GB, Parts, StoreDtype, estimate
from forerun.training.features.manifest import Manifest, check_manifest, settle_manifest
from forerun.training.features.passes import MAX_ROWS, Sample, blank, capture, log_normalizer
from forerun.training.features.shards import Item
from forerun.training.features.store import FeatureStore, check_bound


def open_source(
    target: Target,
    taps: Sequence[int],
    *,
    store: str | Path | None = None,
    gb: float | None = None,
    dtype: StoreDtype = "bfloat16",
    max_num_batched_tokens: int = MAX_ROWS,
    normalizer: bool = False,
    allow_target_mismatch: bool = False,
) -> FeatureSource:
    """The features of a target's hidden states `taps`, for any samples.

    Args:
        target: computes them; see `capture` for who owns its KV storage.
        taps: in h, strictly ascending within 1 .. n; none, if only the last hidden state is needed.
        store: a folder to keep them in; None computes them in every epoch.
        gb: bound of the folder in 10^9 bytes; with `store` only.
        dtype: of the stored states below the last layer; a folder that exists keeps its own.
        max_num_batched_tokens: rows of one pass of the target.
        normalizer: batches have `log_normalizer`.
        allow_target_mismatch: read a store of another target of the same shape (a fine-tuned one); nothing is added.

    Raises:
        OptionError: taps out of range, no bound or one the disk cannot hold, a folder of something else, of other
            taps, or of another target.
    """
    taps = check_taps(taps, target) if taps else ()
    if store is None:
        if gb is not None:
            raise OptionError("--store-gb", "bounds a feature store; name its folder with --feature-store")
        return FeatureSource(target, taps, None, None, max_num_batched_tokens, normalizer)
    if dtype not in ("bfloat16", "fp8"):
        raise OptionError("--store-dtype", f"must be bfloat16 or fp8, got {dtype!r}")
    wanted = Manifest.of(target, taps, dtype, normalizer)
    folder = Path(store)
    found = settle_manifest(folder, wanted)
    own = check_manifest(found, wanted, folder, allow_target_mismatch)
    opened = FeatureStore(folder, found.layout, check_bound(folder, gb), read_only=not own)
    return FeatureSource(target, taps, opened, found, max_num_batched_tokens, normalizer)


class FeatureSource:
    """Makes batches. With a store, a batch is bit for bit the same whether its samples were found or just computed.

    Made by `open_source`; belongs to one thread.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        store: FeatureStore | None,
        manifest: Manifest | None,
        max_num_batched_tokens: int,
        normalizer: bool,
    ):
        self.target, self.taps, self.store = target, taps, store
        self.normalizer = normalizer
        self.captured = 0
        """Samples computed so far."""
        self._rows = max_num_batched_tokens
        self._salt = "" if manifest is None else manifest.digest

    def batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """Features of these samples, in their order; the ones that are not stored are computed together.

        Raises:
            OptionError: see `capture`. ModelError: the target itself gives numbers that are not finite.
        """
        if self.store is None:
            return self._captured(samples, self.normalizer)
        stores_normalizer = self.store.layout.normalizer
        batch = blank(self.target, samples, self.taps, self.normalizer)
        keys = [self._key(sample) for sample in samples]
        if any(key not in self.store for key in keys):
            self.store.refresh()  # another process may have stored it
        missing = []
        for sample, key, start in zip(samples, keys, batch.starts, strict=True):
            parts = self.store.read(key, len(sample.token_ids))
            if parts is None:
                missing.append((sample, start))
            else:
                self._fill(batch, start, parts)
        if missing:
            self._compute(batch, missing)
        if self.normalizer and not stores_normalizer:
            return replace(batch, log_normalizer=log_normalizer(self.target, batch.last))
        return batch

    def _captured(self, samples: Sequence[Sample], with_normalizer: bool) -> TrainingBatch:
        batch = capture(
            self.target,
            samples,
            self.taps,
            max_num_batched_tokens=self._rows,
            with_normalizer=with_normalizer,
        )
        self.captured += len(samples)
        finite = batch.features.isfinite().all(-1) & batch.last.isfinite().all(-1)  # [T]
        if not bool(finite.all()):
            row = int(finite.logical_not().nonzero()[0])
            which = max(i for i, start in enumerate(batch.starts) if start <= row)
            raise ModelError(
                f"--target: {self.target.name} in {self.target.dtype} gives hidden states that are not finite at "
                f"token {row - batch.starts[which]} of sample {samples[which].id}; try another --target-dtype"
            )
        return batch

    def _compute(self, batch: TrainingBatch, missing: Sequence[tuple[Sample, int]]) -> None:
        """Fills the rows of samples that are not stored, with what a later read will give, and stores them."""
        assert self.store is not None
        layout = self.store.layout
        captured = self._captured([sample for sample, _ in missing], with_normalizer=False)
        # From the rounded state: the teacher's law is rebuilt from that one, and has to sum to 1.
        last = captured.last.to(torch.bfloat16)
        normalizer = log_normalizer(self.target, last.to(self.target.dtype)) if layout.normalizer else None
        lower = captured.features[:, : layout.lower * layout.hidden_size]
        items = []
        for (sample, start), length, at in zip(missing, captured.lengths, captured.starts, strict=True):
            rows = slice(at, at + length)
            parts = Parts(lower[rows], last[rows], None if normalizer is None else normalizer[rows])
            items.append(Item(self._key(sample), length, layout.encode(parts)))
            self._fill(batch, start, layout.decode(items[-1].payload, length))
        self.store.append(items)

    def _fill(self, batch: TrainingBatch, start: int, parts: Parts) -> None:
        rows = slice(start, start + len(parts.last))
        batch.features[rows, : parts.lower.shape[1]] = _there(parts.lower, batch.features)
        batch.last[rows] = _there(parts.last, batch.last)
        if batch.log_normalizer is not None and parts.log_normalizer is not None:
            batch.log_normalizer[rows] = _there(parts.log_normalizer, batch.log_normalizer)

    def _key(self, sample: Sample) -> str:
        """Of the sample's id and tokens, and of everything the manifest says of their features."""
        hasher = hashlib.sha256(f"{self._salt}\n{sample.id}\n".encode())
        hasher.update(np.ascontiguousarray(sample.token_ids, "<i4").tobytes())
        return hasher.hexdigest()[:32]

    def describe(self) -> str:
        """One sentence on where features come from, and how many came from where so far."""
        n = self.target.num_layers
        states = f"{len({*self.taps, n})} hidden states of {self.target.hidden_size:,} numbers a token"
        if self.store is None:
            size = estimate(1, self.target.hidden_size, self.taps, normalizer=self.normalizer, num_layers=n)
            return f"features: {states}, computed in every epoch ({size.bytes_per_token:,} bytes a token if stored)"
        layout, counts = self.store.layout, self.store.counts
        damaged = f", {counts.damaged.total()} damaged" if counts.damaged else ""
        return (
            f"features: {states}, stored in {self.store.folder} ({layout.dtype}, {layout.bytes_per_token:,} bytes a "
            f"token, at most {self.store.limit / GB:g} GB); {len(self.store):,} samples there, {counts.read:,} read, "
            f"{self.captured:,} computed, {counts.declined:,} not stored, {counts.evicted_shards} shards "
            f"evicted{damaged}"
        )


def _there(part: Tensor, like: Tensor) -> Tensor:
    return part if part.device == like.device else part.to(like.device)
