"""A backbone that begins with what least squares can say, before the first step of its training.

From random layers, or from those of the target, a block drafter learns next to nothing until its attention has found
the newest rows of the context: a short run spends most of its steps on that. (Qwen2.5-Coder 0.5B, 3 layers: after 30
minutes of a core a trained drafter had an acceptance of 0.26 at the first position, where a linear map of the features
of the row before the anchor has 0.44.) So the map is computed, in one pass over some of the data, and written into
the weights:

    features of the newest row --fc--> code --values--> attention on that row --output--> the target's next state

Reduced-rank regression (Izenman 1975) of the target's next normed states on the features, in the metric of its head,
gives the code: the directions that change the logits most come first, and every layer passes some of them on. Queries
and keys begin with one constant direction, which rotary embedding turns into a preference for near rows; rows of the
block have it reversed. The feed-forward parts begin by adding nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from forerun.drafters.dflash.blocks import Blocks, block_mixer, draw_anchors
from forerun.drafters.learned import Material, TrainingBatch
from forerun.drafters.learned.head import head_rows
from forerun.target.donor import final_norm_weight
from forerun.target.hf import HFTarget

if TYPE_CHECKING:
    from forerun.drafters.dflash.config import BlockConfig
    from forerun.drafters.dflash.drafter import BlockDrafter
    from forerun.drafters.dflash.network import Backbone
    from forerun.drafters.layers import Attention, DecoderLayer, Mix
    from forerun.target.base import Target

ROWS = 60_000
"""Rows of the data that are looked at, at most: 12 for each number of five taps of 896."""
SHARES = (1.0, 0.5, 0.25)
"""Weights of the states after the anchor, the one after it, and so on: one code serves all slots."""
RIDGE = 1e-3
"""Added to the correlation matrix of the features."""
CONSTANT = 10.0
"""Of the code's first number, which is nearly the same for all rows; the others have variance 1."""
NOISE = 0.002
"""Standard deviation of what is added to queries, keys, values and outputs, so that heads can grow apart."""
SLOWEST = 1 / 16
"""Radians per token of the slowest rotation that begins with a part in the attention: slower ones tell near rows from
nearer ones too little."""
ANCHORS = 256
"""Blocks of a sequence, at most, that are run to know what attention will see."""
EVEN = 1e-2
"""Added to the mean square of what is mapped to one direction, as a share of it."""


@torch.no_grad()
def fit_backbone(
    drafter: BlockDrafter, backbone: Backbone, material: Material, said: Callable[[Tensor], Tensor] | None = None
) -> bool:
    """Writes the start into `backbone`.

    Args:
        drafter: gives target, config and the ids that can be drafted: their rows of the head are the metric.
        backbone: of the drafter, on the target's device, in float32, its linear layers random.
        material: only as many of its batches are taken as are needed.
        said: token ids [n] -> [n, H], what another part of the drafter adds to the logits after that token, as a normed
            state (DSpark's Markov head): what it says need not be said twice.

    Returns:
        False, and nothing is changed, if the target's final norm is no RMS norm or the data have no row to learn from.
    """
    target = drafter.target
    weight = final_norm_weight(target) if isinstance(target, HFTarget) else None
    if weight is None:
        material.say("start: random layers; the target's final norm is none that a fitted start could use")
        return False
    material.say(f"start: fitting layers to the target's states, up to {ROWS:,} rows")
    seen, first = Regression(), None
    for batch in material.batches:
        rows = rows_to_fit(batch)
        if len(rows):
            seen.add(batch.features[rows - 1].float(), next_states(batch, rows, target, said))
            first = first or batch
        if seen.count >= ROWS:
            break
    if first is None:
        material.say("start: random layers; no sample is long enough to fit them to")
        return False
    metric = Metric.of(head_rows(target, drafter.vocabulary).to(target.device), weight.to(target.device))
    code = seen.code(metric, backbone.fc.out_features - 1)
    if said is not None:  # it says how frequent tokens are, and better: means of logits are not those of laws
        code = replace(code, base=torch.zeros_like(code.base))
    _write(backbone, code, metric, drafter.config, target, first)
    return True


# ---------------------------------------------------------------------------------------------------------- regression


def rows_to_fit(batch: TrainingBatch) -> Tensor:
    """[n] packed rows of tokens under the loss mask with a row before them and all the states after that are fitted."""
    lengths = torch.tensor(batch.lengths, device=batch.tokens.device)
    ends = (torch.tensor(batch.starts, device=lengths.device) + lengths).repeat_interleave(lengths)
    rows = torch.arange(len(batch.tokens), device=lengths.device)
    return rows[batch.loss_mask & (batch.positions > 0) & (rows + len(SHARES) <= ends)]


