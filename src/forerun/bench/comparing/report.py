"""A comparison on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.bench.comparing.sections import Findings, Section, sections
from forerun.bench.screen import fitted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LEFT = ("drafter", "way", "metric")
"""Columns of words."""


def show(findings: Findings, console: Console) -> None:
    """Every section, tables below their sentences."""
    fitted(console)
    for section in sections(findings):
        console.print(f"[bold]{section.title}[/]")
        for line in section.lines:
            loud = line.startswith(("NOT LOSSLESS", "DIFFERS"))
            console.print(line, markup=False, style="bold red" if loud else "")
        if section.head:
            console.print(table(section.head, section.rows), soft_wrap=False)
        console.print()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False)
    for name in head:
        grid.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name in LEFT)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))  # a name may have brackets
    return grid


__all__ = ["Section", "show", "table"]
