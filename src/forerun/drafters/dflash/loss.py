"""Training a block drafter: all blocks of a batch in one pass, then its law against the target's, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.drafters.dflash.blocks import Blocks, block_mixer, draw_anchors, draw_lengths, position_weights, taught
from forerun.drafters.dflash.config import BlockConfig, BlockSettings
from forerun.drafters.dflash.network import Backbone
from forerun.drafters.learned import Exercise, LearnedDrafter, TrainingBatch, wide
from forerun.drafters.losses import RowLosses, Taught, chunk_rows, compare, in_chunks, weighed


def exercise(
    batch: TrainingBatch, config: BlockConfig, settings: BlockSettings, generator: torch.Generator
) -> Exercise:
    """Anchors for a batch, and the weight of what they teach."""
    device, whole, least = batch.tokens.device, config.block_size, 1 + config.first_slot
    anchors, lengths = [], []
    for own in draw_anchors(batch, settings.anchors, generator):
        anchors.append(own.to(device))
        lengths.append(draw_lengths(len(own), whole, least, settings.short_blocks, generator).to(device))
    blocks = Blocks(anchors, batch.starts, whole, torch.cat(lengths))
    weights = position_weights(taught(batch, blocks, config.max_draft), settings.decay_gamma)
    return Exercise(float(weights.sum()), {"blocks": blocks, "weights": weights})


def hidden_states(
    backbone: Backbone, batch: TrainingBatch, blocks: Blocks, config: BlockConfig, embed: Callable[[Tensor], Tensor]
) -> Tensor:
    """[B, K, d]: the hidden state, after the final norm, that predicts token s + k of every block."""
    slots = torch.full((len(blocks.rows), blocks.size), config.mask_token_id, device=batch.tokens.device)
    slots[:, 0] = batch.tokens[blocks.rows]
    dtype = backbone.hidden_norm.weight.dtype
    context = backbone.fuse(batch.features)  # [T, d]
    mix = block_mixer(
        blocks, context, backbone.rotary(batch.positions, dtype), backbone.rotary(blocks.positions, dtype)
    )
    hidden: Tensor = backbone(embed(slots.flatten()).to(dtype), mix)
    return hidden.reshape(len(blocks.rows), blocks.size, hidden.shape[-1])[:, config.first_slot :]


@dataclass(frozen=True)
class Rows:
    """The taught positions of a batch, flat: N of them."""

    hidden: Tensor
    """[N, d]"""
    teacher: Tensor
    """[N] packed row whose next token is predicted: s + k - 1."""
    labels: Tensor
    """[N] target ids of the text."""
    weights: Tensor
    """[N]"""
    positions: Tensor
    """[N] k, from 1."""

    @classmethod
    def of(cls, hidden: Tensor, batch: TrainingBatch, blocks: Blocks, weights: Tensor) -> Rows:
        """From hidden states [B, K, d] and weights [B, K]."""
        block, slot = weights.nonzero(as_tuple=True)
        teacher = blocks.rows[block] + slot
        return cls(hidden[block, slot], teacher, batch.tokens[teacher + 1], weights[block, slot], slot + 1)


def row_losses(
    drafter: LearnedDrafter,
    batch: TrainingBatch,
    rows: Rows,
    settings: BlockSettings,
    progress: float,
    correction: tuple[Tensor, nn.Linear] | None = None,
) -> tuple[Tensor, RowLosses]:
    """The objective over the taught rows, and their losses [N] without a gradient.

    Args:
        drafter: gives head, teacher and vocabulary.
        batch: the sequences.
        rows: what is taught.
        settings: of the loss.
        progress: share of the training that is done.
        correction: latent [N, r] and the map [n, r] -> [n, D] of what it adds to the logits (DSpark's Markov bias).
    """
    latent = rows.hidden.new_zeros(len(rows.hidden), 0) if correction is None else correction[0]

    def taught(hidden: Tensor, latent: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor) -> Taught:
        logits = wide(drafter.target_head(hidden))
        if correction is not None:
            logits = logits + wide(correction[1](latent))
        teachers, where = torch.unique(teacher, return_inverse=True)  # neighbouring blocks overlap: each law once
        known = None if batch.log_normalizer is None else batch.log_normalizer[teachers]
        target_probs = drafter.target_probs(batch.last[teachers], known)[where]
        losses = compare(logits, target_probs, drafter.vocabulary.to_draft(labels), settings.teacher_top)
        return (weights * objective(losses, settings, progress)).sum(), losses

    size = chunk_rows(drafter.teacher_columns(batch.log_normalizer is not None))
    own = () if correction is None else correction[1].parameters()
    tensors = (rows.hidden, latent, rows.teacher, rows.labels, rows.weights)
    total, columns = in_chunks(taught, size, tensors, parameters=own)
    return total, RowLosses(*columns)


def objective(losses: RowLosses, settings: BlockSettings, progress: float) -> Tensor:
    """[N] what each row adds to the objective, before its position's weight (DSpark eq. 9 to 12)."""
    ce_weight, l1_weight = settings.ce_weight, settings.l1_weight
    if progress < settings.ce_first:
        ce_weight, l1_weight = ce_weight + l1_weight, 0.0
    return weighed(losses, settings.ce, ce_weight, l1_weight)


def metrics_of(rows: Rows, losses: RowLosses, length: int) -> dict[str, tuple[float, float]]:
    """Sums and weights: cross entropy and l1 weighted as they are taught, acceptance by position plain."""
    total = float(rows.weights.sum())
    out = {
        name: (float((rows.weights * column).sum()), total)
        for name, column in (("ce", losses.ce), ("soft_ce", losses.soft_ce), ("l1", losses.l1))
    }
    for k in range(1, length + 1):
        own = losses.acceptance[rows.positions == k]
        out[f"teacher_forced_acceptance@{k}"] = (float(own.sum()), float(len(own)))
    return out
