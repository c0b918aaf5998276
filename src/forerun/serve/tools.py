"""Calling tools: how the model of this server writes a call, the form of an answer that must be one, its ids."""

from __future__ import annotations

import json
import logging
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forerun.serve.calls import (
    ARGS,
    CALL,
    CALL_END,
    PYTHON_TAG,
    TOOL_CALLS,
    CallReader,
    HermesReader,
    Llama3Reader,
    MistralReader,
)
from forerun.serve.errors import invalid, unsupported
from forerun.serve.grammar import Grammar, spaced
from forerun.serve.schemas import ChatRequest, NamedTool, Tool
from forerun.target.base import Tokenizer

logger = logging.getLogger("forerun.serve")

Mark = Callable[[str], str]
"""`mark(text)`: how a mark of a notation stands in a grammar: as a token where it is one, or as text."""


@dataclass(frozen=True)
class Notation:
    """How a family of models writes tool calls."""

    name: str
    """As --tool-call-parser has it."""
    reader: Callable[[], CallReader]
    grammar: Callable[[Sequence[Tool], bool, Mark], str]
    """`grammar(tools, several, mark)`: rules of `calls` in Lark's notation: one call of a tool, or one and more."""
    marks: tuple[str, ...] = ()
    """What must be seen in the text for a call to be read. Special tokens among them are kept in it."""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


def _hermes_grammar(tools: Sequence[Tool], several: bool, mark: Mark) -> str:
    more = ' ("\\n" call)*' if several else ""
    call = f'{mark(CALL)} "\\n" body "\\n" {mark(CALL_END)}'
    return f"calls: call{more}\ncall: {call}\nbody: %json {_any_call(tools, 'arguments')}\n"


def _llama3_grammar(tools: Sequence[Tool], several: bool, mark: Mark) -> str:  # noqa: ARG001 - it has no marks
    more = ' ("; " call)*' if several else ""
    return f"calls: call{more}\ncall: %json {_any_call(tools, 'parameters')}\n"


def _mistral_grammar(tools: Sequence[Tool], several: bool, mark: Mark) -> str:
    more = ' ("," " "? call)*' if several else ""
    listed = f'{mark(TOOL_CALLS)} " "? "[" call{more} "]"'
    return f"calls: {listed}\ncall: %json {_any_call(tools, 'arguments')}\n"


def _named_grammar(tools: Sequence[Tool], several: bool, mark: Mark) -> str:
    """Of Mistral's newer models: a mark and a name for each call."""
    names = [f"{json.dumps(tool.function.name)} {mark(ARGS)} args_{i}" for i, tool in enumerate(tools)]
    rules = [f"args_{i}: %json {json.dumps(spaced(_parameters(tool)))}" for i, tool in enumerate(tools)]
    calls = [f"calls: call{'+' if several else ''}", f"call: {mark(TOOL_CALLS)} ({' | '.join(names)})"]
    return "\n".join([*calls, *rules, ""])


def _any_call(tools: Sequence[Tool], arguments: str) -> str:
    """JSON schema, as text, of a call of one of these tools whose arguments stand under this name."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, arguments: _parameters(tool)},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps(spaced({"anyOf": calls} if len(calls) > 1 else calls[0]))


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _lax(tool: Tool) -> Tool:
    """The tool with any arguments, unless it is a strict one."""
    if tool.function.strict:
        return tool
    return tool.model_copy(update={"function": tool.function.model_copy(update={"parameters": {"type": "object"}})})


_TAG = re.compile(r"<(?!0x[0-9A-Fa-f]{2}>).*>", re.DOTALL)
"""A token written like a tag, and not for a byte."""

_LETTERS = string.ascii_letters + string.digits


def _nine_letters() -> str:
    """Mistral's templates take no other ids."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


HERMES = Notation("hermes", HermesReader, _hermes_grammar, (CALL, CALL_END))
LLAMA3 = Notation("llama3_json", Llama3Reader, _llama3_grammar)
MISTRAL = Notation("mistral", MistralReader, _mistral_grammar, (TOOL_CALLS, ARGS), _nine_letters)
MISTRAL_NAMED = Notation("mistral", MistralReader, _named_grammar, MISTRAL.marks, _nine_letters)


def notation_of(template: str | None, parser: str = "auto") -> Notation:
    """The notation a chat template teaches, or the one that was asked for. Where neither says, Hermes'."""
    text = template or ""
    mistral = MISTRAL_NAMED if ARGS in text else MISTRAL
    named = {HERMES.name: HERMES, LLAMA3.name: LLAMA3, MISTRAL.name: mistral}
    if parser in named:
        return named[parser]
    if TOOL_CALLS in text:
        return mistral
    # Qwen3-Coder puts XML between these tags: Hermes' reader leaves it text.
    if CALL in text and "<function=" not in text:
        return HERMES
    if PYTHON_TAG in text or '"parameters": dictionary of argument name' in text:
        return LLAMA3
    if "tools" in text:
        logger.warning("the chat template teaches no known notation of tool calls; hermes is assumed")
    return HERMES


