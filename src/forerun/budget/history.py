"""What past rounds say about the next: acceptance by position, shared across requests, and per request on top.

Only rounds that reached a verdict enter. The proposal of a preempted request or a failed step has been looked at, and
its anchor will read the same noise again: a budget that knew its confidences would know the tokens it decides about
(methods, 7.5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.budget.curve import FloatArray

ACCEPTANCE = 0.7
"""Acceptance a drafter is given credit for before it has shown any (published means: .53 to .93)."""
PRIOR = 2.0
"""Rounds that such credit weighs: few, so that a useless drafter is found out quickly."""
CARD_PRIOR = 20.0
"""Rounds that a card weighs: measured, but on other text."""
NEIGHBOUR_PRIOR = 6.0
"""Rounds that the position before weighs against a position's own."""
OPTIMISM = 100.0
"""Rounds after which the benefit of the doubt, one standard deviation, is halved."""
SHARED_PRIOR = 20.0
"""Rounds that what all requests have shown weighs against a request's own."""
SHARED_MEMORY = 500.0
"""Rounds over which shared counts fade (their discounted sum), so that new traffic replaces old."""
OWN_MEMORY = 100.0
"""The same of one request's counts: a text changes its character faster than the traffic does."""


class Outcome(NamedTuple):
    """One drafter's part in one round of one request that reached a verdict."""

    verified: int
    """Draft tokens sent to the target."""
    accepted: int
    """Of them, kept; before a stop rule cuts."""
    confidence: Sequence[float] = ()
    """Calibrated c_1 .. of every slot looked at: also those behind `verified`, and one that was looked at and not
    drafted; empty where there are none."""
    trust: Sequence[float] = ()
    """How far each of them may stand in for a verdict, in [0, 1]."""


class Estimate(NamedTuple):
    """Expected survival by position, with bounds of some 90 %."""

    mean: FloatArray
    """[K]"""
    low: FloatArray
    high: FloatArray


@dataclass(slots=True)
class _Counts:
    """Discounted counts by position: rounds that reached it, and of these, rounds that accepted it."""

    reached: FloatArray
    accepted: FloatArray

    @classmethod
    def empty(cls) -> _Counts:
        return cls(np.zeros(0), np.zeros(0))

    def add(self, reached: FloatArray, accepted: FloatArray, memory: float) -> None:
        size, fade = len(reached), 1 - 1 / memory
        if len(self.reached) < size:
            self.reached, self.accepted = _padded(self.reached, size), _padded(self.accepted, size)
        for mine, more in ((self.reached, reached), (self.accepted, accepted)):  # in place: at every round
            mine *= fade
            mine[:size] += more


def _padded(values: FloatArray, size: int) -> FloatArray:
    """[size]: cut, or with zeros behind."""
    out = np.zeros(size)
    out[: min(size, len(values))] = values[:size]
    return out


