"""What a simulated run came to: counted exactly, then turned into the rates users know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.bench.timeline import percentile
from forerun.budget.bypass import Reason
from forerun.budget.planning import Plan
from forerun.engine.stats import DecodingStats

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has all its tokens."""

    number: int
    tokens: int
    arrived: float
    first: float
    last: float

    @property
    def seconds_per_token(self) -> float | None:
        """(last - first) / (tokens - 1); None of a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class Books:
    """Sums over steps. A round is a step of one request that decodes; a prefill's first token is no round."""

    most: int
    """Longest draft there can be."""
    seconds: float = 0.0
    drafting_seconds: float = 0.0
    following_seconds: float = 0.0
    round_seconds: float = 0.0
    """Seconds of every step times the requests that decoded in it."""
    running_seconds: float = 0.0
    """The same of all that were in the batch."""
    steps: int = 0
    rows: int = 0
    """Of the target's passes."""
    rounds: int = 0
    first_tokens: int = 0
    planned: int = 0
    """Draft tokens planned."""
    drafted: int = 0
    drafting_rounds: int = 0
    plain_rounds: int = 0
    """Rounds for which nothing was planned."""
    probes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    """Of each drafter."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    preemptions: int = 0
    ended: list[Ended] = field(default_factory=list)
    grid: list[list[int]] = field(default_factory=list)
    """(drafted, verified, accepted) of each request in the last step with any round."""

    def __post_init__(self) -> None:
        self.verdicts: Counts = np.zeros((self.most + 1, self.most + 1), dtype=np.int64)
        """[verified, accepted] rounds."""

    # ---------------------------------------------------------------------------------------------------------- entries

    def judged(self, plans: Sequence[Plan], drafted: Counts, verified: Counts, accepted: Counts) -> None:
        """The rounds of a step, [R] each."""
        if not plans:
            return
        assert bool(np.all((accepted <= verified) & (verified <= drafted))), "more accepted than verified than drafted"
        np.add.at(self.verdicts, (verified, accepted), 1)
        self.rounds += len(plans)
        self.drafted += int(drafted.sum())
        self.drafting_rounds += int(np.count_nonzero(drafted))
        self.planned += sum(plan.k for plan in plans)
        self.probes += sum(plan.probe for plan in plans)
        idle = [plan for plan in plans if not plan.choices]
        self.plain_rounds += len(idle)
        self.reasons.update(plan.reason for plan in idle if plan.reason is not None)
        self.grid = np.stack((drafted, verified, accepted), axis=1).tolist()

    def passed(self, seconds: float, rows: int, decoding: int, running: int) -> None:
        """A step, whatever was in it."""
        self.steps += 1
        self.seconds += seconds
        self.rows += rows
        self.round_seconds += seconds * decoding
        self.running_seconds += seconds * running

    # ---------------------------------------------------------------------------------------------------------- answers

    @property
    def verified(self) -> int:
        return int(self.verdicts.sum(axis=1) @ np.arange(self.most + 1))

    @property
    def accepted(self) -> int:
        return int(self.verdicts.sum(axis=0) @ np.arange(self.most + 1))

    @property
    def tokens(self) -> int:
        """All that were emitted: one for each round and each accepted draft, and the first of each request."""
        return self.rounds + self.accepted + self.first_tokens

    def stats(self) -> DecodingStats:
        """The same in the counters of an engine."""
        table = self.verdicts
        by_position = [
            (int(table[k:].sum()), int(table[k:, k - 1 :].sum()), int(table[k:, k:].sum()))
            for k in range(1, self.most + 1)
        ]
        reached = [counts for counts in by_position if counts[0] > 0]
        return DecodingStats(
            drafted=self.drafted,
            verified=self.verified,
            accepted=self.accepted,
            emitted=self.rounds + self.accepted,
            drafting_rounds=self.drafting_rounds,
            target_steps=self.rounds,
            preemptions=self.preemptions,
            verified_by_position=[counts[0] for counts in reached],
            reached_by_position=[counts[1] for counts in reached],
            accepted_by_position=[counts[2] for counts in reached],
        )

    def as_row(self) -> dict[str, Any]:
        """Rates by name, as JSON types; a rate without a denominator is None."""
        stats = self.stats()
        return {
            "tokens_per_second": _rate(self.tokens, self.seconds),
            "tokens_per_second_per_user": _rate(stats.emitted, self.round_seconds),
            "mean_running": _rate(self.running_seconds, self.seconds),
            "verify_budget": _rate(stats.verified, self.rounds),
            "drafted_per_round": _rate(self.drafted, self.rounds),
            "mean_accepted_length": stats.mean_accepted_length,
            "tokens_per_step": stats.tokens_per_step,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_by_position": stats.acceptance_by_position,
            "bypass_share": _rate(self.plain_rounds, self.rounds),
            "bypass_reasons": {str(reason): count for reason, count in sorted(self.reasons.items())},
            "probe_share": _rate(self.probes, self.rounds),
            "drafting_share": _rate(self.drafting_seconds, self.seconds),
            "rows_per_step": _rate(self.rows, self.steps),
            **self._latencies(),
            "seconds": self.seconds,
            "steps": self.steps,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "preemptions": self.preemptions,
            "grid": self.grid[:GRID_ROWS],
        }

    def _latencies(self) -> dict[str, dict[str, float | None]]:
        first = [one.first - one.arrived for one in self.ended]
        each = [t for one in self.ended if (t := one.seconds_per_token) is not None]
        return {name: _points(values) for name, values in (("ttft_ms", first), ("tpot_ms", each))}


GRID_ROWS = 32
"""Requests whose draft tokens are kept, for a picture."""


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _points(values: Sequence[float]) -> dict[str, float | None]:
    points = {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95)}
    return {name: None if value is None else 1e3 * value for name, value in points.items()}


__all__ = ["GRID_ROWS", "Books", "Ended"]
