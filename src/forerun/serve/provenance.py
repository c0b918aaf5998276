"""Where each token of a streamed answer came from: a draft that verification kept, or the target itself."""

from __future__ import annotations

import codecs
import math
from typing import Any

from forerun.engine import Chunk
from forerun.serve.tokens import TokenText

DRAFTED = "drafted"
"""Proposed by a drafter and kept."""
CORRECTED = "corrected"
"""The target's own token in place of a draft token that it refused."""
BONUS = "bonus"
"""The target's own token behind a draft that was kept whole."""
PLAIN = "plain"
"""The target's own token of a step that verified nothing."""
SOURCES = (DRAFTED, CORRECTED, BONUS, PLAIN)


class Provenance:
    """Tells of each event's tokens what a page or an experiment wants to show of them.

    Texts are the tokens' own and joined the text of the ids: a character of several tokens is in the last of them. A
    stop string may have cut the end of them from the answer.

    Args:
        tokens: text of single tokens.
    """

    def __init__(self, tokens: TokenText):
        self._tokens = tokens
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def of(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Of the next chunk of choice `index`: what its step verified and accepted, and where each token came from."""
        tokens = [self._token(index, chunk, place) for place in range(len(chunk.token_ids))]
        return {"verified": chunk.verified, "accepted": chunk.accepted, "tokens": tokens}

    def _token(self, index: int, chunk: Chunk, place: int) -> dict[str, Any]:
        token = chunk.token_ids[place]
        last = chunk.finished and place == len(chunk.token_ids) - 1
        source = _source(chunk, place)
        found: dict[str, Any] = {"id": token, "text": self._text(index, token, last), "source": source}
        if token in self._tokens.special_ids:
            found["special"] = True
        if source in (DRAFTED, CORRECTED):
            found["confidence"] = _confidence(chunk, place)
        if source == CORRECTED and chunk.rejected:
            found["instead_of"] = self._tokens.text_of(chunk.rejected[0])
        return found

    def _text(self, index: int, token: int, last: bool) -> str:
        """The characters that this token completes."""
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        return decoder.decode(self._tokens.bytes_of(token), last)


def _source(chunk: Chunk, place: int) -> str:
    if chunk.from_draft[place]:
        return DRAFTED
    if chunk.verified == 0:
        return PLAIN
    return CORRECTED if chunk.accepted < chunk.verified else BONUS


def _confidence(chunk: Chunk, place: int) -> float | None:
    """c_k of the draft token at this place, which the target kept or refused; None: the drafter gave none."""
    value = chunk.confidence[place] if place < len(chunk.confidence) else math.nan
    return None if math.isnan(value) else value


__all__ = ["SOURCES", "Provenance"]
