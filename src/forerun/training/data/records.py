"""The shapes in which people keep conversations and texts, read into two: a chat, or plain text.

A record is read by the first of these keys that it has:

| keys | becomes |
|---|---|
| `messages`, `conversation` | chat in OpenAI form |
| `conversations` | chat in ShareGPT form (`from`, `value`), or in OpenAI form under that name |
| `turns` | chat of user turns alone |
| `prompt` and `completion` as lists of messages | chat |
| `prompt` and `completion` as text | plain: what follows the prompt is learned |
| a pair of `PAIRS` | chat of one question and its answer |
| `text` | plain: all of it is learned |
| `prompt` alone | plain, to be answered |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.errors import OptionError
from forerun.parsing import json_of
from forerun.training.data.report import Dropped
from forerun.training.data.sources import Raw

Message = dict[str, Any]

PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"), ("query", "response"),
    ("prompt", "response"), ("input", "output"),
)  # fmt: skip
"""Question and answer of one exchange. Beside `instruction` an `input` is its second paragraph; `system` goes first."""

SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "tool": "tool", "observation": "tool",
    "function_response": "tool", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Emitted:
    """The ids a target emitted as an answer, and `ids_hash` of the prompt ids it was given."""

    token_ids: Sequence[int]
    prompt_hash: str | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the target's chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages that are to be learned: the assistant's, but those of weight 0."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and m.get("weight", 1) != 0]


@dataclass(frozen=True, slots=True)
class Plain:
    """Text that goes through no template. `completion` None: it is still to be written."""

    prompt: str
    completion: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One record, whatever shape it had."""

    id: str
    """Its own, or made from its content."""
    group: str
    """Records of one prompt share it; they are never split over training and held-out data."""
    where: str
    body: Chat | Plain
    finish_reason: str | None = None
    """Of the last answer, where a target wrote it."""
    emitted: Sequence[Emitted | None] = field(default=())
    """One per answer that is to be learned, or none at all."""


def ids_hash(ids: Sequence[int]) -> str:
    """A short name for a sequence of ids, to recognise a prompt by."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def content_hash(record: Record) -> str:
    """The same for records of the same content, whatever their ids."""
    body = record.body
    content: Any = [body.messages, body.tools] if isinstance(body, Chat) else [body.prompt, body.completion]
    ids = [None if one is None else list(one.token_ids) for one in record.emitted]
    text = json.dumps([content, ids], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_record(raw: Raw, option: str, as_chat: bool = False) -> Record:
    """Reads a record of any known shape.

    Args:
        raw: as it was found.
        option: what the data was named by, for messages.
        as_chat: a `prompt` of text is a user's message, its `completion` the answer.

    Raises:
        OptionError: its shape is not known.
        Dropped: it cannot be used, though its shape is known.
    """
    content = raw.content
    try:
        body = _body(content, as_chat)
    except _Unknown as error:
        keys = ", ".join(map(str, content)) or "none"
        raise OptionError(
            option, f"{raw.where}: {error} (its keys: {keys}); see docs/data.md for known shapes"
        ) from None
    finish = content.get("finish_reason")
    record = Record("", "", raw.where, body, finish if isinstance(finish, str) else None, _emitted(raw, option))
    given = content.get("id")
    own = str(given) if isinstance(given, (str, int)) and str(given) else content_hash(record)
    group = content.get("group")
    return replace(record, id=own, group=group if isinstance(group, str) else own)


class _Unknown(Exception):
    """What is odd about a record's shape."""


def _body(content: Mapping[str, Any], as_chat: bool) -> Chat | Plain:
    has = {key for key, value in content.items() if value is not None}
    for key in ("messages", "conversation", "conversations"):
        if key in has:
            return _chat(_many(content[key], key), content)
    if "turns" in has:
        turns = _many(content["turns"], "turns")
        return _chat([{"role": "user", "content": turn} for turn in turns], content)
    if {"prompt", "completion"} <= has:
        return _completion(content, as_chat)
    for asked, answered in PAIRS:
        if {asked, answered} <= has:
            return _exchange(content, asked, answered)
    if "text" in has:
        return Plain("", _text(content["text"], "text"))
    if "prompt" in has:
        return _completion(content, as_chat)
    raise _Unknown("it has none of messages, conversations, turns, prompt, instruction, text")


def _completion(content: Mapping[str, Any], as_chat: bool) -> Chat | Plain:
    prompt, completion = content["prompt"], content.get("completion")
    if isinstance(prompt, list):
        return _chat([*_many(prompt, "prompt"), *_many(completion or [], "completion")], content)
    asked = _text(prompt, "prompt")
    answer = None if completion is None else _text(completion, "completion")
    if not as_chat:
        return Plain(asked, answer)
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    return _chat([{"role": "user", "content": asked}, *answered], content)


