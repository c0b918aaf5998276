"""The text of a chat answer taken apart while it comes: reasoning, content and tool calls.

What comes out does not depend on how the text is cut into pieces, so a stream adds up to the whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind; of a call `text` is its arguments as JSON and `name` the function."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    name: str = ""


class AnswerParser:
    """Reads the answer of one sample.

    Args:
        reasoning: whether text between <think> and </think> is reasoning.
        thinking: whether the answer begins inside of it (the prompt has opened it).
        tools: whether <tool_call>{"name": .., "arguments": ..}</tool_call> is a call (Hermes' and Qwen's notation).
    """

    def __init__(self, reasoning: bool = False, thinking: bool = False, tools: bool = False):
        self._tools = tools
        self._state = "content"
        if reasoning:
            self._state = "reasoning" if thinking else "start"
        self._buffer = ""
        self._blank = ""  # white space of the content that is shown only if more content follows
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """Adds text; what became certain."""
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self) -> list[Piece]:
        """The rest at the end of the answer."""
        return list(self._advance(final=True))

    def _advance(self, final: bool) -> Iterator[Piece]:
        state = ""
        while state != self._state:  # a tag was found and what follows is of another kind
            state = self._state
            if state == "start":
                self._start(final)
            elif state == "reasoning":
                yield from self._until(THINK_END, "reasoning", "content", final)
            elif state == "content":
                yield from self._content(final)
            else:
                yield from self._call(final)
        if final and self._blank and not self.calls:
            yield Piece("content", self._blank)
            self._blank = ""

    def _start(self, final: bool) -> None:
        """Whether the answer begins by thinking."""
        seen = self._buffer.lstrip()
        if seen.startswith(THINK):
            self._buffer = seen[len(THINK) :]
            self._state = "reasoning"
        elif final or not THINK.startswith(seen):
            self._state = "content"

    def _until(self, tag: str, kind: Literal["reasoning", "content"], after: str, final: bool) -> Iterator[Piece]:
        """Text up to a tag. An end of the text that may become the tag is kept back."""
        before, found, rest = self._buffer.partition(tag)
        if found:
            self._buffer, self._state = rest, after
        else:
            held = 0 if final else _beginning_of(tag, before)
            before, self._buffer = before[: len(before) - held], before[len(before) - held :]
        if before:
            yield Piece(kind, before)

    def _content(self, final: bool) -> Iterator[Piece]:
        if not self._tools:
            text, self._buffer = self._buffer, ""
            if text:
                yield Piece("content", text)
            return
        for piece in self._until(CALL, "content", "call", final):
            text = self._blank + piece.text
            shown = text.rstrip()
            self._blank = text[len(shown) :]
            if shown:
                yield Piece("content", shown)

    def _call(self, final: bool) -> Iterator[Piece]:
        body, found, rest = self._buffer.partition(CALL_END)
        if not found and not final:
            return
        self._buffer, self._state = rest, "content"
        call = _read_call(body)
        if call is not None:
            self.calls += 1
            self._blank = ""
            yield call
        else:  # not what a call looks like: it stays text
            yield Piece("content", f"{self._blank}{CALL}{body}{found}")
            self._blank = ""


def _beginning_of(tag: str, text: str) -> int:
    """Length of the longest end of a text that is a beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


def _read_call(body: str) -> Piece | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Piece("call", text, found["name"])


__all__ = ["CALL", "CALL_END", "THINK", "THINK_END", "AnswerParser", "Piece"]
