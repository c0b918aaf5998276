"""EAGLE-3's loss: cross entropy along the chain, the training-time test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.chain.lesson import Lesson
from forerun.drafters.chain.unroll import chosen_ce, compare_chains, metrics_by_step
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
    lesson = Lesson.of(drafter, batch, steps)
    if len(lesson.rows) == 0:
        return lesson.nothing
    unroll = lesson.unroll(lesson.features)

    def compared(rows: Tensor) -> RowLosses:
        return compare_chains(drafter, batch, rows, drafter.logits(unroll.hidden(rows, steps)))

    row_losses = in_chunks(compared, lesson.chunk, lesson.rows)  # [n, steps]
    weights = lesson.mask * decay ** torch.arange(steps, device=lesson.rows.device)
    total = (chosen_ce(row_losses, drafter.settings.ce) * weights).sum()
    return Losses(total, metrics_by_step(row_losses, lesson.mask))
