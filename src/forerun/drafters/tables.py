"""Which KV blocks of a drafter hold the rows of which request: lengths are the state."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockKey, BlockPool, KeptBlocks


class Tables:
    """Which blocks hold the rows of which request. Rows beyond a request's length are void and get overwritten.

    Complete blocks can be kept by key, as the target's are. There are as many blocks as the target has, and a request
    has no more here than there. So there is room for all where every block that requests share there is shared here,
    and a key is dropped with the target's block (`Drafter.drop`).
    """

    def __init__(self, num_blocks: int = 0):
        self._pool = BlockPool(num_blocks)
        self._kept = KeptBlocks(self._pool)
        self._tables: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._offered: dict[int, int] = {}  # by request, how many of its first blocks were kept, or are those of others

    @property
    def used(self) -> int:
        """Blocks held by all requests."""
        return self._pool.used

    @property
    def lengths(self) -> dict[int, int]:
        """Rows held, by request."""
        return dict(self._rows)

    def rows(self, request_id: int) -> int:
        """Rows held of a request; 0 for one that is not known."""
        return self._rows.get(request_id, 0)

    def has_room(self, request_id: int, rows: int) -> bool:
        """Whether `reserve` can be granted."""
        return self._pool.can_grow(self._tables.get(request_id, ()), rows)

    def reserve(self, request_id: int, rows: int) -> list[int]:
        """The block table of a request, grown to cover that many rows; its length stays. OutOfBlocks."""
        table = self._tables.setdefault(request_id, [])
        self._rows.setdefault(request_id, 0)
        self._pool.grow(table, rows)
        return table

    def extend(self, request_id: int, rows: int) -> None:
        """Rows up to here are written now."""
        assert rows <= len(self._tables[request_id]) * BLOCK_SIZE
        self._rows[request_id] = rows

    def cut(self, request_id: int, rows: int) -> None:
        """Forgets the rows from here on, if there are any, and gives back what was reserved beyond."""
        if request_id in self._rows:
            rows = self._rows[request_id] = min(rows, self._rows[request_id])
            whole = rows // BLOCK_SIZE
            if self._offered.get(request_id, 0) > whole:
                assert rows % BLOCK_SIZE == 0, f"request {request_id} is cut inside a block that others may read"
                self._offered[request_id] = whole
            self._pool.shrink(self._tables[request_id], rows)

    def release(self, request_id: int) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.shrink(table, 0)
        self._rows.pop(request_id, None)
        self._offered.pop(request_id, None)

    # ------------------------------------------------------------------------------------------------------ kept blocks

    def keep(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        """Keeps a request's complete blocks for others to `adopt`, `keys[i]` naming block i; what was offered before is
        passed over, and so is what another request has kept under the same key."""
        first, end = self._offered.get(request_id, 0), min(len(keys), self.rows(request_id) // BLOCK_SIZE)
        for index in range(first, end):
            self._kept.keep(keys[index], self._tables[request_id][index])
        if end > first:
            self._offered[request_id] = end

    def kept(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first of these blocks are kept."""
        return self._kept.leading(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        """A request that holds nothing begins with these kept blocks."""
        assert not self._tables.get(request_id), f"request {request_id} has blocks of its own"
        table: list[int] = []
        self._tables[request_id] = table
        self._kept.hold(table, keys)
        self._rows[request_id] = len(keys) * BLOCK_SIZE
        self._offered[request_id] = len(keys)

    def drop(self, key: BlockKey) -> None:
        """Nobody will `adopt` this block any more."""
        self._kept.drop(key)

    def audit(self) -> None:
        """Asserts that the pool's books, the tables and the kept blocks agree."""
        self._pool.audit(self._tables.values(), self._kept.blocks.values())
        self._kept.audit()
