"""One engine under one load, in real time: requests are submitted when they come, and every step is looked at."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.bench.cold import own_salt
from forerun.bench.load.arrivals import Load, arrival_times
from forerun.bench.timeline import Timeline
from forerun.engine import Completion, DecodingStats, Engine
from forerun.engine.request import Chunk, Request
from forerun.engine.schedule import RoundReport
from forerun.engine.stats import total
from forerun.sampling import Sampling

Round = list[int]
"""[drafted, verified, accepted] of one request in one step."""


class Clock(Protocol):
    """Time, and waiting."""

    def __call__(self) -> float:
        """Seconds, monotonic."""

    def wait(self, seconds: float) -> None:
        """Returns so much later."""


class WallClock:
    """The machine's."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Task:
    """One request of a run."""

    prompt: Sequence[int]
    sampling: Sampling
    domain: str = ""


@dataclass
class LoadRun:
    """What a run of tasks came to."""

    seconds: float
    completions: list[Completion]
    timelines: list[Timeline]
    grid: list[Round] = field(default_factory=list)
    """Of the step nearest to the middle of the run, of those with the most requests."""
    by_drafter: dict[str, DecodingStats] = field(default_factory=dict)
    """Of each drafter, the rounds it was asked in; one without a draft if it had nothing to propose."""

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def stats(self) -> DecodingStats:
        return total(completion.stats for completion in self.completions)

    @property
    def seconds_per_token(self) -> float:
        """Of all requests together."""
        return self.seconds / self.tokens

    @property
    def decoding_seconds(self) -> float:
        """From the first token of each request to its last, all added up."""
        return sum(line.emissions[-1][0] - line.emissions[0][0] for line in self.timelines)

    @property
    def seconds_per_token_per_user(self) -> float:
        """What the user of one request waits for a token, the first ones left out."""
        later = self.tokens - len(self.completions)
        return self.decoding_seconds / later if later else 0.0


def drive(
    engine: Engine,
    tasks: Sequence[Task],
    load: Load,
    speculative: bool | Mapping[str, Any],
    clock: Clock,
    seed: int = 0,
) -> LoadRun:
    """Decodes all tasks, in their order.

    Args:
        engine: idle.
        tasks: at least one.
        load: so many at once, or arriving at a rate.
        speculative: see `Engine.submit`.
        clock: time and waiting.
        seed: of the times of arrival.
    """
    run = _Run(engine, tasks, load, speculative, clock, seed)
    before, engine.core.on_round = engine.core.on_round, run.note
    try:
        while not run.done:
            run.submit_due()
            if run.active:
                run.step()
            else:
                clock.wait(max(0.0, run.until_next()))
    finally:
        engine.core.on_round = before
    return run.result()


class _Run:
    def __init__(
        self,
        engine: Engine,
        tasks: Sequence[Task],
        load: Load,
        speculative: bool | Mapping[str, Any],
        clock: Clock,
        seed: int,
    ):
        self._engine, self._load, self._speculative, self._clock = engine, load, speculative, clock
        self._salt = own_salt()  # of the whole run: its requests share what they have in common, as anywhere
        self._start = clock()
        due = arrival_times(load, len(tasks), seed) if load.is_open else [0.0] * len(tasks)
        self._waiting = deque((self._start + at, task) for at, task in zip(due, tasks, strict=True))
        self._requests: list[Request] = []
        self._timelines: list[Timeline] = []
        self._steps: list[list[Round]] = []
        self._by_drafter: dict[str, DecodingStats] = {}
        self.active: list[Request] = []

    @property
    def done(self) -> bool:
        return not self._waiting and not self.active

    def until_next(self) -> float:
        return self._waiting[0][0] - self._clock()

    def submit_due(self) -> None:
        """Requests that have come: all whose time it is, or as many as there is room for in a closed loop."""
        while self._waiting and self._may_enter():
            due, task = self._waiting.popleft()
            line = Timeline(due if self._load.is_open else self._clock())

            def note(chunk: Chunk, line: Timeline = line) -> None:
                line.arrived(self._clock(), len(chunk.token_ids))

            [request] = self._engine.submit(
                [list(task.prompt)],
                task.sampling,
                speculative=self._speculative,
                cache_salt=self._salt,
                listener=note,
            )
            self._timelines.append(line)
            self._requests.append(request)
            self.active.append(request)

    def _may_enter(self) -> bool:
        if self._load.concurrency is not None:
            return len(self.active) < self._load.concurrency
        return self.until_next() <= 0

    def step(self) -> None:
        before = [(r.stats.target_steps, r.stats.drafted, r.stats.verified, r.stats.accepted) for r in self.active]
        self._engine.step()
        rounds = []
        for request, (steps, drafted, verified, accepted) in zip(self.active, before, strict=True):
            now = request.stats
            if now.target_steps > steps:
                rounds.append([now.drafted - drafted, now.verified - verified, now.accepted - accepted])
        self._steps.append(rounds)
        self.active = [request for request in self.active if request.finish_reason is None]

    def note(self, report: RoundReport) -> None:
        for name in report.missed:
            self._of(name).record(0, 0, 0)
        if report.drafter is not None:
            self._of(report.drafter).record(len(report.draft.tokens), report.verified, report.accepted)

    def _of(self, drafter: str) -> DecodingStats:
        return self._by_drafter.setdefault(drafter, DecodingStats())

    def result(self) -> LoadRun:
        seconds = self._clock() - self._start
        completions = [self._engine.result(request) for request in self._requests]
        return LoadRun(seconds, completions, self._timelines, _middle(self._steps), self._by_drafter)


def _middle(steps: Sequence[list[Round]]) -> list[Round]:
    most = max(map(len, steps), default=0)
    if most == 0:
        return []
    full = [i for i, rounds in enumerate(steps) if len(rounds) == most]
    return steps[min(full, key=lambda i: abs(i - len(steps) / 2))]


__all__ = ["Clock", "LoadRun", "Round", "Task", "WallClock", "drive"]
