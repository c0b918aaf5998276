"""The rows of every request's chain: their features and keys, in blocks as the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from forerun.drafters.base import Accepted, DraftView
from forerun.drafters.cache import DraftCache, bytes_per_block
from forerun.drafters.chain.network import ChainNetwork
from forerun.drafters.features import FeatureBuffer
from forerun.target.base import BLOCK_SIZE, Batch, Segment, Target
from forerun.target.blocks import BlockKey

INGEST_ROWS = 512
"""Rows per pass while catching up with a prompt, which bounds the memory of one pass."""

WAITING_ROWS = 64
"""Rows of raw features a request may have waiting: plain decoding then costs the drafter one matmul in 64 steps."""


class ChainRows:
    """What decoding keeps of each request, by row.

        rows 0 .. paired - 1     feature and keys, made with the token behind the row
        paired .. fused - 1      feature only: the token behind the last of them was not known when it came
        fused .. anchor - 1      raw target features, waiting to be fused
        anchor - 1 ..            rows of the draft in flight, void afterwards

    Fused features are kept as long as the request, beside the keys: when a conversation is cut back, the row before the
    cut gets another token behind it and is made anew. They also bound what a request that never drafts holds.

    A block that is kept for other requests has both for all of its rows, so the token behind the block has a part in
    it. Whoever adopts the block has the same token there, and goes on as if it had made the rows itself.

    Args:
        network: on its device and in its dtype.
        fuse: raw target features [n, m * H] -> what the network is given, [n, H].
        target: embeds tokens.
    """

    def __init__(self, network: ChainNetwork, fuse: Callable[[Tensor], Tensor], target: Target):
        self._network, self._fuse, self._target = network, fuse, target
        self.allocate(0)

    @property
    def block_bytes(self) -> int:
        dtype = self._network.dtype
        return bytes_per_block([self._network.attention], dtype) + self._feature_size * BLOCK_SIZE * dtype.itemsize

    @property
    def _feature_size(self) -> int:
        return self._target.hidden_size

    def allocate(self, num_blocks: int) -> None:
        dtype, device = self._network.dtype, self._target.device
        self._cache = DraftCache([self._network.attention], num_blocks, dtype, device)
        self._features = torch.zeros(num_blocks * BLOCK_SIZE, self._feature_size, dtype=dtype, device=device)
        self._buffer = FeatureBuffer()
        self._paired: dict[int, int] = {}

    # ---------------------------------------------------------------------------------------------- between two rounds

    @torch.no_grad()
    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Takes in the features of final rows and forgets what lies behind them."""
        for rows in accepted:
            # Without new rows this is a request that goes on differently from here: the row before has lost its token.
            changed = rows.start if rows.end > rows.start else rows.start - 1
            self._cut(rows.request_id, rows.start, max(0, changed))
            # A gap - state that was dropped half-way - stays one: there is no chain with a hole in it.
            if rows.features is not None and self._held(rows.request_id) == rows.start:
                self._buffer.add(rows.request_id, rows.start, rows.features)
        self._take_in([r.request_id for r in accepted if self._buffer.rows(r.request_id) > WAITING_ROWS])

    def _cut(self, request_id: int, rows: int, paired: int) -> None:
        self._cache.cut(request_id, rows)
        self._buffer.cut(request_id, rows)
        if request_id in self._paired:
            self._paired[request_id] = min(paired, self._paired[request_id])

    def _held(self, request_id: int) -> int:
        return self._cache.rows(request_id) + self._buffer.rows(request_id)

    def release(self, request_id: int) -> None:
        self._cache.release(request_id)
        self._buffer.release(request_id)
        self._paired.pop(request_id, None)

    @torch.no_grad()
    def keep(self, request_id: int, tokens: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """See `Drafter.keep`. What waits is fused and paired now: nobody else could make up for it."""
        self._take_in([request_id])
        rows = min(len(keys), self._cache.rows(request_id) // BLOCK_SIZE) * BLOCK_SIZE
        if rows == 0:
            return
        for batch in _passes(list(self._unpaired(request_id, tokens, rows))):
            self._store_keys(batch)
        self._paired[request_id] = max(rows, self._paired.get(request_id, 0))
        self._cache.keep(request_id, keys)

    def kept(self, keys: Sequence[BlockKey]) -> int:
        return self._cache.kept(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        self.release(request_id)
        self._cache.adopt(request_id, keys)
        self._paired[request_id] = self._cache.rows(request_id)

    def drop(self, key: BlockKey) -> None:
        self._cache.drop(key)

    def audit(self) -> None:
        """Asserts that the block tables balance and no row is paired that has no feature."""
        self._cache.audit()
        assert all(rows <= self._cache.rows(i) for i, rows in self._paired.items()), (self._paired, self._cache.lengths)

    def _take_in(self, request_ids: Sequence[int]) -> None:
        """Fuses the waiting features of requests and stores them."""
        taken = [(i, *self._buffer.take(i)) for i in request_ids if self._buffer.rows(i)]
        if not taken:
            return
        ends = [start + len(features) for _, start, features in taken]
        segments = [
            Segment(range(start, end), start, self._cache.reserve(i, end), 0)
            for (i, start, _), end in zip(taken, ends, strict=True)
        ]
        slots = self._cache.slots(Batch(segments))
        raw = torch.cat([features for _, _, features in taken])
        for where, part in zip(torch.split(slots, INGEST_ROWS), torch.split(raw, INGEST_ROWS), strict=True):
            self._features.index_copy_(0, where, self._fuse(part))
        for (i, _, _), end in zip(taken, ends, strict=True):
            self._cache.extend(i, end)

    # ------------------------------------------------------------------------------------------------------ in a round

    def complete(self, view: DraftView) -> bool:
        """Whether every row before the anchor has its feature."""
        return view.anchor > 0 and self._held(view.request_id) == view.anchor

    def begin(self, views: Sequence[DraftView]) -> Tensor:
        """Hidden states [R, H] of the last row before each anchor, paired with it, after whatever is missing before."""
        self._take_in([view.request_id for view in views])
        missing = [piece for view in views for piece in self._unpaired(view.request_id, view.tokens, view.anchor - 1)]
        for batch in _passes(missing):
            self._store_keys(batch)
        batch = self._one_row_each(views, [view.tokens[view.anchor] for view in views], 0)
        hidden = self._forward(batch, self._features[self._cache.slots(batch)])
        self._paired.update({view.request_id: view.anchor for view in views})
        return hidden

    def go_on(self, views: Sequence[DraftView], drafted: Sequence[Sequence[int]], feature: Tensor) -> Tensor:
        """Hidden states [R, H] after one more drafted token each; `feature` [R, H] is the row before's."""
        [count] = {len(tokens) for tokens in drafted}
        return self._forward(self._one_row_each(views, [tokens[-1] for tokens in drafted], count), feature)

    def _unpaired(self, request_id: int, tokens: Sequence[int], rows: int) -> Iterator[Segment]:
        """Of so many rows those without keys, with the tokens behind them."""
        table = self._cache.reserve(request_id, rows)
        for start in range(self._paired.get(request_id, 0), rows, INGEST_ROWS):
            end = min(start + INGEST_ROWS, rows)
            yield Segment(tokens[start + 1 : end + 1], start, table, 0)

    def _one_row_each(self, views: Sequence[DraftView], tokens: Sequence[int], drafted: int) -> Batch:
        """The row at position anchor - 1 + drafted of every request, with the token behind it."""
        segments = []
        for view, token in zip(views, tokens, strict=True):
            position = view.anchor - 1 + drafted
            segments.append(Segment([token], position, self._cache.reserve(view.request_id, position + 1), 1))
        return Batch(segments)

    def _embedded(self, batch: Batch) -> Tensor:
        return self._target.embed(torch.tensor(batch.token_ids, device=self._target.device)).to(self._network.dtype)

    def _store_keys(self, batch: Batch) -> None:
        network, slots = self._network, self._cache.slots(batch)
        x = network.attention_input(self._embedded(batch), self._features[slots])
        rotation = network.rotary(torch.tensor(batch.positions, device=self._target.device), network.dtype)
        self._cache.write(network.attention, slots, *network.attention.keys_values(x, rotation))

    def _forward(self, batch: Batch, feature: Tensor) -> Tensor:
        mix = self._cache.mixer(batch, self._network.rotary, self._network.dtype, causal=True)
        hidden: Tensor = self._network(self._embedded(batch), feature, mix)
        return hidden


def _passes(segments: Sequence[Segment]) -> Iterator[Batch]:
    """The segments in batches of at most INGEST_ROWS rows."""
    held: list[Segment] = []
    for segment in segments:
        if sum(len(s.tokens) for s in held) + len(segment.tokens) > INGEST_ROWS:
            yield Batch(held)
            held = []
        held.append(segment)
    if held:
        yield Batch(held)
