"""Every drafter under every load, in a file of rows that survives an interruption.

A drafter is measured alone: its engine is made when its turn comes. Plain decoding has an engine of its own, which pays
for no drafter, and is timed anew beside every drafter and load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from forerun.bench.comparing.confidence import Questions, confidence
from forerun.bench.comparing.equality import Referee
from forerun.bench.comparing.facts import Facts
from forerun.bench.comparing.trend import counts_of
from forerun.bench.load.arrivals import Load
from forerun.bench.load.drive import Clock, LoadRun
from forerun.bench.load.trial import PLAIN, Traffic, Way, measure, runs_of
from forerun.bench.measurement import Row
from forerun.bench.provenance import provenance
from forerun.bench.recommending.acceptance import Shown
from forerun.bench.rows import RowFile, key_of
from forerun.engine import DecodingStats, Engine
from forerun.engine.intake import default_mode
from forerun.engine.stats import total
from forerun.errors import OptionError
from forerun.sampling import VerifyMode

SPEED, CONFIDENCE = "speed", "confidence"
"""What a row is about."""


@dataclass(frozen=True)
class Contender:
    """One drafter of a comparison."""

    label: str
    """As it is told from others."""
    command: str
    """Flags of `forerun generate` that load it."""
    facts: Facts
    made_with: Mapping[str, Any]
    """Models, weights, options and costs that its rows belong to."""
    ways: Sequence[str]
    """Labels of the ways it is decoded, the one with its fixed K first."""
    enter: Callable[[], AbstractContextManager[Sequence[Way]]]
    """Makes its engines, each with this drafter alone, for as long as it is measured."""
    calibration: str | None = None
    """Hash of its calibration, if it has one."""

    @property
    def identity(self) -> str:
        """What its speeds belong to."""
        return _digest([self.label, self.made_with, list(self.ways)])

    @property
    def hearing(self) -> str:
        """What its confidences belong to."""
        return _digest([self.identity, self.calibration])

    def as_dict(self) -> dict[str, Any]:
        return {"drafter": self.label, "command": self.command, **self.facts.as_dict(), "made_with": self.made_with}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Cell(NamedTuple):
    """What a row has measured."""

    what: str
    identity: str
    load: str = ""


@dataclass
class Result:
    """Rows of all drafters, with what they were made with."""

    contenders: Sequence[Contender]
    rows: list[Row]
    made_with: dict[str, Any]
    options: dict[str, Any]
    absent: Mapping[str, str] = field(default_factory=dict)
    """What was not compared, and the command that makes it."""

    def speeds(self, label: str | None = None) -> list[Row]:
        """Rows about speed, of one drafter or of all."""
        return [row for row in self.rows if row["what"] == SPEED and label in (None, row["drafter"])]

    def confidence(self, label: str) -> Row:
        return next(row for row in self.rows if row["what"] == CONFIDENCE and row["drafter"] == label)

    def contender(self, label: str) -> Contender:
        return next(one for one in self.contenders if one.label == label)

    @property
    def lossless(self) -> bool | None:
        """Whether every output is plain decoding's, up to rounding; None: ids need not be the same here."""
        rulings = [ruling for row in self.speeds() for ruling in (row["equality"] or {}).values()]
        return None if not rulings else all(ruling["unexplained"] == 0 for ruling in rulings)


class Study:
    """Measures what a file of rows does not have yet.

    Args:
        plain: an engine without drafters.
        contenders: labels differ.
        loads: closed ones.
        traffic: what is decoded.
        questions: what is decoded to hear confidences.
        clock: time and waiting.
        path: of the file of rows, made if it is not there; None: kept nowhere.

    Raises:
        OptionError: the file cannot be used.
    """

    def __init__(
        self,
        plain: Engine,
        contenders: Sequence[Contender],
        loads: Sequence[Load],
        traffic: Traffic,
        questions: Questions,
        clock: Clock,
        path: Path | None = None,
    ):
        self._plain, self._contenders, self._loads = plain, contenders, loads
        self._traffic, self._questions, self._clock = traffic, questions, clock
        self.options = _options(plain, traffic, questions)
        made_with = provenance(plain)
        self._file = _file(path, key_of(made_with, traffic.prompts, self.options), made_with)
        self._made_with = made_with if self._file is None else self._file.made_with

    @property
    def note(self) -> str | None:
        return None if self._file is None else self._file.note

    @property
    def total(self) -> int:
        """Steps that `run` will tell of: runs, and prompts decoded for their confidences."""
        runs = [
            runs_of([PLAIN, *one.ways], self._traffic)
            for one in self._contenders
            for load in self._loads
            if self._known(Cell(SPEED, one.identity, str(load))) is None
        ]
        prompts = [
            len(self._questions.prompts)
            for one in self._contenders
            if self._known(Cell(CONFIDENCE, one.hearing)) is None
        ]
        return sum(runs) + sum(prompts)

    def run(self, advance: Callable[..., object] = lambda steps=1, note="": None) -> Result:  # noqa: ARG005
        """Everything. `advance(steps, note=..)`, `total` of them."""
        rows = [row for contender in self._contenders for row in self._rows(contender, advance)]
        loads = [load.concurrency for load in self._loads]
        return Result(self._contenders, rows, self._made_with, {**self.options, "concurrency": loads})

    def _rows(self, contender: Contender, advance: Callable[..., object]) -> Iterator[Row]:
        cells = [Cell(SPEED, contender.identity, str(load)) for load in self._loads]
        cells.append(Cell(CONFIDENCE, contender.hearing))
        known = [self._known(cell) for cell in cells]
        if all(row is not None for row in known):
            yield from (row for row in known if row is not None)
            return
        with contender.enter() as ways:
            bench = Bench(contender, self._plain, ways, self._clock)
            for load, row in zip(self._loads, known, strict=False):
                yield row or self._kept(bench.speed(load, self._traffic.under(load), advance))
            yield known[-1] or self._kept(bench.confidence(self._questions, advance))

    def _known(self, cell: Cell) -> Row | None:
        return None if self._file is None else self._file.get(cell)

    def _kept(self, row: Row) -> Row:
        if self._file is not None:
            self._file.add(row)
        return row


