"""Counters of speculative decoding and the rates made of them: one list of names for screens, reports and JSON.

Definitions are those of the documentation's metrics page; k counts from 1. A rate with denominator 0 is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.budget.planning import Plan


@dataclass(slots=True)
class DecodingStats:
    """Counters of one request, or the sum over several."""

    planned: int = 0
    """Draft tokens planned before drafting: the longest draft each round allowed."""
    drafted: int = 0
    """Draft tokens proposed."""
    verified: int = 0
    """Draft tokens sent to the target."""
    accepted: int = 0
    """Draft tokens kept by verification, bonus excluded, before a stop rule cuts."""
    emitted: int = 0
    """Accepted + 1 per target step."""
    discarded: int = 0
    """Emitted, but behind a stop rule."""
    drafting_rounds: int = 0
    """Rounds with at least one token drafted."""
    target_steps: int = 0
    """Target steps after the prefill, plain ones included."""
    invalid_drafts: int = 0
    """Rounds whose draft ended before a law that is not finite or was not made, or an id outside the vocabulary."""
    drafter_faults: int = 0
    """Rounds the drafter raised in."""
    preemptions: int = 0
    predicted_accepted: int = 0
    """Committed draft tokens that were taken from the request's `prediction`."""
    predicted_rejected: int = 0
    """Tokens taken from it that were verified and refused."""
    probes: int = 0
    """Rounds that drafted to learn what drafts are worth."""
    cached_tokens: int = field(default=0, compare=False)
    """Prompt tokens whose rows were found in the prefix cache; what was there before is no part of what was done."""
    verified_by_position: list[int] = field(default_factory=list)
    """[K] rounds in which position k was verified."""
    reached_by_position: list[int] = field(default_factory=list)
    """[K] of those, rounds in which every earlier position was accepted."""
    accepted_by_position: list[int] = field(default_factory=list)
    """[K] of those, rounds in which position k was accepted as well."""
    skipped_steps: dict[str, int] = field(default_factory=dict, compare=False)
    """Rounds planned with K = 0, by reason; why nothing was drafted is no part of what was done."""
    invalid_positions: dict[str, int] = field(default_factory=dict, compare=False)
    """Draft positions by what was wrong and what became of them, as "nan cut": see `record_invalid`."""

    def record(self, drafted: int, verified: int, accepted: int) -> None:
        """One round: so many tokens drafted, sent to the target, and kept."""
        assert 0 <= accepted <= verified <= drafted, (accepted, verified, drafted)
        self.target_steps += 1
        self.drafting_rounds += drafted > 0
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.emitted += accepted + 1
        for counts in (self.verified_by_position, self.reached_by_position, self.accepted_by_position):
            counts.extend([0] * (verified - len(counts)))
        for k in range(verified):
            self.verified_by_position[k] += 1
            self.reached_by_position[k] += accepted >= k
            self.accepted_by_position[k] += accepted > k

    def record_plan(self, plan: Plan) -> None:
        """What the round was planned to be."""
        self.planned += plan.k
        self.probes += plan.probe
        if plan.reason is not None:
            reason = plan.reason.value
            self.skipped_steps[reason] = self.skipped_steps.get(reason, 0) + 1

    def record_invalid(self, reason: str, action: str, positions: int = 1) -> None:
        """Draft positions that could not be as the drafter would have them.

        nan, vocab, limit `cut`: behind a law that is none, an id the target lacks, or K. grammar `masked`: the law was
        masked by the request's own form before the token was drawn; grammar `rejected`: a point mass that the form does
        not allow, refused with p = 0.
        """
        name = f"{reason} {action}"
        self.invalid_positions[name] = self.invalid_positions.get(name, 0) + positions

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Rounds with 1..k accepted / rounds with k verified and 1..k-1 accepted."""
        return [_rate(a, r) for a, r in zip(self.accepted_by_position, self.reached_by_position, strict=True)]

    @property
    def prefix_survival(self) -> list[float | None]:
        """Rounds with 1..k accepted / rounds with k verified."""
        return [_rate(a, v) for a, v in zip(self.accepted_by_position, self.verified_by_position, strict=True)]

    @property
    def draft_acceptance_rate(self) -> float | None:
        return _rate(self.accepted, self.verified)

    @property
    def accepted_per_drafted(self) -> float | None:
        return _rate(self.accepted, self.drafted)

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted / drafting rounds: bonus included, every round counting once."""
        return None if self.drafting_rounds == 0 else 1 + self.accepted / self.drafting_rounds

    @property
    def tokens_per_step(self) -> float | None:
        return _rate(self.emitted, self.target_steps)

    @property
    def verify_rate(self) -> float | None:
        return _rate(self.accepted + self.drafting_rounds, self.verified + self.drafting_rounds)

    def as_dict(self) -> dict[str, Any]:
        """Counters and those rates that exist."""
        rates = {name: getattr(self, name) for name in RATES}
        return asdict(self) | {name: value for name, value in rates.items() if value is not None}


RATES = (
    "acceptance_by_position",
    "prefix_survival",
    "draft_acceptance_rate",
    "accepted_per_drafted",
    "mean_accepted_length",
    "tokens_per_step",
    "verify_rate",
)


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def total(parts: Iterable[DecodingStats]) -> DecodingStats:
    """The sum of counters, position by position."""
    result = DecodingStats()
    for part in parts:
        for name, value in asdict(part).items():
            setattr(result, name, _sum(getattr(result, name), value))
    return result


def _sum(left: Any, right: Any) -> Any:
    if isinstance(right, dict):
        return {name: left.get(name, 0) + right.get(name, 0) for name in (*left, *(n for n in right if n not in left))}
    return _add(left, right) if isinstance(right, list) else left + right


def _add(left: list[int], right: list[int]) -> list[int]:
    size = max(len(left), len(right))
    return [a + b for a, b in zip(left + [0] * (size - len(left)), right + [0] * (size - len(right)), strict=True)]


def mean_accepted_length_macro(parts: Iterable[DecodingStats]) -> float | None:
    """Mean over requests of their own mean accepted length."""
    lengths = [length for part in parts if (length := part.mean_accepted_length) is not None]
    return sum(lengths) / len(lengths) if lengths else None
