"""Two drafters in turn: one that does not always propose (an n-gram) where it does, another where it does not.

tokens   1 + m * (S_1 + .. + S_K) + (1 - m) * m' * (S'_1 + .. + S'_K')       of a request in a step
seconds  ask(R, K) + E[ask'(R - J, K') + verify(R + J * K + (R - J) * m' * K')]

m, S, K  of the first drafter, m', S', K' of the other one, which is asked by the R - J of R requests that the first
         one had nothing for; J is binomial, as requests match or do not by themselves

What each gets right was seen while they ran in turn: places where an n-gram does not match are harder than others.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lgamma, log, log1p
from typing import Any

import numpy as np

from forerun.bench.recommending.acceptance import LEVEL, Shown
from forerun.bench.recommending.recommendation import Verdict, remark
from forerun.budget.costs import Costs
from forerun.budget.curve import FloatArray
from forerun.budget.reliability import bootstrap


@dataclass(frozen=True)
class Part:
    """One of the two."""

    name: str
    costs: Costs
    shown: Shown
    """In its turn: the other one's rounds are those that came to it."""
    config: Mapping[str, Any]
    """Keys of `--speculative-config` that load it, K left out."""

    def flags(self, k: int | None = None) -> str:
        """What loads it on a command line."""
        given = {**self.config, **({} if k is None else {"num_speculative_tokens": k})}
        [only, *more] = given.values()
        return shlex.join(["--drafter", json.dumps(given) if more else str(only)])

    @property
    def most(self) -> int:
        return len(self.shown.survival())


@dataclass(frozen=True)
class Mixed:
    """The first drafter where it proposes, else the other."""

    label: str
    base: str
    """Flags of `forerun generate` that load the target."""
    first: Part
    other: Part

    mixed = True

    @property
    def command(self) -> str:
        return f"{self.base} {self.first.flags()} {self.other.flags()}"

    def verdict(self, requests: int, context: int) -> Verdict:
        """Both K searched together."""
        lengths = self._best(requests, context)
        prompts = self.first.shown.prompts

        def gain(rows: Sequence[int] | slice) -> float:
            return self._gain(lengths, requests, context, rows)

        interval = bootstrap(range(prompts), lambda rows: gain(rows.tolist()), level=LEVEL)
        emitted = self._tokens(lengths, slice(None))
        plain = self.first.costs.plain(requests, context)
        ratio = float(self._verify(lengths, requests, context, slice(None)) @ self._weights(requests, slice(None)))
        return Verdict(self.label, requests, lengths, gain(slice(None)), interval, emitted, ratio / plain)

    def best_gain(self, requests: int, context: int) -> float:
        return max(0.0, self._gain(self._best(requests, context), requests, context, slice(None)))

    def at(self, lengths: Sequence[int]) -> str:
        """In this order: a drafter is asked where the ones before it have nothing."""
        own = [part.flags(k) for part, k in zip((self.first, self.other), lengths, strict=True)]
        return f"{self.base} {' '.join(own)} --policy fixed"

    def as_dict(self) -> dict[str, Any]:
        return {"acceptance": {part.name: part.shown.as_dict() for part in (self.first, self.other)}}

    def remarks(self) -> list[str]:
        return [
            remark(f"{self.label}: {self.first.name}", self.first.shown),
            remark(f"{self.label}: {self.other.name} behind it", self.other.shown),
        ]

    def _best(self, requests: int, context: int) -> tuple[int, int]:
        """The pair of K with the greatest gain; both draft."""
        pairs = product(range(1, self.first.most + 1), range(1, self.other.most + 1))
        return max(pairs, key=lambda lengths: self._gain(lengths, requests, context, slice(None)))

    def _gain(self, lengths: tuple[int, int], requests: int, context: int, rows: Sequence[int] | slice) -> float:
        weights = self._weights(requests, rows)
        seconds = self._first_call(lengths[0], requests, context)
        steps = self._other_calls(lengths[1], requests, context) + self._verify(lengths, requests, context, rows)
        plain = self.first.costs.plain(requests, context)
        return self._tokens(lengths, rows) * plain / (seconds + float(weights @ steps)) - 1

    def _tokens(self, lengths: tuple[int, int], rows: Sequence[int] | slice) -> float:
        """Of a request in a step."""
        first, other = self.first.shown, self.other.shown
        found = first.match(rows) * float(first.survival(rows)[: lengths[0]].sum())
        rest = other.match(rows) * float(other.survival(rows)[: lengths[1]].sum())
        return 1 + found + (1 - first.match(rows)) * rest

    def _weights(self, requests: int, rows: Sequence[int] | slice) -> FloatArray:
        """[R + 1] chance that the first one proposes for so many requests."""
        return binomial(requests, self.first.shown.match(rows))

    def _first_call(self, k: int, requests: int, context: int) -> float:
        return self.first.costs.draft(requests, k, context)

    def _other_calls(self, k: int, requests: int, context: int) -> FloatArray:
        """[R + 1] seconds of the other one's call where the first proposes for 0 .. R requests."""
        draft = self.other.costs.draft
        extra = draft.context.at([context])
        left = np.arange(requests, -1, -1)
        calls: FloatArray = draft.table(requests, k)[k, left] + left * float(extra.request[0] + k * extra.row[0])
        return calls

    def _verify(self, lengths: tuple[int, int], requests: int, context: int, rows: Sequence[int] | slice) -> FloatArray:
        """[R + 1] seconds of the target's pass where the first proposes for 0 .. R requests."""
        verify, proposing = self.first.costs.verify, np.arange(requests + 1, dtype=np.float64)
        behind = (requests - proposing) * self.other.shown.match(rows) * lengths[1]
        tokens = requests + proposing * lengths[0] + behind
        extra = verify.context.at([context])
        passes: FloatArray = verify.tokens.at(tokens) + requests * extra.request[0] + tokens * extra.row[0]
        return passes


def binomial(count: int, chance: float) -> FloatArray:
    """[count + 1] chance of 0 .. count successes. By logarithms: with a thousand the coefficients are no floats."""
    if chance in (0.0, 1.0):
        certain: FloatArray = np.eye(count + 1)[round(count * chance)]
        return certain
    factorials = np.array([lgamma(n + 1) for n in range(count + 1)])
    hits = np.arange(count + 1)
    logs = factorials[-1] - factorials - factorials[::-1] + hits * log(chance) + (count - hits) * log1p(-chance)
    return np.asarray(np.exp(logs), dtype=np.float64)


__all__ = ["Mixed", "Part", "binomial"]
