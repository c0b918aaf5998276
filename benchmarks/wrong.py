"""A drafter that is always wrong and always sure: what does it cost to have one?

    forerun bench load --drafter '{"method": "wrong:Wrong", "model": "runs/dspark/best"}' --bar 0.95 ..

with this folder on PYTHONPATH. It drafts as the DSpark drafter does that it is made of, at the same price, and then
says the last id of the vocabulary instead: one that a model whose vocabulary is padded never emits. What was accepted
nonetheless is in the report of whoever measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from forerun.drafters.base import Draft, DraftView, KeepDrafting, LoadContext, Proposal
from forerun.drafters.dspark import DSpark

SURE = 0.99
"""Its confidence in every token."""


class Wrong(DSpark):
    """Point masses, hence lossless at any temperature: drafts that were not drawn from their law would not be."""

    name = "wrong"
    deterministic = True

    @classmethod
    def load(cls, options: Mapping[str, Any], context: LoadContext) -> Self:
        made = DSpark.load(options, context)
        made.__class__ = cls  # the folder is a `dspark`'s, and is checked to be one
        return made

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        drafts = super().propose(views, lambda view, k, _: keep_drafting(view, k, SURE))
        last = self.target.vocab_size - 1
        return [Draft([last] * len(draft.tokens), None, [SURE] * len(draft.tokens)) for draft in drafts]
