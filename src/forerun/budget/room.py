"""What is known before anything is drafted: the configured K, cut to what request, window and step allow.

None of it depends on the tokens it decides about (methods, 8.3).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What a request could use in this step, each counted in draft tokens."""

    tokens_left: int
    """Tokens the request may still commit (max_tokens and the context)."""
    window_left: int
    """Target positions free after the anchor."""
    rows_left: int
    """Its share of the step's rows, anchor excluded."""
    drafter_window_left: int | None = None
    """The largest K whose highest position the drafter still has; None: no limit of its own."""


def plan(k: int, room: Room) -> int:
    """K for one request in one round; 0 is the plain path.

    One token is always emitted by the target itself, so drafting more than tokens_left - 1 cannot pay.
    """
    limits = [k, room.tokens_left - 1, room.window_left, room.rows_left]
    if room.drafter_window_left is not None:
        limits.append(room.drafter_window_left)
    return max(0, min(limits))


__all__ = ["Room", "plan"]
