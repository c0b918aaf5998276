"""Ids to text as they come: whole characters only, stop strings found across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_LONG = 32
"""Tokens without a character border after which the window is cut, so that work per token stays bounded."""


class Detokenizer:
    """Turns ids into text incrementally: the concatenated pieces equal the decoding of all ids.

    Only a window that reaches back to the last but one character border is decoded for a new token; a border further
    back is needed because some tokenizers drop the leading space of whatever they are given. Text that ends in U+FFFD
    is an incomplete character, held back until it completes or the text ends. It is held back as a whole: a decoder
    with byte fallback (Llama 2, Gemma) writes one U+FFFD per byte of an unfinished run of byte tokens, even for bytes
    of complete characters before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._border = 0  # tokens of the window whose text has been handed out
        self._given = ""  # that text, as it decodes without what follows
        self._patience = _LONG

    def push(self, token: int) -> str:
        """Adds a token; the text that became certain."""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._border
        if text.endswith(_REPLACEMENT):
            return self._cut(text) if waiting > self._patience else ""
        piece = self._behind_border(text)
        if piece:
            self._move()
        elif waiting > _LONG:
            del self._window[self._border :]  # ids without a text of their own, skipped special ones
        return piece

    def flush(self) -> str:
        """The rest at the end of the text, an incomplete character as U+FFFD."""
        piece = self._behind_border(self._decode(self._window))
        self._window, self._border, self._given = [], 0, ""
        return piece

    def _behind_border(self, text: str, end: int | None = None) -> str:
        """The text behind the border, where `text` is that of the window up to `end`."""
        if text.startswith(self._given):
            return text[len(self._given) :]
        # Byte fallback turned complete characters into U+FFFD because a broken byte followed. They have been shown.
        return self._decode(self._window[self._border : end])

    def _move(self) -> None:
        self._window = self._window[self._border :]
        self._border = len(self._window)
        self._given = self._decode(self._window)
        self._patience = _LONG

    def _cut(self, text: str) -> str:
        """Hands out the front of a window full of broken bytes, where that leaves the rest as it is; else waits twice
        as long."""
        for keep in range(4, 9):  # an incomplete character is at most 3 bytes, so at most 3 tokens
            front = self._decode(self._window[:-keep])
            if front + self._decode(self._window[-keep:]) == text:
                piece = self._behind_border(front, -keep)
                self._window, self._border, self._given = self._window[-keep:], 0, ""
                self._patience = _LONG
                return piece
        self._patience = 2 * (len(self._window) - self._border)
        return ""


class TextStream:
    """The visible text of one request: detokenised, searched for stop strings, released when it cannot change."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], include_stop: bool = False):
        self._detokenizer = Detokenizer(decode)
        self._stops = stops
        self._include_stop = include_stop
        self.text = ""
        self._released = 0

    def push(self, token: int, look_for_stops: bool = True) -> str | None:
        """Adds a committed token; the stop string that its text completes, if any. Text from there on is cut."""
        before = len(self.text)
        self.text += self._detokenizer.push(token)
        return self._cut_at_stop(before) if look_for_stops else None

    def _cut_at_stop(self, before: int) -> str | None:
        """Looks for matches that end behind `before`: others were complete while nobody looked, and have been shown."""
        starts = [(max(0, before - len(stop) + 1), stop) for stop in self._stops]
        found = [(at, -len(stop), stop) for start, stop in starts if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, _, stop = min(found)  # the earliest match, among those at one place the longest
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop

    def release(self) -> str:
        """New text that no stop string can take back any more."""
        safe = len(self.text) - self._held_back()
        piece = self.text[self._released : safe]
        self._released = max(self._released, safe)
        return piece

    def finish(self, flush: bool) -> str:
        """The rest of the text. `flush` adds an incomplete character; not after a stop string cut the text."""
        if flush:
            self.text += self._detokenizer.flush()
        piece = self.text[self._released :]
        self._released = len(self.text)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        return max((_overlap(self.text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Of one stop string: its own length bounds the work, whatever the others are."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