def next_states(batch: TrainingBatch, rows: Tensor, target: Target, said: Callable[[Tensor], Tensor] | None) -> Tensor:
    """[n, S, H] normed states of the target at these rows and the ones after, less what is said of them."""
    states = []
    for ahead in range(len(SHARES)):
        state = target.final_norm(batch.last[rows + ahead].to(target.dtype)).float()
        states.append(state if said is None else state - said(batch.tokens[rows + ahead]))
    return torch.stack(states, 1)


@dataclass(frozen=True)
class Metric:
    """How far apart two normed states are in their logits."""

    gram: Tensor
    """[H, H] U^T U / D of the head's rows U [D, H], a little of the identity added."""
    weight: Tensor
    """[H] of the final norm; small ones are held away from 0, they are divided by."""

    @classmethod
    def of(cls, head: Tensor, weight: Tensor) -> Metric:
        """From rows [D, H] of the head and the final norm's weight [H]."""
        gram: Tensor = head.T @ head / len(head)
        gram += 1e-3 * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), device=gram.device)
        least = 0.05 * weight.abs().median().clamp(min=1e-6)
        return cls(gram, torch.where(weight < 0, -1.0, 1.0) * weight.abs().clamp(min=least))

    @property
    def silent(self) -> Tensor:
        """[H] of mean square 1: the direction before the final norm that changes the logits least."""
        before = self.weight[:, None] * self.gram * self.weight
        least: Tensor = torch.linalg.eigh(before).eigenvectors[:, 0]
        return least * math.sqrt(len(before))


@dataclass(frozen=True)
class Code:
    """What of the features says something of the next states: k numbers of variance 1, the most telling ones first."""

    read: Tensor
    """[F, k]: features, less their mean, -> code."""
    mean: Tensor
    """[F] of the features."""
    write: Tensor
    """[k, H]: code -> the next normed state, less its mean."""
    base: Tensor
    """[H] mean of the next normed state."""


