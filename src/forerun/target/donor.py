"""A decoder layer's weights under the names of the portable draft layers, for drafters that start from the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forerun.target.base import Batch, Segment, Shape
from forerun.target.blocks import blocks_for
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


def narrowed(given: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The same layer with a feed-forward part of `size` neurons, in their order: those with the largest product of the
    norms of what they read and write. Nothing changes where the part is missing, or is no wider."""
    names = [f"mlp.{name}.weight" for name in FEED_FORWARD]
    if not all(name in given for name in names) or len(given[names[0]]) <= size:
        return given
    gate, up, down = (given[name] for name in names)
    weight = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = weight.topk(size).indices.sort().values
    return {**given, names[0]: gate[kept], names[1]: up[kept], names[2]: down[:, kept]}


def final_norm_weight(target: HFTarget) -> Tensor | None:
    """[H], the factor of the final norm; None if it is no RMS norm."""
    return norm_weight(target.anatomy.norm, target.shape.hidden_size, target.shape.rms_norm_eps)


PROBE_TOKENS = 128
"""Of the pass that measures what layers change."""
TELLING = 0.1
"""Share of the layers' mean influence below which a layer is passed over as a donor: it hardly changes anything."""


def layer_influence(target: HFTarget, token_ids: Sequence[int]) -> list[float]:
    """How much each decoder layer changes what it is given: 1 - the mean cosine of a hidden state before and after it.

    The target's KV storage is free afterwards.
    """
    states = target.num_layers + 1
    target.allocate(blocks_for(len(token_ids)))
    try:
        segment = Segment(token_ids, 0, list(range(blocks_for(len(token_ids)))), 0)
        features = target.forward(Batch([segment]), tuple(range(states))).features
    finally:
        target.allocate(0)
    assert features is not None
    hidden = features.float().reshape(len(token_ids), states, -1)  # [T, n + 1, H]
    kept = torch.cosine_similarity(hidden[:, :-1], hidden[:, 1:], -1).mean(0)
    return (1 - kept).tolist()


def layers_by_influence(target: HFTarget, token_counts: Tensor, seed: int) -> list[float]:
    """`layer_influence` on tokens as frequent as in some data [V] (ShortGPT's measure, arXiv 2403.03853)."""
    generator = torch.Generator().manual_seed(seed)
    frequent = token_counts.double().cpu() + 1e-9
    probe = torch.multinomial(frequent, min(PROBE_TOKENS, target.window), replacement=True, generator=generator)
    return layer_influence(target, probe.tolist())


def last_telling_layers(target: HFTarget, count: int, token_counts: Tensor, seed: int) -> list[int]:
    """The last `count` layers that change the hidden state noticeably, ascending; the last ones if there are fewer.

    In a model that was made deeper by copies, the last layers may be next to nothing: a draft layer that starts as one
    of them starts as nothing (measured on the embedded target, where 8 of 12 are such).
    """
    influence = layers_by_influence(target, token_counts, seed)
    least = TELLING * sum(influence) / len(influence)
    telling = [layer for layer, change in enumerate(influence) if change >= least]
    others = [layer for layer in range(target.num_layers) if layer not in telling]
    return sorted((others + telling)[-count:])


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
