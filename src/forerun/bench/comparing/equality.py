"""Outputs that are not those of plain decoding in the same run, and whether rounding explains them.

Where ids must be the same (greedy, or coupled with a seed) every output is compared with the plain one of its own
turn. One that differs is decoded plainly once more, alone, and held against that by the margin rule: in float32 no
difference is accepted, in lower precision those whose margin is below the measured noise of the passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.comparison import Comparison, Plain, Task
from forerun.bench.load.drive import LoadRun
from forerun.bench.load.drive import Task as Asked
from forerun.bench.load.trial import Traffic
from forerun.bench.margins import Difference
from forerun.engine import Completion, Engine
from forerun.sampling import VerifyMode

EXAMINED = 8
"""Differing outputs of a way and load that are looked at, equal ones counting once: each is decoded again."""


@dataclass
class Ruling:
    """What comparing the outputs of one way with plain decoding has shown."""

    outputs: int = 0
    different: int = 0
    unexplained: int = 0
    """Outputs with a difference that rounding does not explain."""
    unexamined: int = 0
    """Outputs that differ and were not looked at further."""
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def explained(self) -> bool:
        return self.unexplained == 0

    def as_dict(self) -> dict[str, Any]:
        counts = ("outputs", "different", "unexplained", "unexamined", "differences")
        return {name: getattr(self, name) for name in counts}


class Referee:
    """Rules on the outputs of one drafter.

    Args:
        engine: with the drafter, idle whenever it is asked.
        drafter: its name.
        k: its longest draft.
        mode: of verification.
        prompts: all there are, for their numbers.
    """

    def __init__(self, engine: Engine, drafter: str, k: int, mode: VerifyMode, prompts: Sequence[Sequence[int]]):
        self._comparison = Comparison(engine)
        self._drafter, self._k, self._mode = drafter, k, mode
        self._number = {tuple(ids): i for i, ids in reversed(list(enumerate(prompts)))}
        self._plain: dict[Any, Plain] = {}

    def rule(self, plain: Sequence[LoadRun], drafted: Sequence[LoadRun], traffic: Traffic, together: int) -> Ruling:
        """On all runs of one way, turn by turn.

        Args:
            plain: runs of plain decoding, one a turn.
            drafted: of the way, in the same turns.
            traffic: what was decoded.
            together: requests in a step, at most.
        """
        ruling, known = Ruling(), dict[Any, list[Difference]]()
        for turn, (one, other) in enumerate(zip(plain, drafted, strict=True)):
            for asked, mine, its in zip(traffic.tasks(turn), one.completions, other.completions, strict=True):
                ruling.outputs += 1
                if mine.token_ids != its.token_ids:
                    self._examine(ruling, known, asked, its, together)
        return ruling

    def _examine(
        self, ruling: Ruling, known: dict[Any, list[Difference]], asked: Asked, its: Completion, together: int
    ) -> None:
        """Adds one differing output."""
        ruling.different += 1
        key = self._key(asked), tuple(its.token_ids)
        if key not in known and len(known) >= EXAMINED:
            ruling.unexamined += 1
            ruling.unexplained += self._comparison.exact  # no difference is accepted, whatever its margin
            return
        if key not in known:
            known[key] = self._differences(asked, its, together)
            ruling.differences += self._entries(known[key], asked)
        # Equal to plain decoding alone: then plain decoding itself changed in company, which float32 must not do.
        accepted = all(d.explained for d in known[key]) and (bool(known[key]) or not self._comparison.exact)
        ruling.unexplained += not accepted

    def _key(self, asked: Asked) -> tuple[Any, ...]:
        """What decides a plain output: greedy ones have no seed."""
        sampling = asked.sampling
        return tuple(asked.prompt), sampling.max_tokens, None if sampling.greedy else sampling.seed

    def _differences(self, asked: Asked, its: Completion, together: int) -> list[Difference]:
        key = self._key(asked)
        if key not in self._plain:
            self._plain[key] = self._comparison.plain(Task(asked.prompt, asked.sampling, self._mode))
        number = self._number[tuple(asked.prompt)]
        return self._comparison.differences(self._plain[key], its, self._drafter, self._k, number, together)

    def _entries(self, differences: Sequence[Difference], asked: Asked) -> list[dict[str, Any]]:
        if differences:
            return [entry_of(one) for one in differences]
        return [
            {"prompt": self._number[tuple(asked.prompt)], "position": None, "explained": not self._comparison.exact}
        ]


def entry_of(difference: Difference) -> dict[str, Any]:
    """As JSON types; a margin that is infinite (an output of another length) is None."""
    names = ("prompt", "position", "expected", "emitted", "margin", "noise", "explained")
    values = {name: getattr(difference, name) for name in names}
    return {name: None if isinstance(v, float) and math.isinf(v) else v for name, v in values.items()}


def sentence(entry: Mapping[str, Any]) -> str:
    """One line about one difference."""
    where = f"prompt {entry['prompt'] + 1}"
    if entry["position"] is None:
        return f"{where}: the text is that of plain decoding alone; plain decoding beside others gave another one"
    margin = "of another length" if entry["margin"] is None else f"margin {entry['margin']:.3g}"
    bound = f"noise {entry['noise']:.3g}" if entry["noise"] else "none is accepted in this dtype"
    return (
        f"{where}, output token {entry['position'] + 1}: {entry['emitted']} for {entry['expected']}; {margin}, {bound}"
    )


__all__ = ["EXAMINED", "Referee", "Ruling", "entry_of", "sentence"]
