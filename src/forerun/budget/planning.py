"""Before drafting: what each drafter is worth to each request, and how the step's rows are shared out.

All of it is a function of history, load and measured costs. As nothing has been drafted yet, everything may be
searched freely, on the staircase itself, and K may move to a step edge in either direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.budget.bypass import Reason
from forerun.budget.calibration import CalibrationKey
from forerun.budget.costs import Costs, DraftCost, VerifyCost
from forerun.budget.curve import FloatArray
from forerun.budget.prefix import Ranking, best_count, lengths


@dataclass(frozen=True, slots=True)
class Option:
    """A drafter that may propose for a request now."""

    drafter: str
    most: int
    """K after all limits of configuration, request, windows and step (`plan`); at least 1."""
    rebuilds: bool = True
    """Whether it can rebuild a state it has dropped; one that needs the target's features cannot."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What planning knows of one request that decodes in this step."""

    request_id: int
    context: int
    """Tokens its rows attend to."""
    options: tuple[Option, ...] = ()
    """In the order the drafters were loaded; one whose `most` is 0 is left out."""
    reason: Reason | None = None
    """Why there are no options: request, context or fault."""
    confidence_threshold: float = 0.0
    """Neither draft nor verify from the first c_k below it on; 0 is off."""
    calibration: CalibrationKey | None = None
    """The conditions its confidences are calibrated under."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Ask this drafter for at most k tokens."""

    drafter: str
    k: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one request does in this step."""

    request_id: int
    choices: tuple[Choice, ...] = ()
    """In this order, each only where the one before had nothing to propose; empty: plain decoding."""
    reason: Reason | None = None
    """Why nothing is drafted."""
    gain: float = 0.0
    """Predicted gain of the first choice over plain decoding."""
    probe: bool = False
    """Drafted to learn, and verified whole."""
    release: tuple[str, ...] = ()
    """Drafters whose state of this request is to be dropped now: following it costs more than it can win back."""

    @property
    def k(self) -> int:
        """The longest draft it may make."""
        return max((choice.k for choice in self.choices), default=0)


class Load(NamedTuple):
    """The step around the drafts."""

    requests: int
    other_rows: int = 0
    """Further rows in the same pass: prefill chunks, drafts that are settled already."""
    other_tokens: float = 0.0
    """Tokens that those are expected to bring."""
    prefill_rows: int = 0
    """Of the further rows, those of prefill chunks. They are paid once for each request, in this step or another, so
    more tokens in a step do not save any of them."""

    def prefill_seconds(self, verify: VerifyCost) -> float:
        """What the prefill adds to a plain step: no cost of decoding. A draft row costs what it does beside it."""
        rows = self.other_rows + self.requests
        return verify.tokens(rows) - verify.tokens(rows - self.prefill_rows)


class Outlook(NamedTuple):
    """What a drafter promises each of n requests, at every K, if all requests of the step did the same.

    "If all did the same" gives a request its fair share of a pass: the marginal cost of one more drafting request would
    hide a drafter's fixed cost, its full cost would charge it to one.
    """

    length: NDArray[np.int64]
    """[n] best K, 0 where plain decoding is best."""
    gain: FloatArray
    """[n] predicted gain of it over plain decoding: 0.5 is 1.5 times as fast."""
    drafting: FloatArray
    """[n, K + 1] the request's share of a round with 0 .. K drafts, in seconds: of drafting,"""
    verifying: FloatArray
    """[n, K + 1] and of everything else."""
    rate: FloatArray
    """[n, K + 1] expected tokens per second; -inf beyond the request's own limit."""
    drafted: FloatArray
    """[n] draft tokens expected to be accepted at the best K."""


