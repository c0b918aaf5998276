"""The JSON of answers: whole bodies and the events of streams, for both endpoints from the same parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.engine import Chunk, Completion
from forerun.sampling import TokenLogprob
from forerun.serve.answer import AnswerParser, Piece
from forerun.serve.logprobs import of_chat, of_completion, of_prompt
from forerun.serve.provenance import Provenance
from forerun.serve.tokens import TokenText
from forerun.serve.tools import Notation


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    kind: str
    """`object` of the whole answer."""
    event_kind: str
    """`object` of an event."""

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._with(self.kind, choices)

    def event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._with(self.event_kind, choices)

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.system_fingerprint, "choices": choices,
        }  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What of an answer was asked for beside its text."""

    n: int = 1
    logprobs: bool = False
    token_ids: bool = False
    provenance: bool = False


class Writer(ABC):
    """Makes choices of one request: one at the end for each sample, or a piece of one for each chunk."""

    def __init__(self, wanted: Wanted, tokens: TokenText):
        self.wanted = wanted
        self.tokens = tokens
        self._begun: set[int] = set()
        self._provenance = Provenance(tokens) if wanted.provenance else None

    def index(self, part: Chunk | Completion) -> int:
        """Number of the choice: prompts in order, the samples of each together."""
        return part.prompt_index * self.wanted.n + part.sample_index

    @abstractmethod
    def whole(self, completion: Completion) -> dict[str, Any]:
        """The choice of a finished sample."""

    @abstractmethod
    def piece(self, chunk: Chunk) -> dict[str, Any] | None:
        """What a chunk adds to its choice; None: nothing that can be shown yet."""

    def carries(self, chunk: Chunk) -> bool:
        """Whether a chunk without visible text carries something a client waits for."""
        wanted = self.wanted
        return bool(chunk.token_ids) and (wanted.token_ids or wanted.logprobs or wanted.provenance)

    def _by_token(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """What is said of each token of a piece, where it was asked for."""
        found: dict[str, Any] = {"token_ids": chunk.token_ids} if self.wanted.token_ids else {}
        if self._provenance is not None:
            found["provenance"] = self._provenance.of(index, chunk)
        return found

    def _begins(self, index: int) -> bool:
        """Whether this is the first piece of a choice, which carries what is said once."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True

    def _end(self, completion: Completion | None) -> dict[str, Any]:
        if completion is None:
            return {"finish_reason": None, "stop_reason": None}
        return {
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "seed": _signed(completion.seed),
        }


def parted(choice: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What events a piece of a choice becomes: one, or none. A call and the end of the answer are two: OpenAI's client
    tells that a call is complete by an event behind it."""
    if choice is None:
        return []
    if choice["finish_reason"] is None or "tool_calls" not in choice.get("delta", {}):
        return [choice]
    ended = {name: choice[name] for name in ("index", "finish_reason", "stop_reason", "seed")}
    first = {name: value for name, value in choice.items() if name != "seed"}
    return [{**first, "finish_reason": None, "stop_reason": None}, {**ended, "delta": {}, "logprobs": None}]


def _signed(seed: int) -> int:
    """As a request can give it: 64 bits with a sign."""
    return seed if seed < 2**63 else seed - 2**64


class CompletionWriter(Writer):
    """Choices of /v1/completions.

    Args:
        wanted: what was asked for.
        tokens: text of single tokens.
        echoed: the text of each prompt that is repeated in front of its answers; empty: none is.
        scores: log-probabilities of each prompt's tokens behind the first, if they were asked for.
        prompts: ids of each prompt.
        show_scores: whether they are shown as `prompt_logprobs`.
    """

    def __init__(
        self,
        wanted: Wanted,
        tokens: TokenText,
        prompts: Sequence[Sequence[int]],
        echoed: Sequence[str] = (),
        scores: Sequence[Sequence[TokenLogprob]] = (),
        show_scores: bool = False,
    ):
        super().__init__(wanted, tokens)
        self._prompts = prompts
        self._echoed = echoed
        self._scores = scores
        self._show_scores = show_scores
        self._offsets: dict[int, int] = {}

    def whole(self, completion: Completion) -> dict[str, Any]:
        text = self._ahead(completion.prompt_index) + completion.text
        entries = [*self._prompt_entries(completion.prompt_index), *(completion.logprobs or ())]
        return {
            "index": self.index(completion),
            "text": text,
            "logprobs": of_completion(entries, self.tokens) if self.wanted.logprobs else None,
            **self._end(completion),
            **self._said_once(completion.prompt_index),
            **({"token_ids": completion.token_ids} if self.wanted.token_ids else {}),
        }

    def piece(self, chunk: Chunk) -> dict[str, Any] | None:
        index, prompt = self.index(chunk), chunk.prompt_index
        first = self._begins(index)
        text = (self._ahead(prompt) if first else "") + chunk.text
        entries = [*(self._prompt_entries(prompt) if first else ()), *(chunk.logprobs or ())]
        if not (text or chunk.finished or self.carries(chunk)):
            if first:
                self._begun.discard(index)
            return None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, entries) if self.wanted.logprobs else None,
            **self._end(chunk.completion),
            **(self._said_once(prompt) if first else {}),
            **self._by_token(index, chunk),
        }

    def _ahead(self, prompt: int) -> str:
        return self._echoed[prompt] if self._echoed else ""

    def _prompt_entries(self, prompt: int) -> list[TokenLogprob | int]:
        if not (self._echoed and self.wanted.logprobs):
            return []
        return [self._prompts[prompt][0], *self._scores[prompt]]

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob | int]) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        found = of_completion(entries, self.tokens, offset)
        self._offsets[index] = offset + sum(len(text) for text in found["tokens"])
        return found

    def _said_once(self, prompt: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._show_scores:
            found["prompt_logprobs"] = of_prompt(self._prompts[prompt], self._scores[prompt], self.tokens)
        if self.wanted.token_ids:
            found["prompt_token_ids"] = list(self._prompts[prompt])
        return found


@dataclass(frozen=True)
class Reading:
    """How answers of a chat are taken apart; see `AnswerParser`."""

    reasoning: bool = False
    thinking: bool = False
    calls: Notation | None = None
    """How tools are called; None: no call is looked for."""

    def parser(self) -> AnswerParser:
        return AnswerParser(self.reasoning, self.thinking, None if self.calls is None else self.calls.reader())

    def call(self, piece: Piece) -> dict[str, Any]:
        """A call as clients read it."""
        assert self.calls is not None
        function = {"name": piece.name, "arguments": piece.text}
        return {"id": self.calls.new_id(), "type": "function", "function": function}


@dataclass
class _Said:
    """What a chat's answer has said so far, by kind."""

    content: str = ""
    reasoning: str = ""
    calls: list[Piece] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "call":
                self.calls.append(piece)
            elif piece.kind == "content":
                self.content += piece.text
            else:
                self.reasoning += piece.text


class ChatWriter(Writer):
    """Choices of /v1/chat/completions."""

    def __init__(self, wanted: Wanted, tokens: TokenText, reading: Reading):
        super().__init__(wanted, tokens)
        self._reading = reading
        self._parsers: dict[int, AnswerParser] = {}

    def whole(self, completion: Completion) -> dict[str, Any]:
        parser, said = self._reading.parser(), _Said()
        said.add(parser.push(completion.text))
        said.add(parser.finish())
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [self._reading.call(piece) for piece in said.calls]
        if self._reading.reasoning:
            message["reasoning_content"] = said.reasoning or None
        logprobs = of_chat(completion.logprobs or (), self.tokens) if self.wanted.logprobs else None
        return {
            "index": self.index(completion),
            "message": message,
            "logprobs": logprobs,
            **self._ended(completion, bool(said.calls)),
            **({"token_ids": completion.token_ids} if self.wanted.token_ids else {}),
        }

    def piece(self, chunk: Chunk) -> dict[str, Any] | None:
        index = self.index(chunk)
        parser = self._parsers.setdefault(index, self._reading.parser())
        before, said = parser.calls, _Said()
        said.add(parser.push(chunk.text))
        if chunk.finished:
            said.add(parser.finish())
        delta = self._delta(said, before)
        if not (delta or chunk.finished or self.carries(chunk)):
            return None
        if self._begins(index):  # with the first content and not before: drivers time the first event
            delta = {"role": "assistant", "content": "", **delta}
        return {
            "index": index,
            "delta": delta,
            "logprobs": of_chat(chunk.logprobs or (), self.tokens) if self.wanted.logprobs else None,
            **self._ended(chunk.completion, parser.calls > 0),
            **self._by_token(index, chunk),
        }

    def _delta(self, said: _Said, calls_before: int) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content:
            delta["content"] = said.content
        if said.calls:
            made = enumerate(map(self._reading.call, said.calls), calls_before)
            delta["tool_calls"] = [{"index": index, **call} for index, call in made]
        return delta

    def _ended(self, completion: Completion | None, called: bool) -> dict[str, Any]:
        end = self._end(completion)
        if called and end["finish_reason"] == "stop":
            end["finish_reason"] = "tool_calls"
        return end


__all__ = ["ChatWriter", "CompletionWriter", "Envelope", "Reading", "Wanted", "Writer", "parted"]
