"""The text of a chat answer taken apart while it comes: reasoning first, then content and tool calls.

What comes out does not depend on how the text is cut into pieces, so a stream adds up to the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from forerun.serve.calls import CallReader, Piece, beginning_of

THINK, THINK_END = "<think>", "</think>"


class AnswerParser:
    """Reads the answer of one sample.

    Args:
        reasoning: whether text between <think> and </think> is reasoning.
        thinking: whether the answer begins inside of it (the prompt has opened it).
        calls: reads what stands behind it; None: that is content.
    """

    def __init__(self, reasoning: bool = False, thinking: bool = False, calls: CallReader | None = None):
        self._calls = calls
        self._state = "content"
        if reasoning:
            self._state = "reasoning" if thinking else "start"
        self._buffer = ""

    @property
    def calls(self) -> int:
        """Calls so far."""
        return 0 if self._calls is None else self._calls.calls

    def push(self, text: str) -> list[Piece]:
        """Adds text; what became certain."""
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self) -> list[Piece]:
        """The rest at the end of the answer."""
        return list(self._advance(final=True))

    def _advance(self, final: bool) -> Iterator[Piece]:
        if self._state == "start":
            self._start(final)
        if self._state == "reasoning":
            yield from self._reasoning(final)
        if self._state == "content":
            text, self._buffer = self._buffer, ""
            if self._calls is not None:
                yield from self._calls.push(text, final)
            elif text:
                yield Piece("content", text)

    def _start(self, final: bool) -> None:
        """Whether the answer begins by thinking."""
        seen = self._buffer.lstrip()
        if seen.startswith(THINK):
            self._buffer = seen[len(THINK) :]
            self._state = "reasoning"
        elif final or not THINK.startswith(seen):
            self._state = "content"

    def _reasoning(self, final: bool) -> Iterator[Piece]:
        """Text up to the end of the reasoning. An end of the text that may become the mark is kept back."""
        before, found, rest = self._buffer.partition(THINK_END)
        if found:
            self._buffer, self._state = rest, "content"
        else:
            held = 0 if final else beginning_of(THINK_END, before)
            before, self._buffer = before[: len(before) - held], before[len(before) - held :]
        if before:
            yield Piece("reasoning", before)


__all__ = ["THINK", "THINK_END", "AnswerParser", "Piece"]
