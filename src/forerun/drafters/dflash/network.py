"""DFlash's network: fused target features enter every layer as keys and values; a block of slots is one pass.

DFlash (arXiv 2602.06036); the layout of weights is that of the public checkpoints (formats, 4.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from forerun.drafters.layers import Attention, DecoderLayer, LayerConfig, Mix, RMSNorm, Rotary

if TYPE_CHECKING:
    from forerun.drafters.learned import DesignPlan
    from forerun.target.base import Target


class Backbone(nn.Module):
    """Fusion, layers and final norm.

    Args:
        config: shape of the layers.
        feature_size: m * H, columns of the tapped features.
    """

    def __init__(self, config: LayerConfig, feature_size: int):
        super().__init__()
        self.fc = nn.Linear(feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    @property
    def attentions(self) -> list[Attention]:
        return [cast(DecoderLayer, layer).self_attn for layer in self.layers]

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [T, m * H] -> the context [T, d] that all layers read (DSpark eq. 2)."""
        fused: Tensor = self.hidden_norm(self.fc(features.to(self.hidden_norm.weight.dtype)))
        return fused

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        """Embedded slots [N, d] -> hidden states [N, d] after the final norm; `mix` shows each slot what it sees."""
        for layer in self.layers:
            x = layer(x, mix)
        normed: Tensor = self.norm(x)
        return normed


def initialise(backbone: Backbone, target: Target, start: str, plan: DesignPlan, taps: int) -> None:
    """Starting weights.

    `random`, and `fitted` before `start.py` goes on: normal(0, 0.02) for linear layers, ones for norms. `target`: the
    last layers of the target that change anything, its final norm and, for the context, the norm of the first copied
    layer; `fc` passes the last tap through.
    A narrower feed-forward part keeps the neurons that write most. What the target's family builds in another way stays
    random.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    for module in backbone.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02, generator=generator)
    if start == "target":
        _from_target(backbone, target, plan, taps)


@torch.no_grad()
def _from_target(backbone: Backbone, target: Target, plan: DesignPlan, taps: int) -> None:
    from forerun.target.donor import final_norm_weight, last_telling_layers, layer_weights, narrowed
    from forerun.target.hf import HFTarget

    if not isinstance(target, HFTarget):
        return  # a table has no layers
    count = min(len(backbone.layers), target.num_layers)
    donors = last_telling_layers(target, count, plan.token_counts, plan.seed)
    donors = donors[:1] * (len(backbone.layers) - count) + donors
    for place, (layer, donor) in enumerate(zip(backbone.layers, donors, strict=True)):
        given = layer_weights(target, donor)
        given = narrowed(given, cast(DecoderLayer, layer).mlp.gate_proj.out_features)
        for name, parameter in layer.named_parameters():
            if name in given and given[name].shape == parameter.shape:
                parameter.copy_(given[name])
        context_norm = given.get("input_layernorm.weight")
        if place == 0 and context_norm is not None and context_norm.shape == backbone.hidden_norm.weight.shape:
            backbone.hidden_norm.weight.copy_(context_norm)
    norm = final_norm_weight(target)
    if norm is not None and norm.shape == backbone.norm.weight.shape:
        backbone.norm.weight.copy_(norm)
    size = backbone.fc.out_features
    if backbone.fc.in_features == taps * size:
        backbone.fc.weight.mul_(0.05)
        backbone.fc.weight[:, (taps - 1) * size :] += torch.eye(size)


def spread_taps(num_layers: int, most: int = 5) -> tuple[int, ...]:
    """Taps spread evenly from h = 2 to h = n - 2 (z-lab's rule), fewer where the target is shallow."""
    low = min(2, max(1, num_layers - 1))
    high = max(low, num_layers - 2)
    count = min(most, high - low + 1)
    if count == 1:
        return (high,)
    return tuple(sorted({round(low + i * (high - low) / (count - 1)) for i in range(count)}))


def default_layers(num_layers: int) -> int:
    """About a seventh of the target's depth, at most 5: 5 layers for 36 as in the published drafters."""
    return max(1, min(5, round(num_layers / 7)))


def mask_token(target: Target) -> int:
    """An id for the slots after the anchor: one that no text has, with an embedding that says something.

    A padded row of the vocabulary first, then a special token that does not end a text, then the end of text (which is
    never an anchor). Rows of nearly zero are passed over: all slots would look alike to the first layer.
    """
    tokenizer = target.tokenizer
    padded = list(range(tokenizer.size, target.vocab_size))
    special = sorted(tokenizer.special_ids - target.eos_token_ids)
    candidates = [i for i in [*padded, *special, *sorted(target.eos_token_ids)] if i < target.vocab_size]
    candidates = candidates or [target.vocab_size - 1]
    sample = torch.arange(0, min(tokenizer.size, target.vocab_size), device=target.device)[:1024]
    usual = target.embed(sample).float().norm(dim=-1).median()
    norms = target.embed(torch.tensor(candidates, device=target.device)).float().norm(dim=-1)
    speaking = [i for i, norm in zip(candidates, norms, strict=True) if norm > usual / 2]
    return speaking[0] if speaking else candidates[int(norms.argmax())]
