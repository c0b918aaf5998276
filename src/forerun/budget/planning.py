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


class Option(NamedTuple):
    """A drafter that may propose for a request now."""

    drafter: str
    most: int
    """K after all limits of configuration, request, windows and step (`plan`); at least 1."""
    rebuilds: bool = True
    """Whether it reads tokens, when it is asked, so that it can rebuild any state; one that needs the target's features
    takes them in as they come, or never."""


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
    left: int | None = None
    """Tokens it may emit yet; None: not known."""


class Choice(NamedTuple):
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
        if not self.prefill_rows:
            return 0.0
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
    most: Sequence[int] | NDArray[np.int64],
    contexts: Sequence[int],
    match: FloatArray | None = None,
    reach: float = 1.0,
    catch_up: FloatArray | None = None,
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
        catch_up: [n] what the drafter has to take in before it can draft for a request, in seconds for each token that
            the request emits from here on. It is paid at once, so it counts for gain and K, and for no round.
    """
    count, k = survival.shape
    chance = np.ones(count) if match is None else match
    rows = np.arange(k + 1, dtype=np.float64)
    requests = max(load.requests, 1)
    asked = _at_once(requests, reach)
    drafting = _at_once(requests, reach * float(chance.sum()) / count if count else 1.0)
    calls = costs.draft.table(requests, k)[:, round(asked)] / asked  # [K + 1]
    passes = costs.verify.tokens.at(load.other_rows + requests + drafting * rows)  # [K + 1]
    passes = passes - load.prefill_seconds(costs.verify)
    passes = passes[0] / requests + (passes - passes[0]) / drafting
    far, near = costs.draft.context.at(contexts), costs.verify.context.at(contexts)
    drafts = (calls + far.request[:, None] * (rows > 0) + far.row[:, None] * rows) / chance[:, None]
    verifying = passes + near.request[:, None] + near.row[:, None] * (1 + rows)
    certain = 1 + load.other_tokens / requests
    tokens = np.full((count, k + 1), certain)
    tokens[:, 1:] += np.add.accumulate(survival, axis=1)
    allowed, seconds = rows <= np.asarray(most)[:, None], drafts + verifying
    rate = np.where(allowed, tokens / seconds, -np.inf)
    late = 0.0 if catch_up is None else catch_up[:, None] * tokens * (rows > 0)
    worth = np.where(allowed, tokens / (seconds + late), -np.inf)
    length, each = np.argmax(worth, axis=1), np.arange(count)
    gain = worth[each, length] / rate[:, 0] - 1
    return Outlook(length, gain, drafts, verifying, rate, tokens[each, length] - certain)


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


class Bids(NamedTuple):
    """The wishes of a step's R requests for draft rows."""

    requests: Sequence[int]
    contexts: Sequence[int]
    names: Sequence[str]
    """Drafters that may be bid for."""
    drafter: NDArray[np.int64]
    """[R] whom a request bids for, by place in `names`; -1: it does not draft."""
    survival: FloatArray
    """[R, K] expected; 0 beyond the request's largest K, and where it does not draft."""
    weight: FloatArray
    """[R] share of rounds in which its rows are there: below 1 for a drafter that does not always propose."""
    catch_up: FloatArray | None = None
    """[R] see `outlook`; None: there is nothing to take in."""


class Shares(NamedTuple):
    """Draft rows by request."""

    lengths: list[int]
    gain: float
    """Predicted gain of the whole step over plain decoding: of the geometric mean of the requests' tokens."""


