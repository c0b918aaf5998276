"""Engines over exact targets whose clock is their own passes: what a run costs is known, and no wall time is read."""

from __future__ import annotations

from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.target.table import TableTarget, history_model

VOCAB = 7
PASS, ROW = 10.0, 1.0
"""Seconds of every pass and of every row in it: whole numbers, so that sums do not depend on their order."""


def cost(rows: int) -> float:
    return PASS + ROW * rows


def target() -> TableTarget:
    return history_model(VOCAB, seed=3, window=256)


def engine(k: int = 3, **options: object) -> Engine:
    """A perfect small drafter and n-grams."""
    chosen = EngineOptions.of({"num_speculative_tokens": k, **options})
    big = target()
    return Engine(big, load_drafters([Small(target(), VOCAB), Ngram(3, 1)], big, chosen), chosen)


class Passed:
    """Seconds of a target's passes so far. A clock is read several times a step: no pass is added up twice."""

    def __init__(self, target: TableTarget):
        self._passes = target.passes
        self._read, self._seconds = 0, 0.0

    def __call__(self) -> float:
        new = self._passes[self._read :]
        self._read += len(new)
        self._seconds += sum(map(cost, new))
        return self._seconds


def pass_clock(engine: Engine) -> Passed:
    """The target's passes so far, in seconds; drafting is free."""
    return Passed(engine.target)
