"""Tool calls in what a model writes, told apart from its text while it comes, in the notations of different families.

What comes out does not depend on how the text is cut into pieces. A call comes whole: before its end nobody can tell
that it is one. What begins like a call and is none stays text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from forerun.parsing import json_of

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}"]', re.DOTALL)
_NAMED = re.compile(
    rf"\s{{0,8}}([A-Za-z0-9_.-]{{1,64}})\s{{0,8}}"
    rf"(?:{re.escape(CALL_ID)}[\s\w-]{{1,64}})?(?:{re.escape(ARGS)}\s{{0,8}})?"
)
_LONGEST_HEAD = 200
"""Characters of what stands between a mark and its arguments; longer ones do not match anyway."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind; of a call `text` is its arguments as JSON and `name` the function."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    name: str = ""


Step = Callable[[bool], Iterator["Piece"]]
"""`step(final)`: takes from the buffer what is certain, and says what comes next."""


class CallReader(ABC):
    """Reads an answer behind its reasoning. White space around calls is shown only where content follows it."""

    def __init__(self) -> None:
        self.calls = 0
        self._buffer = ""
        self._blank = ""
        self._raw = ""  # taken for the beginning of a call; it is text if there is none
        self._braces = 0
        self._step: Step = self._begin

    def push(self, text: str, final: bool = False) -> Iterator[Piece]:
        """Adds text, the last one if `final`; what became certain."""
        self._buffer += text
        before: tuple[Step, int] | None = None
        while before != (self._step, len(self._buffer)):
            before = self._step, len(self._buffer)
            yield from self._step(final)
        if final and self._blank and not self.calls:
            yield Piece("content", self._blank)
            self._blank = ""

    @abstractmethod
    def _begin(self, final: bool) -> Iterator[Piece]:
        """The first step."""

    def _content(self, text: str) -> Iterator[Piece]:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            yield Piece("content", shown)

    def _rest(self, final: bool) -> Iterator[Piece]:  # noqa: ARG002 - a step
        """All that comes is text."""
        text, self._buffer = self._buffer, ""
        yield from self._content(text)

    def _until(self, mark: str, final: bool) -> tuple[str, bool]:
        """Takes text up to a mark out of the buffer, and the mark; whether it was there. An end of the text that may
        become the mark is left."""
        before, found, rest = self._buffer.partition(mark)
        if not found:
            held = 0 if final else beginning_of(mark, before)
            before, rest = before[: len(before) - held], before[len(before) - held :]
        self._buffer = rest
        return before, bool(found)

    def _take(self, count: int, then: Step) -> None:
        """So many characters belong to a call, if there is one."""
        self._raw += self._buffer[:count]
        self._buffer, self._step = self._buffer[count:], then

    def _called(self, call: Piece, rest: str, then: Step) -> Iterator[Piece]:
        """A call, and what stands behind it."""
        self.calls += 1
        self._blank = self._raw = ""
        self._buffer, self._step = rest, then
        yield call

    def _give_up(self, then: Step) -> Iterator[Piece]:
        """It was no call: what was taken is text, and so may be what follows."""
        raw, self._raw, self._step, self._braces = self._raw, "", then, 0
        yield from self._content(raw)

    def _object(self, text: str) -> int | None:
        """Where the JSON object ends with which a text begins; None: not yet. Looked for only after a new brace."""
        braces = text.count("}")
        if braces == self._braces:
            return None
        end = object_end(text)
        self._braces = 0 if end is not None else braces
        return end


class HermesReader(CallReader):
    """<tool_call>{"name": .., "arguments": ..}</tool_call>, as Hermes, Qwen2.5 and Qwen3 write."""

    def _begin(self, final: bool) -> Iterator[Piece]:
        before, found = self._until(CALL, final)
        yield from self._content(before)
        if found:
            self._raw, self._step = CALL, self._body

    def _body(self, final: bool) -> Iterator[Piece]:
        body, end, rest = self._buffer.partition(CALL_END)
        if not (end or final):
            return
        call = read_call(body)
        if call is not None:
            yield from self._called(call, rest, self._begin)
        else:
            self._take(len(body) + len(end), self._begin)
            yield from self._give_up(self._begin)


