"""What is measured or compared is computed whole, however often it is repeated."""

from __future__ import annotations

import secrets


def own_salt() -> str:
    """A `cache_salt` of its own: nothing that was computed before is found under it.

    Rows from a prefix cache were computed in a pass of another shape, which low precision shows in the last bits, and
    the second run of a pair would have less to do than the first.
    """
    return secrets.token_hex(16)


__all__ = ["own_salt"]
