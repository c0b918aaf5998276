"""A benchmark as a table for people and as CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench.benchmark import Result
from forerun.bench.measurement import Row
from forerun.bench.screen import explain, fitted, number, text_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEFINITIONS = {
    "speed-up": "plain seconds per token / speculative seconds per token; same engine, prompts, sampling, batch, warm",
    "tok/s": "tokens of all requests / seconds, prefill included",
    "accepted length": "1 + accepted / drafting rounds (bonus included, every round counting once)",
    "accepted by position": "rounds with 1..k accepted / rounds with k verified and 1..k-1 accepted",
    "TTFT, ITL, TPOT": "first token; gap between two emissions; (last - first) / (tokens - 1); p50 / p95 in ms",
}


def table(result: Result) -> Table:
    """One line per row of the benchmark."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in ("drafter", "K", "batch", "T", "tok/s", "plain", "speed-up", "[95 %]"):
        grid.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=True)
    for name in ("accepted length", "accepted by position", "TTFT", "ITL", "TPOT", "plain TPOT"):
        grid.add_column(name, justify="right")
    for row in result.rows:
        grid.add_row(*_cells(row))
    return grid


def show(result: Result, console: Console) -> None:
    """The table, what it was made with, and what its words mean."""
    fitted(console)
    console.print(table(result), soft_wrap=False)
    console.print(setting(result), style="dim", markup=False)
    explain(console, DEFINITIONS)


def as_text(result: Result) -> str:
    """The same for a file."""
    return text_of(lambda console: show(result, console))


def setting(result: Result) -> str:
    """Models, hardware and options in one line: a number means nothing without them."""
    made, options = result.made_with, result.options
    target, hardware = made["target"], made["hardware"]
    ends = "end-of-sequence ignored" if options["ignore_eos"] else "end-of-sequence ends"
    return (
        f"{target['name']}, {target['dtype']}, on {hardware['name']} ({hardware['device']}, {hardware['threads']} "
        f"threads); {options['prompts']} prompts, up to {options['max_tokens']} tokens, {ends}, "
        f"{options['rounds']} rounds, {options['verify_mode']} mode, seed {options['seed']}; "
        f"forerun {made['versions']['forerun']}, torch {made['versions']['torch']}"
    )


def _cells(row: Row) -> list[str]:
    low, high = row["speedup_spread"]["interval_95"]
    return [
        row["drafter"],
        str(row["k"]),
        str(row["batch"]),
        f"{row['temperature']:g}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['plain_tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}x",
        f"{low:.2f}-{high:.2f}",
        number(row["mean_accepted_length"]),
        " ".join(number(rate) for rate in row["acceptance_by_position"]),
        *(_points(row[name]) for name in ("ttft_ms", "itl_ms", "tpot_ms", "plain_tpot_ms")),
    ]


def _points(points: Mapping[str, float | None]) -> str:
    return "/".join("-" if value is None else f"{value:.0f}" for value in (points["p50"], points["p95"]))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Flat rows with the union of their columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
