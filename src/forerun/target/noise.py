"""How far passes of different lengths disagree about the same positions: the bound behind every claim of equality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import blocks_for


@dataclass(frozen=True, slots=True)
class PassNoise:
    """Logits of single-row passes against those of passes over several rows, at the same positions after one text."""

    rows: int
    """Positions compared."""
    max_difference: float
    """Largest difference of any logit. The gap between two logits can move by twice this."""
    argmax_flips: int
    """Positions whose greedy token differs."""
    smallest_margin: float
    """Smallest gap between the two best logits of a single-row pass."""


def measure_noise(target: Target, ids: Sequence[int], block: int = 9, prefill: int | None = None) -> PassNoise:
    """Runs a text in single rows and in blocks of rows and compares the logits.

    A kernel may add up in another order when it is given more rows; in low precision that is enough to swap two nearly
    equal logits. Speculative and plain decoding differ by no more than this measures.

    Args:
        target: its KV storage is allocated anew, so measure before an engine uses it.
        ids: a text of at least prefill + block tokens.
        block: rows of the longer passes, K + 1.
        prefill: tokens to run first, in one pass; by default half of the text.
    """
    start = len(ids) // 2 if prefill is None else prefill
    assert 0 < start <= len(ids) - block, f"{len(ids)} tokens are too few for a block of {block} after {start}"
    single = _logits(target, ids, start, 1)
    several = _logits(target, ids, start, block)
    best = single.topk(2, -1).values
    return PassNoise(
        rows=len(single),
        max_difference=torch.where(single == several, 0, (single - several).abs()).max().item(),  # -inf in both: 0
        argmax_flips=int((single.argmax(-1) != several.argmax(-1)).sum()),
        smallest_margin=(best[:, 0] - best[:, 1]).min().item(),
    )


def _logits(target: Target, ids: Sequence[int], start: int, rows: int) -> Tensor:
    """[len(ids) - start, V] in float64, from passes of `rows` rows after one prefill; its own rows are read back."""
    table = list(range(blocks_for(len(ids))))
    target.allocate(len(table))
    target.forward(Batch([Segment(ids[:start], 0, table, 0)]))
    parts = []
    for first in range(start, len(ids), rows):
        tokens = ids[first : first + rows]
        parts.append(target.forward(Batch([Segment(tokens, first, table, len(tokens))])).logits.double())
    return torch.cat(parts)
