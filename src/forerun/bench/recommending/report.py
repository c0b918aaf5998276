"""A recommendation as a table and as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.recommending.recommendation import WORTH_IT, Candidate, Choice, Verdict, by_batch, last_paying

if TYPE_CHECKING:
    from rich.table import Table

FORMULA = (
    "speed-up = (1 + m * (S_1 + .. + S_K)) / cost(K); S_k: chance that drafts 1 .. k are accepted, so that at a "
    "constant acceptance a the tokens of a round are (1 - a^(K+1)) / (1 - a); m: share of rounds with a draft; cost: "
    "drafting and verifying in plain steps, read from the measured staircase"
)
NOT_WORTH_IT = "not worth it here"
MIXED_BEATS = 0.02
"""Gain by which two drafters in turn must beat a single one: a second model is a second thing to keep."""


@dataclass(frozen=True)
class Setting:
    """The load a recommendation is for."""

    concurrency: Sequence[int]
    context: int
    """Tokens before a request, on average."""
    most: int
    """Requests up to which K is given."""
    window: int
    """Longest context that is looked at."""


@dataclass(frozen=True)
class Recommendation:
    """Every choice at every load."""

    choices: Sequence[Choice]
    setting: Setting
    verdicts: Sequence[Verdict]

    @classmethod
    def of(cls, choices: Sequence[Choice], setting: Setting) -> Recommendation:
        verdicts = [choice.verdict(n, setting.context) for n in setting.concurrency for choice in choices]
        return cls(choices, setting, verdicts)

    def best(self, requests: int) -> Verdict | None:
        """The choice with the greatest gain at a load, several drafters only where they gain `MIXED_BEATS` more than
        any single one; None: plain decoding."""
        mine = [verdict for verdict in self.verdicts if verdict.requests == requests and verdict.worth_it]
        return max(mine, key=lambda v: v.gain - MIXED_BEATS * self.choice(v.label).mixed, default=None)

    def choice(self, label: str) -> Choice:
        return next(choice for choice in self.choices if choice.label == label)

    def as_dict(self) -> dict[str, Any]:
        best = {str(n): found.label if (found := self.best(n)) else "vanilla" for n in self.setting.concurrency}
        return {
            "best": best,
            "minimum_gain": WORTH_IT,
            "context": self.setting.context,
            "choices": [self._choice_dict(choice) for choice in self.choices],
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
        }

    def _choice_dict(self, choice: Choice) -> dict[str, Any]:
        limits = {"up_to_concurrency": self.up_to_concurrency(choice), "up_to_context": self.up_to_context(choice)}
        table = {}
        if isinstance(choice, Candidate):
            ranges = by_batch(choice, self.setting.most, self.setting.context)
            table["num_speculative_tokens_per_batch_size"] = [list(row) for row in ranges]
        return {"drafter": choice.label, **choice.as_dict(), **table, **limits}

    def up_to_concurrency(self, choice: Choice) -> int:
        """The most requests with which drafting pays at this context; 0: never."""
        loads = ((n, self.setting.context) for n in range(1, self.setting.most + 1))
        found = last_paying(choice, loads)
        return found[0] if found else 0

    def up_to_context(self, choice: Choice) -> int | None:
        """The longest context behind which drafting pays for a single request, of eight an octave; None: never."""
        contexts = sorted({min(self.setting.window, round(16 * 2 ** (i / 8))) for i in range(200)})
        found = last_paying(choice, ((1, context) for context in contexts))
        return found[1] if found else None


def table(recommendation: Recommendation) -> Table:
    """One line per load and choice."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in ("requests", "drafter", "K", "speed-up", "[90 %]", "tokens a step", "pass, times plain", ""):
        grid.add_column(name, justify="left" if name in ("drafter", "") else "right", no_wrap=True)
    for one in recommendation.verdicts:
        best = recommendation.best(one.requests)
        note = "best" if best is one else NOT_WORTH_IT if not one.worth_it else ""
        low, high = (1 + bound for bound in one.interval)
        grid.add_row(
            str(one.requests),
            one.label,
            told(one.lengths),
            f"{1 + one.gain:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{one.emitted:.2f}",
            f"{one.verify_ratio:.2f}",
            note,
        )
    return grid


def told(lengths: Sequence[int]) -> str:
    """K of each drafter: `4`, or `6, else 4`."""
    return ", else ".join(map(str, lengths))


def by_k(recommendation: Recommendation) -> Table:
    """The speed-up at every K: one line per load and drafter."""
    from rich.table import Table

    most = max(len(one.gains) for one in recommendation.verdicts)
    grid = Table(box=None, pad_edge=False)
    grid.add_column("requests", justify="right", no_wrap=True)
    grid.add_column("drafter", no_wrap=True)
    for k in range(1, most):
        grid.add_column(f"K = {k}", justify="right", no_wrap=True)
    for one in (verdict for verdict in recommendation.verdicts if verdict.gains):
        cells = [f"{1 + gain:.2f}x" for gain in one.gains[1:]]
        grid.add_row(str(one.requests), one.label, *cells)
    return grid


def sentences(recommendation: Recommendation) -> Iterator[str]:
    """What to run, and how far it holds."""
    setting = recommendation.setting
    for requests in setting.concurrency:
        best = recommendation.best(requests)
        where = "one request at a time" if requests == 1 else f"{requests} requests together"
        if best is None:
            least = f"{100 * WORTH_IT:.0f} %"
            yield f"{where}: speculative decoding is {NOT_WORTH_IT}: a gain of {least} is not to be expected"
            continue
        choice = recommendation.choice(best.label)
        unsure = "" if best.interval.low > 0 else "; on other prompts it may lose"
        yield f"{where}: {best.label} with K = {told(best.lengths)}, {1 + best.gain:.2f} times as fast{unsure}"
        yield f"    forerun generate {choice.at(best.lengths)}"
        yield f"    forerun generate {choice.command}    adapts K to load and text, at most the drafter's own"
    for choice in recommendation.choices:
        yield from _limits(recommendation, choice)


def _limits(recommendation: Recommendation, choice: Choice) -> Iterator[str]:
    setting, up_to = recommendation.setting, recommendation.up_to_concurrency(choice)
    if up_to == 0:
        return
    if isinstance(choice, Candidate):
        ranges = [list(row) for row in by_batch(choice, setting.most, setting.context)]
        yield f"{choice.label}, K by requests: {json.dumps({'num_speculative_tokens_per_batch_size': ranges})}"
    name = f"    {choice.label}: beyond"
    if up_to < setting.most:
        yield f"{name} {up_to} requests plain decoding wins; the default policy sees to that by itself"
    context = recommendation.up_to_context(choice)
    if context is not None and context < setting.window:
        yield f"{name} some {context:,} tokens of context plain decoding wins, for a single request"


__all__ = ["FORMULA", "NOT_WORTH_IT", "Recommendation", "Setting", "by_k", "sentences", "table"]
