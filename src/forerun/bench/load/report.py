"""A study as a table for people, with the verdicts over all its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench.load.arrivals import Load
from forerun.bench.load.protocol import LEAST_PAIRS, geometric_mean
from forerun.bench.load.study import BAR, Result, verdicts
from forerun.bench.load.trial import PLAIN
from forerun.bench.measurement import Row
from forerun.bench.screen import explain, fitted, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 150
"""Columns of the table where there is no terminal to fit."""

DEFINITIONS = {
    "tok/s": "tokens of all requests / seconds, prefill included; per user: tokens behind the first / their seconds",
    "speed": "plain seconds per token over this way's, geometric mean over neighbouring runs; open loop: of a user's",
    "verified": "draft tokens sent to the target, for each request and step",
    "accepted length": "1 + accepted / rounds with a draft (bonus included)",
    "bypass": "share of a request's steps for which nothing was planned",
    "TTFT, TPOT": "first token; (last - first) / (tokens - 1); p50 / p95 in ms",
}


def table(rows: Sequence[Row]) -> Table:
    """One line per way of each row."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in ("load", "drafter", "way"):
        grid.add_column(name, justify="right" if name == "load" else "left", no_wrap=True)
    for name in ("tok/s", "per user", "speed", "verified", "accepted length", "bypass", "TTFT", "TPOT", "same text"):
        grid.add_column(name, justify="right")
    for row in rows:
        for way in row["ways"]:
            grid.add_row(*_cells(row, way))
    return grid


def _cells(row: Row, way: str) -> list[str]:
    found, plain = row["ways"][way], way == PLAIN
    costs = zip(row["seconds_per_token"][PLAIN], row["seconds_per_token"][way], strict=True)
    return [
        str(Load.of(row)),
        row["drafter"],
        way,
        number(found["tokens_per_second"], 1),
        number(found["tokens_per_second_per_user"], 1),
        f"{geometric_mean([theirs / own for theirs, own in costs]):.2f}x",
        "-" if plain else number(found["verify_budget"], 2),
        number(found["mean_accepted_length"], 2),
        "-" if plain or found["bypass_share"] is None else f"{found['bypass_share']:.0%}",
        *("/".join(number(found[name][p], 0) for p in ("p50", "p95")) for name in ("ttft_ms", "tpot_ms")),
        "-" if plain else f"{found['outputs_identical']}/{found['outputs']}",
    ]


def verdict_lines(rows: Sequence[Row], bar: float = BAR) -> list[str]:
    """One line for each claim that was tested, and how the test was made."""
    found = verdicts(rows, bar)
    lines = []
    for one in found:
        cell, word = one.cell, "FAILED" if one.failed else "not refuted"
        enough = "" if one.pairs >= LEAST_PAIRS // (1 if cell.rival == PLAIN else 2) else ", too few pairs"
        lines.append(
            f"{cell.drafter} at load {cell.load}: {cell.way} {one.ratio:.3f}x {cell.rival}, upper bound {one.high:.3f} "
            f"(bar {bar:g}, {one.pairs} pairs{enough}): {word}"
        )
    if found:
        lines.append(
            "a claim has failed if the one-sided upper bound of its ratio, corrected by Holm's procedure at 5 % over "
            "all cells, lies below the bar; the best fixed K is chosen on half of the pairs and compared on the others"
        )
    return lines


def setting(result: Result) -> str:
    """Models, hardware and options in one line: a number means nothing without them."""
    least, most = result.options["max_tokens"]
    return in_one_line(result.made_with, result.options, f"{least}-{most}", f", profile {result.options['profile']}")


def in_one_line(made: Mapping[str, Any], options: Mapping[str, Any], tokens: str, more: str = "") -> str:
    """What a study of `Traffic` was made with; `tokens` of an output, and `more` options."""
    target, hardware = made["target"], made["hardware"]
    ends = "end-of-sequence ignored" if options["ignore_eos"] else "end-of-sequence ends"
    return (
        f"{target['name']}, {target['dtype']}, on {hardware['name']} ({hardware['device']}, {hardware['threads']} "
        f"threads); {options['prompts']} prompts, {tokens} tokens, {ends}, temperature {options['temperature']:g}, "
        f"{options['pairs']} pairs, {options['verify_mode']} mode, seed {options['seed']}{more}; "
        f"forerun {made['versions']['forerun']}, torch {made['versions']['torch']}"
    )


def show(result: Result, console: Console, bar: float = BAR) -> None:
    """The table, the verdicts, what it was made with, and what its words mean."""
    fitted(console, WIDTH)
    console.print(table(result.rows), soft_wrap=False)
    for line in verdict_lines(result.rows, bar):
        console.print(line, markup=False)
    console.print(setting(result), style="dim", markup=False)
    explain(console, DEFINITIONS)


def failed(document: Mapping[str, Any]) -> bool:
    """Whether any claim of a result's JSON has failed."""
    return any(verdict["failed"] for verdict in document["verdicts"])


__all__ = ["failed", "in_one_line", "setting", "show", "table", "verdict_lines"]
