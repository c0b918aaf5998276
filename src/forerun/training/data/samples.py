"""From records to what is learned: token ids with a mask over those the target wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from forerun.errors import OptionError
from forerun.training.data.dataset import Sample
from forerun.training.data.records import Chat, Emitted, Plain, Record, ids_hash
from forerun.training.data.rendering import Rendered, Rendering
from forerun.training.data.report import Dropped

Turns = Literal["all", "last", "split"]
Overlong = Literal["skip", "truncate"]
Unfinished = Literal["keep", "drop"]

MAX_LENGTH = 4096
"""Tokens of a sample where nobody says otherwise and the target's window is not shorter."""

Piece = tuple[Sequence[int], Sequence[bool]]
"""Ids, and for each of them whether it is learned."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is kept of a record. `forerun data prepare --help` has the meanings."""

    max_length: int
    """Tokens of a sample at most."""
    overlong: Overlong = "skip"
    turns: Turns = "all"
    unfinished: Unfinished = "keep"
    """Answers that ended because their length was limited."""
    retokenize: bool = False
    """Learn the answers' text, not the ids that were emitted."""

    def __post_init__(self) -> None:
        for name, known in (
            ("overlong", get_args(Overlong)),
            ("turns", get_args(Turns)),
            ("unfinished", get_args(Unfinished)),
        ):
            if getattr(self, name) not in known:
                raise OptionError(f"--{name}", f"must be one of {', '.join(known)}, got {getattr(self, name)!r}")


class Samples:
    """Makes samples of records for one target."""

    def __init__(self, rendering: Rendering, choice: Choice):
        self.rendering = rendering
        self.choice = choice

    def of(self, record: Record) -> Iterator[Sample | tuple[str, Dropped]]:
        """Samples of a record, one unless turns are split; in the place of one that is left out, where it was and why.

        Raises:
            OptionError: the template cannot be used (see `Rendering.render`), or the record's ids were emitted for a
                prompt that this template does not make.
        """
        try:
            parts = list(self._parts(record))
        except Dropped as dropped:
            yield _example(record), dropped
            return
        for part in parts:
            try:
                yield self._sample(part.id, self._pieces(part))
            except Dropped as dropped:
                yield _example(part), dropped

    # ---------------------------------------------------------------------------------------------------------- turns

    def _parts(self, record: Record) -> Iterator[Record]:
        """The record as one or more records that end with their last answer."""
        if self.choice.unfinished == "drop" and record.finish_reason == "length":
            raise Dropped("an answer that its length limit ended")
        if isinstance(record.body, Plain):
            if not record.body.completion and not record.emitted:
                raise Dropped("no text" if record.body.completion == "" else "no answer")
            yield record
            return
        chat, answers = record.body, _answers(record)
        if self.choice.turns == "all":
            yield _up_to(record, chat, answers, answers)
        elif self.choice.turns == "last":
            yield _up_to(record, chat, answers, answers[-1:])
        else:
            for turn, number in enumerate(answers, start=1):
                part = _up_to(record, chat, answers, [number])
                yield part if len(answers) == 1 else replace(part, id=f"{record.id}#{turn}")

    # --------------------------------------------------------------------------------------------------------- pieces

    def _pieces(self, record: Record) -> list[Piece]:
        if isinstance(record.body, Plain):
            return self._plain(record, record.body)
        chat, answers = record.body, record.body.answers
        emitted = self._checked(record)
        if len(answers) == 1 and emitted and emitted[0] is not None:
            head = self.rendering.prompt(chat.messages[:-1], chat.tools)
            return [_given(head), _learned(self._matching(record, head, emitted[0]))]
        rendered = self.rendering.render(chat, answers, record.where)
        return self._along(record, rendered, emitted or [None] * len(answers))

    def _along(self, record: Record, rendered: Rendered, emitted: Sequence[Emitted | None]) -> list[Piece]:
        """A rendered conversation with the emitted ids in the places of its answers."""
        pieces: list[Piece] = []
        at = 0
        for span, one in zip(rendered.spans, emitted, strict=True):
            pieces.append(_given(rendered.ids[at : span.start]))
            at = span.end + 1
            if one is None:
                pieces.append((rendered.ids[span.start : at], rendered.learned(span)))
                continue
            ids = self._matching(record, rendered.ids[: span.start], one)
            pieces.append(_learned(ids))
            if ids[-1] not in self.rendering.end_ids:
                at = span.end  # the template ends what the target did not end
        if record.finish_reason == "length" and emitted[-1] is None:
            ids, learned = pieces[-1]
            pieces[-1] = ids[:-1], learned[:-1]
        return pieces

    def _plain(self, record: Record, body: Plain) -> list[Piece]:
        """Text as it is. Special tokens that the tokenizer puts around a text are not learned."""
        head = self.rendering.ids(body.prompt, add_special_tokens=True) if body.prompt else []
        emitted = self._checked(record)
        if emitted and emitted[0] is not None:
            return [_given(head), _learned(self._matching(record, head, emitted[0]))]
        text = body.completion or ""
        whole = self.rendering.ids(body.prompt + text, add_special_tokens=True)
        if not body.prompt:
            return _around(whole, self.rendering.ids(text))
        if whole[: len(head)] != head:
            whole = self.rendering.joined(head, text, whole)
        return [_given(head), _learned(whole[len(head) :])]

    def _checked(self, record: Record) -> Sequence[Emitted | None]:
        return () if self.choice.retokenize else record.emitted

    def _matching(self, record: Record, head: Sequence[int], emitted: Emitted) -> Sequence[int]:
        """The emitted ids, if they followed these prompt ids (bugs TS-9: the same drafter under two templates)."""
        if emitted.prompt_hash is not None and emitted.prompt_hash != ids_hash(head):
            raise OptionError(
                "--chat-template",
                f"{record.where} was answered to other prompt ids than this template makes of it: the template, its "
                "options or the tokenizer differ; give those it was answered with, or --retokenize to learn the text",
            )
        if not emitted.token_ids:
            raise Dropped("empty answer")
        return emitted.token_ids

    # --------------------------------------------------------------------------------------------------------- sample

    def _sample(self, name: str, pieces: Sequence[Piece]) -> Sample:
        """Pieces put together, cut behind the last token that is learned."""
        ids = [i for piece, _ in pieces for i in piece]
        mask = [m for _, learned in pieces for m in learned]
        most = self.choice.max_length
        kept = _last(mask) + 1
        if not kept:
            raise Dropped("no token that is learned")
        if kept > most:
            if self.choice.overlong == "skip":
                raise Dropped("longer than --max-length", f"{kept} tokens")
            kept = _last(mask[:most]) + 1
            if not kept:
                raise Dropped("longer than --max-length before its first answer", f"{len(ids)} tokens")
        return Sample(name, np.array(ids[:kept], np.int32), np.array(mask[:kept], np.bool_))