def outlook(
    load: Load,
    costs: Costs,
    survival: FloatArray,
    most: Sequence[int],
    contexts: Sequence[int],
    match: FloatArray | None = None,
    reach: float = 1.0,
) -> Outlook:
    """The promise of one drafter.

    Args:
        load: of the step; `requests` includes those that will not draft.
        costs: of target and drafter.
        survival: [n, K] expected.
        most: [n] largest K of each.
        contexts: [n].
        match: [n] chance that the drafter proposes at all. The promise is for rounds in which it does. Each of them has
            1 / match drafting calls to pay, and only so many of the other requests have rows in the same pass.
        reach: share of the requests that come to this drafter, where another is asked before it.
    """
    count, k = survival.shape
    chance = np.ones(count) if match is None else match
    rows = np.arange(k + 1, dtype=np.float64)
    requests = max(load.requests, 1)
    asked = _at_once(requests, reach)
    drafting = _at_once(requests, reach * float(chance.mean()) if count else 1.0)
    calls = costs.draft.table(requests, k)[:, round(asked)] / asked  # [K + 1]
    passes = costs.verify.tokens.at(load.other_rows + requests + drafting * rows)  # [K + 1]
    passes = passes - load.prefill_seconds(costs.verify)
    passes = passes[0] / requests + (passes - passes[0]) / drafting
    far, near = costs.draft.context.at(contexts), costs.verify.context.at(contexts)
    drafts = (calls + far.request[:, None] * (rows > 0) + far.row[:, None] * rows) / chance[:, None]
    verifying = passes + near.request[:, None] + near.row[:, None] * (1 + rows)
    certain = 1 + load.other_tokens / requests
    tokens = certain + np.concatenate((np.zeros((count, 1)), np.cumsum(survival, axis=1)), axis=1)
    rate = np.where(rows <= np.asarray(most)[:, None], tokens / (drafts + verifying), -np.inf)
    length = np.argmax(rate, axis=1)
    best = np.take_along_axis(rate, length[:, None], axis=1)[:, 0]
    drafted = np.take_along_axis(tokens, length[:, None], axis=1)[:, 0] - certain
    return Outlook(length, best / rate[:, 0] - 1, drafts, verifying, rate, drafted)


def _at_once(requests: int, chance: float) -> float:
    """Requests that do what a certain one does and each other one does with this chance."""
    return 1 + (requests - 1) * chance


class Forecast(NamedTuple):
    """What to expect of one drafter at one load."""

    length: int
    """Best K."""
    gain: float
    """Predicted gain at that K."""
    gains: list[float]
    """At K = 0 .. most."""


def forecast(costs: Costs, survival: FloatArray, requests: int = 1, context: int = 0) -> Forecast:
    """The gain of every K for `requests` equal requests with expected survival [K]: expected tokens of a round over
    its cost in plain steps, less 1 (E[tokens] = (1 - alpha^(K+1)) / (1 - alpha) for a constant acceptance)."""
    promise = outlook(Load(requests), costs, survival[None], [len(survival)], [context])
    gains = promise.rate[0] / promise.rate[0, 0] - 1
    return Forecast(int(promise.length[0]), float(promise.gain[0]), gains.tolist())


def probe_length(costs: Costs, load: Load, survival: FloatArray) -> int:
    """K of a probe by one request: it reaches the most positions for the seconds it adds, at the expected survival [K].

    One token where little is accepted, more where the first row of a step has to be paid anyway.
    """
    most, first = len(survival), load.other_rows + load.requests
    passes = costs.verify.tokens.over(first, first + most)
    added = costs.draft.table(1, most)[1:, 1] + passes[1:] - passes[0]  # [K]
    reached = 1 + _summed(survival[:-1])  # [K] positions whose predecessors were all accepted
    return int(np.argmax(reached / np.maximum(added, 1e-12))) + 1


# ------------------------------------------------------------------------------------------------------------- sharing


class Bid(NamedTuple):
    """A request's wish for draft rows."""

    request_id: int
    context: int
    drafter: str | None
    """None: it does not draft."""
    survival: FloatArray
    """[K] expected; its length is the largest K."""
    weight: float = 1.0
    """Share of rounds in which its rows are there: below 1 for a drafter that does not always propose."""


class Shares(NamedTuple):
    """Draft rows by request."""

    lengths: list[int]
    gain: float
    """Predicted gain of the whole step over plain decoding."""


