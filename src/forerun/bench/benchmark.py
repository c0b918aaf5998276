"""A whole benchmark: drafters x K x batch x temperature, plain decoding beside every one of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.bench.measurement import Cell, Clock, Row, Workload, measure, pairs_of
from forerun.bench.provenance import provenance
from forerun.bench.rows import RowFile, key_of
from forerun.engine import Engine
from forerun.errors import OptionError


@dataclass(frozen=True)
class Grid:
    """What is varied; `drafters` are labels, `lengths` the values of K."""

    drafters: Sequence[str]
    lengths: Sequence[int]
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)

    def cells(self) -> list[Cell]:
        product = itertools.product(self.temperatures, self.batches, self.drafters, self.lengths)
        return [Cell(drafter, k, batch, temperature) for temperature, batch, drafter, k in product]


@dataclass
class Result:
    """Rows with what they were made with."""

    rows: list[Row]
    made_with: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "options": self.options, **self.made_with}


class Benchmark:
    """Measures the cells of a grid that a file of rows does not have yet."""

    def __init__(
        self, engine: Engine, grid: Grid, workload: Workload, rows: Path | None = None, clock: Clock = time.perf_counter
    ):
        _check(engine, grid)
        self.engine = engine
        idle = {entry.label for entry in engine.core.loaded if entry.drafter.max_draft == 0}
        # One that drafts nothing has no cells: plain decoding is measured beside all the others.
        self.cells = [cell for cell in grid.cells() if cell.drafter not in idle]
        self.workload = workload
        self.options = _options(engine, workload)
        self._clock = clock
        made_with = provenance(engine)
        key = key_of(_without_k(made_with), workload.prompts, self.options)
        self._file = None if rows is None else RowFile(rows, key, made_with)
        self._made_with = made_with if self._file is None else self._file.made_with

    @property
    def note(self) -> str | None:
        return None if self._file is None else self._file.note

    @property
    def open_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if self._file is None or self._file.get(cell) is None]

    @property
    def total(self) -> int:
        """Pairs of runs that `run` will make."""
        return sum(pairs_of(cell, self.workload) for cell in self.open_cells)

    def run(self, advance: Callable[[], object] = lambda: None) -> Result:
        rows: dict[Cell, Row] = {}
        for cell in self.cells:
            done = None if self._file is None else self._file.get(cell)
            rows[cell] = done or measure(self.engine, cell, self.workload, self._clock, advance)
            if done is None and self._file is not None:
                self._file.add(rows[cell])
        return Result(list(rows.values()), self._made_with, self.options)


def _without_k(made_with: Mapping[str, Any]) -> dict[str, Any]:
    """K is asked for with each row. What a drafter is configured for only bounds it: rows of a larger grid go with
    those of a smaller one."""
    drafters = []
    for one in made_with["drafters"]:
        config = {name: value for name, value in one["config"].items() if name != "num_speculative_tokens"}
        drafters.append({**one, "config": config})
    return {**made_with, "drafters": drafters}


def _options(engine: Engine, workload: Workload) -> dict[str, Any]:
    given = {name: value for name, value in asdict(workload).items() if name != "prompts"}
    limits = asdict(engine.options.limits)
    return {**given, "prompts": len(workload.prompts), "verify_mode": engine.options.verify_mode, **limits}


def _check(engine: Engine, grid: Grid) -> None:
    """K beyond a drafter's own would be lowered without a word."""
    for entry in engine.core.loaded:
        longest = entry.longest(batch_size=1)
        if entry.drafter.max_draft != 0 and entry.label in grid.drafters and max(grid.lengths) > longest:
            raise OptionError("--k", f"{max(grid.lengths)} is more than {entry.label!r} is configured for ({longest})")
    seqs = engine.options.limits.max_num_seqs
    if max(grid.batches) > seqs:
        raise OptionError("--batch", f"{max(grid.batches)} is more than max_num_seqs ({seqs})")
