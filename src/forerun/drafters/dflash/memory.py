"""What a training pass of a block drafter holds: arithmetic, for plans of runs and of machines that are not here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forerun.drafters.dflash.blocks import CHUNK_ROWS
from forerun.drafters.layers import LayerConfig, kept_of_row
from forerun.drafters.learned import Held
from forerun.drafters.learned.memory import chunk_of_logits


@dataclass(frozen=True, kw_only=True)
class BlockPass:
    """The sizes of a pass."""

    layer: LayerConfig
    lengths: Sequence[int]
    """Tokens of its samples."""
    anchors: int
    """Blocks of a sample, at most."""
    block_size: int
    drafts: int
    """Of a block; the anchor's own slot may predict nothing."""
    features: int
    """m * H, columns of the tapped features."""
    feature_itemsize: int
    teacher_columns: int
    """Logits computed of a row of the teacher's law."""
    draft_vocab_size: int
    head_bytes: int = 0
    """What heads of its own keep of a slot."""

    @property
    def blocks(self) -> list[int]:
        """Of each sample: an anchor has a token behind it, so short ones have fewer."""
        return [min(self.anchors, max(0, length - 1)) for length in self.lengths]

    @property
    def slots(self) -> int:
        return sum(self.blocks) * self.block_size

    def chunks(self) -> Iterator[tuple[int, float]]:
        """For each attention call: its slots, and the rows they are shown: the context before its last anchor, and
        themselves. Anchors lie evenly, so the last one of chunk i of n is near i / n of the sample."""
        each = max(1, CHUNK_ROWS // self.block_size)
        for length, blocks in zip(self.lengths, self.blocks, strict=True):
            count = math.ceil(blocks / each)
            for i in range(count):
                own = (min(blocks, (i + 1) * each) - i * each) * self.block_size
                yield own, length * (i + 1) / count + own


def block_memory(work: BlockPass, half: bool) -> list[Held]:
    """Line by line; `half`: with bfloat16 autocast."""
    layer, size = work.layer, 2 if half else 4
    layers, tokens, slots = layer.num_hidden_layers, sum(work.lengths), work.slots
    slot = layers * kept_of_row(layer, half) + 16 * layer.hidden_size + work.head_bytes  # 16: the final norm, gathered
    token = _kept_of_token(work, half)
    chunks = list(work.chunks())
    shown, pairs = round(sum(rows for _, rows in chunks)), round(sum(own * rows for own, rows in chunks))
    groups = layer.num_attention_heads // layer.num_key_value_heads
    copied = 2 * layer.num_key_value_heads * layer.head_dim * size
    return [
        Held("activations", slots * slot, f"{slots:,} slots x {slot:,} bytes"),
        Held("fused context", tokens * token, f"{tokens:,} tokens x {token:,} bytes"),
        Held("keys and values shown", layers * shown * copied,
             f"{layers} layers x {shown:,} rows x {copied:,} bytes, copied for each attention call"),
        Held("attention masks", layers * pairs * groups * size,
             f"{layers} layers x {pairs:,} slots and rows x {groups} x {size} bytes"),
        chunk_of_logits(sum(work.blocks) * work.drafts, work.teacher_columns, work.draft_vocab_size),
    ]  # fmt: skip


def _kept_of_token(work: BlockPass, half: bool) -> int:
    """Bytes of a context row: the features as `fc` reads them, its norm, and of each layer what keys are made of."""
    layer = work.layer
    same = work.feature_itemsize == (2 if half else 4) and not half
    read = 0 if same else work.features * (2 if half else 4)
    norm = layer.hidden_size * (6 if half else 12)
    normed = layer.num_key_value_heads * layer.head_dim * (6 if half else 8) * (layer.model_type == "qwen3")
    cast = 4 * layer.hidden_size if half else 0  # for keys and for values
    return read + norm + layer.num_hidden_layers * (normed + cast)
