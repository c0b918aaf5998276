"""The fused context of every request as draft KV rows, and a pass over blocks that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.drafters.base import Accepted, Draft, DraftView
from forerun.drafters.cache import DraftCache, bytes_per_block
from forerun.drafters.dflash.config import BlockConfig
from forerun.drafters.dflash.network import Backbone
from forerun.drafters.features import FeatureBuffer
from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import BlockKey

INGEST_ROWS = 512
"""Context rows fused in one pass, which bounds its memory."""


class FusedContext:
    """What a block drafter keeps per request: one key and value per layer for every row before the anchor.

    Rows are fused lazily: features wait until their request drafts again, or until many have gathered. A request some
    of whose rows never came (its state was dropped half-way) is not drafted for: there is no context without holes.

    Args:
        backbone: the network, on its device and in its dtype.
        config: block size and mask.
        target: embeds the slots.
    """

    def __init__(self, backbone: Backbone, config: BlockConfig, target: Target):
        self._backbone, self._config, self._target = backbone, config, target
        self._buffer = FeatureBuffer()
        self._cache = DraftCache((), 0, torch.float32, torch.device("cpu"))

    @property
    def _dtype(self) -> torch.dtype:
        return self._backbone.hidden_norm.weight.dtype

    @property
    def block_bytes(self) -> int:
        return bytes_per_block(self._backbone.attentions, self._dtype)

    def allocate(self, num_blocks: int) -> None:
        device = self._backbone.hidden_norm.weight.device
        self._cache = DraftCache(self._backbone.attentions, num_blocks, self._dtype, device)
        self._buffer = FeatureBuffer()

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Takes in the features of rows that became final, and forgets what lies behind them."""
        for rows in accepted:
            known = self._cache.rows(rows.request_id) + self._buffer.rows(rows.request_id)
            if rows.features is None or rows.start > known:  # nothing to learn, or a hole before it
                self._cut(rows.request_id, rows.end)
                continue
            self._cut(rows.request_id, rows.start)
            self._buffer.add(rows.request_id, rows.start, rows.features)
            if self._buffer.rows(rows.request_id) > INGEST_ROWS:
                self._ingest([rows.request_id])

    def _cut(self, request_id: int, rows: int) -> None:
        self._cache.cut(request_id, rows)
        self._buffer.cut(request_id, rows)

    def release(self, request_id: int) -> None:
        self._cache.release(request_id)
        self._buffer.release(request_id)

    def keep(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        """See `Drafter.keep`. Features that wait are fused now: nobody else could make up for them."""
        if self._buffer.rows(request_id):
            self._ingest([request_id])
        self._cache.keep(request_id, keys)

    def kept(self, keys: Sequence[BlockKey]) -> int:
        return self._cache.kept(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        self.release(request_id)
        self._cache.adopt(request_id, keys)

    def drop(self, key: BlockKey) -> None:
        self._cache.drop(key)

    def audit(self) -> None:
        self._cache.audit()

    def propose(
        self, views: Sequence[DraftView], drafts_of: Callable[[Sequence[DraftView]], Sequence[Draft]]
    ) -> list[Draft]:
        """One draft per view: `drafts_of` those whose context is whole, nothing for the others."""
        ready = [i for i, view in enumerate(views) if self._whole(view)]
        drafts = [Draft() for _ in views]
        if ready:
            with torch.inference_mode():
                for i, draft in zip(ready, drafts_of([views[i] for i in ready]), strict=True):
                    drafts[i] = draft
        return drafts

    def _whole(self, view: DraftView) -> bool:
        """Whether the context of all rows before the anchor is there."""
        return self._cache.rows(view.request_id) + self._buffer.rows(view.request_id) == view.anchor

    def blocks(self, views: Sequence[DraftView]) -> list[Tensor]:
        """Hidden states [K, d], after the final norm, of the slots that predict token s + 1 .. s + K of each view.

        Exactly as many slots run as the planned K needs. Only for views that `propose` found whole.
        """
        self._ingest([view.request_id for view in views if self._buffer.rows(view.request_id)])
        first, segments = self._config.first_slot, []
        for view in views:
            slots = [view.tokens[view.anchor], *[self._config.mask_token_id] * (view.k + first - 1)]
            table = self._cache.reserve(view.request_id, view.anchor + len(slots))
            segments.append(Segment(slots, view.anchor, table, 0))
        batch = Batch(segments)
        embedded = self._target.embed(torch.tensor(batch.token_ids, device=self._target.device)).to(self._dtype)
        hidden = self._backbone(embedded, self._cache.mixer(batch, self._backbone.rotary, self._dtype, causal=False))
        parts = hidden.split([len(segment.tokens) for segment in segments])
        return [part[first:] for part in parts]

    def _ingest(self, requests: Sequence[int]) -> None:
        """Fuses the waiting features of these requests and stores their keys and values, in bounded passes."""
        waiting = [(request_id, *self._buffer.take(request_id)) for request_id in requests]
        segments, pieces = [], []
        for request_id, start, features in waiting:
            table = self._cache.reserve(request_id, start + len(features))
            self._cache.extend(request_id, start + len(features))
            segments.append(Segment([0] * len(features), start, table, 0))  # only the places of its rows are read
            pieces.append(features)
        if not segments:
            return
        batch, features = Batch(segments), torch.cat(pieces)
        slots = self._cache.slots(batch)
        positions = torch.tensor(batch.positions, device=slots.device)
        for first in range(0, len(features), INGEST_ROWS):
            rows = slice(first, first + INGEST_ROWS)
            context = self._backbone.fuse(features[rows])
            rotation = self._backbone.rotary(positions[rows], self._dtype)
            for attention in self._backbone.attentions:
                self._cache.write(attention, slots[rows], *attention.keys_values(context, rotation))
