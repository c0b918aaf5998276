"""A decoder layer's weights under the names of the portable draft layers, for drafters that start from the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forerun.target.base import Shape
from forerun.target.packed import PackedLinear

if TYPE_CHECKING:
    from forerun.target.hf import HFTarget

NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def layer_weights(target: HFTarget, layer: int) -> dict[str, Tensor]:
    """What decoder layer `layer` (0 .. n - 1) has of a portable pre-norm layer, in float32 and by its names there.

    Linear weights `self_attn.q_proj.weight`, .., norms as the factor they multiply with (of `1 + w` norms as well).
    A part that the family builds in another way - fused projections, sandwich norms, experts - is not in the result;
    biases are not either, the portable layers have none.
    """
    module = target.anatomy.layers[layer]
    return {name: weight for name, weight in _parts(module, target.shape) if weight.isfinite().all()}


def final_norm_weight(target: HFTarget) -> Tensor | None:
    """[H], the factor of the final norm; None if it is no RMS norm."""
    return norm_weight(target.anatomy.norm, target.shape.hidden_size, target.shape.rms_norm_eps)


def _parts(module: nn.Module, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    inner = dict(module.named_modules())
    sandwich = any("feedforward" in name for name in inner)  # Gemma 2 and 3: the names mean other norms there
    for name in () if sandwich else NORMS:
        if name in inner:
            yield from _norm(name, inner[name], shape.hidden_size, shape.rms_norm_eps)
    for name in HEAD_NORMS:
        if f"self_attn.{name}" in inner:
            yield from _norm(f"self_attn.{name}", inner[f"self_attn.{name}"], shape.head_dim, shape.rms_norm_eps)
    for name in (*(f"self_attn.{part}" for part in ATTENTION), *(f"mlp.{part}" for part in FEED_FORWARD)):
        if isinstance(inner.get(name), (nn.Linear, PackedLinear)):
            yield f"{name}.weight", inner[name].weight.detach().float()


def _norm(name: str, module: nn.Module, size: int, eps: float) -> Iterator[tuple[str, Tensor]]:
    weight = norm_weight(module, size, eps)
    if weight is not None:
        yield f"{name}.weight", weight


@torch.no_grad()
def norm_weight(norm: nn.Module, size: int, eps: float) -> Tensor | None:
    """[size] in float32: what an RMS norm multiplies with, found by applying it; None if it is none over `size`."""
    parameter = next(norm.parameters(), None)
    if parameter is None or parameter.shape != (size,):
        return None
    probe = torch.linspace(1, 2, size, dtype=torch.float64)
    probes = torch.stack([probe, probe.flip(0) * 3]).to(parameter)  # [2, size]
    wide = probes.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    weights: Tensor = norm(probes).double() / expected
    tolerance = 1e-4 if parameter.dtype in (torch.float32, torch.float64) else 2e-2
    if not torch.allclose(weights[0], weights[1], rtol=tolerance, atol=tolerance):
        return None
    return weights[0].float()
