"""A draft model's own KV rows for every request, in blocks as the target's: lengths are the state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.layers import Attention, Mix, Rotary
from forerun.drafters.tables import Tables
from forerun.target.attention import LayerStore, LoopPlan, PaddedPlan, Plan, Rule
from forerun.target.base import BLOCK_SIZE, Batch, Segment


class DraftCache(Tables):
    """`Tables` with storage for the layers of a network.

    Args:
        layers: the attentions, one per layer.
        num_blocks: blocks of 16 rows.
        dtype, device: of keys and values.
    """

    def __init__(self, layers: Sequence[Attention], num_blocks: int, dtype: torch.dtype, device: torch.device):
        super().__init__(num_blocks)
        self._device = device
        self._stores: dict[Attention, LayerStore] = {}
        for layer in layers:
            shape = num_blocks * BLOCK_SIZE, layer.kv_heads, layer.head_dim
            # Zeros, not garbage: a NaN in a row nobody wrote would survive a mask.
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            self._stores[layer] = LayerStore(keys, values, None)

    def write(self, attention: Attention, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [T, kv_heads, head_dim] of rows at slots [T]."""
        store = self._stores[attention]
        store.keys.index_copy_(0, slots, keys.to(store.keys.dtype))
        store.values.index_copy_(0, slots, values.to(store.values.dtype))

    def slots(self, batch: Batch) -> Tensor:
        return torch.tensor(batch.slots, device=self._device)

    def mixer(self, batch: Batch, rotary: Rotary, dtype: torch.dtype, causal: bool) -> Mix:
        """Attention of packed rows [T] over what their requests have stored, these rows included.

        The rows' keys and values are written first. Causal, or every row of a segment sees the whole segment.
        """
        plan: Plan = (LoopPlan if self._device.type == "cpu" else PaddedPlan)(batch, self._device)
        slots = self.slots(batch)
        rotation = rotary(torch.tensor(batch.positions, device=self._device), dtype)

        def mix(attention: Attention, x: Tensor) -> Tensor:
            query = attention.query(x, rotation)
            self.write(attention, slots, *attention.keys_values(x, rotation))
            rule = Rule(attention.scaling, causal=causal)
            mixed = plan.attend(query.transpose(0, 1)[None], self._stores[attention], rule)  # [1, T, heads, dim]
            return attention.output(mixed[0])

        return mix


def bytes_per_block(layers: Sequence[Attention], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one block takes over these layers."""
    return sum(2 * a.kv_heads * a.head_dim for a in layers) * BLOCK_SIZE * dtype.itemsize


__all__ = ["Batch", "DraftCache", "Segment", "Tables", "bytes_per_block"]