def share(load: Load, verify: VerifyCost, drafts: Mapping[str, DraftCost], bids: Sequence[Bid]) -> Shares:
    """Gives draft rows to requests so that the step brings the most tokens per second.

    Candidates are taken by expected survival, less what a row behind a longer context costs beyond others, at the rate
    of plain decoding. The best number of them is searched on the measured staircase, draft costs included: every count
    is looked at, so a dear first row does not end the search, and the rows up to a step edge come by themselves.
    """
    extra = verify.context.at([bid.context for bid in bids])
    plain = verify.tokens(load.other_rows + load.requests - load.prefill_rows)
    plain += float((extra.request + extra.row).sum())
    rows, positions, survival, charge = _candidates(bids, drafts, extra.row, len(bids) / plain)
    weight = np.array([bid.weight for bid in bids])[rows]
    first = load.other_rows + load.requests
    passes = verify.tokens.at(first + _summed(weight)) - verify.tokens(first)
    seconds = plain + passes + _summed(weight * charge)
    seconds += _drafting(drafts, [bids[r].drafter for r in rows], positions)
    theta = (load.requests + load.other_tokens + _summed(weight * survival)) / seconds
    count = best_count(theta)
    chosen = lengths(Ranking(rows, survival), count, len(bids))
    return Shares(chosen, float(theta[count] / theta[0] - 1))


def _summed(values: FloatArray) -> FloatArray:
    """[n + 1] sums of the first 0 .. n."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _candidates(
    bids: Sequence[Bid], drafts: Mapping[str, DraftCost], row_extra: FloatArray, rate: float
) -> tuple[NDArray[np.intp], NDArray[np.intp], FloatArray, FloatArray]:
    """(row, position, survival, seconds that its context adds) of all candidates, best first."""
    width = max((len(bid.survival) for bid in bids if bid.drafter is not None), default=0)
    survival, first, further = np.zeros((len(bids), width)), np.zeros(len(bids)), row_extra.copy()
    for name in sorted({bid.drafter for bid in bids if bid.drafter is not None}):
        mine = [r for r, bid in enumerate(bids) if bid.drafter == name]
        drafting = drafts[name].context.at([bids[r].context for r in mine])
        first[mine] += drafting.request
        further[mine] += drafting.row
        for r in mine:
            survival[r, : len(bids[r].survival)] = bids[r].survival
    rows, positions = np.nonzero(survival > 0)
    key = survival[rows, positions] - rate * further[rows]
    ids = np.array([bid.request_id for bid in bids], dtype=np.int64)
    order = np.lexsort((ids[rows], positions, -key))
    rows, positions = rows[order], positions[order]
    return rows, positions, survival[rows, positions], further[rows] + first[rows] * (positions == 0)


def _occurrence(values: NDArray[np.intp]) -> NDArray[np.intp]:
    """[n] how often each value has occurred up to and including its place."""
    by_value = np.argsort(values, kind="stable")
    ordered = values[by_value]
    counts = np.empty(len(values), dtype=np.intp)
    counts[by_value] = np.arange(1, len(values) + 1) - np.searchsorted(ordered, ordered)
    return counts


def _drafting(drafts: Mapping[str, DraftCost], names: Sequence[str | None], positions: NDArray[np.intp]) -> FloatArray:
    """[n + 1] seconds of all drafting calls once the first 0 .. n candidates are drafted."""
    seconds = np.zeros(len(positions) + 1)
    owner = np.array([name or "" for name in names])
    for name in sorted({name for name in names if name is not None}):
        mine = np.flatnonzero(owner == name)
        slot = positions[mine]
        counts = _occurrence(slot)
        table = drafts[name].slots(int(counts.max()), int(slot.max()) + 1)
        seconds[mine + 1] = table[slot, counts] - table[slot, counts - 1]
    return np.cumsum(seconds)


__all__ = [
    "Ask",
    "Bid",
    "Choice",
    "Forecast",
    "Load",
    "Option",
    "Outlook",
    "Plan",
    "Shares",
    "forecast",
    "outlook",
    "probe_length",
    "share",
]