def cell_of(row: Row) -> Cell:
    load = str(Load.of(row)) if row["what"] == SPEED else ""
    return Cell(row["what"], row["identity"], load)


def _file(path: Path | None, key: str, made_with: Mapping[str, Any]) -> RowFile | None:
    try:
        return None if path is None else RowFile(path, key, made_with, cell_of)
    except OptionError as error:
        raise OptionError("--out", error.reason) from error


def _options(plain: Engine, traffic: Traffic, questions: Questions) -> dict[str, Any]:
    given = {name: value for name, value in asdict(traffic).items() if name not in ("prompts", "domains")}
    return {
        **given,
        "max_tokens": list(traffic.max_tokens),
        "prompts": len(traffic.prompts),
        "asked_for_confidence": [questions.sampling.max_tokens, questions.batch],
        "verify_mode": plain.options.verify_mode,
        **asdict(plain.options.limits),
    }


# ---------------------------------------------------------------------------------------------------------- one drafter


class Bench:
    """One drafter with its engines.

    Args:
        contender: the drafter.
        plain: of plain decoding.
        ways: of decoding with it; the first drafts and verifies its whole K.
        clock: time and waiting.
    """

    def __init__(self, contender: Contender, plain: Engine, ways: Sequence[Way], clock: Clock):
        assert [way.label for way in ways] == list(contender.ways), (ways, contender.ways)
        self._contender, self._fixed, self._clock = contender, ways[0], clock
        [self._entry] = self._fixed.engine.core.loaded
        self._mode: VerifyMode = default_mode([self._entry], self._fixed.engine.options.verify_mode)
        # In the drafter's own mode: a seed gives another text in the other one.
        self._ways = [Way(PLAIN, plain, {"method": (), "verify_mode": self._mode}), *ways]

    def speed(self, load: Load, traffic: Traffic, advance: Callable[..., object]) -> Row:
        """The row of a load: `forerun bench load`'s, with what a comparison needs beside it."""
        runs: dict[str, list[LoadRun]] = {way.label: [] for way in self._ways}
        row = measure(
            self._ways, self._contender.label, load, traffic, self._clock,
            lambda: advance(1, note=f"{self._contender.label}, {load} together"),
            lambda label, run: runs[label].append(run),
        )  # fmt: skip
        shown = shown_by_prompt(runs[self._fixed.label], traffic, self._contender.facts.draft_tokens)
        own = {"what": SPEED, "identity": self._contender.identity}
        return {**own, **row, "acceptance": counts_of(shown), "equality": self._equality(load, traffic, runs)}

    def _equality(self, load: Load, traffic: Traffic, runs: Mapping[str, Sequence[LoadRun]]) -> Row | None:
        """By way; None where the law is the same and not the ids: sampled, with verification by rejection."""
        if traffic.tasks(0)[0].sampling.greedy or self._mode == "coupled":
            k = self._contender.facts.draft_tokens
            referee = Referee(self._fixed.engine, self._entry.name, k, self._mode, traffic.prompts)
            together = load.concurrency or 1
            return {
                way: referee.rule(runs[PLAIN], runs[way], traffic, together).as_dict() for way in self._contender.ways
            }
        return None

    def confidence(self, questions: Questions, advance: Callable[..., object]) -> Row:
        """The row about confidences."""
        told = 0

        def tell(prompts: int) -> None:
            nonlocal told
            told += prompts
            advance(prompts, note=f"{self._contender.label}, confidence")

        found = confidence(self._fixed.engine, questions, tell)
        tell(len(questions.prompts) - told)
        return {
            "what": CONFIDENCE,
            "drafter": self._contender.label,
            "identity": self._contender.hearing,
            "temperature": questions.sampling.temperature,
            **found,
        }


def shown_by_prompt(runs: Sequence[LoadRun], traffic: Traffic, k: int) -> Shown:
    """What was accepted, added up by prompt: the same prompt decoded greedily again tells nothing new."""
    by_prompt: dict[tuple[int, ...], list[DecodingStats]] = {}
    for turn, run in enumerate(runs):
        for task, completion in zip(traffic.tasks(turn), run.completions, strict=True):
            by_prompt.setdefault(tuple(task.prompt), []).append(completion.stats)
    return Shown.of([total(parts) for parts in by_prompt.values()], max(1, k))


__all__ = ["CONFIDENCE", "SPEED", "Bench", "Cell", "Contender", "Result", "Study", "cell_of", "shown_by_prompt"]
