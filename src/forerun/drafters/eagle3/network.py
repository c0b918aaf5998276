"""EAGLE-3's network: fused taps, one layer that reads embedding and feature side by side, a head of its own.

Layout of the public checkpoints (formats, 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.drafters.chain.network import ChainNetwork
from forerun.drafters.eagle3.config import Eagle3Config
from forerun.drafters.layers import Attention, FeedForward, Head, LayerConfig, Mix, RMSNorm, Rotary


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads [input_layernorm(embedding), hidden_norm(feature)]; its residual stream is
    the feature's alone."""

    def __init__(self, config: LayerConfig, norm_before_residual: bool):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = FeedForward(config)
        self._norm_before_residual = norm_before_residual

    def attention_input(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """[n, 2 * H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)

    def forward(self, embedded: Tensor, feature: Tensor, mix: Mix) -> Tensor:
        """[n, H], [n, H] -> [n, H]."""
        residual = self.hidden_norm(feature) if self._norm_before_residual else feature
        x = residual + mix(self.self_attn, self.attention_input(embedded, feature))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Network(ChainNetwork):
    """Fusion, layer, final norm and head, with the variants the config names."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        layer, taps = config.transformer_layer_config, len(config.aux_hidden_state_layer_ids)
        size, wide = layer.hidden_size, taps * config.target_hidden_size
        self.input_norm = RMSNorm(wide, layer.rms_norm_eps) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, layer.rms_norm_eps) for _ in range(taps if config.fc_norm else 0)
        )
        self.fc = nn.Linear(wide, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(layer, config.norm_before_residual)])
        self.norm = RMSNorm(size, layer.rms_norm_eps)
        self.lm_head = Head(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(layer)
        self._norm_output = config.norm_output

    def taps(self, features: Tensor) -> Tensor:
        """Target features [n, m * H] as `fc` reads them."""
        features = self.input_norm(features.to(self.dtype))
        if self.fc_norm:
            taps = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        return features

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [n, m * H] -> [n, H]."""
        fused: Tensor = self.fc(self.taps(features))
        return fused

    def attention_input(self, embedded: Tensor, feature: Tensor) -> Tensor:
        out: Tensor = self.layers[0].attention_input(embedded, feature)  # type: ignore[operator]
        return out

    def forward(self, embedded: Tensor, feature: Tensor, mix: Mix) -> Tensor:
        hidden: Tensor = self.layers[0](embedded, feature, mix)
        return hidden

    def feedback(self, hidden: Tensor) -> Tensor:
        fed: Tensor = self.norm(hidden) if self._norm_output else hidden
        return fed

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., D]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out
