"""The gain to expect of every drafter and K at a load, how sure that is, and what follows from it.

gain(K) = (1 + m * (S_1 + .. + S_K)) / cost(K) - 1

S_k      chance that drafts 1 .. k are all accepted; (1 - alpha^(K+1)) / (1 - alpha) in all for a constant one
m        share of the rounds in which the drafter proposes anything
cost(K)  seconds of a round over those of a plain step: drafting for all requests, and a pass over the drafts' rows
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forerun.bench.recommending.acceptance import Acceptance
from forerun.budget.costs import Costs
from forerun.budget.curve import FloatArray
from forerun.budget.planning import Load, outlook
from forerun.budget.reliability import Interval

WORTH_IT = 0.04
"""Gain from which drafting is recommended. More than a scheduler asks for: that adapts, advice does not, and costs are
known to a few percent."""


def gains(costs: Costs, survival: FloatArray, match: float, requests: int, context: int) -> FloatArray:
    """[K + 1] predicted gain over plain decoding at K = 0 .. , if all requests draft alike.

    Args:
        costs: of target and drafter.
        survival: [K].
        match: share of rounds in which the drafter proposes anything.
        requests: decoding together.
        context: tokens before each of them.
    """
    if match <= 0:
        return np.array([0.0, *[-_asking(costs, requests, context)] * len(survival)])
    seen = outlook(Load(requests), costs, survival[None], [len(survival)], [context], np.array([match]))
    tokens = 1 + match * np.concatenate(([0.0], np.cumsum(survival)))
    plain = seen.verifying[0, 0]
    seconds = match * (seen.drafting[0] + seen.verifying[0]) + (1 - match) * plain
    predicted: FloatArray = tokens * plain / seconds - 1
    return predicted


def _asking(costs: Costs, requests: int, context: int) -> float:
    """What is lost by asking a drafter that never proposes."""
    plain, call = costs.plain(requests, context), costs.draft(requests, 1, context)
    return call / (plain + call)


@dataclass(frozen=True)
class Verdict:
    """One choice at one load."""

    label: str
    requests: int
    lengths: tuple[int, ...]
    """The best K of those that draft, of each drafter in the order they are asked."""
    gain: float
    """At that K; negative where plain decoding is better at every K."""
    interval: Interval
    """Of the gain, by what is known of acceptance; costs are taken as they were measured."""
    emitted: float
    """Tokens of a round."""
    verify_ratio: float
    """A pass that verifies these drafts of every request over one that verifies none."""
    gains: Sequence[float] = ()
    """At K = 0 .. most; of a single drafter."""

    @property
    def length(self) -> int:
        """K of the drafter that is asked first."""
        return self.lengths[0]

    @property
    def worth_it(self) -> bool:
        return self.gain >= WORTH_IT

    def as_dict(self) -> dict[str, Any]:
        best = self.length if len(self.lengths) == 1 else list(self.lengths)
        return {
            "drafter": self.label,
            "concurrency": self.requests,
            "num_speculative_tokens": best if self.worth_it else 0,
            "best_drafting_k": best,
            "gain": self.gain,
            "gain_interval_90": list(self.interval),
            "worth_it": self.worth_it,
            "tokens_per_step": self.emitted,
            "verify_ratio": self.verify_ratio,
            "gains": list(self.gains),
        }


class Choice(Protocol):
    """What can be run: a drafter, or several in turn."""

    @property
    def label(self) -> str:
        """As it is told from others."""

    @property
    def command(self) -> str:
        """What follows `forerun generate` to run it."""

    @property
    def mixed(self) -> bool:
        """Whether it is more than one drafter."""

    def verdict(self, requests: int, context: int) -> Verdict:
        """The best K at a load, and what to expect of it."""

    def best_gain(self, requests: int, context: int) -> float:
        """At the best K, 0 where plain decoding is best."""

    def at(self, lengths: Sequence[int]) -> str:
        """What follows `forerun generate` to run it with these K and no others."""

    def as_dict(self) -> dict[str, Any]:
        """What is known of its acceptance, as JSON types."""

    def remarks(self) -> list[str]:
        """The same in words, a line each."""


@dataclass(frozen=True)
class Candidate:
    """A drafter, what it costs and what it gets right."""

    label: str
    command: str
    costs: Costs
    shown: Acceptance

    mixed = False

    def gains(self, requests: int, context: int) -> FloatArray:
        return gains(self.costs, self.shown.survival(), self.shown.match(), requests, context)

    def best_gain(self, requests: int, context: int) -> float:
        return float(self.gains(requests, context).max())

    def verdict(self, requests: int, context: int) -> Verdict:
        return judge(self, requests, context)

    def at(self, lengths: Sequence[int]) -> str:
        return f"{self.command} --num-speculative-tokens {lengths[0]} --policy fixed"

    def as_dict(self) -> dict[str, Any]:
        return {"acceptance": self.shown.as_dict()}

    def remarks(self) -> list[str]:
        return [remark(self.label, self.shown)]


def remark(label: str, shown: Acceptance) -> str:
    """What is known of a drafter's acceptance, in a line."""
    survival = " ".join(f"{value:.2f}" for value in shown.survival())
    return f"{label}: {shown.told}, a draft in {100 * shown.match():.0f} % of them, survival by position {survival}"


def judge(choice: Candidate, requests: int, context: int) -> Verdict:
    """The best K of a drafter at a load, and what to expect of it."""
    predicted, shown = choice.gains(requests, context), choice.shown
    k = 1 + int(np.argmax(predicted[1:]))
    interval = shown.bounds(lambda survival, match: float(gains(choice.costs, survival, match, requests, context)[k]))
    emitted = 1 + shown.match() * float(shown.survival()[:k].sum())
    plain = choice.costs.plain(requests, context)
    ratio = choice.costs.verify(requests, requests * (k + 1), context) / plain if plain else 1.0
    return Verdict(choice.label, requests, (k,), float(predicted[k]), interval, emitted, ratio, predicted.tolist())


def by_batch(choice: Candidate, most: int, context: int) -> list[tuple[int, int, int]]:
    """K by the number of requests, as (from, to, K): what `num_speculative_tokens_per_batch_size` takes. A K that
    gains too little is 0."""
    ranges: list[tuple[int, int, int]] = []
    for requests in range(1, most + 1):
        predicted = choice.gains(requests, context)
        k = int(np.argmax(predicted))
        k = k if predicted[k] >= WORTH_IT else 0
        if ranges and ranges[-1][2] == k:
            ranges[-1] = ranges[-1][0], requests, k
        else:
            ranges.append((requests, requests, k))
    return ranges


def last_paying(choice: Choice, loads: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The last of these (requests, context) at which drafting pays; None: it does at none."""
    paying = [load for load in loads if choice.best_gain(*load) >= WORTH_IT]
    return paying[-1] if paying else None


__all__ = ["WORTH_IT", "Candidate", "Choice", "Verdict", "by_batch", "gains", "judge", "last_paying", "remark"]
