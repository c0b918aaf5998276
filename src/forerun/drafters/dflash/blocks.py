"""Blocks of a training batch: which anchors, which slots are taught, and the attention between blocks and context.

The context is the packed sequences' own rows; a block sees the rows before its anchor and itself, never another block
(methods, 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.drafters.layers import Attention, Mix, Rotation
from forerun.drafters.learned import TrainingBatch
from forerun.drafters.losses import decay_weights

CHUNK_ROWS = 256
"""Query rows of one attention call: the keys of a chunk's own blocks are then a small share of what it reads."""


@dataclass(frozen=True)
class Blocks:
    """Anchors of a batch, ascending within their sequence, and their slots.

    Args:
        anchors: per sequence, [A] positions in it.
        starts: packed row where each sequence begins.
        size: b, slots per block.
    """

    anchors: list[Tensor]
    starts: list[int]
    size: int
    lengths: Tensor | None = None
    """[B] slots that each block runs, as it would decode with a smaller K: the others are seen by nobody. None: all."""

    @cached_property
    def rows(self) -> Tensor:
        """[B] packed row of every anchor, B = blocks of all sequences."""
        return torch.cat([own + start for own, start in zip(self.anchors, self.starts, strict=True)])

    @cached_property
    def positions(self) -> Tensor:
        """[B * b] position of every slot: anchor + j."""
        return (torch.cat(self.anchors)[:, None] + torch.arange(self.size, device=self.rows.device)).flatten()

    @property
    def running(self) -> Tensor:
        """[B, b] which slots run."""
        slots = torch.arange(self.size, device=self.rows.device)
        if self.lengths is None:
            return torch.ones(len(self.rows), self.size, dtype=torch.bool, device=self.rows.device)
        return slots < self.lengths[:, None]

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """(first block, first packed row of its sequence, anchors [C]) of neighbouring blocks of one sequence."""
        block = 0
        for own, start in zip(self.anchors, self.starts, strict=True):
            for part in torch.split(own, max(1, CHUNK_ROWS // self.size)) if len(own) else ():
                yield block, start, part
                block += len(part)


def draw_anchors(batch: TrainingBatch, most: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Per sequence up to `most` positions i, drawn without replacement: tokens i and i + 1 are under the loss mask.

    One sequence after the other, when it is asked for: whatever else is drawn for a sequence is drawn in between, so
    that nothing depends on which sequences share a batch.
    """
    mask = batch.loss_mask.cpu()
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        own = mask[start : start + length]
        candidates = (own[:-1] & own[1:]).nonzero()[:, 0]
        chosen = torch.randperm(len(candidates), generator=generator)[:most]
        yield candidates[chosen].sort().values


def draw_lengths(count: int, most: int, least: int, share: float, generator: torch.Generator) -> Tensor:
    """[B] slots to run: `most`, but for that share of the blocks any number from `least` on, uniform.

    Slots see each other both ways, so a drafter that has met whole blocks only is at a loss when decoding plans fewer
    drafts and runs a shorter block (measured: accepted lengths of 1.7 of 2 where whole blocks were known by heart).
    """
    short = torch.rand(count, generator=generator) < share
    drawn = torch.randint(least, most + 1, (count,), generator=generator)
    return torch.where(short, drawn, most)


def taught(batch: TrainingBatch, blocks: Blocks, length: int) -> Tensor:
    """[B, K] bool: whether position k = 1 .. K of each block is taught: its slot runs, token s + k exists and is under
    the loss mask, and so is every one before it, so that no block crosses into another turn."""
    ends = torch.cat([
        torch.full_like(own, start + total)
        for own, start, total in zip(blocks.anchors, blocks.starts, batch.lengths, strict=True)
    ])  # fmt: skip
    label_rows = blocks.rows[:, None] + torch.arange(1, length + 1, device=blocks.rows.device)  # [B, K]
    inside = label_rows < ends[:, None]
    masked = batch.loss_mask[label_rows.clamp(max=len(batch.tokens) - 1)] & inside
    masked &= blocks.running[:, blocks.size - length :]
    return masked.long().cumprod(-1).bool()


def position_weights(mask: Tensor, gamma: float) -> Tensor:
    """[B, K] weight of every taught position, 0 elsewhere."""
    return mask * decay_weights(mask.shape[1], gamma, mask.device)


def block_mixer(blocks: Blocks, context: Tensor, context_rotation: Rotation, rotation: Rotation) -> Mix:
    """Attention of all slots [B * b] over fused context rows [T, d] before their anchor and over their own block."""

    def mix(attention: Attention, x: Tensor) -> Tensor:
        query = attention.query(x, rotation)
        own = attention.keys_values(x, rotation)
        outside = attention.keys_values(context, context_rotation)
        return attention.output(attend_blocks(blocks, query, outside, own, attention.scaling))

    return mix


def attend_blocks(
    blocks: Blocks, query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], scaling: float
) -> Tensor:
    """The attention itself, in bounded chunks of blocks.

    Args:
        blocks: B blocks of b slots.
        query: [B * b, heads, dim].
        context: keys and values [T, kv_heads, dim] of the packed rows.
        own: keys and values [B * b, kv_heads, dim] of the slots.
        scaling: of the scores.

    Returns:
        [B * b, heads, dim]
    """
    size, out = blocks.size, []
    for block, start, anchors in blocks.chunks():
        slots = slice(block * size, (block + len(anchors)) * size)
        seen = slice(start, start + int(anchors[-1]))  # rows before the chunk's last anchor
        keys, values = (torch.cat([o[seen], i[slots]]) for o, i in zip(context, own, strict=True))
        running = blocks.running[block : block + len(anchors)].flatten()
        mask = _visible(anchors, size, running)  # [C * b, L + C * b]
        out.append(_grouped(query[slots], keys, values, mask, scaling))
    return torch.cat(out) if out else torch.zeros_like(query)


def _visible(anchors: Tensor, size: int, running: Tensor) -> Tensor:
    """Slots [C * b] against the context rows before the last anchor and the chunk's own slots that run [C * b]."""
    block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(size)
    context = torch.arange(int(anchors[-1]), device=anchors.device) < anchors[block][:, None]
    return torch.cat([context, (block[:, None] == block) & running], 1)


def _grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """[N, heads, dim]: query heads that share a KV head are laid side by side as rows, so that nothing is repeated."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    folded = query.reshape(rows, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, dim)
    mixed = scaled_dot_product_attention(
        folded,
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask.repeat(groups, 1),
        scale=scaling,
    )  # [1, kv_heads, groups * N, dim]
    return mixed.reshape(kv_heads, groups, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)
