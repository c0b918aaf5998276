"""Who owns which KV block: host integers only."""

from __future__ import annotations

import heapq

from forerun.errors import OutOfBlocks
from forerun.target.base import BLOCK_SIZE


def blocks_for(rows: int) -> int:
    """Blocks that hold this many rows."""
    return -(-rows // BLOCK_SIZE)


class BlockPool:
    """A pool of KV blocks. Tables (lists of block ids) belong to their holders; the pool knows only who is free.

    The lowest free ids go first: neighbours in a table then tend to be neighbours in memory, which lets attention read
    a request's rows as one slice.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._taken)

    def can_grow(self, table: list[int], rows: int) -> bool:
        return blocks_for(rows) - len(table) <= self.free

    def grow(self, table: list[int], rows: int) -> None:
        """Extends a table in place until it covers `rows`. OutOfBlocks leaves it as it was."""
        missing = blocks_for(rows) - len(table)
        if missing > self.free:
            raise OutOfBlocks(
                f"{missing} KV blocks needed, {self.free} of {self.num_blocks} are free; raise kv_cache_memory_bytes"
            )
        for _ in range(missing):
            block = heapq.heappop(self._free)
            self._taken.add(block)
            table.append(block)

    def shrink(self, table: list[int], rows: int) -> None:
        """Gives back the blocks of a table that lie beyond `rows`."""
        keep = blocks_for(rows)
        for block in table[keep:]:
            self._taken.remove(block)
            heapq.heappush(self._free, block)
        del table[keep:]

    def audit(self, tables: list[list[int]]) -> None:
        """Asserts that every block is either free or in exactly one of these tables."""
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held)), "a block is in two tables"
        assert set(held) == self._taken, f"leaked blocks: {sorted(self._taken - set(held))}"
        assert len(self._free) + len(self._taken) == self.num_blocks, "free + used is not the total"
