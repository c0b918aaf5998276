"""Not drafting (K = 0) as an ordinary answer: when to choose it, how to notice that it no longer pays, and why.

Everything here is decided before drafting, from history and costs, hence exact.
"""

from __future__ import annotations

import math
from enum import StrEnum

MIN_PREDICTED_GAIN = 0.005
"""Below this gain of a step nothing is drafted. With the hysteresis it is what is forgone where drafting would pay, so
it is small: costs are known to a few percent, but wrong to either side, and real step times correct them."""
HYSTERESIS = 0.01
"""Gain beyond the minimum that it takes to come back: at a border the answer must not change with every step."""
PROBING_SHARE = 0.01
"""Share of the decoding time that probing may cost."""
TRIALS = 8
"""Probes of a drafter that is hardly known which are not charged: there is no other way to know it."""
DROP_AFTER = 256
"""Bypassed tokens of a request after which a drafter that takes in every token as it comes, and pays for it, drops its
state. It cannot get that back; one that reads tokens when it is asked never drops what it has read."""


class Reason(StrEnum):
    """Why a request does not draft in a step; the words of the metric."""

    GAIN = "gain"
    """It would gain too little: its drafts are rarely accepted or dear."""
    BATCH = "batch"
    """The step as a whole is better off without its drafts: too much load."""
    REQUEST = "request"
    """The request does not want drafts, or has no more than one token to go."""
    CONTEXT = "context"
    """Its context: at the end of a window, or so long that drafting behind it no longer pays."""
    FAULT = "fault"
    """Its drafters keep failing."""
    STATE_DROPPED = "state dropped"
    """The drafter's state of this request was dropped and cannot be rebuilt."""


class Gate:
    """Open while drafting pays: closes below the minimum, opens again only at minimum + hysteresis."""

    def __init__(self, minimum: float = MIN_PREDICTED_GAIN, hysteresis: float = HYSTERESIS):
        self._close, self._open = minimum, minimum + hysteresis
        self._is_open = True

    def update(self, gain: float) -> bool:
        """Whether to draft at this predicted gain."""
        self._is_open = gain >= (self._close if self._is_open else self._open)
        return self._is_open


def probe_interval(round_ratio: float, share: float = PROBING_SHARE) -> float:
    """Plain steps between two probes so that probing costs at most `share` of the time.

    A probe that wins nothing costs round_ratio - 1 plain steps (methods, 8.5).
    """
    return max(1, math.ceil((round_ratio - 1) / share))


class ProbeLedger:
    """Time set aside for probing. Every step puts in a share of its time; a probe takes out what it may lose.

    For probes of equal cost that is one every `probe_interval` steps; the bound holds for any mixture of costs. What a
    probe wins is not credited, and at most one probe is saved up.
    """

    def __init__(self, share: float = PROBING_SHARE):
        self._share = share
        self.credit = 0.0

    def earn(self, seconds: float) -> None:
        """A step of so many seconds was planned."""
        self.credit += self._share * seconds

    def spend(self, seconds: float) -> bool:
        """Whether a probe that may lose so much time can be afforded; if so it is paid."""
        if self.credit < seconds:
            return False
        self.credit = min(self.credit - seconds, seconds)
        return True


class StateKeeper:
    """Which requests are no longer worth following, for drafters that follow every step.

    What they take in of a request that does not draft costs time at every token and, by how long it has gone on, will
    hardly be won back: after `drop_after` tokens the state is dropped, unless following costs nothing. Memory is no
    reason: a drafter's rows lie in blocks of its own, as many as the target has.
    """

    def __init__(self, drop_after: int = DROP_AFTER):
        self._drop_after = drop_after
        self._bypassed: dict[tuple[int, str], int] = {}
        self._dropped: set[tuple[int, str]] = set()

    @property
    def any_dropped(self) -> bool:
        """Of any request."""
        return bool(self._dropped)

    def followed(self, request_id: int, drafter: str, tokens: int) -> None:
        """So many tokens were committed that this drafter had no part in."""
        key = request_id, drafter
        bypassed = self._bypassed[key] = self._bypassed.get(key, 0) + tokens
        if bypassed > self._drop_after:
            self._dropped.add(key)

    def used(self, request_id: int, drafter: str) -> None:
        """It drafted."""
        self._bypassed.pop((request_id, drafter), None)
        self._dropped.discard((request_id, drafter))

    def is_dropped(self, request_id: int, drafter: str) -> bool:
        return (request_id, drafter) in self._dropped

    def forget(self, request_id: int) -> None:
        for key in [key for key in self._bypassed if key[0] == request_id]:
            self.used(*key)


__all__ = [
    "DROP_AFTER",
    "HYSTERESIS",
    "MIN_PREDICTED_GAIN",
    "PROBING_SHARE",
    "TRIALS",
    "Gate",
    "ProbeLedger",
    "Reason",
    "StateKeeper",
    "probe_interval",
]