def share(load: Load, verify: VerifyCost, drafts: Mapping[str, DraftCost], bids: Bids) -> Shares:
    """Gives draft rows to requests so that the step brings each of them the most tokens per second.

    That is the mean over requests of log(tokens), less log(seconds): a row is worth its survival *over what its request
    emits anyway*. All texts have to be decoded in the end. The plain sum of tokens would take rows from hard texts for
    easy ones, which then leave; the batch would fill with hard texts that are decoded plainly, and all together would
    take longer than with the same rows for everyone.

    Candidates are taken by what they are worth, less what a row behind a longer context costs beyond others, at the
    rate of plain decoding. The best number of them is searched on the measured staircase, draft costs included: every
    count is looked at, so a dear first row does not end the search, and the rows up to a step edge come by themselves.
    """
    count = len(bids.requests)
    extra = verify.context.at(bids.contexts)
    plain = verify.tokens(load.other_rows + load.requests - load.prefill_rows)
    plain += float((extra.request + extra.row).sum())
    found = _candidates(load, drafts, bids, extra.row, count / plain)
    weight = bids.weight[found.rows]
    first = load.other_rows + load.requests
    passes = verify.tokens.at(first + _summed(weight)) - verify.tokens(first)
    seconds = plain + passes + _summed(weight * found.charge)
    seconds += _drafting(drafts, bids, found.rows, found.positions)
    rate = _summed(found.growth) / load.requests - np.log(seconds)
    best = best_count(rate)
    return Shares(lengths(Ranking(found.rows, found.worth), best, count), float(np.expm1(rate[best] - rate[0])))


def _summed(values: FloatArray) -> FloatArray:
    """[n + 1] sums of the first 0 .. n."""
    return np.add.accumulate(np.concatenate(([0.0], values)))


class _Candidates(NamedTuple):
    """Draft rows that may be given, best first."""

    rows: NDArray[np.intp]
    """[n] request of each, by place."""
    positions: NDArray[np.intp]
    worth: FloatArray
    """[n] survival over the tokens that its request emits without it."""
    growth: FloatArray
    """[n] by how much it raises the logarithm of its request's tokens."""
    charge: FloatArray
    """[n] seconds that its context adds, and what its drafter has to take in."""


def _candidates(
    load: Load, drafts: Mapping[str, DraftCost], bids: Bids, row_extra: FloatArray, rate: float
) -> _Candidates:
    first, further = np.zeros(len(bids.requests)), row_extra.copy()
    for i, name in enumerate(bids.names):
        drafting, mine = drafts[name].context.at(bids.contexts), bids.drafter == i
        first += np.where(mine, drafting.request, 0.0)
        further += np.where(mine, drafting.row, 0.0)
    more = bids.survival * bids.weight[:, None]
    after = 1 + load.other_tokens / load.requests + np.add.accumulate(more, axis=1)
    rows, positions = np.nonzero(bids.survival > 0)
    here = rows, positions
    late = np.zeros(len(first)) if bids.catch_up is None else bids.catch_up
    first += late * (1 + load.other_tokens / load.requests)
    own = further[rows] + late[rows] * bids.survival[here]
    worth, growth = bids.survival[here] / (after - more)[here], np.log(after[here] / (after - more)[here])
    ids = np.array(bids.requests, dtype=np.int64)
    order = np.lexsort((ids[rows], positions, rate * own - worth))
    rows, positions = rows[order], positions[order]
    charge = own[order] + first[rows] * (positions == 0)
    return _Candidates(rows, positions, worth[order], growth[order], charge)


def _occurrence(values: NDArray[np.intp]) -> NDArray[np.intp]:
    """[n] how often each value has occurred up to and including its place."""
    by_value = values.argsort(kind="stable")
    ordered = values[by_value]
    counts = np.empty(len(values), dtype=np.intp)
    counts[by_value] = np.arange(1, len(values) + 1) - ordered.searchsorted(ordered)
    return counts


def _drafting(
    drafts: Mapping[str, DraftCost], bids: Bids, rows: NDArray[np.intp], positions: NDArray[np.intp]
) -> FloatArray:
    """[n + 1] seconds of all drafting calls once the first 0 .. n candidates are drafted."""
    seconds, owner = np.zeros(len(positions) + 1), bids.drafter[rows]
    for i, name in enumerate(bids.names):
        (mine,) = (owner == i).nonzero()
        if len(mine):
            slot = positions[mine]
            counts, table = _occurrence(slot), drafts[name].slots(*bids.survival.shape)
            seconds[mine + 1] = table[slot, counts] - table[slot, counts - 1]
    return np.cumsum(seconds)


__all__ = [
    "Ask",
    "Bids",
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
