"""The target's hidden states of whole sequences, through the pass that decoding uses.

Who owns the target's KV storage: `capture` allocates what one call needs and gives it back when it returns. An engine
over the same target allocates for itself when it is made. So the two take turns - capture, make an engine, decode, drop
it, capture - and neither has to know of the other; an engine that goes on decoding after a capture fails with an index
error instead of reading rows that are no longer its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.learned import Text, TrainingBatch
from forerun.errors import OptionError
from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import BlockPool, blocks_for

MAX_ROWS = 2048
"""Rows of one pass: enough to keep a CPU and most GPUs busy, and 17 MB a hidden state where H = 4096, in bfloat16."""

LOGITS_AT_ONCE = 1 << 25
"""Elements of teacher logits that exist at a time: 128 MiB in float32, 220 rows of Qwen's vocabulary."""


class Sample(Text, Protocol):
    """What is asked of a training sample."""

    @property
    def id(self) -> str: ...


def capture(
    target: Target,
    samples: Sequence[Sample],
    taps: Sequence[int],
    *,
    max_num_batched_tokens: int = MAX_ROWS,
    with_normalizer: bool = False,
) -> TrainingBatch:
    """What the target computes for these samples, in their order. The target's KV storage is free afterwards.

    A sample's rows come from passes that are cut at fixed places of the sample itself - every
    `max_num_batched_tokens` rows - so its features do not depend on its neighbours further than the target's passes
    do (not at all on a table and with packed bfloat16 layers, in the last bits in float32).

    Args:
        target: whatever it held in its KV storage is dropped.
        samples: sequences of any lengths; they are packed, nothing is padded.
        taps: hidden states in h, strictly ascending; may be empty and may hold n.
        max_num_batched_tokens: rows of one pass at most, which bounds its memory whatever the sequences' lengths.
        with_normalizer: also the log-sum-exp of the teacher's logits, at one full head per token.

    Returns:
        Features [T, m * H] of the taps and `last` [T, H] in the target's dtype, on its device, without a graph.

    Raises:
        OptionError: a sample that is empty, longer than the target's window or not of its vocabulary.
    """
    if max_num_batched_tokens < 1:
        raise OptionError("max_num_batched_tokens", f"must be at least 1, got {max_num_batched_tokens}")
    for sample in samples:
        _check(sample, target)
    batch = blank(target, samples, taps)
    states = tuple(sorted({*taps, target.num_layers}))
    width, row = batch.features.shape[1], 0
    try:
        for packed in _passes(target, samples, max_num_batched_tokens):
            hidden = target.forward(packed, states).features
            assert hidden is not None
            rows = slice(row, row + len(hidden))
            batch.features[rows] = hidden[:, :width]
            if target.num_layers not in taps:  # else `last` is a part of the features
                batch.last[rows] = hidden[:, -target.hidden_size :]
            row = rows.stop
    finally:
        target.allocate(0)
    if not with_normalizer:
        return batch
    return TrainingBatch(
        batch.tokens, batch.lengths, batch.loss_mask, batch.features, batch.last, log_normalizer(target, batch.last)
    )


@torch.no_grad()
def log_normalizer(target: Target, last: Tensor) -> Tensor:
    """Log-sum-exp of the teacher's logits at temperature 1, a few rows at a time: last [T, H] -> [T] float32."""
    rows = max(1, LOGITS_AT_ONCE // target.vocab_size)
    out = torch.empty(len(last), dtype=torch.float32, device=last.device)
    for start in range(0, len(last), rows):
        logits = target.logits(target.final_norm(last[start : start + rows]))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        out[start : start + rows] = wide.logsumexp(-1)
    return out


def blank(target: Target, samples: Sequence[Sample], taps: Sequence[int], normalizer: bool = False) -> TrainingBatch:
    """A batch with tokens, lengths and masks; the rest is memory yet to be written.

    `last` is a view of the last columns of the features where n is among the taps.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    rows, hidden = sum(lengths), target.hidden_size

    def memory(columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=target.dtype, device=target.device)

    tokens = np.concatenate([np.asarray(sample.token_ids, np.int64) for sample in samples])
    mask = np.concatenate([np.asarray(sample.loss_mask, np.bool_) for sample in samples])
    features = memory(len(taps) * hidden)
    last = features[:, -hidden:] if target.num_layers in taps else memory(hidden)
    return TrainingBatch(
        torch.from_numpy(tokens).to(target.device),
        lengths,
        torch.from_numpy(mask).to(target.device),
        features,
        last,
        torch.empty(rows, dtype=torch.float32, device=target.device) if normalizer else None,
    )


def _check(sample: Sample, target: Target) -> None:
    length = len(sample.token_ids)
    if not 1 <= length <= target.window:
        raise OptionError(
            "--data",
            f"sample {sample.id} has {length} tokens, {target.name} takes 1 .. {target.window}; prepare the data with "
            f"--max-length {target.window} or less",
        )
    assert len(sample.loss_mask) == length, f"sample {sample.id}: {len(sample.loss_mask)} marks for {length} tokens"
    low, high = int(np.min(sample.token_ids)), int(np.max(sample.token_ids))
    if low < 0 or high >= target.vocab_size:
        raise OptionError(
            "--data",
            f"sample {sample.id} has ids {low} .. {high}, {target.name} knows 0 .. {target.vocab_size - 1}; it was "
            "prepared with another tokenizer",
        )


# ------------------------------------------------------------------------------------------------------------- passes


class Chunk(NamedTuple):
    """Rows start .. end - 1 of one sample."""

    sample: int
    start: int
    end: int


def plan_passes(lengths: Sequence[int], most: int) -> list[list[Chunk]]:
    """Which rows each pass computes: in the order of the samples, at most `most` a pass.

    Only a sample longer than `most` is cut, after every `most` rows. Shorter ones stay whole: a causal pass over a
    whole sequence needs no mask, and where they are cut would depend on their neighbours.
    """
    passes: list[list[Chunk]] = []
    room = 0
    for sample, length in enumerate(lengths):
        for start in range(0, length, most):
            chunk = Chunk(sample, start, min(start + most, length))
            if chunk.end - chunk.start > room:
                passes.append([])
                room = most
            passes[-1].append(chunk)
            room -= chunk.end - chunk.start
    return passes


def _passes(target: Target, samples: Sequence[Sample], most: int) -> Iterator[Batch]:
    """The passes as packed batches without logits, over block tables that are given back as samples end.

    A sample that goes on is alone in its passes but for the last one, so the storage holds one long sequence and a
    pass of short ones at most, and the tables' blocks are neighbours, which attention reads without a copy.
    """
    passes = plan_passes([len(sample.token_ids) for sample in samples], most)
    pool = BlockPool(max((sum(blocks_for(chunk.end) for chunk in one) for one in passes), default=0))
    target.allocate(pool.num_blocks)
    tables: list[list[int]] = [[] for _ in samples]
    for one in passes:
        segments = []
        for chunk in one:
            pool.grow(tables[chunk.sample], chunk.end)
            tokens = samples[chunk.sample].token_ids[chunk.start : chunk.end].tolist()
            segments.append(Segment(tokens, chunk.start, tables[chunk.sample], logit_rows=0))
        yield Batch(segments)
        for chunk in one:
            if chunk.end == len(samples[chunk.sample].token_ids):
                pool.shrink(tables[chunk.sample], 0)
