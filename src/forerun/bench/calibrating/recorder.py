"""Rounds of the real engine, recorded while every draft is made and verified whole: a cut draft has no labels behind
the cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.calibrating.rounds_file import PromptRounds, RoundsFile
from forerun.bench.profiling.profiler import longest_draft
from forerun.budget.calibration import CalibrationKey
from forerun.budget.scaling import SATURATED
from forerun.engine import Engine
from forerun.engine.intake import default_mode
from forerun.engine.propose import LoadedDrafter
from forerun.engine.request import Request
from forerun.engine.schedule import RoundReport
from forerun.errors import OptionError
from forerun.sampling import Sampling


@dataclass(frozen=True)
class Recording:
    """What is decoded to record rounds."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    """Of every request; the temperature and the seed are replaced."""
    temperatures: Sequence[float] = (0.0, 1.0)
    batch: int = 8
    """Requests decoded together."""
    rounds: int | None = None
    """Enough for one drafter and temperature; None: all prompts are decoded. Prompts begun together are finished."""
    seed: int = 0

    def of(self, temperature: float, prompt: int) -> Sampling:
        return replace(self.sampling, temperature=temperature, seed=self.seed + prompt)

    def options(self) -> dict[str, Any]:
        """What decides the rounds of a prompt, for the key of the file."""
        s = self.sampling
        kept = {name: getattr(s, name) for name in ("max_tokens", "top_k", "top_p", "min_p", "ignore_eos")}
        return {**kept, "seed": self.seed, "batch": self.batch}


@dataclass(frozen=True)
class Conditions:
    """What one calibration table is for, and K."""

    entry: LoadedDrafter
    temperature: float
    key: CalibrationKey
    k: int


class Recorder:
    """Decodes prompts and records what confidences said and what verification decided.

    Args:
        engine: idle, with policy `fixed`.
        recording: what to decode.
        file: of prompts that are done.
    """

    def __init__(self, engine: Engine, recording: Recording, file: RoundsFile):
        assert not engine.core.schedule.scheduler.adapts
        self._engine, self._recording, self._file = engine, recording, file
        self._notes: dict[int, _Notes] = {}  # by request

    def conditions(self) -> list[Conditions]:
        """Every drafter that drafts at all, at every temperature; K as configured."""
        return [
            Conditions(entry, temperature, self._key(entry, temperature), longest_draft(entry))
            for entry in self._engine.core.loaded
            if longest_draft(entry) > 0
            for temperature in self._recording.temperatures
        ]

    def _key(self, entry: LoadedDrafter, temperature: float) -> CalibrationKey:
        mode = default_mode(self._engine.core.loaded, self._engine.options.verify_mode)
        return CalibrationKey.of(self._recording.of(temperature, 0), mode, entry.config.draft_sample_method)

    @property
    def total(self) -> int:
        """Prompts to decode, those that are done included."""
        return len(self._recording.prompts) * len(self.conditions())

    def record(self, conditions: Conditions, advance: Callable[[int], object]) -> list[PromptRounds]:
        """The rounds of one drafter at one temperature. `advance` is told of prompts done or not needed.

        Raises:
            OptionError: the drafter gives no confidences.
        """
        done: list[PromptRounds] = []
        groups = self._groups()
        for number, group in enumerate(groups):
            done += self._decoded(conditions, group)
            advance(len(group))
            if self._recording.rounds is not None and _rounds(done) >= self._recording.rounds:
                advance(sum(map(len, groups[number + 1 :])))
                break
        return done

    def _groups(self) -> list[list[int]]:
        count, batch = len(self._recording.prompts), self._recording.batch
        return [list(range(start, min(start + batch, count))) for start in range(0, count, batch)]

    def _decoded(self, conditions: Conditions, group: Sequence[int]) -> Iterator[PromptRounds]:
        """The rounds of these prompts, decoded together unless all of them are on file."""
        name, temperature = conditions.entry.name, conditions.temperature
        known = [self._file.get(name, temperature, prompt) for prompt in group]
        if all(known):
            yield from (one for one in known if one is not None)
            return
        for prompt, notes in zip(group, self._run(conditions, group), strict=True):
            if notes.without_confidence:
                raise OptionError("--drafter", f"{name!r} gives no confidences: there is nothing to calibrate")
            made = PromptRounds(name, temperature, prompt, notes.logits, notes.accepted, notes.left_out)
            if self._file.get(*made.place) is None:
                self._file.add(made)
            yield made

    def _run(self, conditions: Conditions, group: Sequence[int]) -> list[_Notes]:
        engine, recording = self._engine, self._recording
        requests = engine.submit(
            [list(recording.prompts[prompt]) for prompt in group],
            [recording.of(conditions.temperature, prompt) for prompt in group],
            speculative={"method": conditions.entry.name, "max_draft": conditions.k},
        )
        self._notes = {request.id: _Notes(conditions.k) for request in requests}
        before, engine.core.on_round = engine.core.on_round, self._note
        try:
            while any(request.finish_reason is None for request in requests):
                engine.step()
        finally:
            engine.core.on_round = before
            engine.cancel(requests)
        for request in requests:
            Engine.result(request)  # raises the error of a request that failed
        return [self._notes[request.id] for request in requests]

    def _note(self, report: RoundReport) -> None:
        request: Request = report.request
        if report.drafter is not None and request.id in self._notes:
            self._notes[request.id].take(report)


class _Notes:
    """Of one request."""

    def __init__(self, k: int):
        self._k = k
        self.logits: list[list[float]] = []
        self.accepted: list[int] = []
        self.left_out = 0
        self.without_confidence = False

    def take(self, report: RoundReport) -> None:
        confidence = report.draft.confidence
        if not confidence:
            self.without_confidence = True
        elif len(confidence) == report.verified == self._k and all(map(math.isfinite, confidence)):
            self.logits.append([logit(c) for c in confidence])
            self.accepted.append(report.accepted)
        else:
            self.left_out += 1


def logit(confidence: float) -> float:
    """log(c / (1 - c)), bounded, to six digits: what a file needs to hold."""
    inside = min(max(confidence, SATURATED), 1 - SATURATED)
    return round(math.log(inside / (1 - inside)), 6)


def _rounds(done: Sequence[PromptRounds]) -> int:
    return sum(len(one.accepted) for one in done)


__all__ = ["Conditions", "Recorder", "Recording", "logit"]
