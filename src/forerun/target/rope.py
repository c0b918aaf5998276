"""Rotary frequencies of a model, for drafters that must rotate as their target does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import OptionError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def full_attention_rope(config: PretrainedConfig) -> dict[str, Any]:
    """`rope_parameters` of a config, those of the full-attention layers where the kinds of layer have their own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {kind: value for kind, value in parameters.items() if isinstance(value, dict) and "rope_type" in value}
    chosen = nested.get("full_attention") or next(iter(nested.values()), parameters)
    return {"rope_type": "default", "rope_theta": 10000.0, **chosen}


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int, window: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32 and the factor of cosine and sine, by transformers' own functions.

    A kind whose frequencies follow the length of the text (`dynamic`, `longrope`) has one value inside its original
    length; a target is served only there (see `probe`), and so is its drafter.

    Raises:
        OptionError: a kind of rotation that transformers does not know.
    """
    kind = rope["rope_type"]
    if kind == "default" or kind == "dynamic":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise OptionError("rope_parameters", f"rope_type {kind!r} is not known to transformers")
    # hidden_size and heads: some kinds derive the dimension from these.
    fields = {
        "max_position_embeddings": window,
        "head_dim": head_dim,
        "hidden_size": head_dim,
        "num_attention_heads": 1,
    }
    config = PretrainedConfig(**fields, rope_parameters=dict(rope))  # type: ignore[call-arg, arg-type]
    original = rope.get("original_max_position_embeddings")
    if original is not None:
        config.original_max_position_embeddings = original
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), seq_len=min(window, original or window)
    )
    return frequencies.float(), float(factor)
