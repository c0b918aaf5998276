"""EAGLE's network: embedding and feature fused, then one decoder layer; its output is the next feature.

Layout of the public checkpoints (formats, 9).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.drafters.chain.network import ChainNetwork
from forerun.drafters.layers import Attention, FeedForward, LayerConfig, Mix, RMSNorm, Rotary


class EagleLayer(nn.Module):
    """A llama layer without its first norm: what `fc` puts out is attended to as it is."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        """[n, H] -> [n, H]."""
        x = x + mix(self.self_attn, x)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleNetwork(ChainNetwork):
    """Fusion and layer.

    Args:
        config: shape of the layer.
        bias: of `fc`.
    """

    def __init__(self, config: LayerConfig, bias: bool):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.rotary = Rotary(config)

    def attention_input(self, embedded: Tensor, feature: Tensor) -> Tensor:
        fused: Tensor = self.fc(torch.cat([embedded, feature], -1))
        return fused

    def forward(self, embedded: Tensor, feature: Tensor, mix: Mix) -> Tensor:
        hidden: Tensor = self.layers[0](self.attention_input(embedded, feature), mix)
        return hidden