class AcceptanceHistory:
    """Acceptance by drafter and position.

    A position is estimated from its own rounds and from the estimate of the position before it, the first from all
    positions together: acceptance changes slowly along a draft, and a few rounds must do.

    A drafter that is hardly known gets the benefit of the doubt: giving it up by bad luck costs more than trying on, as
    afterwards it is only probed.

    Slots that were not verified, or not even drafted for their confidence, count with what it expects, as far as it is
    trusted. Otherwise only slots that looked good would be counted, and every draft would look better than it is.

    Args:
        priors: acceptance by position (conditional) of a drafter, from its card; the last value goes on.
    """

    def __init__(self, priors: Mapping[str, Sequence[float]] | None = None):
        self._priors = {name: list(values) for name, values in (priors or {}).items() if values}
        self._shared: dict[str, _Counts] = {}
        self._own: dict[tuple[str, int], _Counts] = {}
        self._rounds: dict[str, int] = {}
        self._lookups: dict[str, tuple[float, float]] = {}  # drafter -> discounted lookups, matches
        self._own_lookups: dict[tuple[str, int], tuple[float, float]] = {}
        self.entries = 0
        """Made so far: while this stays the same, so do the answers."""

    # --------------------------------------------------------------------------------------------------------- entries

    def record(self, drafter: str, request_id: int, outcome: Outcome) -> None:
        """A round in which this drafter had something to propose and that reached its verdict."""
        reached, accepted = _credit(outcome)
        self._shared.setdefault(drafter, _Counts.empty()).add(reached, accepted, SHARED_MEMORY)
        self._own.setdefault((drafter, request_id), _Counts.empty()).add(reached, accepted, OWN_MEMORY)
        self._rounds[drafter] = self._rounds.get(drafter, 0) + (outcome.verified > 0)
        self._look(drafter, request_id, matched=True)

    def record_miss(self, drafter: str, request_id: int) -> None:
        """A round in which this drafter was asked and had nothing to propose (an n-gram without a match)."""
        self._look(drafter, request_id, matched=False)

    def _look(self, drafter: str, request_id: int, matched: bool) -> None:
        self.entries += 1
        self._lookups[drafter] = _faded(self._lookups.get(drafter, (0.0, 0.0)), matched, SHARED_MEMORY)
        key = drafter, request_id
        self._own_lookups[key] = _faded(self._own_lookups.get(key, (0.0, 0.0)), matched, OWN_MEMORY)

    def forget(self, request_id: int) -> None:
        """The request is gone; what it has shown stays in the shared counts."""
        for store in (self._own, self._own_lookups):
            for key in [key for key in store if key[1] == request_id]:
                del store[key]

    # --------------------------------------------------------------------------------------------------------- answers

    def rounds(self, drafter: str) -> int:
        """Rounds of this drafter so far in which something was verified, over all requests."""
        return self._rounds.get(drafter, 0)

    def own_rounds(self, drafter: str, request_id: int) -> float:
        """Weight of what this request itself has shown."""
        counts = self._own.get((drafter, request_id))
        return float(counts.reached[0]) if counts is not None and len(counts.reached) else 0.0

    def match_rate(self, drafter: str, request_id: int) -> float:
        """Chance that the drafter has anything to propose when it is asked."""
        asked, matched = self._lookups.get(drafter, (0.0, 0.0))
        shared = (matched + PRIOR) / (asked + PRIOR)
        asked, matched = self._own_lookups.get((drafter, request_id), (0.0, 0.0))
        return (matched + SHARED_PRIOR * shared) / (asked + SHARED_PRIOR)

    def acceptance(self, drafter: str, k: int) -> tuple[FloatArray, FloatArray]:
        """Shared conditional acceptance [k] by position, and the rounds [k] it rests on, priors included."""
        counts = self._shared.get(drafter) or _Counts.empty()
        reached, accepted = _padded(counts.reached, k), _padded(counts.accepted, k)
        prior = self._priors.get(drafter, [])
        credit, weight = (prior[0], CARD_PRIOR) if prior else (ACCEPTANCE, PRIOR)
        pooled = float((counts.accepted.sum() + weight * credit) / (counts.reached.sum() + weight))
        # A card says how acceptance falls from one position to the next; without one it does not.
        falls = [1.0 if j == 0 or j >= len(prior) else prior[j] / max(prior[j - 1], 1e-9) for j in range(k)]
        mean, before = np.zeros(k), pooled
        for j in range(k):
            before = (accepted[j] + NEIGHBOUR_PRIOR * min(1.0, before * falls[j])) / (reached[j] + NEIGHBOUR_PRIOR)
            mean[j] = before
        return mean, reached + weight

    def survival(self, drafter: str, request_ids: Sequence[int], k: int) -> FloatArray:
        """Expected survival [R, k]: that tokens 1 .. j of a proposal are accepted, for these requests."""
        shared, rounds = self.acceptance(drafter, k)
        doubt = np.sqrt(shared * (1 - shared) / (rounds + NEIGHBOUR_PRIOR)) * OPTIMISM / (OPTIMISM + rounds)
        shared = np.minimum(1.0, shared + doubt)
        counts = [self._own.get((drafter, request)) or _Counts.empty() for request in request_ids]
        reached = np.array([_padded(c.reached, k) for c in counts]).reshape(len(counts), k)
        accepted = np.array([_padded(c.accepted, k) for c in counts]).reshape(len(counts), k)
        return np.multiply.accumulate((accepted + SHARED_PRIOR * shared) / (reached + SHARED_PRIOR), axis=1)

    def estimate(self, drafter: str, k: int) -> Estimate:
        """Shared survival [k] with its uncertainty.

        Acceptance at a position is a Beta variable; the variances of log alpha add up along the draft. The bounds are
        the 5 % and 95 % points of the log-normal with that variance.
        """
        alpha, rounds = self.acceptance(drafter, k)
        safe = np.clip(alpha, 1e-6, 1 - 1e-6)
        spread = 1.645 * np.sqrt(np.cumsum((1 - safe) / (safe * (rounds + 1))))
        mean = np.multiply.accumulate(alpha)
        return Estimate(mean, mean * np.exp(-spread), np.minimum(1.0, mean * np.exp(spread)))


def _credit(outcome: Outcome) -> tuple[FloatArray, FloatArray]:
    """(reached, accepted) by position, of one round: counted where verified, expected behind that."""
    verified, kept = outcome.verified, outcome.accepted
    assert 0 <= kept <= verified, outcome
    size = max(verified, len(outcome.confidence))
    reached, accepted = np.zeros(size), np.zeros(size)
    reached[: min(kept + 1, verified)] = 1.0
    accepted[:kept] = 1.0
    if kept == verified:
        alive = 1.0
        for j in range(verified, len(outcome.confidence)):
            reached[j] = alive * outcome.trust[j]
            alive *= outcome.confidence[j]
            accepted[j] = alive * outcome.trust[j]
    return reached, accepted


def _faded(pair: tuple[float, float], matched: bool, memory: float) -> tuple[float, float]:
    fade = 1 - 1 / memory
    return pair[0] * fade + 1, pair[1] * fade + matched


__all__ = ["AcceptanceHistory", "Estimate", "Outcome"]
