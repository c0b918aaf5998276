"""Prompt lookup: what followed the last tokens the last time they were seen (Saxena 2023, prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import Accepted, Draft, Drafter, DraftView, KeepDrafting, Proposal
from forerun.errors import OptionError

_BORDER = -1
"""Stands between prediction and prompt, so that no n-gram spans the two."""


class Ngram(Drafter):
    """Looks the last n tokens up in prediction, prompt and output; the longest n wins, then the latest occurrence.

    Drafts are point masses: a function of the history alone. The index grows with the committed tokens and is never
    rebuilt, so a round costs O(new tokens + K).

    Args:
        prompt_lookup_max: longest suffix to look up.
        prompt_lookup_min: shortest one. One of the two given sets both.
    """

    name = "ngram"
    config_keys = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
    uses_prediction = True
    default_draft = 6

    def __init__(self, prompt_lookup_max: int | None = None, prompt_lookup_min: int | None = None):
        longest = prompt_lookup_max if prompt_lookup_max is not None else prompt_lookup_min
        shortest = prompt_lookup_min if prompt_lookup_min is not None else prompt_lookup_max
        self.sizes = range(2 if shortest is None else shortest, (4 if longest is None else longest) + 1)
        if self.sizes.start < 1 or not self.sizes:
            raise OptionError(
                "prompt_lookup_min", f"need 1 <= min <= max, got {self.sizes.start} and {self.sizes.stop - 1}"
            )
        self._indexes: dict[int, _Index] = {}

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        return [Draft(self._index(view).lookup(view.k)) for view in views]

    def _index(self, view: DraftView) -> _Index:
        index = self._indexes.get(view.request_id)
        if index is None:
            index = self._indexes[view.request_id] = _Index(self.sizes, view.prediction)
        index.extend(view.tokens)
        return index

    def commit(self, accepted: Sequence[Accepted]) -> None:
        for rows in accepted:
            index = self._indexes.get(rows.request_id)
            if index is not None and index.length > rows.end:
                self.release(rows.request_id)  # cut back to before what was indexed: start over

    def release(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)


class _Index:
    """n-gram -> place after its latest occurrence, over one growing corpus."""

    def __init__(self, sizes: range, prediction: Sequence[int]):
        self._sizes = sizes
        self._corpus = [*prediction, _BORDER] if prediction else []
        self._before = len(self._corpus)
        self._places: dict[tuple[int, ...], int] = {}
        self._add(1)

    @property
    def length(self) -> int:
        """Tokens of the request that are indexed."""
        return len(self._corpus) - self._before

    def extend(self, tokens: Sequence[int]) -> None:
        start = max(1, len(self._corpus))
        self._corpus += tokens[self.length :]
        self._add(start)

    def _add(self, start: int) -> None:
        """Enters the n-grams that end before each place from `start` on, i.e. those whose continuation is known."""
        corpus = self._corpus
        for place in range(start, len(corpus)):
            for n in self._sizes:
                if n <= place:
                    self._places[tuple(corpus[place - n : place])] = place

    def lookup(self, k: int) -> list[int]:
        """Up to k tokens that followed the longest known suffix; a repetition is continued into the draft itself."""
        corpus = self._corpus
        for n in reversed(self._sizes):
            place = self._places.get(tuple(corpus[-n:])) if n <= len(corpus) else None
            if place is None:
                continue
            draft: list[int] = []
            for source in range(place, place + k):
                token = corpus[source] if source < len(corpus) else draft[source - len(corpus)]
                if token == _BORDER:
                    break
                draft.append(token)
            if draft:
                return draft
        return []
