"""Who owns which KV block: host integers only."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from forerun.errors import OutOfBlocks
from forerun.target.base import BLOCK_SIZE

BlockKey = bytes
"""Names a block by all tokens up to its end: two texts that begin alike have the same keys so far, no others do."""


def blocks_for(rows: int) -> int:
    """Blocks that hold this many rows."""
    return -(-rows // BLOCK_SIZE)


class BlockPool:
    """A pool of KV blocks. Tables (lists of block ids) belong to their holders; the pool counts who holds a block.

    A block that is kept outlives its holders, for others to `hold` it again: until the pool needs it. Of the kept
    blocks that nobody holds, which count as free, the one given back first goes first.

    The lowest free ids go first: neighbours in a table then tend to be neighbours in memory, which lets attention read
    a request's rows as one slice.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        """Told of each kept block that the pool takes for other rows."""
        self._free = list(range(num_blocks))
        self._holders: dict[int, int] = {}  # of each block in use, how many tables
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept blocks in no table, in the order of their eviction

    @property
    def free(self) -> int:
        """Blocks that can be had."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def can_grow(self, table: Sequence[int], rows: int) -> bool:
        return blocks_for(rows) - len(table) <= self.free

    def grow(self, table: list[int], rows: int) -> None:
        """Extends a table in place until it covers `rows`. OutOfBlocks leaves it as it was."""
        missing = blocks_for(rows) - len(table)
        if missing > self.free:
            raise OutOfBlocks(
                f"{missing} KV blocks needed, {self.free} of {self.num_blocks} are free; raise kv_cache_memory_bytes"
            )
        while len(self._free) < missing:
            self._evict()
        for _ in range(missing):
            block = heapq.heappop(self._free)
            self._holders[block] = 1
            table.append(block)

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self._kept.remove(block)
        heapq.heappush(self._free, block)
        if self.on_evict is not None:
            self.on_evict(block)

    def hold(self, table: list[int], blocks: Iterable[int]) -> None:
        """Extends a table by kept blocks, which may be in other tables too. Their rows must not be written again."""
        for block in blocks:
            assert block in self._kept, f"block {block} is not kept"
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
            table.append(block)

    def shrink(self, table: list[int], rows: int) -> None:
        """Gives back the blocks of a table that lie beyond `rows`."""
        keep = blocks_for(rows)
        # From the end: what a later block is worth depends on those before it, so it has to go first.
        for block in reversed(table[keep:]):
            self._give_back(block)
        del table[keep:]

    def _give_back(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        del self._holders[block]
        if block in self._kept:
            self._idle[block] = None
        else:
            heapq.heappush(self._free, block)

    def keep(self, block: int) -> None:
        """A block in use will stay when nobody holds it any more."""
        assert block in self._holders, f"block {block} is in no table"
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """A kept block need not stay."""
        self._kept.remove(block)
        if block in self._idle:
            del self._idle[block]
            heapq.heappush(self._free, block)

    def audit(self, tables: Iterable[Sequence[int]], kept: Iterable[int] = ()) -> None:
        """Asserts that every block is either free, or idle, or in use by as many of these tables as are counted; that
        these are the kept ones; and that only kept ones are in several tables."""
        held = Counter(block for table in tables for block in table)
        leaked = {block: count for block, count in self._holders.items() if held[block] != count}
        assert dict(held) == self._holders, f"leaked blocks, or holders unknown to the pool: {leaked}, {dict(held)}"
        several = [block for block, count in held.items() if count > 1 and block not in self._kept]
        assert not several, f"in two tables, though not kept: {several}"
        assert set(kept) == self._kept, f"kept unknown to their keeper: {sorted(self._kept ^ set(kept))}"
        assert self._idle.keys() == self._kept - held.keys(), "a kept block is neither idle nor in use"
        assert len(self._free) + len(self._idle) + len(held) == self.num_blocks, "free + idle + used is not the total"


class KeptBlocks:
    """The kept blocks of a pool by their keys: who knows a key can hold its block again.

    Args:
        pool: of the blocks; nobody else keeps any of them.
        on_evict: told of each key whose block the pool took for other rows.
    """

    def __init__(self, pool: BlockPool, on_evict: Callable[[BlockKey], None] | None = None):
        self._pool, self._on_evict = pool, on_evict
        self.blocks: dict[BlockKey, int] = {}
        """In use or not."""
        self._keys: dict[int, BlockKey] = {}
        pool.on_evict = self._evicted

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first of these blocks are kept."""
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def keep(self, key: BlockKey, block: int) -> None:
        """Keeps a block in use; passed over where another one is kept under the key: it was computed twice."""
        if key not in self.blocks:
            self._pool.keep(block)
            self.blocks[key], self._keys[block] = block, key

    def hold(self, table: list[int], keys: Iterable[BlockKey]) -> None:
        """Extends a table by the blocks of these keys, which are kept."""
        self._pool.hold(table, [self.blocks[key] for key in keys])

    def drop(self, key: BlockKey) -> None:
        """The block need not stay, if it is kept."""
        block = self.blocks.pop(key, None)
        if block is not None:
            del self._keys[block]
            self._pool.drop(block)

    def clear(self) -> None:
        """Forgets all of them, as if each had been evicted."""
        for block in list(self._keys):
            self._pool.drop(block)
            self._evicted(block)

    def _evicted(self, block: int) -> None:
        key = self._keys.pop(block)
        del self.blocks[key]
        if self._on_evict is not None:
            self._on_evict(key)

    def audit(self) -> None:
        """Asserts that every key has its block, and every kept block one key."""
        assert {key: block for block, key in self._keys.items()} == self.blocks
