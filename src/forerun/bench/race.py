"""Drafters against plain decoding, side by side in one process: the same tokens, and how much sooner.

Every engine decodes a prompt right after the others did, in an order that rotates, so that a disturbance of the
machine hits all of them and a ratio is made of neighbours in time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.bench.cold import own_salt
from forerun.bench.comparison import Comparison, Plain, Task, first_difference
from forerun.bench.machine import Spread
from forerun.engine import Completion, DecodingStats, Engine
from forerun.engine.stats import total
from forerun.sampling import Sampling

WARM_TOKENS = 8
COUPLED = {"verify_mode": "coupled"}
"""Sampled runs draw their noise by position, so that one seed gives one text with any drafter and without one."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One prompt decoded plainly and with a drafter."""

    prompt: int
    plain: Completion
    drafted: Completion

    @property
    def same(self) -> bool:
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def speedup(self) -> float:
        """Plain seconds per token over speculative seconds per token."""
        per_token = self.plain.seconds / len(self.plain.token_ids)
        return per_token / (self.drafted.seconds / len(self.drafted.token_ids))


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token of a lap that is not plain decoding's."""

    prompt: int
    position: int
    """Of the output, from 0."""
    expected: int | None
    """None: plain decoding had ended."""
    emitted: int | None
    top_margin: float
    """Best score minus second best of plain decoding's choice there: logits if greedy, T (log p + g) if sampled."""

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt + 1}, output token {self.position + 1}: {self.emitted} instead of {self.expected}; "
            f"top-2 margin of plain decoding there: {self.top_margin:.3g}"
        )


@dataclass(slots=True)
class Standing:
    """All laps of one drafter in one mode."""

    drafter: str
    mode: str
    laps: list[Lap] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)

    @property
    def speedup(self) -> Spread:
        return Spread.of([lap.speedup for lap in self.laps], "x")

    @property
    def plain_rate(self) -> Spread:
        return _rate([lap.plain for lap in self.laps])

    @property
    def rate(self) -> Spread:
        return _rate([lap.drafted for lap in self.laps])

    @property
    def stats(self) -> DecodingStats:
        return total(lap.drafted.stats for lap in self.laps)


def _rate(completions: Sequence[Completion]) -> Spread:
    return Spread.of([len(one.token_ids) / one.seconds for one in completions], "tokens/s")


@dataclass(frozen=True)
class Course:
    """What is run: every prompt in every mode."""

    prompts: Sequence[Sequence[int]]
    modes: Mapping[str, Sampling]
    seconds: float = float("inf")
    """No further prompt is started that would not end by then at the pace so far; at least one is run."""

    def sampling(self, mode: str, prompt: int) -> Sampling:
        """Each prompt has a seed of its own."""
        one = self.modes[mode]
        return replace(one, seed=(one.seed or 0) + prompt)


def race(
    plain: Engine, rivals: Mapping[str, Engine], course: Course, advance: Callable[[], object] = lambda: None
) -> list[Standing]:
    """Runs the course and compares every output with plain decoding's.

    Args:
        plain: an engine without drafters over the same target.
        rivals: drafter name -> an engine with that drafter alone, over a copy of the target.
        advance: called after each run; there are prompts * modes * (1 + rivals) of them.

    Returns:
        One standing per drafter and mode.
    """
    standings = {(name, mode): Standing(name, mode) for name in rivals for mode in course.modes}
    _warm([plain, *rivals.values()], course)
    start = time.monotonic()
    for prompt, ids in enumerate(course.prompts):
        if prompt and (time.monotonic() - start) * (prompt + 1) / prompt > course.seconds:
            break
        for mode in course.modes:
            sampling = course.sampling(mode, prompt)
            done = {}
            for name in _rotated(["", *rivals], prompt):
                engine = rivals[name] if name else plain
                [done[name]] = engine.generate([ids], sampling, speculative=COUPLED, cache_salt=own_salt())
                advance()
            for name in rivals:
                lap = Lap(prompt, done[""], done[name])
                standings[name, mode].laps.append(lap)
                if not lap.same:
                    standings[name, mode].partings.append(_parting(plain, lap, sampling))
    return list(standings.values())


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _warm(engines: Sequence[Engine], course: Course) -> None:
    for engine in engines:
        for mode in course.modes:
            short = replace(course.sampling(mode, 0), max_tokens=WARM_TOKENS)
            engine.generate([course.prompts[0]], short, speculative=COUPLED)


# -------------------------------------------------------------------------------------------------------- differences


def _parting(plain: Engine, lap: Lap, sampling: Sampling) -> Parting:
    """Where the outputs part, and how near plain decoding's choice was there. The engine must be idle."""
    ours, theirs = lap.plain.token_ids, lap.drafted.token_ids
    at = first_difference(ours, theirs)
    assert at is not None
    task = Task(lap.plain.prompt_token_ids, sampling, "coupled")
    near = math.inf  # an output that ends too early or too late is no matter of rounding
    if at < min(len(ours), len(theirs)):
        near = Comparison(plain).choice(Plain(task, lap.plain, ()), at).top_margin
    expected, emitted = (ids[at] if at < len(ids) else None for ids in (ours, theirs))
    return Parting(lap.prompt, at, expected, emitted, near)
