"""Answers to prompts: made turn by turn, shown in order while they come, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.cli.prompts import PromptRecord, check_prompts
from forerun.cli.show import OWN, Painted, Painter, put, unpainted
from forerun.engine import Chunk, Completion, Engine
from forerun.errors import OptionError, PromptError
from forerun.sampling import Sampling


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which answer: of which prompt, to which of its turns, which of n samples."""

    prompt: int
    turn: int
    sample: int


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be answered, and how."""

    records: Sequence[PromptRecord]
    sampling: Sampling
    prediction: str | None = None

    def __post_init__(self) -> None:
        if self.sampling.n > 1 and self.rounds > 1:
            raise OptionError("--n", "a conversation of several turns has one sample a turn; use --n 1")

    @property
    def rounds(self) -> int:
        return max(record.answers for record in self.records)

    @property
    def places(self) -> list[Place]:
        """All answers in the order in which they are computed and shown."""
        samples = range(self.sampling.n)
        return [Place(i, turn, s) for turn in range(self.rounds) for i in self.open(turn) for s in samples]

    def open(self, turn: int) -> list[int]:
        return [i for i, record in enumerate(self.records) if turn < record.answers]


def answer(engine: Engine, task: Task) -> Iterator[tuple[Place, Chunk]]:
    """Answers all prompts together; a further turn once all have answered the one before.

    Raises:
        OptionError: a prompt cannot be used; it says which one.
    """
    tokenizer = engine.target.tokenizer
    said: list[list[str]] = [[] for _ in task.records]
    for turn in range(task.rounds):
        going = task.open(turn)
        rendered = [task.records[i].render(tokenizer, said[i]) for i in going]
        try:
            for chunk in engine.stream(rendered, task.sampling, prediction=task.prediction):
                index = going[chunk.prompt_index]
                if chunk.completion is not None:
                    said[index].append(chunk.completion.text)
                yield Place(index, turn, chunk.sample_index), chunk
        except PromptError:
            # Again one by one, to say which it is.
            check_prompts(engine, rendered, [task.records[i] for i in going], task.sampling, task.prediction)
            raise


# ----------------------------------------------------------------------------------------------------------- showing


Brush = Callable[[Chunk], Painted]
"""From the chunks of one sample, in order, to what is shown of them."""


def brush(engine: Engine, show_drafts: bool, with_rejected: bool) -> Brush:
    """A new one for each sample: it remembers how far the sample is."""
    if not (show_drafts or with_rejected):
        return unpainted
    return Painter(engine.target.tokenizer.decode, with_rejected).paint


class Scroll:
    """Shows answers as they come, one after another: the first unfinished one streams, the others wait."""

    def __init__(self, places: Sequence[Place], new_brush: Callable[[], Brush]):
        self._open = list(places)
        self._headed = len(places) > 1
        self._brushes = {place: new_brush() for place in places}
        self._held: dict[Place, Painted] = {}
        self._ended: set[Place] = set()
        self._head()

    def show(self, place: Place, chunk: Chunk) -> None:
        self._held.setdefault(place, []).extend(self._brushes[place](chunk))
        if chunk.finished:
            self._ended.add(place)
        while self._open:
            first = self._open[0]
            put(self._held.pop(first, []))
            if first not in self._ended:
                return
            put([("\n", OWN)])
            del self._open[0]
            self._head()

    def _head(self) -> None:
        if self._headed and self._open:
            put([(f"{heading(self._open[0])}\n", OWN)])


def heading(place: Place) -> str:
    """The line above an answer where there are several."""
    parts = [f"prompt {place.prompt + 1}"]
    parts += [f"turn {place.turn + 1}"] if place.turn else []
    parts += [f"sample {place.sample + 1}"] if place.sample else []
    return f"--- {', '.join(parts)} ---"


def as_text(answers: Sequence[tuple[Place, Completion]]) -> str:
    """What `Scroll` shows, as one text."""
    if len(answers) == 1:
        return f"{answers[0][1].text}\n"
    return "".join(f"{heading(place)}\n{completion.text}\n" for place, completion in answers)


def as_document(answers: Sequence[tuple[Place, Completion]]) -> dict[str, Any] | list[dict[str, Any]]:
    """The JSON of `generate`: one object, or an array of them in the order of (prompt, turn, sample)."""
    objects = [_as_object(place, completion) for place, completion in sorted(answers, key=lambda pair: pair[0])]
    return objects[0] if len(objects) == 1 else objects


def _as_object(place: Place, completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_index": place.prompt,
        "turn_index": place.turn,
        "sample_index": place.sample,
        "seed": completion.seed,
        "stats": {
            "drafter": completion.drafter,
            "rounds": stats.target_steps,
            "planned": stats.planned,
            "drafted": stats.drafted,
            "verified": stats.verified,
            "accepted": stats.accepted,
            "emitted": stats.emitted,
            "mean_accepted_length": stats.mean_accepted_length,
            "tokens_per_step": stats.tokens_per_step,
            "tokens_per_second": completion.tokens_per_second,
            "probes": stats.probes,
            "skipped_steps": stats.skipped_steps,
        },
    }
    if completion.logprobs is not None:
        document["logprobs"] = [
            {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in completion.logprobs
        ]
    return document


def summary(completions: Sequence[Completion], seconds: float) -> str:
    """One line about a run. It names no speed-up: that needs a plain run beside it, see `forerun demo`."""
    from forerun.engine.stats import total

    count = sum(len(completion.token_ids) for completion in completions)
    stats = total(completion.stats for completion in completions)
    names = "+".join(dict.fromkeys(completion.drafter for completion in completions))
    line = f"{count} tokens in {seconds:.1f} s ({count / seconds:.1f} tokens/s)"
    if stats.mean_accepted_length is None:
        return f"{line}, {names}"
    return f"{line}, {names}: {stats.mean_accepted_length:.2f} tokens a drafting round, {stats.target_steps} rounds"
