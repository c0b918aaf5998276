"""Which KV blocks of a drafter hold the rows of which request: lengths are the state."""

from __future__ import annotations

from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockPool


class Tables:
    """Which blocks hold the rows of which request. Rows beyond a request's length are void and get overwritten."""

    def __init__(self, num_blocks: int = 0):
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}

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
            self._rows[request_id] = min(rows, self._rows[request_id])
            self._pool.shrink(self._tables[request_id], self._rows[request_id])

    def release(self, request_id: int) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.shrink(table, 0)
        self._rows.pop(request_id, None)

    def audit(self) -> None:
        """Asserts that the pool's books and the tables agree."""
        self._pool.audit(list(self._tables.values()))
