"""What a training pass of a chain holds: of every row its inputs, and one chunk of rows with all of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from forerun.drafters.chain.unroll import chunk_of
from forerun.drafters.layers import kept_of_row
from forerun.drafters.learned import Held
from forerun.drafters.losses import COPIES

if TYPE_CHECKING:
    from forerun.drafters.chain.decode import ChainDrafter

KEPT, PASSING = 2, 2
"""Float32 copies of the scores that each step keeps (1.5 with bfloat16 autocast), and that are on their way at the
height of the backward pass: counted by torch's profiler, see the tests of plans."""


def chain_memory(drafter: ChainDrafter, lengths: Sequence[int], steps: int, half: bool) -> list[Held]:
    """Line by line.

    Args:
        drafter: any chain.
        lengths: tokens of the samples of a pass.
        steps: of every chain.
        half: with bfloat16 autocast.
    """
    tokens, (rows, span) = sum(lengths), _chunk(drafter, lengths, steps)
    attention, columns = drafter.network.attention, drafter.vocabulary.draft_size
    config: Any = drafter.config
    token, layer = _kept_of_token(drafter), kept_of_row(config.transformer_layer_config, half)
    logits = COPIES * 4 * steps * columns
    score = rows * 4 * attention.heads * span
    kept, passing = round(score * (1.5 if half else KEPT) * steps), score * PASSING
    inputs = Held("inputs of all rows", tokens * token, f"{tokens:,} tokens x {token:,} bytes")
    loss = Held("chunk of logits", rows * logits, f"{COPIES} x {rows:,} rows x {steps} steps x {columns:,} x 4 bytes")
    back = Held(
        "scores on their way back", passing, f"{PASSING} x {rows:,} rows x {attention.heads} x {span:,} x 4 bytes"
    )
    weights = sum(p.numel() for p in drafter.network.parameters() if p.requires_grad)
    return [
        inputs,
        Held("gradients of the chunks", 4 * weights, f"{weights:,} x 4 bytes, until they are handed on"),
        max(loss, back, key=lambda held: held.size),  # the logits are gone when the scores' turn comes
        Held("scores of the chunk", kept, f"{rows:,} rows x {kept // max(1, rows):,} bytes"),
        Held("layer of the chunk", rows * steps * layer, f"{rows:,} rows x {steps} steps x {layer:,} bytes"),
    ]


def _chunk(drafter: ChainDrafter, lengths: Sequence[int], steps: int) -> tuple[int, int]:
    """(rows, span) of a chunk where all rows are taught but the last two of a sequence, with nothing to predict."""
    ends = accumulate(lengths)
    taught = [row for length, end in zip(lengths, ends, strict=True) for row in range(end - length, end - 2)]
    if not taught:
        return 0, 0
    rows, span = chunk_of(drafter, lengths, torch.tensor(taught), steps, drafter.needs_normalizer)
    return min(len(taught), rows), span


def _kept_of_token(drafter: ChainDrafter) -> int:
    """Features as they are read (where that is not how they came), fused, embedded, normed or noised, side by side;
    keys and values."""
    attention, size = drafter.network.attention, drafter.target.hidden_size
    read = 4 * size * len(drafter.taps) if drafter.target.dtype.itemsize != 4 else 0
    return read + 24 * size + 8 * attention.kv_heads * attention.head_dim