class Regression:
    """Sums over rows, from which next states [S, H] are foreseen by features [F]."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor] = []

    def add(self, features: Tensor, states: Tensor) -> None:
        """features [n, F], states [n, S, H]."""
        states = states.flatten(1)
        own = [features.T @ features, features.T @ states, features.sum(0), states.sum(0)]
        self._sums = [old + new for old, new in zip(self._sums, own, strict=True)] if self._sums else own
        self.count += len(features)

    def code(self, metric: Metric, most: int) -> Code:
        """At most so many numbers; fewer, where no more of them say anything."""
        square, cross, features, states = (total / self.count for total in self._sums)
        size = len(metric.gram)
        covariance = square - features[:, None] * features
        whitened = torch.linalg.cholesky(metric.gram)  # a state times it: as far apart as logits are
        shares = torch.tensor(SHARES, device=states.device)
        wanted = (cross - features[:, None] * states).reshape(len(features), -1, size) * shares[:, None] @ whitened
        spread = covariance.diagonal().clamp(min=1e-12).sqrt()
        related = covariance / spread[:, None] / spread + RIDGE * torch.eye(len(spread), device=spread.device)
        slopes = torch.linalg.solve(related, wanted.flatten(1) / spread[:, None]) / spread[:, None]  # [F, S * H]
        told, ways = torch.linalg.eigh(slopes.T @ covariance @ slopes)
        told, ways = told.flip(0)[:most], ways.flip(1)[:, :most]
        kept = told > 1e-6 * told[0].clamp(min=1e-12)
        told, ways = told[kept].sqrt(), ways[:, kept]
        write = torch.linalg.solve_triangular(whitened, (told[:, None] * ways[:size].T), upper=False, left=False)
        return Code(slopes @ ways / told, features, write / SHARES[0], states[:size])


# ------------------------------------------------------------------------------------------------------------- weights


def _read(backbone: Backbone, code: Code) -> None:
    """`fc` gives the code, behind a number that is nearly constant; the norm after it changes little."""
    constant = code.mean / (code.mean @ code.mean).clamp(min=1e-12)  # [F], 1 on the mean of the features
    read = code.read - constant[:, None] * (code.mean @ code.read)
    backbone.fc.weight.zero_()
    backbone.fc.weight[0] = CONSTANT * constant
    backbone.fc.weight[1 : 1 + read.shape[1]] = read.T
    backbone.hidden_norm.weight.fill_(1.0)


def _write(
    backbone: Backbone, code: Code, metric: Metric, config: BlockConfig, target: Target, batch: TrainingBatch
) -> None:
    """Fusion, values, outputs and, layer by layer with what comes out of it, queries and keys."""
    _read(backbone, code)
    backbone.norm.weight.copy_(metric.weight)
    context = backbone.fuse(batch.features)  # [T, d]
    taught = batch.loss_mask
    scale = backbone.fc(batch.features[taught].float()).square().mean(-1).sqrt().mean()
    parts = _parts(code, metric, scale, float(context[taught, 0].mean()))
    x, mix, shape = _blocks(backbone, config, target, batch, context)
    generator = torch.Generator().manual_seed(len(parts))
    for layer in (cast("DecoderLayer", each) for each in backbone.layers):
        layer.mlp.down_proj.weight.zero_()
        room = layer.self_attn.kv_heads * layer.self_attn.head_dim
        _pass_on(layer.self_attn, parts[:room])
        parts = parts[room:]
        normed = layer.input_layernorm(x).reshape(*shape, -1)
        slots = [part.flatten(0, 1) for part in (normed[:, :1], normed[:, 1:]) if part.numel()]
        _look_back(layer.self_attn, context[taught], slots, backbone.rotary.frequencies, 1 + config.first_slot)
        _disturb(layer.self_attn, generator)
        x = layer(x, mix)


def _parts(code: Code, metric: Metric, scale: Tensor, constant: float) -> list[tuple[int, Tensor]]:
    """(place in the fused context, [H] what a unit of it adds before the final norm): the constant first.

    All of them together have a mean square of about 1, so that the final norm leaves them as they are: what the mean
    and the code leave of it goes in the direction that says nothing.
    """
    write, base = code.write * scale / metric.weight, code.base / metric.weight
    spent = (code.write / metric.weight).square().sum(0).mean() + base.square().mean()
    rest = (1 - spent).clamp(min=0.2).sqrt()
    first = (base + rest * metric.silent) / constant
    return [(0, first), *((1 + i, one) for i, one in enumerate(write))]


def _blocks(
    backbone: Backbone, config: BlockConfig, target: Target, batch: TrainingBatch, context: Tensor
) -> tuple[Tensor, Mix, tuple[int, int]]:
    """Embedded slots [B * b, d] of some blocks, the attention over them, and (B, b)."""
    generator = torch.Generator().manual_seed(0)
    anchors = [own.to(batch.tokens.device) for own in draw_anchors(batch, ANCHORS, generator)]
    blocks = Blocks(anchors, batch.starts, config.block_size)
    slots = torch.full((len(blocks.rows), blocks.size), config.mask_token_id, device=batch.tokens.device)
    slots[:, 0] = batch.tokens[blocks.rows]
    turns = backbone.rotary(batch.positions, context.dtype), backbone.rotary(blocks.positions, context.dtype)
    mix = block_mixer(blocks, context, *turns)
    return target.embed(slots.flatten()).to(context.dtype), mix, (len(blocks.rows), blocks.size)


def _pass_on(attention: Attention, parts: list[tuple[int, Tensor]]) -> None:
    """Each value takes one part from the context; the query heads that read it share in writing it."""
    sharing, dim = attention.heads // attention.kv_heads, attention.head_dim
    attention.v_proj.weight.zero_()
    attention.o_proj.weight.zero_()
    for value, (place, written) in enumerate(parts):
        attention.v_proj.weight[value, place] = 1.0
        head, column = divmod(value, dim)
        for query in range(head * sharing, (head + 1) * sharing):
            attention.o_proj.weight[:, query * dim + column] = written / sharing


def _look_back(attention: Attention, context: Tensor, slots: list[Tensor], frequencies: Tensor, distance: int) -> None:
    """Queries and keys of one direction, which rotation makes most alike at that distance back; keys of the block,
    whose rows are nearer, have it reversed.

    Args:
        attention: of the layer.
        context: [T, d] rows of the context.
        slots: [B, d] normed anchors, and, if there are any, [N, d] normed slots after them.
        frequencies: [head_dim / 2] of the rotation, radians per token.
        distance: between the first slot that predicts and the newest row of the context.
    """
    size = attention.head_dim
    turning = frequencies.to(context)[: size // 2]
    strength = (turning >= min(SLOWEST, float(turning.max()))).to(turning)
    strength *= math.sqrt(size / float(strength.sum()))
    angles = turning * distance
    key = torch.cat([strength, torch.zeros_like(strength)])
    query = torch.cat([strength * angles.cos(), -strength * angles.sin()])
    asked = _directed([(own, query) for own in slots])
    found = _directed([(context, key), *((own, -key) for own in slots)])
    attention.q_proj.weight.copy_(asked.repeat(attention.heads, 1))
    attention.k_proj.weight.copy_(found.repeat(attention.kv_heads, 1))


def _directed(wanted: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[out, d]: the map that brings all rows [n, d] of a group nearest to its vector [out], groups counting alike."""
    gram = torch.stack([rows.T @ rows / len(rows) for rows, _ in wanted]).mean(0)
    gram += EVEN * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), device=gram.device)
    towards = torch.stack([torch.outer(rows.mean(0), vector) for rows, vector in wanted]).mean(0)
    found: Tensor = torch.linalg.solve(gram, towards).T
    return found


def _disturb(attention: Attention, generator: torch.Generator) -> None:
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        assert isinstance(layer, nn.Linear)
        noise = torch.randn(layer.weight.shape, generator=generator) * NOISE
        layer.weight.add_(noise.to(layer.weight.device))
