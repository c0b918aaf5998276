"""What drafters have yet to take in of a request before they can draft for it, and whether it lasts long enough to pay.

A drafter that reads the target's features follows every step. Any other takes tokens in when it is asked, all that came
since: the whole prompt the first time. A request that ends soon after does not win that back, however good its drafts.
"""

from __future__ import annotations

from collections import defaultdict

TOKENS = 256.0
"""Tokens that a request is taken to emit before any has ended,"""
PRIOR = 2.0
"""and how many requests that weighs: few, so that the traffic soon says it itself."""
MEMORY = 64.0
"""Requests over which lengths fade (their discounted sum), so that new traffic replaces old."""


class Backlog:
    """By request and drafter the tokens that were taken in, and how many tokens requests go on for.

    At every token a request may end with the same chance: all tokens of all requests, over those that have ended, are
    expected to follow. One that has gone on for longer than that is expected to go on for as long again.
    """

    def __init__(self) -> None:
        self._taken_in: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self._began: dict[int, int] = {}
        """Tokens of each request's context when it was first seen,"""
        self._now: dict[int, int] = {}
        """and when it was last."""
        self._left: dict[int, int | None] = {}
        self._ended, self._emitted = PRIOR, PRIOR * TOKENS

    def saw(self, request_id: int, context: int, left: int | None = None) -> None:
        """A request decodes behind so many tokens and may emit so many more; None: nobody knows."""
        self._emitted += max(0, context - self._now.get(request_id, context))
        self._began.setdefault(request_id, context)
        self._now[request_id], self._left[request_id] = context, left

    def took_in(self, request_id: int, drafter: str, tokens: int) -> None:
        """A drafter was asked, and knows so many tokens of the request since."""
        self._taken_in[request_id][drafter] = tokens

    def behind(self, request_id: int, drafter: str) -> int:
        """Tokens that it has to take in when it is asked again."""
        return max(0, self._now[request_id] - self._taken_in[request_id].get(drafter, 0))

    def ahead(self, request_id: int) -> float:
        """Tokens that a request is expected to emit from here on; at least 1."""
        left, expected = self._left[request_id], self._emitted / self._ended
        expected = max(expected, self._now[request_id] - self._began[request_id])
        return max(1.0, expected if left is None else min(left, expected))

    def restart(self, request_id: int) -> None:
        """The drafters' states of a request are fresh."""
        self._taken_in.pop(request_id, None)

    def forget(self, request_id: int) -> None:
        """It has ended."""
        self.restart(request_id)
        self._left.pop(request_id, None)
        self._began.pop(request_id, None)
        if self._now.pop(request_id, None) is not None:
            fade = 1 - 1 / MEMORY
            self._ended, self._emitted = self._ended * fade + 1, self._emitted * fade


__all__ = ["Backlog"]
