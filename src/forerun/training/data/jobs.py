"""Prompts to be answered by a target, turn by turn, and the records that come of it."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.training.data.records import Chat, Message, Record
from forerun.training.data.report import Dropped


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a target."""

    message: Message
    """As an assistant's message: content, tool calls, reasoning. Of plain text only the content counts."""
    finish_reason: str
    tokens: int
    token_ids: Sequence[int] | None = None
    """What was emitted, the end of sequence included; None where a server does not say."""
    prompt_hash: str | None = None
    """`ids_hash` of the prompt ids it was emitted after."""


@dataclass
class Job:
    """A conversation being answered; or one plain prompt, whose only turn it is."""

    id: str
    group: str
    prompt: str | None
    turns: Sequence[Sequence[Message]]
    """Messages that come before each answer."""
    tools: Sequence[Mapping[str, Any]] | None = None
    answers: list[Answer] = field(default_factory=list)
    failure: Dropped | None = None
    """Why it ended before its last turn."""
    attempts: int = 0
    """Of the present turn, at servers."""

    @property
    def over(self) -> bool:
        return self.failure is not None or len(self.answers) == max(1, len(self.turns))

    def take(self, answer: Answer) -> None:
        """The next turn's answer. After one that was cut there is no next turn."""
        self.answers.append(answer)
        self.attempts = 0
        if answer.finish_reason != "stop" and not self.over:
            self.failure = Dropped(f"later turns after finish_reason {answer.finish_reason}")

    def messages(self) -> list[Message]:
        """The conversation up to the answer that is wanted next, or to its end."""
        said: list[Message] = []
        for number, turn in enumerate(self.turns[: len(self.answers) + 1]):
            if number == len(self.answers) and self.over:
                break
            said += turn
            if number < len(self.answers):
                said.append(self.answers[number].message)
        return said

    def record(self) -> dict[str, Any]:
        """What is written about its answers so far."""
        made: dict[str, Any] = {"id": self.id}
        if self.group != self.id:
            made["group"] = self.group
        if self.prompt is None:
            made["messages"] = self.messages()
            made |= {"tools": list(self.tools)} if self.tools else {}
        else:
            made |= {"prompt": self.prompt, "completion": self.answers[0].message["content"]}
        made["finish_reason"] = self.answers[-1].finish_reason
        if all(answer.token_ids is not None for answer in self.answers):
            made["token_ids"] = [list(answer.token_ids or ()) for answer in self.answers]
            made["prompt_hashes"] = [answer.prompt_hash for answer in self.answers]
        return made


class Answerer(Protocol):
    """Who answers: our engine, or servers."""

    @property
    def model(self) -> str: ...
    @property
    def sampling(self) -> Mapping[str, Any]:
        """As it is written into every record."""

    def run(self, jobs: Iterator[Job]) -> Generator[Job]:
        """Jobs in the order in which they end. It takes as many as it can work on at a time."""


def jobs_of(record: Record, samples: int = 1) -> list[Job]:
    """The jobs of one record, as many as samples are wanted of it. Dropped: it asks nothing."""
    body = record.body
    names = [record.id] if samples == 1 else [f"{record.id}#{number}" for number in range(1, samples + 1)]
    if isinstance(body, Chat):
        turns = _turns(body)
        return [Job(name, record.group, None, turns, body.tools) for name in names]
    if not body.prompt:
        raise Dropped("no prompt")
    return [Job(name, record.group, body.prompt, ()) for name in names]


def _turns(chat: Chat) -> list[list[Message]]:
    """Every user message is answered anew, after the target's own earlier answers.

    A conversation with results of tools keeps its history, which does not count as the target's: results belong to the
    calls that were made. Only its last answer is written anew.
    """
    messages = list(chat.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise Dropped("no prompt")
    if any(message["role"] == "tool" for message in messages):
        return [[{**m, "weight": 0} if m["role"] == "assistant" else m for m in messages]]
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
    turns.pop() if not turns[-1] else None
    if not any(message["role"] == "user" for message in turns[-1]):
        raise Dropped("no prompt")
    return turns


def seed_of(seed: int | None, job: Job) -> int | None:
    """A seed for the next turn of a job, which does not depend on the order of jobs; None: there is no seed."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed} {job.id} {len(job.answers)}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


__all__ = ["Answer", "Answerer", "Job", "jobs_of", "seed_of"]
