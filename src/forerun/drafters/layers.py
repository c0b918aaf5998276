"""Layers that learned drafters are built from, with the names and shapes of the portable checkpoint types.

One set for every target family: the `qwen3` layer (each head of queries and keys normed) and the `llama` layer
(without). Attention is split in three, so that training and decoding share the weights and differ in what lies
between: `query`, `keys_values`, then whatever mixes them, then `output`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from forerun.drafters.learned.config import MOST_LAYERS, Strict
from forerun.target.base import Target
from forerun.target.rope import inverse_frequencies


class LayerConfig(Strict):
    """Shape of a drafter's decoder layers. Every field is written; none has a default that two programs could set."""

    model_type: Literal["qwen3", "llama"]
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1, le=MOST_LAYERS)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rms_norm_eps: float = Field(gt=0)
    hidden_act: Literal["silu"]
    attention_bias: Literal[False]
    rope_parameters: dict[str, float | int | str | list[float] | bool | None]
    max_position_embeddings: int = Field(ge=1)

    @model_validator(mode="after")
    def _turns(self) -> LayerConfig:
        try:
            frequencies, _ = inverse_frequencies(self.rope_parameters, self.head_dim, self.max_position_embeddings)
        except KeyError as error:
            raise ValueError(f"rope_parameters has no {error.args[0]}") from None
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # also of transformers and torch
            raise ValueError(f"rope_parameters cannot be used: {error}") from None
        if not frequencies.isfinite().all() or self.head_dim % 2:
            raise ValueError("rope_parameters and an even head_dim must give finite frequencies")
        return self


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine [T, head_dim] of some positions."""

Mix = Callable[["Attention", Tensor], Tensor]
"""`mix(attention, normed [T, H])`: the attention's whole work on normed rows, [T, hidden]."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, normed in at least float32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Head(nn.Linear):
    """A linear layer that gives logits, a row for each token: an optimiser treats it as a table, not as a matrix."""


class Rotary(nn.Module):
    """Rotary embedding in the half-split form of Hugging Face's Llama and Qwen (Su et al. 2021)."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        with torch.device("cpu"):  # real numbers also where the network is built without memory for its weights
            frequencies, factor = inverse_frequencies(
                config.rope_parameters, config.head_dim, config.max_position_embeddings
            )
        self.factor = factor
        # No buffer: a cast of the network to bfloat16 would round it, and decoding turn by other angles than training.
        self.frequencies = frequencies

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Positions [T] -> cosine and sine [T, head_dim], computed in at least float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions[:, None].to(wide) * self.frequencies.to(positions.device, wide)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, head_dim] turned by the positions of `rotation`."""
    cosine, sine = (part[:, None] for part in rotation)
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cosine + turned * sine


class Attention(nn.Module):
    """Projections of grouped-query attention; what mixes the rows is the caller's.

    Args:
        config: shape; `qwen3` norms each head of queries and keys.
        input_size: columns of what is projected, if not hidden_size (EAGLE-3: embedding and feature side by side).
    """

    def __init__(self, config: LayerConfig, input_size: int | None = None):
        super().__init__()
        size = input_size or config.hidden_size
        self.head_dim, self.heads, self.kv_heads = (
            config.head_dim, config.num_attention_heads, config.num_key_value_heads,
        )  # fmt: skip
        self.q_proj = nn.Linear(size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        normed = config.model_type == "qwen3"
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    @property
    def scaling(self) -> float:
        return float(self.head_dim**-0.5)

    def query(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, input] -> [T, heads, head_dim], rotated."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[T, input] -> keys and values [T, kv_heads, head_dim], the keys rotated."""
        keys, values = (p(x).unflatten(-1, (self.kv_heads, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(keys), rotation), values

    def output(self, mixed: Tensor) -> Tensor:
        """[T, heads, head_dim] -> [T, hidden]."""
        projected: Tensor = self.o_proj(mixed.flatten(-2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer; `mix` does the attention between its projections."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        x = x + mix(self.self_attn, self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def kept_of_row(config: LayerConfig, half: bool) -> int:
    """Bytes that a row leaves in one layer for the backward pass; keys and values beyond the norm are their reader's.

    | of | in float32 | with bfloat16 autocast |
    |---|---|---|
    | two norms: input, normed, output | 2 x 3 x 4 d | 2 x 2 x 4 d, and a copy for each of the five projections, 10 d |
    | queries: normed per head (twice 4), turned, mixed, read by `o_proj` | (8 +) 12 | (6 +) 6 |
    | keys: normed per head | (8) | (6) |
    | gate, its silu, up, their product | 16 F | 8 F |
    """
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    normed = config.model_type == "qwen3"
    norms = 26 if half else 24
    of_heads = (6 if half else 8) * normed
    mixing, feed = (6, 8) if half else (12, 16)
    return (
        norms * config.hidden_size + (mixing + of_heads) * queries + of_heads * keys + feed * config.intermediate_size
    )


def like_target(target: Target, model_type: Literal["qwen3", "llama"], layers: int, ffn: int | None) -> LayerConfig:
    """Layers with the measures of the target's own; `ffn` is another intermediate size."""
    shape = target.shape
    return LayerConfig(
        model_type=model_type,
        hidden_size=shape.hidden_size,
        intermediate_size=ffn or shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        hidden_act="silu",
        attention_bias=False,
        rope_parameters=dict(shape.rope_parameters),
        max_position_embeddings=target.window,
    )
