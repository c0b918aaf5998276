"""What a target is to the rest of forerun: one packed forward, its own norm and head, KV rows that can be cut back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK_SIZE = 16
"""Tokens per KV block."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows in a step: `tokens` at positions start, start + 1, ... whose keys and values are appended.

    Rows 0 .. start - 1 must already lie in `blocks`. Cutting a request back is starting its next segment earlier:
    lengths are the only state, rows behind them are overwritten.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    """Block table: block i holds positions i * BLOCK_SIZE ...; it must cover start + len(tokens) rows."""
    logit_rows: int
    """How many of the last rows need logits: 0 inside a prefill, 1 at its end, all in a verify block."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """All rows of one step, packed into [T] without padding."""

    segments: Sequence[Segment]

    @cached_property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]  # [T]

    @cached_property
    def positions(self) -> list[int]:
        return [p for segment in self.segments for p in range(segment.start, segment.end)]  # [T]

    @cached_property
    def slots(self) -> list[int]:
        """Where each row's key and value go: block * BLOCK_SIZE + offset."""
        return [
            segment.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for segment in self.segments
            for p in range(segment.start, segment.end)
        ]

    @cached_property
    def logit_index(self) -> list[int]:
        """Packed row numbers that need logits, ascending."""
        out: list[int] = []
        row = 0
        for segment in self.segments:
            row += len(segment.tokens)
            out += range(row - segment.logit_rows, row)
        return out


class Forward(NamedTuple):
    """The result of one pass."""

    logits: Tensor
    """[L, V], one row per entry of `batch.logit_index`, in the model's dtype."""
    features: Tensor | None
    """[T, m * H], the tapped hidden states of all rows side by side in ascending h, each before the final norm."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder layer of a target looks like: the measures a drafter's own layers start from."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    """transformers' `rope_parameters` of its full-attention layers, at least `rope_type` and `rope_theta`."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def size(self) -> int:
        """Number of ids the tokenizer knows (the model's vocabulary may be padded beyond it)."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def vocabulary(self) -> Mapping[str, int]:
        """Token string -> id, added tokens included."""

    @property
    def chat_template(self) -> str | None: ...
    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The chat template applied, ending where the assistant's answer begins. ModelError if there is no template."""


class Target(ABC):
    """A causal language model that scores packed rows over revocable KV storage."""

    name: str
    vocab_size: int
    """Columns of the logits (the config's padded value)."""
    window: int
    """Positions the model has: prompt + output never exceed it."""
    hidden_size: int
    num_layers: int
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    """Every end-of-sequence id, from config and generation config."""
    sampling_defaults: Mapping[str, float]
    """temperature, top_k, top_p, ... of the model's generation config."""
    dtype: torch.dtype
    device: torch.device
    shape: Shape

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of keys and values that one block takes over all layers."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Makes KV storage of that many blocks; drops what was there."""

    @abstractmethod
    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Forward:
        """One pass over the packed rows, which appends their keys and values.

        Args:
            batch: the rows.
            taps: hidden state numbers h, strictly ascending in 0 .. num_layers: 0 is the embedding output, h the output
                of the h-th decoder layer, always before the final norm (methods, 2).

        Returns:
            Forward(logits [L, V], features [T, m * H] or None without taps).
        """

    @abstractmethod
    def final_norm(self, hidden: Tensor) -> Tensor:
        """The model's own final norm, [..., H] -> [..., H]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own head on an already normed vector, soft-cap included: [..., H] -> [..., V]."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """The model's own embedding, scaled as the model scales it: ids [...] -> [..., H], hidden state h = 0."""

    @abstractmethod
    def partial_logits(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """`logits` cut down to the columns ids [D]: a function [..., H] -> [..., D] that computes no others."""
