"""All cells of a study, in a file of rows that survives an interruption, and the verdicts over them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from forerun.bench.load.arrivals import Load
from forerun.bench.load.drive import Clock
from forerun.bench.load.protocol import Verdict, best_of_half, judge
from forerun.bench.load.trial import PLAIN, Cell, Traffic, Way, measure, runs_of
from forerun.bench.measurement import Row
from forerun.bench.provenance import provenance
from forerun.bench.rows import RowFile, key_of
from forerun.budget.profile import Profile
from forerun.engine import Engine

BAR = 0.97
"""Speed over plain decoding's, and over the best fixed K's, that no cell may fall below."""


@dataclass(frozen=True)
class Subject:
    """One drafter, or several together, in all the ways it is decoded."""

    drafter: str
    ways: Sequence[Way]


@dataclass
class Result:
    """Rows with what they were made with."""

    rows: list[Row]
    made_with: dict[str, Any]
    options: dict[str, Any]

    def as_dict(self, bar: float = BAR) -> dict[str, Any]:
        found = [{**verdict.as_dict(), **verdict.cell._asdict()} for verdict in verdicts(self.rows, bar)]
        return {"rows": self.rows, "verdicts": found, "options": self.options, **self.made_with}


class Study:
    """Measures the cells that a file of rows does not have yet.

    Args:
        engine: the scheduled one, whose models and costs the rows belong to.
        subjects: drafters and ways.
        loads: each of them with each subject.
        traffic: what is decoded.
        clock: time and waiting.
        rows: file of finished rows, made if it is not there.
    """

    def __init__(
        self,
        engine: Engine,
        subjects: Sequence[Subject],
        loads: Sequence[Load],
        traffic: Traffic,
        clock: Clock,
        rows: Path | None = None,
    ):
        self._subjects, self._loads, self._traffic, self._clock = subjects, loads, traffic, clock
        self.options = _options(engine, subjects, traffic)
        made_with = provenance(engine)
        key = key_of(made_with, traffic.prompts, self.options)
        self._file = None if rows is None else RowFile(rows, key, made_with, cell_of)
        self._made_with = made_with if self._file is None else self._file.made_with

    @property
    def note(self) -> str | None:
        return None if self._file is None else self._file.note

    @property
    def total(self) -> int:
        """Runs that `run` will make."""
        return sum(
            runs_of(s.ways, self._traffic) for s in self._subjects for ld in self._loads if not self._done(s, ld)
        )

    def run(self, advance: Callable[[], object] = lambda: None) -> Result:
        rows = []
        for load in self._loads:
            for subject in self._subjects:
                row = self._done(subject, load)
                if row is None:
                    traffic = self._traffic.under(load)
                    row = measure(subject.ways, subject.drafter, load, traffic, self._clock, advance)
                    if self._file is not None:
                        self._file.add(row)
                rows.append(row)
        return Result(rows, self._made_with, self.options)

    def _done(self, subject: Subject, load: Load) -> Row | None:
        return (
            None if self._file is None else self._file.get(Cell(subject.drafter, str(load), self._traffic.temperature))
        )


def cell_of(row: Row) -> Cell:
    return Cell(row["drafter"], str(Load.of(row)), row["temperature"])


def _options(engine: Engine, subjects: Sequence[Subject], traffic: Traffic) -> dict[str, Any]:
    given = {name: value for name, value in asdict(traffic).items() if name not in ("prompts", "domains")}
    scheduler = engine.core.schedule.scheduler
    fitted = {name: _digest(one.dumps()) for name, one in sorted(scheduler.calibrations.items())}
    return {
        **given,
        "max_tokens": list(traffic.max_tokens),
        "prompts": len(traffic.prompts),
        "ways": {subject.drafter: [way.label for way in subject.ways] for subject in subjects},
        "verify_mode": engine.options.verify_mode,
        "profile": None if scheduler.profile is None else _digest(_own(scheduler.profile, engine).dumps()),
        "calibrations": fitted,
        **asdict(engine.options.limits),
    }


def _own(profile: Profile, engine: Engine) -> Profile:
    """Without drafters that are not loaded: measuring another one must not set rows aside."""
    names = {entry.name for entry in engine.core.loaded}
    return replace(profile, drafts={name: cost for name, cost in profile.drafts.items() if name in names}, models={})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------- verdicts


class Claim(NamedTuple):
    """That a way is not slower than a rival, in one cell."""

    drafter: str
    load: str
    way: str
    rival: str


def verdicts(rows: Sequence[Row], bar: float = BAR) -> list[Verdict[Claim]]:
    """Every scheduled way of every cell: over plain decoding, and over the best fixed K. Two families of claims, each
    corrected over all of its cells."""
    return [verdict for family in families(rows) for verdict in judge(family, bar)]


def families(rows: Sequence[Row]) -> tuple[dict[Claim, list[float]], dict[Claim, list[float]]]:
    """Speed of every scheduled way, pair by pair: over plain decoding, and over the best fixed K in those pairs that it
    was not chosen on."""
    plain: dict[Claim, list[float]] = {}
    fixed: dict[Claim, list[float]] = {}
    for row in rows:
        costs: Mapping[str, Sequence[float]] = row["seconds_per_token"]
        lengths = [way for way in costs if way.startswith("fixed")]
        for way in costs:
            if way == PLAIN or way in lengths:
                continue
            own = [theirs / mine for theirs, mine in zip(costs[PLAIN], costs[way], strict=True)]
            plain[_claim(row, way, PLAIN)] = own
            if lengths and len(own) > 1:
                best, compared = best_of_half({label: costs[label] for label in (*lengths, way)}, way)
                fixed[_claim(row, way, best)] = compared
    return plain, fixed


def _claim(row: Row, way: str, rival: str) -> Claim:
    return Claim(row["drafter"], str(Load.of(row)), way, rival)


__all__ = ["BAR", "Claim", "Result", "Study", "Subject", "cell_of", "families", "verdicts"]
