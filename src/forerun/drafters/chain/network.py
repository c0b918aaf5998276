"""The one decoder layer of a chain, as decoding and training see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from forerun.drafters.layers import Attention, LayerConfig, Mix, RMSNorm, Rotary
from forerun.errors import OptionError

ONE_LAYER = "one decoder layer: servers disagree on what a second one reads (hidden_norm or input_layernorm)"
"""vLLM and SGLang (formats, 8.2). It also means that of all rows but the last only keys and values are ever needed."""


class ChainNetwork(nn.Module, ABC):
    """A network of one layer in `layers`, whose output is the next row's feature."""

    fc: nn.Linear
    layers: nn.ModuleList
    rotary: Rotary

    @property
    def attention(self) -> Attention:
        return cast(Attention, self.layers[0].self_attn)

    @property
    def dtype(self) -> torch.dtype:
        return cast(RMSNorm, self.layers[0].post_attention_layernorm).weight.dtype

    @abstractmethod
    def attention_input(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Embedded tokens [n, H] and features [n, H] of rows -> what queries, keys and values are projected from."""

    @abstractmethod
    def forward(self, embedded: Tensor, feature: Tensor, mix: Mix) -> Tensor:
        """Embedded tokens [n, H] and features [n, H] -> hidden states [n, H]."""

    def feedback(self, hidden: Tensor) -> Tensor:
        """The feature [n, H] that the next row is given."""
        return hidden


def check_one_layer(layers: int | None) -> None:
    """OptionError for a setting of more layers."""
    if layers not in (None, 1):
        raise OptionError("layers", f"must be 1, got {layers}; {ONE_LAYER}")


def need_one_layer(config: LayerConfig) -> LayerConfig:
    """For validators: ValueError for a config of more layers."""
    if config.num_hidden_layers != 1:
        raise ValueError(f"num_hidden_layers must be 1; {ONE_LAYER}")
    return config
