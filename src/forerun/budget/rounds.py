"""What the budget is told of a round: a draft without its tokens, its verdict, the time it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.budget.policy import Exposure


@dataclass(frozen=True, slots=True)
class Drafted:
    """One request's draft."""

    request_id: int
    drafter: str | None = None
    """Who made it; None: there is none."""
    count: int = 0
    """Tokens drafted."""
    confidence: Sequence[float] = ()
    """[count] c_k as the drafter gave them; empty where it gives none."""
    exposure: Exposure = field(default_factory=Exposure)

    def __post_init__(self) -> None:
        assert len(self.confidence) in (0, self.count), f"{len(self.confidence)} confidences for {self.count} tokens"
        assert (self.drafter is not None) == (self.count > 0), f"{self.count} tokens drafted by {self.drafter}"


@dataclass(frozen=True, slots=True)
class Judged:
    """One request's round that reached a verdict."""

    draft: Drafted
    verified: int = 0
    accepted: int = 0
    """Before a stop rule cuts."""
    missed: tuple[str, ...] = ()
    """Drafters that were asked and had nothing to propose."""


@dataclass(frozen=True, slots=True)
class DraftTime:
    """One drafting call and its seconds."""

    drafter: str
    lengths: Sequence[int]
    """For each request it was asked for, the K that such a call is measured with: what was computed, which may be more
    than the draft. Compared with a cost of fewer tokens, a drafter that is often stopped would look like one that has
    become slow."""
    contexts: Sequence[int]
    """Tokens behind which each of them drafts."""
    seconds: float


__all__ = ["DraftTime", "Drafted", "Judged"]
