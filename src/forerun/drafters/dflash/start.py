"""A backbone that begins with what least squares can say, before the first step of its training.

From random layers, or from those of the target, a block drafter learns next to nothing until its attention has found
the newest rows of the context: a short run spends most of its steps on that. A linear map of the features of the row
before the anchor finds them at once. So that map is computed, in one pass over some of the data, and written into the
weights (Qwen2.5-Coder 0.5B, before the first step, with a Markov head: acceptance 0.35 at the first position, 0.01 with
the target's layers, 0.00 with random ones; docs/benchmarks/qwen-starts.md):

    features of the newest row --fc--> code --values--> attention on that row --output--> the target's next state

Every layer passes on some numbers of the code. Queries and keys begin with one constant direction, which rotary
embedding turns into a preference for near rows; rows of the block have it reversed. The feed-forward parts begin by
adding nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from forerun.drafters.dflash.blocks import Blocks, block_mixer, draw_anchors
from forerun.drafters.learned import Material
from forerun.drafters.learned.aim import disturb, look_back, pass_on
from forerun.drafters.learned.fitting import Code, Fit, Said, constant_part, fit_states, reduced

if TYPE_CHECKING:
    from forerun.drafters.dflash.drafter import BlockDrafter
    from forerun.drafters.dflash.network import Backbone
    from forerun.drafters.layers import DecoderLayer, Mix

CONSTANT = 10.0
"""Of the code's first number, which is nearly the same for all rows; the others have variance 1."""
PEAK = 8.0
"""Score of a row of the context as far back as the newest one from the first slot that predicts. That row then has more
than half of that slot's attention, and the others share the rest. A sharper look (12 was tried) gains at the first
position and loses more at the later ones, whose slots would foresee what the first one does."""
ANCHORS = 256
"""Blocks of a sequence, at most, that are run to know what attention will see."""


@torch.no_grad()
def fit_backbone(drafter: BlockDrafter, backbone: Backbone, material: Material, said: Said | None = None) -> bool:
    """Writes the start into `backbone`, a part of the drafter, whose linear layers are random so far.

    False, and nothing is changed: there is nothing to fit it to (`fit_states` has said what).
    """
    fit = fit_states(drafter, material, lambda batch, rows: batch.features[rows - 1], said)
    if fit is None:
        return False
    seen = fit.regression
    code = reduced(seen.slopes(), seen.covariance, fit.metric, backbone.fc.out_features - 1)
    # A Markov head says how frequent tokens are, and better: means of logits are not those of laws.
    base = seen.base[0] if said is None else torch.zeros_like(seen.base[0])
    _read(backbone, code, seen.mean)
    _write(backbone, code, base, fit, drafter)
    return True


def _read(backbone: Backbone, code: Code, mean: Tensor) -> None:
    """`fc` gives the code, behind a number that is nearly constant; the norm after it changes little."""
    constant = constant_part(mean)
    read = code.read - constant[:, None] * (mean @ code.read)
    backbone.fc.weight.zero_()
    backbone.fc.weight[0] = CONSTANT * constant
    backbone.fc.weight[1 : 1 + read.shape[1]] = read.T
    backbone.hidden_norm.weight.fill_(1.0)


def _write(backbone: Backbone, code: Code, base: Tensor, fit: Fit, drafter: BlockDrafter) -> None:
    """Values, outputs and, layer by layer with what comes out of it, queries and keys."""
    batch, weight = fit.first, fit.metric.weight
    backbone.norm.weight.copy_(weight)
    context = backbone.fuse(batch.features)  # [T, d]
    taught = context[batch.loss_mask]
    scale = backbone.fc(batch.features[batch.loss_mask].float()).square().mean(-1).sqrt().mean()
    spoken = torch.cat([base[None], code.write]) / weight
    constant = (spoken[0] + fit.metric.filling(spoken.square().sum(0).sqrt())) / taught[:, 0].mean()
    written = torch.cat([constant[None], spoken[1:] * scale])  # [1 + k, H]
    read = one_hot(torch.arange(len(written), device=context.device), backbone.fc.out_features).to(context)
    x, mix, shape = _blocks(backbone, drafter, fit, context)
    generator, done = torch.Generator().manual_seed(len(written)), 0
    for layer in (cast("DecoderLayer", each) for each in backbone.layers):
        attention = layer.self_attn
        layer.mlp.down_proj.weight.zero_()
        own = slice(done, done + attention.kv_heads * attention.head_dim)
        pass_on(attention, list(zip(read[own], written[own], strict=True)))
        done = own.stop
        normed = layer.input_layernorm(x).reshape(*shape, -1)
        slots = [part.flatten(0, 1) for part in (normed[:, :1], normed[:, 1:]) if part.numel()]
        newest = 1 + drafter.config.first_slot  # as far from the first slot that predicts
        look_back(attention, backbone.rotary, newest, slots, [taught], unseen=slots, peak=PEAK)
        disturb(attention, generator)
        x = layer(x, mix)


def _blocks(
    backbone: Backbone, drafter: BlockDrafter, fit: Fit, context: Tensor
) -> tuple[Tensor, Mix, tuple[int, int]]:
    """Embedded slots [B * b, d] of some blocks, the attention over them, and (B, b)."""
    batch, config = fit.first, drafter.config
    blocks = Blocks(_anchors(fit), batch.starts, config.block_size)
    slots = torch.full((len(blocks.rows), blocks.size), config.mask_token_id, device=batch.tokens.device)
    slots[:, 0] = batch.tokens[blocks.rows]
    turns = backbone.rotary(batch.positions, context.dtype), backbone.rotary(blocks.positions, context.dtype)
    mix = block_mixer(blocks, context, *turns)
    return drafter.target.embed(slots.flatten()).to(context.dtype), mix, (len(blocks.rows), blocks.size)


def _anchors(fit: Fit) -> list[Tensor]:
    """Per sequence [A] positions: as in training, or the rows that were fitted where the batch has no place for that
    (no two learned tokens in a row)."""
    batch = fit.first
    drawn = list(draw_anchors(batch, ANCHORS, torch.Generator().manual_seed(0)))
    if not any(len(own) for own in drawn):
        fitted = torch.zeros_like(batch.loss_mask).index_fill_(0, fit.rows, True)
        drawn = [own.nonzero()[:ANCHORS, 0] for own in torch.split(fitted, list(batch.lengths))]
    return [own.to(batch.tokens.device) for own in drawn]
