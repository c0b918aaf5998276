"""Ids to text as they come: whole characters only, stop strings found across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_LONG = 32
"""Tokens without a character border after which the window is cut, so that work per token stays bounded."""


class Detokenizer:
    """Turns ids into text incrementally: the concatenated pieces equal the decoding of all ids.

    Only a window that reaches back to the last but one character border is decoded for a new token; a border further
    back is needed because some tokenizers drop the leading space of whatever they are given. An incomplete UTF-8 tail
    decodes to one U+FFFD, which is held back until it completes or the text ends.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._border = 0  # tokens of the window whose text is complete
        self._given = 0  # characters of the window's text already handed out
        self._patience = _LONG

    def push(self, token: int) -> str:
        """Adds a token; the text that became certain."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            piece = text[self._given :]
            self._move(self._border)
            return piece
        piece = text[self._given : -1]
        self._given = max(self._given, len(text) - 1)
        if len(self._window) > self._patience:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """The rest at the end of the text, an incomplete character as one U+FFFD."""
        piece = self._decode(self._window)[self._given :]
        self._given += len(piece)
        return piece

    def _move(self, start: int) -> None:
        self._window = self._window[start:]
        self._border = len(self._window)
        self._given = len(self._decode(self._window))
        self._patience = _LONG

    def _cut(self, text: str) -> None:
        """Shortens a window full of broken bytes where that provably changes no text; else waits twice as long."""
        for keep in range(4, 9):  # an incomplete character is at most 3 bytes, so at most 3 tokens
            head, tail = self._window[:-keep], self._window[-keep:]
            front = self._decode(head)
            if front + self._decode(tail) == text:
                self._window, self._border, self._given = tail, 0, self._given - len(front)
                self._patience = _LONG
                return
        self._patience = 2 * len(self._window)


class TextStream:
    """The visible text of one request: detokenised, searched for stop strings, released when it cannot change."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], include_stop: bool = False):
        self._detokenizer = Detokenizer(decode)
        self._stops = stops
        self._include_stop = include_stop
        self._longest = max((len(stop) for stop in stops), default=0)
        self.text = ""
        self._released = 0

    def push(self, token: int, look_for_stops: bool = True) -> str | None:
        """Adds a committed token; the stop string that its text completes, if any. Text from there on is cut."""
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += self._detokenizer.push(token)
        return self._cut_at_stop(searched) if look_for_stops else None

    def _cut_at_stop(self, start: int) -> str | None:
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
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
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0
