"""What `forerun train` shows on stderr: settings with their origins, progress, evaluations; and a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench.screen import size
from forerun.cli.console import LINE_EVERY, PATIENCE, notes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from forerun.training.config import Chosen
    from forerun.training.evaluation import Evaluation
    from forerun.training.metrics import Usage
    from forerun.training.plan import Line, Plan
    from forerun.training.step import StepReport

POSITIONS = "teacher_forced_acceptance"
WIDTH = 220
"""Columns where the output is no terminal."""


def show_settings(chosen: Chosen) -> None:
    """Every value and where it came from."""
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for name, value, origin in chosen.rows():
        shown = ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        table.add_row(name.replace("_", "-"), shown, origin)
    _print(table, notes())


def _print(table: Table, console: Console) -> None:
    """A table as wide as it needs to be where nobody wraps it by hand: in files and pipes."""
    console.print(table, markup=False, width=None if console.is_terminal else WIDTH)


class TrainScreen:
    """A listener: a bar on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._steps = self._first = 0
        self._began = self._next = 0.0
        self._bar: Any = None
        self._task: Any = None

    def settings(self, chosen: Chosen) -> None:
        show_settings(chosen)

    def note(self, text: str) -> None:
        notes().print(text, markup=False)

    def begin(self, step: int, steps: int) -> None:
        self._first, self._steps = step, steps
        self._began = time.monotonic()
        self._next = self._began + PATIENCE
        console = notes()
        if console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )  # fmt: skip
            self._bar = Progress(*columns, console=console, transient=True, speed_estimate_period=600)
            self._task = self._bar.add_task("", total=steps, completed=step)
            self._bar.start()

    def stepped(self, report: StepReport, used: Usage) -> None:
        now = time.monotonic()
        loss = report.sums.as_dict()["loss"]
        shown = "-" if loss is None else f"{loss:.4f}"
        speed = used.tokens / used.seconds if used.seconds else 0.0
        state = f"loss {shown}, {speed:,.0f} tokens/s, peak {used.peak_memory / 1e9:.2f} GB"
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=state)
        elif now >= self._next and report.step < self._steps:
            left = (now - self._began) / (report.step - self._first) * (self._steps - report.step)
            notes().print(f"step {report.step}/{self._steps}: {state}, about {left:.0f} s left", markup=False)
            self._next = now + LINE_EVERY

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        console = self._bar.console if self._bar is not None else notes()
        for line in evaluation_lines(evaluation, best):
            console.print(line, markup=False)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def evaluation_lines(evaluation: Evaluation, best: bool) -> list[str]:
    """One line for each temperature, one for the given text."""
    forced = evaluation.teacher_forced.as_dict()
    first = f"step {evaluation.step}, held out: loss {_number(forced['loss'])}"
    if forced.get(POSITIONS):
        first += f", {POSITIONS} {_list(forced[POSITIONS])}"
    lines = [first]
    for one in evaluation.decoding:
        numbers = one.as_dict()
        line = f"  decoding at T = {one.temperature:g}: accepted length {_number(numbers.get('mean_accepted_length'))}"
        line += f", tokens per step {_number(numbers.get('tokens_per_step'))}"
        line += f", acceptance by position {_list(numbers.get('acceptance_by_position', ()))}"
        if "confidence_ece" in numbers:
            line += f", confidence error {numbers['confidence_ece']:.3f}"
        if one.stats.drafter_faults or one.stats.invalid_drafts:
            line += f" ({one.stats.drafter_faults} faults, {one.stats.invalid_drafts} invalid drafts)"
        lines.append(line)
    if best:
        lines[-1] += "; the best so far"
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _list(values: Sequence[float | None]) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in values) or "-"


# ---------------------------------------------------------------------------------------------------------------- plans


def show_plan(plan: Plan, console: Console) -> None:
    """Each number with its arithmetic."""
    from rich.table import Table

    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    sections = (
        ("memory of a device", plan.memory, plan.memory_bytes),
        ("disk", plan.disk, plan.disk_bytes),
        ("features", plan.features, None),
        ("time", plan.time, None),
    )
    for title, lines, total in sections:
        if not lines:
            continue
        table.add_row(title, "" if total is None else size(total), "")
        for line in lines:
            table.add_row(f"  {line.name}", value_text(line), line.arithmetic)
    _print(table, console)


def value_text(line: Line) -> str:
    """A number with its unit, as people read it."""
    if line.unit == "bytes":
        return size(line.value)
    if line.unit == "s":
        return f"{line.value:,.0f} s" if line.value < 7200 else f"{line.value / 3600:,.1f} h"
    return f"{line.value:,.0f} {line.unit}" if line.value < 1e9 else f"{line.value:.3g} {line.unit}"
