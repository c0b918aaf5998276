"""The exact law of what an engine emits, with nothing assumed about how it decides.

Whatever an engine does with a request is a function of the random numbers it reads, and `Noise` is where it reads them.
`Scripted` puts chosen numbers there. Every number that a run reads becomes a branching: [0, 1) is cut where what the
engine does (drafts, accepts, emits) changes, each part counts with its width, and the walk goes on in each of them.
Hints say where theory puts the cuts; a cut that lies elsewhere is found by halving, so a wrong engine is measured too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forerun.sampling import Noise

Key = tuple[int, int, int]
"""(anchor or position, purpose, slot) of one random number."""

Script = Mapping[Key, float]
Law = dict[tuple[int, ...], float]
"""Output -> probability."""

EDGE = 2.0**-46
"""How near to a cut its two sides are looked at; it bounds the error of a part's width."""


@dataclass(frozen=True)
class Scripted(Noise):
    """Noise that reads from a script, 0.5 where it has no entry, and keeps a list of what was read."""

    script: Script = field(default_factory=dict)
    tokens: Sequence[int] = ()
    """The request's own growing list of tokens."""
    span: range = range(0)
    """Reads count while the request has so many tokens."""
    reads: list[Key] = field(default_factory=list)

    def uniforms(self, anchor: int, purpose: int, count: int) -> np.ndarray:
        keys = [(anchor, purpose, slot) for slot in range(count)]
        if len(self.tokens) in self.span:
            self.reads.extend(key for key in keys if key not in self.reads)
        return np.array([self.script.get(key, 0.5) for key in keys])


class Run(NamedTuple):
    """What an engine did under one script."""

    reads: Sequence[Key]
    acts: Hashable
    """Everything it decided, in order."""
    output: tuple[int, ...]
    hints: Callable[[Key], Sequence[float]]
    """Where theory expects the decision that this number takes to change."""


Runner = Callable[[Sequence[Script]], Sequence[Run]]
"""Runs one request per script, all of them together."""


class Part(NamedTuple):
    """A part of [0, 1) in which an engine acts alike."""

    inside: float
    width: float


def measure(runner: Runner) -> Law:
    """The law of the output."""
    law: Law = defaultdict(float)
    nodes: list[tuple[Script, float]] = [({}, 1.0)]
    while nodes:
        runs = runner([script for script, _ in nodes])
        questions, weights = [], []
        for (script, weight), run in zip(nodes, runs, strict=True):
            key = next((key for key in run.reads if key not in script), None)
            if key is None:
                law[run.output] += weight
            else:
                questions.append(_Question(script, key, run.hints(key)))
                weights.append(weight)
        nodes = [
            ({**question.script, question.key: part.inside}, weight * part.width)
            for question, weight, parts in zip(questions, weights, _divide(runner, questions), strict=True)
            for part in parts
        ]
    return dict(law)


class _Question(NamedTuple):
    script: Script
    key: Key
    hints: Sequence[float]

    def ask(self, number: float) -> Script:
        return {**self.script, self.key: number}


def _divide(runner: Runner, questions: Sequence[_Question]) -> list[list[Part]]:
    """For each question, the parts of [0, 1) of its number, all questions asked together."""
    seen: list[dict[float, Hashable]] = [{} for _ in questions]
    asked = [(i, number) for i, question in enumerate(questions) for number in _first_numbers(question.hints)]
    while asked:
        runs = runner([questions[i].ask(number) for i, number in asked])
        for (i, number), run in zip(asked, runs, strict=True):
            seen[i][number] = run.acts
        asked = [(i, number) for i, known in enumerate(seen) for number in _between(known)]
    return [_parts(known) for known in seen]


def _first_numbers(hints: Sequence[float]) -> list[float]:
    ends = {0.0, 1 - 2.0**-53}
    return sorted(ends | {x for cut in hints for x in (cut - EDGE, cut + EDGE) if 0 < x < 1})


def _between(known: Mapping[float, Hashable]) -> list[float]:
    """The middle of every gap across which the engine changes and that is still wide."""
    pairs = itertools.pairwise(sorted(known))
    return [(low + high) / 2 for low, high in pairs if known[low] != known[high] and high - low > 4 * EDGE]


def _parts(known: Mapping[float, Hashable]) -> list[Part]:
    numbers = sorted(known)
    cuts = [(low + high) / 2 for low, high in itertools.pairwise(numbers) if known[low] != known[high]]
    return [Part((low + high) / 2, high - low) for low, high in itertools.pairwise([0.0, *cuts, 1.0])]