class Llama3Reader(CallReader):
    """{"name": .., "parameters": ..} as the whole answer, several separated by semicolons, with or without a
    <|python_tag|> in front, as Llama 3.1 to 3.3 write."""

    def _begin(self, final: bool) -> Iterator[Piece]:
        seen = self._buffer.lstrip()
        if seen.startswith(PYTHON_TAG):
            self._take(len(self._buffer) - len(seen) + len(PYTHON_TAG), self._read)
        elif seen.startswith("{"):
            self._step = self._read
        elif final or not PYTHON_TAG.startswith(seen):
            self._step = self._rest
        yield from ()

    def _read(self, final: bool) -> Iterator[Piece]:
        seen = self._buffer.lstrip()
        possible = seen.startswith("{")
        end = self._object(seen) if possible else None
        call = None if end is None else read_call(seen[:end], needs_arguments=True)
        if call is not None:
            yield from self._called(call, seen[end:], self._between)
        elif final or end is not None or (seen and not possible):
            yield from self._give_up(self._rest)

    def _between(self, final: bool) -> Iterator[Piece]:
        after = self._buffer.lstrip().removeprefix(";").lstrip()
        if after.startswith("{"):
            self._take(len(self._buffer) - len(after), self._read)
        elif final or after:
            self._step = self._rest
        yield from ()


class MistralReader(CallReader):
    """[TOOL_CALLS] [{"name": .., "arguments": ..}, ..], or for each call [TOOL_CALLS]name[ARGS]{..}, as older and newer
    models of Mistral write."""

    def _begin(self, final: bool) -> Iterator[Piece]:
        before, found = self._until(TOOL_CALLS, final)
        yield from self._content(before)
        if found:
            self._raw, self._step = TOOL_CALLS, self._kind

    def _kind(self, final: bool) -> Iterator[Piece]:
        """Whether a list follows the mark, or the name of a function."""
        seen = self._buffer.lstrip()
        if seen.startswith("["):
            self._take(len(self._buffer) - len(seen) + 1, self._item)
        elif seen or final:
            self._step = self._named
        yield from ()

    def _item(self, final: bool) -> Iterator[Piece]:
        seen = self._buffer.lstrip(" \t\r\n,")
        possible = seen.startswith("{")
        end = self._object(seen) if possible else None
        call = None if end is None else read_call(seen[:end])
        if call is not None:
            yield from self._called(call, seen[end:], self._item)
        elif seen.startswith("]") and not self._raw:
            self._buffer, self._step = seen[1:], self._begin
        elif final or end is not None or (seen and not possible):
            yield from self._give_up(self._begin)

    def _named(self, final: bool) -> Iterator[Piece]:
        head, brace, _ = self._buffer.partition("{")
        found = _NAMED.fullmatch(head) if brace else None
        body = self._buffer[len(head) :]
        end = None if found is None else self._object(body)
        call = read_arguments(found[1], body[:end]) if found is not None and end is not None else None
        if call is not None:
            yield from self._called(call, body[end:], self._begin)
        elif final or end is not None or (brace and found is None) or len(head) > _LONGEST_HEAD:
            yield from self._give_up(self._begin)


# ----------------------------------------------------------------------------------------------------------- the pieces


def beginning_of(tag: str, text: str) -> int:
    """Length of the longest end of a text that is a beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


def object_end(text: str) -> int | None:
    """Where the JSON object ends with which a text begins; None: it does not end there."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0]
        if mark == '"':  # a string that is still open
            return None
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return found.end()
    return None


def read_call(body: str, needs_arguments: bool = False) -> Piece | None:
    """The call that a JSON object describes; None: it describes none."""
    found = _json(body)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    if needs_arguments and not found.keys() & {"arguments", "parameters"}:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Piece("call", text, found["name"])


def read_arguments(name: str, body: str) -> Piece | None:
    """The call of a function by its name, with the arguments of a JSON object; None: they are none."""
    found = _json(body)
    return Piece("call", json.dumps(found, ensure_ascii=False), name) if isinstance(found, dict) else None


def _json(text: str) -> Any:
    try:
        return json_of(text)
    except ValueError:
        return None


__all__ = [
    "ARGS",
    "CALL",
    "CALL_END",
    "CALL_ID",
    "PYTHON_TAG",
    "TOOL_CALLS",
    "CallReader",
    "HermesReader",
    "Llama3Reader",
    "MistralReader",
    "Piece",
    "beginning_of",
]