def _answers(record: Record) -> list[int]:
    """Numbers of the messages to learn. Dropped: there are none, or one of them is empty."""
    assert isinstance(record.body, Chat)
    answers = record.body.answers
    if not answers:
        raise Dropped("no assistant turn")
    if answers[0] == 0:
        raise Dropped("an answer to nothing: the assistant speaks first")
    emitted = record.emitted or [None] * len(answers)
    if len(emitted) != len(answers):
        raise Dropped("token_ids that do not go with the answers", f"{len(emitted)} for {len(answers)}")
    for number, one in zip(answers, emitted, strict=True):
        message = record.body.messages[number]
        said = [message.get(key) for key in ("content", "reasoning_content", "tool_calls")]
        if one is None and not any(part.strip() if isinstance(part, str) else part for part in said):
            raise Dropped("empty answer")
    return answers


def _up_to(record: Record, chat: Chat, answers: Sequence[int], learned: Sequence[int]) -> Record:
    """The record cut behind the last of the answers to learn; its other answers weigh nothing."""
    last = learned[-1]
    messages = [
        {**message, "weight": 1 if number in learned else 0} if message["role"] == "assistant" else message
        for number, message in enumerate(chat.messages[: last + 1])
    ]
    emitted = [one for number, one in zip(answers, record.emitted, strict=False) if number in learned]
    finish = record.finish_reason if last == answers[-1] else None
    return replace(record, body=replace(chat, messages=messages), emitted=emitted, finish_reason=finish)


def _example(record: Record) -> str:
    return f"{record.where}, id {record.id}"


def _last(mask: Sequence[bool]) -> int:
    """Place of the last True; -1 if there is none."""
    return next((i for i in range(len(mask) - 1, -1, -1) if mask[i]), -1)


def _given(ids: Sequence[int]) -> Piece:
    return ids, [False] * len(ids)


def _learned(ids: Sequence[int]) -> Piece:
    return ids, [True] * len(ids)


def _around(whole: Sequence[int], text: Sequence[int]) -> list[Piece]:
    """A text within the special tokens around it."""
    for start in range(len(whole) - len(text) + 1):
        if list(whole[start : start + len(text)]) == list(text):
            end = start + len(text)
            return [_given(whole[:start]), _learned(text), _given(whole[end:])]
    return [_learned(whole)]
