"""Prompt lookup: what followed the last tokens the last time they were seen (Saxena 2023, prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import Accepted, Draft, Drafter, DraftView, KeepDrafting, Proposal
from forerun.errors import OptionError

_BORDER = -1
"""Stands between prediction and prompt, so that no n-gram spans the two."""

PRIOR = 4.0
"""Weight, in look-ups, of what is assumed of a match before the request has shown anything of its kind."""


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
    config_keys = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
    uses_prediction = True
    deterministic = True
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
        return [self._index(view).lookup(view.k) for view in views]

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
        self._longest_first = sizes[::-1]
        self._corpus = [*prediction, _BORDER] if prediction else []
        self._before = len(self._corpus)
        self._places: dict[tuple[int, ...], int] = {}
        self._looked = dict.fromkeys(sizes, 0)
        self._right = dict.fromkeys(sizes, 0)
        """By length of the longest match: look-ups at places of the request so far, and those that were right."""
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
        corpus, places = self._corpus, self._places
        for place in range(start, len(corpus)):
            open_ = place > self._before  # places of the prediction are no look-ups
            for n in self._longest_first:
                if n > place:
                    continue
                gram = tuple(corpus[place - n : place])
                if open_ and (known := places.get(gram)) is not None and corpus[known] != _BORDER:
                    open_ = False  # what the look-up before this place would have said
                    self._looked[n] += 1
                    self._right[n] += corpus[known] == corpus[place]
                places[gram] = place

    def confidence(self, n: int) -> float:
        """That a look-up matching n tokens is right, in (0, 1)."""
        n = min(n, self._sizes[-1])
        return (self._right[n] + PRIOR * n / (n + 1)) / (self._looked[n] + PRIOR)

    def lookup(self, k: int) -> Draft:
        """Up to k tokens that followed the longest known suffix; a repetition is continued into the draft itself."""
        corpus = self._corpus
        for n in self._longest_first:
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
                confidence = [self.confidence(n + j) for j in range(len(draft))]
                return Draft(draft, None, confidence, predicted=place < self._before)
        return Draft()
