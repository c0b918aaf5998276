"""EAGLE's loss: the next feature by smooth L1, and what the target's head reads from it by soft cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from forerun.drafters.chain.lesson import Lesson
from forerun.drafters.chain.unroll import compare_chains, metrics_by_step, taught
from forerun.drafters.learned import Exercise, Losses, TrainingBatch
from forerun.drafters.losses import RowLosses, Taught, weighed

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
    unroll = lesson.unroll(noisy)

    def chains(rows: Tensor, clean: Tensor, *shared: Tensor) -> Taught:
        hidden = unroll.over(*shared).hidden(rows, 1)[:, 0]  # [n, H]
        feature = functional.smooth_l1_loss(hidden, clean, reduction="none").mean(-1)
        losses = compare_chains(drafter, batch, rows, drafter.logits(hidden)[:, None])  # [n, 1]
        tokens = weighed(losses, settings.ce, settings.ce_weight)
        return settings.feature_weight * feature.sum() + tokens.sum(), (*losses, feature)

    total, (*columns, feature) = lesson.in_chunks(chains, unroll, clean[rows + 1])
    metrics = {
        "feature": (float(feature.sum()), float(len(rows))),
        **metrics_by_step(RowLosses(*columns), lesson.mask),
    }
    return Losses(total, metrics)


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
