"""Prompt lookup as a drafter of its own."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import Accepted, Drafter, DraftView, KeepDrafting, Proposal
from forerun.drafters.lookup import KEYS, Indexes, sizes_of


class Ngram(Drafter):
    """Looks the last n tokens up in prediction, prompt and output; the longest n wins, then the latest occurrence.

    Drafts are point masses: a function of the history alone. The index grows with the committed tokens and is never
    rebuilt, so a round costs O(new tokens + K).

    Confidence: how often a look-up that matched n tokens would have been right so far in this very request, prompt
    included, with n / (n + 1) as the prior. Every token of the request that follows a known n-gram is such a look-up,
    whether or not anything was drafted there, so code that repeats itself is known from its prompt on and prose does
    not pass for it. Behind k - 1 accepted drafts the match is longer by as many: c_k is the rate of that length. All
    of it is a function of the tokens before the proposal, however they came.

    Args:
        prompt_lookup_max: longest suffix to look up.
        prompt_lookup_min: shortest one. One of the two given sets both.
    """

    name = "ngram"
    config_keys = KEYS
    uses_prediction = True
    deterministic = True
    default_draft = 6

    def __init__(self, prompt_lookup_max: int | None = None, prompt_lookup_min: int | None = None):
        self.sizes = sizes_of(prompt_lookup_max, prompt_lookup_min) or range(2, 4 + 1)
        self._indexes = Indexes(self.sizes)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        return [self._indexes.of(view).lookup(view.k) for view in views]

    def commit(self, accepted: Sequence[Accepted]) -> None:
        self._indexes.commit(accepted)

    def release(self, request_id: int) -> None:
        self._indexes.release(request_id)
