"""What past rounds say about the next: acceptance by position, shared across requests, and per request on top.

Only rounds that reached a verdict enter. The proposal of a preempted request or a failed step has been looked at, and
its anchor will read the same noise again: a budget that knew its confidences would know the tokens it decides about
(methods, 7.5).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""Rounds of a drafter after which the benefit of the doubt, one standard deviation, is halved."""
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
    """Discounted counts: by position rounds that reached it, and of these, rounds that accepted it; lookups."""

    fade: float
    """What is left of each after one more."""
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    lookups: float = 0.0
    matches: float = 0.0

    def add(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        self.reached = _faded(self.reached, reached, self.fade)
        self.accepted = _faded(self.accepted, accepted, self.fade)

    def look(self, matched: bool) -> None:
        self.lookups = self.lookups * self.fade + 1
        self.matches = self.matches * self.fade + matched


def _faded(values: Sequence[float], more: Sequence[float], fade: float) -> list[float]:
    """`more` on top of what is left of `values`, each of any length."""
    return [value * fade + new for value, new in itertools.zip_longest(values, more, fillvalue=0.0)]


def _padded(values: list[float], size: int) -> list[float]:
    """[size]: cut, or with zeros behind."""
    return values if len(values) == size else [*values[:size], *[0.0] * (size - len(values))]


NOTHING = _Counts(1.0)
"""Of a request or drafter that has shown nothing."""


class AcceptanceHistory:
    """Acceptance by drafter and position.

    A position is estimated from its own rounds and from the estimate of the position before it, the first from all
    positions together: acceptance changes slowly along a draft, and a few rounds must do.

    A drafter that is hardly known gets the benefit of the doubt: giving it up by bad luck costs more than trying on, as
    afterwards it is only probed. A late position of a drafter that is known gets none, however seldom it is looked at:
    that is where drafts end because it does not pay, and doubt would say ever again that it does.

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
        self.entries = 0
        """Made so far: while this stays the same, so do the answers."""

    # --------------------------------------------------------------------------------------------------------- entries

    def record(self, drafter: str, request_id: int, outcome: Outcome) -> None:
        """A round in which this drafter had something to propose and that reached its verdict."""
        reached, accepted = _credit(outcome)
        for counts in self._counts(drafter, request_id):
            counts.add(reached, accepted)
            counts.look(matched=True)
        self._rounds[drafter] = self._rounds.get(drafter, 0) + (outcome.verified > 0)

    def record_miss(self, drafter: str, request_id: int) -> None:
        """A round in which this drafter was asked and had nothing to propose (an n-gram without a match)."""
        for counts in self._counts(drafter, request_id):
            counts.look(matched=False)

    def _counts(self, drafter: str, request_id: int) -> tuple[_Counts, _Counts]:
        """The shared ones and the request's own, for an entry."""
        self.entries += 1
        shared, own = self._shared.get(drafter), self._own.get((drafter, request_id))
        if shared is None:
            shared = self._shared[drafter] = _Counts(1 - 1 / SHARED_MEMORY)
        if own is None:
            own = self._own[drafter, request_id] = _Counts(1 - 1 / OWN_MEMORY)
        return shared, own

    def forget(self, request_id: int) -> None:
        """The request is gone; what it has shown stays in the shared counts."""
        for key in [key for key in self._own if key[1] == request_id]:
            del self._own[key]

    # --------------------------------------------------------------------------------------------------------- answers

    def rounds(self, drafter: str) -> int:
        """Rounds of this drafter so far in which something was verified, over all requests."""
        return self._rounds.get(drafter, 0)

    def own_rounds(self, drafter: str, request_ids: Sequence[int]) -> FloatArray:
        """[R] weight of the rounds in which these requests themselves asked the drafter, whatever it had."""
        return np.array([own.lookups for own in self._own_counts(drafter, request_ids)], dtype=np.float64)

    def match_rate(self, drafter: str, request_id: int) -> float:
        """Chance that the drafter has anything to propose when it is asked."""
        return float(self.match_rates(drafter, [request_id])[0])

    def match_rates(self, drafter: str, request_ids: Sequence[int]) -> FloatArray:
        """[R] the same for several requests."""
        shared = self._shared.get(drafter, NOTHING)
        credit = SHARED_PRIOR * ((shared.matches + PRIOR) / (shared.lookups + PRIOR))
        counts = self._own_counts(drafter, request_ids)
        return np.array([(own.matches + credit) / (own.lookups + SHARED_PRIOR) for own in counts], dtype=np.float64)

    def _own_counts(self, drafter: str, request_ids: Sequence[int]) -> list[_Counts]:
        return [self._own.get((drafter, request), NOTHING) for request in request_ids]

    def acceptance(self, drafter: str, k: int) -> tuple[FloatArray, FloatArray]:
        """Shared conditional acceptance [k] by position, and the rounds [k] it rests on, priors included."""
        counts = self._shared.get(drafter, NOTHING)
        reached, accepted = _padded(counts.reached, k), _padded(counts.accepted, k)
        prior = self._priors.get(drafter, [])
        credit, weight = (prior[0], CARD_PRIOR) if prior else (ACCEPTANCE, PRIOR)
        pooled = float((np.array(counts.accepted).sum() + weight * credit) / (np.array(counts.reached).sum() + weight))
        # A card says how acceptance falls from one position to the next; without one it does not.
        falls = [1.0 if j == 0 or j >= len(prior) else prior[j] / max(prior[j - 1], 1e-9) for j in range(k)]
        mean, before = [], pooled
        for taken, came, fall in zip(accepted, reached, falls, strict=True):
            before = (taken + NEIGHBOUR_PRIOR * min(1.0, before * fall)) / (came + NEIGHBOUR_PRIOR)
            mean.append(before)
        return np.array(mean), np.array(reached) + weight

    def survival(self, drafter: str, request_ids: Sequence[int], k: int) -> FloatArray:
        """Expected survival [R, k]: that tokens 1 .. j of a proposal are accepted, for these requests."""
        shared, rounds = self.acceptance(drafter, k)
        known = rounds[:1]  # every round of the drafter looks at the first position
        doubt = np.sqrt(shared * (1 - shared) / (known + NEIGHBOUR_PRIOR)) * OPTIMISM / (OPTIMISM + known)
        shared = np.minimum(1.0, shared + doubt)
        counts = self._own_counts(drafter, request_ids)
        reached = np.array([_padded(own.reached, k) for own in counts]).reshape(len(counts), k)
        accepted = np.array([_padded(own.accepted, k) for own in counts]).reshape(len(counts), k)
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


def _credit(outcome: Outcome) -> tuple[list[float], list[float]]:
    """(reached, accepted) by position, of one round: counted where verified, expected behind that."""
    verified, kept = outcome.verified, outcome.accepted
    assert 0 <= kept <= verified, outcome
    reached, accepted = [1.0] * min(kept + 1, verified), [1.0] * kept
    if kept == verified:
        alive = 1.0
        for j in range(verified, len(outcome.confidence)):
            reached.append(alive * outcome.trust[j])
            alive *= outcome.confidence[j]
            accepted.append(alive * outcome.trust[j])
    size = max(verified, len(outcome.confidence))
    return _padded(reached, size), _padded(accepted, size)


__all__ = ["AcceptanceHistory", "Estimate", "Outcome"]