def _exchange(content: Mapping[str, Any], asked: str, answered: str) -> Chat:
    question, more = _text(content[asked], asked), content.get("input")
    if asked == "instruction" and more:
        question = f"{question}\n\n{_text(more, 'input')}"
    answer = _text(content[answered], answered)
    exchange = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(exchange, content)


def _chat(messages: Sequence[Any], content: Mapping[str, Any]) -> Chat:
    read = [_message(number, one) for number, one in enumerate(messages, start=1)]
    if not read:
        raise Dropped("no messages")
    if content.get("system") and read[0]["role"] != "system":
        read.insert(0, {"role": "system", "content": _text(content["system"], "system")})
    tools = content.get("tools")
    if isinstance(tools, str):  # Parquet has no objects of differing fields, so tables keep them as JSON
        tools = _json(tools, "tools")
    return Chat(read, _many(tools, "tools") if tools else None)


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, Mapping):
        raise _Unknown(f"message {number} is of type {type(given).__name__}")
    message = {key: value for key, value in given.items() if value is not None}  # Parquet fills absent keys with None
    if "from" in message and "role" not in message:
        message = _sharegpt(number, message)
    if not isinstance(message.get("role"), str):
        raise _Unknown(f"message {number} has no role, but {', '.join(map(str, given)) or 'nothing'}")
    if "content" in message:
        message["content"] = _flat(message["content"], f"the content of message {number}")
    if "tool_calls" in message:
        message["tool_calls"] = [_call(one) for one in _many(message["tool_calls"], "tool_calls")]
    return message


def _sharegpt(number: int, message: Message) -> Message:
    source = message.pop("from")
    if source not in SHAREGPT:
        raise _Unknown(f"message {number} is from {source!r}")
    value = message.pop("value", None)
    if source == "function_call":
        calls = _json(_text(value, "value"), f"the value of message {number}")
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    else:
        message["content"] = value
    return {"role": SHAREGPT[source], **message}


def _call(given: Any) -> Message:
    """A tool call with its arguments as an object. OpenAI sends them as JSON text, which a template that writes JSON
    would quote once more; servers parse them before they render."""
    if not isinstance(given, Mapping):
        raise _Unknown(f"a tool call is of type {type(given).__name__}")
    call = dict(given) if "function" in given else {"type": "function", "function": dict(given)}
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _json(arguments, "the arguments of a tool call")
    return {**call, "function": function}


def _flat(content: Any, what: str) -> str:
    """Text, or the text parts of a list, a line each: as vLLM hands them to templates that take text."""
    if isinstance(content, str):
        return content
    parts = _many(content, what)
    if any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts):
        raise Dropped("content that is not text")
    return "\n".join(_text(part.get("text") if isinstance(part, Mapping) else part, what) for part in parts)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _Unknown(f"{what} is of type {type(value).__name__}, not text")
    return value


def _many(value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _Unknown(f"{what} is of type {type(value).__name__}, not a list")
    return list(value)


def _json(text: str, what: str) -> Any:
    try:
        return json_of(text)
    except ValueError as error:
        raise Dropped("tool call or tools that are not JSON", what) from error


def _emitted(raw: Raw, option: str) -> list[Emitted | None]:
    """The ids that `forerun data regenerate` wrote beside the answers."""
    given, hashes = raw.content.get("token_ids"), raw.content.get("prompt_hashes")
    if given is None or hashes is None:  # ids of other makers are not ours to trust
        return []
    if isinstance(given, list) and isinstance(hashes, list) and len(given) == len(hashes) and all(map(_is_ids, given)):
        return [None if ids is None else Emitted(ids, name) for ids, name in zip(given, hashes, strict=True)]
    raise OptionError(option, f"{raw.where}: token_ids must be lists of ids, and prompt_hashes as many names")


def _is_ids(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value))


class Names:
    """Ids, each given once. Datasets that were put together often number their records alike: the id of another record
    is made different by a hash of the content."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._seen: set[str] = set()

    def unique(self, record: Record) -> Record:
        """The record under an id of its own. Dropped: another one has the same content."""
        content = content_hash(record)
        if content in self._seen:
            raise Dropped("duplicate")
        self._seen.add(content)
        if record.id in self._taken:
            own = f"{record.id}~{content}"
            record = replace(record, id=own, group=own if record.group == record.id else record.group)
        self._taken.add(record.id)
        return record


def read_records(
    found: Iterator[Raw | tuple[str, Dropped]], option: str, as_chat: bool = False
) -> Iterator[Record | tuple[str, Dropped]]:
    """Records with ids of their own; in the place of one that is left out, where it was and why.

    Raises:
        OptionError: a record whose shape is not known.
    """
    names = Names()
    for raw in found:
        if isinstance(raw, tuple):
            yield raw
            continue
        try:
            yield names.unique(read_record(raw, option, as_chat))
        except Dropped as dropped:
            yield raw.where, dropped
