"""EAGLE-3's loss: cross entropy along the chain, the training-time test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.drafters.chain.lesson import Lesson
from forerun.drafters.chain.unroll import compare_chains, metrics_by_step
from forerun.drafters.learned import Exercise, Losses, TrainingBatch
from forerun.drafters.losses import RowLosses, Taught, weighed

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

    def chains(rows: Tensor, weights: Tensor, *shared: Tensor) -> Taught:
        hidden = unroll.over(*shared).hidden(rows, steps)
        losses = compare_chains(drafter, batch, rows, drafter.logits(hidden))
        return (weighed(losses, drafter.settings.ce, 1.0) * weights).sum(), losses

    weights = lesson.mask * decay ** torch.arange(steps, device=lesson.rows.device)
    total, columns = lesson.in_chunks(chains, unroll, weights)
    return Losses(total, metrics_by_step(RowLosses(*columns), lesson.mask))
