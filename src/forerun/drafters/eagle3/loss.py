"""EAGLE-3's loss: cross entropy along the chain, the training-time test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.chain.unroll import (
    Unroll,
    chosen_ce,
    compare_chains,
    metrics_by_step,
    rows_per_chunk,
    taught,
)
from forerun.drafters.learned import Exercise, Losses, TrainingBatch
from forerun.drafters.losses import RowLosses, in_chunks

if TYPE_CHECKING:
    from forerun.drafters.eagle3.decode import Eagle3


def prepare(batch: TrainingBatch) -> Exercise:
    """Every row weighs 1, taught or not: dividing by taught rows alone hurt (DeepSpec's finding; methods, 4.3)."""
    return Exercise(float(len(batch.tokens)))


def losses(drafter: Eagle3, batch: TrainingBatch) -> Losses:
    """The sum over steps t and taught rows of decay^t times a cross entropy: of the target's law, or of the text."""
    steps, decay = drafter.settings.ttt_steps, drafter.settings.step_decay
    mask = taught(batch, steps)
    rows = mask.any(-1).nonzero()[:, 0]  # a row taught at no step is needed for its key and value alone
    if len(rows) == 0:
        return Losses(drafter.network.fc.weight.sum() * 0, {})
    features = drafter.fuse(batch.features)
    embedded = drafter.target.embed(batch.tokens).to(features.dtype)
    unroll = Unroll(drafter.network, batch, embedded, features)

    def compared(rows: Tensor) -> RowLosses:
        return compare_chains(drafter, batch, rows, drafter.logits(unroll.hidden(rows, steps)))

    row_losses = in_chunks(compared, rows_per_chunk(drafter, batch, steps), rows)  # [n, steps]
    weights = mask[rows] * decay ** torch.arange(steps, device=rows.device)
    return Losses((chosen_ce(row_losses, drafter.settings.ce) * weights).sum(), metrics_by_step(row_losses, mask[rows]))
