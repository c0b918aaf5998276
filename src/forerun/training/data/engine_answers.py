"""Answers by our own engine: as many conversations at a time as it decodes, each going on as soon as it can."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import fields, replace
from typing import Any

from forerun.engine import Chunk, Engine
from forerun.engine.request import Completion, Request
from forerun.errors import PromptError
from forerun.sampling import Sampling
from forerun.training.data.jobs import Answer, Job, seed_of
from forerun.training.data.records import ids_hash
from forerun.training.data.rendering import Rendering
from forerun.training.data.report import Dropped

QUEUED = 2
"""Conversations taken in for each one decoded, so that there is always one to go on with."""


class EngineAnswers:
    """The target's answers, with the ids it emitted.

    Args:
        engine: with any drafters: they change when an answer is there, not what it is.
        rendering: makes the prompts, with the engine's own tokenizer.
        sampling: of every answer; n is 1.
    """

    def __init__(self, engine: Engine, rendering: Rendering, sampling: Sampling):
        self.model = engine.target.name
        self.sampling = describe(sampling)
        self._engine = engine
        self._rendering = rendering
        self._options = sampling
        self._going: dict[int, tuple[Job, Request]] = {}  # by the job's own number
        self._ended: list[int] = []

    def run(self, jobs: Iterator[Job]) -> Generator[Job]:
        """Jobs in the order in which they end."""
        most = QUEUED * self._engine.options.max_num_seqs
        try:
            while True:
                while len(self._going) < most and (job := next(jobs, None)) is not None:
                    self._ask(job)
                    if job.over:
                        yield job
                if not self._going:
                    return
                self._engine.step()
                yield from self._settle()
        finally:
            self._engine.cancel([request for _, request in self._going.values()])
            self._going.clear()

    def _ask(self, job: Job) -> None:
        """Queues the next turn; a prompt that cannot be used ends the job."""
        sampling = replace(self._options, seed=seed_of(self._options.seed, job))
        try:
            prompt = self._prompt(job)
            number = id(job)

            def listen(chunk: Chunk) -> None:
                if chunk.finished:
                    self._ended.append(number)

            [request] = self._engine.submit([prompt], sampling, listener=listen)
        except PromptError as error:
            job.failure = Dropped(_kind(error), str(error))
        except Dropped as dropped:
            job.failure = dropped
        else:
            self._going[number] = (job, request)

    def _prompt(self, job: Job) -> list[int]:
        if job.prompt is not None:
            return self._rendering.ids(job.prompt, add_special_tokens=True)
        return self._rendering.prompt(job.messages(), job.tools)

    def _settle(self) -> Iterator[Job]:
        """Takes the answers that are complete, and goes on with their conversations."""
        ended, self._ended = self._ended, []
        for number in ended:
            job, request = self._going.pop(number)
            if request.error is not None:
                job.failure = Dropped("an error while decoding", str(request.error))
            else:
                job.take(_answer(self._engine.result(request)))
            if not job.over:
                self._ask(job)
            if job.over:
                yield job


def _answer(completion: Completion) -> Answer:
    ids = completion.token_ids
    message = {"role": "assistant", "content": completion.text}
    return Answer(message, completion.finish_reason, len(ids), ids, ids_hash(completion.prompt_token_ids))


def _kind(error: PromptError) -> str:
    """What a prompt is refused for, without its numbers."""
    too_long = error.option == "max_tokens" or "window" in str(error)
    return "a prompt too long for the window or the KV memory" if too_long else "a prompt that is refused"


def describe(sampling: Sampling) -> dict[str, Any]:
    """The options that differ from the library's defaults, and the temperature."""
    default = Sampling()
    found = {f.name: getattr(sampling, f.name) for f in fields(Sampling) if f.name not in ("n", "logits_processors")}
    return {name: value for name, value in found.items() if value != getattr(default, name) or name == "temperature"}
