"""Plain autoregressive decoding: the same loop with nothing proposed."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import Draft, Drafter, DraftView, KeepDrafting, Proposal


class Vanilla(Drafter):
    """Proposes nothing, so every round is a plain step (K = 0)."""

    name = "vanilla"
    max_draft = 0

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        return [Draft() for _ in views]
