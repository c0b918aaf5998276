"""A sweep as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench.load.arrivals import Load
from forerun.bench.screen import explain, fitted, number
from forerun.bench.simulate.specs import PLAIN
from forerun.bench.simulate.sweep import BAR, Row, margin, worst

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 150
"""Columns of the table where there is no terminal to fit."""

DEFINITIONS = {
    "tok/s": "tokens of all requests / seconds, prefill included; per user: tokens of a decoding request / its seconds",
    "speed": "over plain decoding of the same texts under the same load; of best fixed: over the best fixed K's",
    "verified": "draft tokens sent to the target, for each request and step",
    "accepted length": "1 + accepted / rounds with a draft (bonus included)",
    "bypass": "share of a request's steps for which nothing was planned",
}


def table(rows: Sequence[Row]) -> Table:
    """One line per row."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in ("load", "drafter", "policy"):
        grid.add_column(name, justify="right" if name == "load" else "left", no_wrap=True)
    for name in ("tok/s", "per user", "speed", "of best fixed", "verified", "accepted length", "bypass"):
        grid.add_column(name, justify="right")
    for row in rows:
        grid.add_row(*_cells(row))
    return grid


def _cells(row: Row) -> list[str]:
    plain = row["policy"] == PLAIN
    weak = not plain and not row["policy"].startswith("fixed") and margin(row) < BAR
    return [
        str(Load.of(row)),
        "-" if plain else row["label"],
        row["policy"],
        number(row["tokens_per_second"], 0 if row["tokens_per_second"] >= 100 else 1),
        number(row["tokens_per_second_per_user"], 1),
        f"{row['speedup']:.2f}x" + ("!" if weak else ""),
        "-" if plain or row["over_best_fixed"] is None else f"{row['over_best_fixed']:.2f}x",
        "-" if plain else number(row["verify_budget"], 2),
        number(row["mean_accepted_length"], 2),
        "-" if plain else f"{row['bypass_share']:.0%}",
    ]


def worst_lines(rows: Sequence[Row]) -> list[str]:
    """The worst cell of each policy, in words."""
    lines = []
    for entry in worst(rows):
        best = "" if entry["over_best_fixed"] is None else f", {entry['over_best_fixed']:.2f}x the best fixed K"
        where = f"{entry['label']} at load {Load.of(entry)}"
        lines.append(f"worst of {entry['policy']}: {entry['over_plain']:.2f}x plain{best} ({where})")
    return lines


def setting(document: Mapping[str, Any]) -> str:
    """What was simulated, in one line: a number means nothing without it."""
    system, lengths = document["system"], document["options"]["lengths"]
    kind = "costs are modelled, not measured" if system["modelled"] else "costs were measured"
    prompt, output = ("-".join(map(str, lengths[name])) for name in ("prompt", "output"))
    return (
        f"simulated: {system['name']}, {system['key']['model']} {system['key']['dtype']} on {system['key']['device']}; "
        f"{kind}; prompts of {prompt} and outputs of {output} tokens, seeds {document['options']['seeds']}"
    )


def show(document: Mapping[str, Any], console: Console) -> None:
    """The table, what was simulated, the worst cells, and what the words mean."""
    fitted(console, WIDTH)
    console.print(table(document["rows"]), soft_wrap=False)
    console.print(setting(document), style="dim", markup=False)
    for line in worst_lines(document["rows"]):
        console.print(line, markup=False)
    explain(console, DEFINITIONS)


def show_predictions(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Measured beside predicted."""
    from rich.table import Table

    fitted(console, WIDTH)
    grid = Table(box=None, pad_edge=False)
    for name in ("load", "drafter", "policy", "measured tok/s", "predicted", "error"):
        grid.add_column(name, justify="left" if name in ("drafter", "policy") else "right", no_wrap=True)
    for row in rows:
        speeds = (f"{row[f'{name}_tokens_per_second']:.1f}" for name in ("measured", "predicted"))
        grid.add_row(str(Load.of(dict(row))), row["drafter"], row["policy"], *speeds, f"{row['error']:+.1%}")
    console.print(grid, soft_wrap=False)


__all__ = ["show", "show_predictions"]
