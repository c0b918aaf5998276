"""Starting weights of a chain: random, or as much of the target as fits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forerun.drafters.layers import RMSNorm
from forerun.drafters.learned import DesignPlan
from forerun.target.base import Target
from forerun.target.donor import last_telling_layers, layer_weights, narrowed
from forerun.target.hf import HFTarget


@torch.no_grad()
def randomise(network: nn.Module, seed: int) -> None:
    """normal(0, 0.02) for linear layers, zeros for their biases, ones for norms: the families' own start."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, 0.02, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)


def last_layer(target: Target, plan: DesignPlan) -> dict[str, Tensor]:
    """The target's last decoder layer that changes anything, by portable names; nothing of a table, which has none."""
    if not isinstance(target, HFTarget):
        return {}
    [layer] = last_telling_layers(target, 1, plan.token_counts, plan.seed)
    return layer_weights(target, layer)


@torch.no_grad()
def take_over(layer: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Copies what fits by name and shape. A projection of twice the columns gets it on its second half, the feature's,
    and zeros on the embedding's."""
    own = dict(layer.named_parameters())
    if "mlp.gate_proj.weight" in own:
        given = narrowed(dict(given), len(own["mlp.gate_proj.weight"]))
    for name, weight in given.items():
        if name not in own or _needs_head_norm(name, given, own):
            continue
        parameter = own[name]
        if parameter.shape == weight.shape:
            parameter.copy_(weight)
        elif name.endswith("_proj.weight") and parameter.shape == (len(weight), 2 * weight.shape[1]):
            parameter.copy_(torch.cat([torch.zeros_like(weight), weight], 1))


def _needs_head_norm(name: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    """Queries and keys of a family that norms each head mean nothing to a layer without these norms."""
    norm = {"self_attn.q_proj.weight": "self_attn.q_norm.weight", "self_attn.k_proj.weight": "self_attn.k_norm.weight"}
    return name in norm and norm[name] in given and norm[name] not in own


@torch.no_grad()
def pass_last(fc: nn.Linear) -> None:
    """Makes a fusion the identity on the last of the vectors it is given side by side."""
    size = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -size:].copy_(torch.eye(size))
