"""What followed the last tokens the last time they were seen (Saxena 2023, prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.drafters.base import Accepted, DraftView
from forerun.errors import OptionError
from forerun.verify import Draft

_BORDER = -1
"""Stands between prediction and prompt, so that no n-gram spans the two."""

PRIOR = 4.0
"""Weight, in look-ups, of what is assumed of a match before the request has shown anything of its kind."""
KEYS = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
"""Of `--speculative-config`, vLLM's names."""
USUAL = {"prompt_lookup_min": 2, "prompt_lookup_max": 6}
"""For a drafter that copies: longer matches are surer, and the share of each length is judged by itself."""


def sizes_of(longest: int | None, shortest: int | None) -> range | None:
    """Lengths of the n-grams that are looked up; one of the two given sets both. None: neither is given.

    Raises:
        OptionError: the shortest is longer than the longest.
    """
    given = [size for size in (shortest, longest) if size is not None]
    if not given:
        return None
    least, most = given[0], given[-1]
    if not 1 <= least <= most:
        raise OptionError("prompt_lookup_min", f"need 1 <= min <= max, got {least} and {most}")
    return range(least, most + 1)


class Indexes:
    """The index of every request that has been looked at.

    Args:
        sizes: lengths of n-grams.
    """

    def __init__(self, sizes: range):
        self.by_request: dict[int, NgramIndex] = {}
        self._sizes = sizes

    def of(self, view: DraftView) -> NgramIndex:
        """Up to date with the view's tokens."""
        index = self.by_request.get(view.request_id)
        if index is None:
            index = self.by_request[view.request_id] = NgramIndex(self._sizes, view.prediction)
        index.extend(view.tokens)
        return index

    def commit(self, accepted: Sequence[Accepted]) -> None:
        for rows in accepted:
            index = self.by_request.get(rows.request_id)
            if index is not None and index.length > rows.end:
                self.release(rows.request_id)  # cut back to before what was indexed: start over

    def release(self, request_id: int) -> None:
        self.by_request.pop(request_id, None)


class Foreseen(NamedTuple):
    """What a look-up says of the next token."""

    token: int
    n: int
    """Tokens that matched."""
    predicted: bool
    """It stands in the request's `prediction`."""


class NgramIndex:
    """n-gram -> place after its latest occurrence, over one growing corpus.

    It counts how often a look-up that matched n tokens has been right: every token of the request that follows a known
    n-gram is one, whether or not anything was drafted there.

    Args:
        sizes: lengths of n-grams.
        prediction: tokens the user expects, looked up before the prompt.
    """

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

    def foresee(self, drafted: Sequence[int]) -> Foreseen | None:
        """The token that followed the longest known n-gram at the end of the text and of what is drafted behind it;
        None: no such n-gram is known."""
        match = self._longest([*self._corpus[-self._sizes[-1] :], *drafted])
        if match is None:
            return None
        place, n = match
        return Foreseen(self._corpus[place], n, place < self._before)

    def lookup(self, k: int) -> Draft:
        """Up to k tokens that followed the longest known suffix; a repetition is continued into the draft itself."""
        corpus, draft = self._corpus, list[int]()
        match = self._longest(corpus[-self._sizes[-1] :])
        if match is None:
            return Draft()
        place, n = match
        for source in range(place, place + k):
            token = corpus[source] if source < len(corpus) else draft[source - len(corpus)]
            if token == _BORDER:
                break
            draft.append(token)
        confidence = [self.confidence(n + j) for j in range(len(draft))]
        return Draft(draft, None, confidence, predicted=len(draft) if place < self._before else 0)

    def _longest(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """(place after the latest occurrence of the longest known n-gram at the end, n), if a token stands there."""
        for n in self._longest_first:
            place = self._places.get(tuple(tail[-n:])) if n <= len(tail) else None
            if place is not None and self._corpus[place] != _BORDER:
                return place, n
        return None
