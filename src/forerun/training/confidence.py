"""How well a drafter knows what will be accepted: its confidence against what verification decided.

`Observed` stands in for a drafter in an engine and notes, round by round, what it was confident of and what was kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.budget import reliability
from forerun.drafters.base import Accepted, Drafter, DraftView, KeepDrafting, Proposal


@dataclass(frozen=True, slots=True)
class Round:
    """One drafted block that was verified whole."""

    confidence: tuple[float, ...]
    """c_1 .. c_K."""
    accepted: int


class Observed(Drafter):
    """A drafter that is watched. It behaves as the one inside.

    The last round of a request is left out: a stop rule may have cut it short of what was accepted.
    """

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.default_draft = inner.default_draft
        self.taps, self.max_draft, self.window = inner.taps, inner.max_draft, inner.window
        self.rounds: list[Round] = []
        self._drafted: dict[int, tuple[int, tuple[float, ...]]] = {}  # request -> anchor, confidence
        self._judged: dict[int, Round] = {}

    @property
    def block_bytes(self) -> int:
        return self.inner.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self.inner.allocate(num_blocks)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        proposal = self.inner.propose(views, keep_drafting)
        for view, draft in zip(views, proposal, strict=True):
            if view.request_id in self._judged:  # it went on, so nothing had cut that round
                self.rounds.append(self._judged.pop(view.request_id))
            if draft.tokens and len(draft.confidence) == len(draft.tokens) and not draft.invalid:
                self._drafted[view.request_id] = view.anchor, tuple(draft.confidence)
        return proposal

    def commit(self, accepted: Sequence[Accepted]) -> None:
        for rows in accepted:
            anchor, confidence = self._drafted.pop(rows.request_id, (None, ()))
            if anchor == rows.start:  # the anchor's own row, and one for each accepted token
                self._judged[rows.request_id] = Round(confidence, rows.end - rows.start - 1)
        self.inner.commit(accepted)

    def release(self, request_id: int) -> None:
        self._drafted.pop(request_id, None)
        self._judged.pop(request_id, None)
        self.inner.release(request_id)

    def audit(self) -> None:
        self.inner.audit()


def survival_pairs(rounds: Sequence[Round]) -> list[tuple[float, bool]]:
    """(predicted, observed) survival of every position: c_1 * .. * c_k, and whether tokens 1 .. k were accepted."""
    pairs = []
    for one in rounds:
        predicted = 1.0
        for k, confidence in enumerate(one.confidence, 1):
            predicted *= confidence
            pairs.append((predicted, one.accepted >= k))
    return pairs


def confidence_error(rounds: Sequence[Round]) -> dict[str, Any]:
    """Of survival (methods, 8.1): `confidence_ece`, the expected calibration error in 15 bins, `confidence_bce` in
    nats, and how many rounds they are from. Nothing without rounds."""
    pairs = survival_pairs(rounds)
    if not pairs:
        return {}
    return {
        "confidence_ece": expected_calibration_error(pairs),
        "confidence_bce": cross_entropy(pairs),
        "confidence_rounds": len(rounds),
    }


def expected_calibration_error(pairs: Sequence[tuple[float, bool]]) -> float:
    """`reliability.expected_calibration_error` of (predicted, observed) pairs."""
    predicted, happened = np.array(pairs, dtype=np.float64).T
    return reliability.expected_calibration_error(predicted.clip(max=1), happened)  # 1 and a rounding is 1


def cross_entropy(pairs: Sequence[tuple[float, bool]]) -> float:
    """Mean of -log of the probability that was given to what happened, at most that of a float's last bit."""
    tiny = 2.0**-52
    return -sum(math.log(max(tiny, p if happened else 1 - p)) for p, happened in pairs) / len(pairs)
