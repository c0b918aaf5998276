"""EAGLE's loss: the next feature by smooth L1, and what the target's head reads from it by soft cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from forerun.drafters.chain.lesson import Lesson
from forerun.drafters.chain.unroll import chosen_ce, compare_chains, metrics_by_step, taught
from forerun.drafters.learned import Exercise, Losses, TrainingBatch
from forerun.drafters.losses import RowLosses, in_chunks

if TYPE_CHECKING:
    from forerun.drafters.eagle.decode import Eagle

NOISE_LENGTH = 512
"""Tokens of the sequence for which the width of the noise is given."""


def prepare(batch: TrainingBatch, generator: torch.Generator) -> Exercise:
    """The taught rows weigh 1 each; the noise of a sequence is a seed until it is used."""
    seeds = torch.randint(2**31, (len(batch.lengths),), generator=generator).tolist()
    return Exercise(float(taught(batch, 1).sum()), {"noise_seeds": seeds})


def losses(drafter: Eagle, batch: TrainingBatch, exercise: Exercise) -> Losses:
    """Feature and token losses, each a mean over the taught rows of a step (methods, 3.2)."""
    settings, lesson = drafter.settings, Lesson.of(drafter, batch, 1)
    rows, clean = lesson.rows, lesson.features
    if len(rows) == 0:
        return lesson.nothing
    noisy = clean + _noise(batch, clean, settings.feature_noise, exercise.drawn["noise_seeds"])
    hidden = _hidden(lesson, noisy)  # [n, H]
    feature = functional.smooth_l1_loss(hidden, clean[rows + 1], reduction="none").mean(-1)

    def compared(rows: Tensor, hidden: Tensor) -> RowLosses:
        return compare_chains(drafter, batch, rows, drafter.logits(hidden)[:, None])

    row_losses = in_chunks(compared, lesson.chunk, rows, hidden)  # [n, 1]
    total = settings.feature_weight * feature.sum() + settings.ce_weight * chosen_ce(row_losses, settings.ce).sum()
    metrics = {
        "feature": (float(feature.detach().sum()), float(len(rows))),
        **metrics_by_step(row_losses, lesson.mask),
    }
    return Losses(total, metrics)


def _hidden(lesson: Lesson, features: Tensor) -> Tensor:
    """[n, H] predicted features of the taught rows, in chunks that are computed again in the backward pass."""
    unroll = lesson.unroll(features)
    parts = torch.split(lesson.rows, lesson.chunk)
    return torch.cat([checkpoint(unroll.hidden, part, 1, use_reentrant=False)[:, 0] for part in parts])


def _noise(batch: TrainingBatch, like: Tensor, width: float, seeds: Sequence[int]) -> Tensor:
    """[T, H] uniform in (-1/2, 1/2) * width * 512 / length: so that the drafter learns to go on from its own output."""
    if width == 0:
        return torch.zeros_like(like)
    uniform = torch.cat([
        torch.rand(length, like.shape[1], generator=torch.Generator().manual_seed(seed)) - 0.5
        for length, seed in zip(batch.lengths, seeds, strict=True)
    ])  # fmt: skip
    lengths = torch.tensor(list(batch.lengths))
    widths = (width * NOISE_LENGTH / lengths).repeat_interleave(lengths)
    return (uniform * widths[:, None]).to(like)
