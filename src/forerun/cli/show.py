"""Which tokens of a text came from the drafter, as colours."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from forerun.cli.console import screen
from forerun.engine.text import Detokenizer

if TYPE_CHECKING:
    from forerun.engine import Chunk

ACCEPTED = "bold green"
"""Bold too: NO_COLOR takes the colour away and leaves the weight."""
REJECTED = "red strike"
OWN = ""

Decode = Callable[[Sequence[int]], str]
Painted = list[tuple[str, str]]
"""Pieces of text with their styles. (A rich `Text` would drop control characters.)"""


def unpainted(chunk: Chunk) -> Painted:
    """A chunk's text as it is."""
    return [(chunk.text, OWN)]


class Painter:
    """Styles the text of one sample as it comes.

    The text itself is the engine's: it may hold characters back, and cuts at a stop string. The painter decodes the
    tokens once more only to know how many characters belong to which token.
    """

    def __init__(self, decode: Decode, with_rejected: bool):
        self._decode = decode
        self._with_rejected = with_rejected
        self._detokenizer = Detokenizer(decode)
        self._spans: deque[tuple[str, str]] = deque()  # (text, style); rejected ones take no character of the output

    def paint(self, chunk: Chunk) -> Painted:
        """The chunk's text, styled."""
        self._extend(chunk)
        painted, left = [], chunk.text
        while left and self._spans:
            piece, style = self._spans.popleft()
            if style == REJECTED:
                painted.append((piece, style))
                continue
            shown, left = left[: len(piece)], left[len(piece) :]
            painted.append((shown, style))
            if len(shown) < len(piece):
                self._spans.appendleft((piece[len(shown) :], style))
        return [*painted, (left, OWN)]  # left is an incomplete character at the end of the text

    def _extend(self, chunk: Chunk) -> None:
        """Accepted drafts, then what was refused, then the target's own token that stands in its place."""
        rejected = self._decode(chunk.rejected) if self._with_rejected and chunk.rejected else ""
        for token, drafted in zip(chunk.token_ids, chunk.from_draft, strict=True):
            if not drafted and rejected:
                self._spans.append((rejected.replace("\n", "\N{RETURN SYMBOL}"), REJECTED))
                rejected = ""
            piece = self._detokenizer.push(token)
            if piece:
                self._spans.append((piece, ACCEPTED if drafted else OWN))


def put(painted: Painted) -> None:
    """Prints pieces at once. Unstyled text goes out as it is, tabs and control characters included."""
    for piece, style in painted:
        if style == OWN:
            sys.stdout.write(piece)
        else:
            screen().print(Text(piece, style), end="")
    sys.stdout.flush()


def legend(with_rejected: bool) -> Text:
    """What the colours mean."""
    parts = [("drafted and accepted", ACCEPTED), (", the target's own", OWN)]
    parts += [(", ", OWN), ("drafted and refused", REJECTED)] if with_rejected else []
    return Text.assemble(*parts)