class ToolCalls:
    """How the answers of one server call tools.

    Args:
        tokenizer: of the target, with its chat template.
        parser: as --tool-call-parser.
    """

    def __init__(self, tokenizer: Tokenizer, parser: str = "auto"):
        self._tokenizer = tokenizer
        self._read = parser != "none"
        self.notation = notation_of(tokenizer.chat_template, parser)

    @property
    def parser(self) -> str:
        """What --tool-call-parser came to."""
        return self.notation.name if self._read else "none"

    def notation_for(self, request: ChatRequest) -> Notation | None:
        """The notation in which calls are looked for in the answers of a request; None: they are text."""
        return self.notation if self._read and wants_tools(request) else None

    def grammar(self, request: ChatRequest) -> Grammar | None:
        """The form of an answer that must call a tool; None where it need not."""
        choice, tools = request.tool_choice, request.tools or []
        if not wants_tools(request) or choice in (None, "auto"):
            if request.parallel_tool_calls is False and wants_tools(request):
                raise unsupported("parallel_tool_calls", "false needs tool_choice `required` or a named function")
            return None
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
        several = choice == "required" and request.parallel_tool_calls is not False
        return Grammar.own("tools", "start: calls\n" + self.notation.grammar(tools, several, self._mark))

    def strict_grammar(self, request: ChatRequest) -> Grammar | None:
        """The form of an answer that may call tools, some of them with `strict`: free text, but what begins a call is
        one, with arguments of the schema where its tool is strict. None where no tool is."""
        tools = request.tools or []
        if not (wants_tools(request) and any(tool.function.strict for tool in tools)):
            return None
        lax = [_lax(tool) for tool in tools]
        begin = next(iter(self.notation.marks), None)
        if begin is None:  # a call is the whole answer, told by its first brace
            return Grammar.own("tools", self._llama3_start() + self.notation.grammar(lax, True, self._mark))
        heads = [f"head_{i}" for i, _ in enumerate(self._spellings(begin))]
        other = self._other_tokens
        rules = [
            f"start: (calls{other and f' | TEXT {other}'})* TEXT",
            r"TEXT: /(.|\n)*/",
            f"head: {' | '.join(heads)}",
        ]
        for head, spelling in zip(heads, self._spellings(begin), strict=True):
            rules.append(f"{head}{'' if spelling.startswith('<') else '[lazy]'}: TEXT {spelling}")
        mark = lambda text: "head" if text == begin else self._mark(text)  # noqa: E731
        return Grammar.own("tools", "\n".join([*rules, self.notation.grammar(lax, self.notation is MISTRAL, mark)]))

    def _llama3_start(self) -> str:
        """What Llama's reader takes for the beginning of a call begins one; any other answer is free."""
        tag, other = self._special(PYTHON_TAG), self._other_tokens
        tagged = "calls" if tag is None else f"<[{tag}]>? calls"
        return rf"""start: {tagged} | BLANK | TEXT {other and f"({other} ANY)*"}
BLANK: /[ \t\r\n]*/
ANY: /(.|\n)*/
TEXT: /(?s:.*)/ & ~BLANK & ~/[ \t\r\n]*(\{{|<\|python_tag\|>)(?s:.*)/
"""

    @cached_property
    def _other_tokens(self) -> str:
        """Tokens that are no text to the grammar's library and mark no call, as one symbol; empty: there are none. They
        are the special ones and those that are written like a tag."""
        known = self._tokenizer.vocabulary()
        tags = {i for piece, i in known.items() if _TAG.fullmatch(piece)}
        marks = {known.get(mark) for mark in (*self.notation.marks, PYTHON_TAG)}
        others = sorted((self._tokenizer.special_ids | tags) - marks)
        return f"<[{','.join(map(str, others))}]>" if others else ""

    def readable(self, request: ChatRequest, marks: Sequence[str] = ()) -> ChatRequest:
        """The request with special tokens in its text, where calls are marked by some, or these marks are some, and it
        does not say otherwise."""
        notation = self.notation_for(request)
        if request.skip_special_tokens is not None:
            return request
        own = () if notation is None else notation.marks
        special = any(self._special(mark) is not None for mark in (*own, *marks))
        return request.model_copy(update={"skip_special_tokens": False}) if special else request

    def _special(self, text: str) -> int | None:
        """The id of a special token; None: it is none."""
        token = self._tokenizer.vocabulary().get(text)
        return token if token in self._tokenizer.special_ids else None

    def _mark(self, text: str) -> str:
        spellings = self._spellings(text)
        return spellings[0] if len(spellings) == 1 else f"({' | '.join(spellings)})"

    def _spellings(self, text: str) -> list[str]:
        """How a mark may come: as its token, as text, or as either where the token is shown like a text (Qwen's). To
        the grammar's library such a token is not its text."""
        token, spelled = self._tokenizer.vocabulary().get(text), json.dumps(text, ensure_ascii=False)
        if token is None:
            return [spelled]
        return [f"<[{token}]>"] if token in self._tokenizer.special_ids else [f"<[{token}]>", spelled]


def wants_tools(request: ChatRequest) -> bool:
    """Whether the answer may call tools. ApiError: a choice without tools, or of one that is not there."""
    choice, tools = request.tool_choice, request.tools
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return False
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid("tool_choice.function.name", f"no tool is called {choice.function.name!r}")
    if len(set(names)) < len(names):
        raise invalid("tools", "two tools have the same name")
    return choice != "none"


__all__ = ["HERMES", "LLAMA3", "MISTRAL", "MISTRAL_NAMED", "Notation", "ToolCalls", "notation_of", "wants_tools"]
