"""The page of the grid: its worst cells, and how much of it was looked at; Markdown, and the rows behind it as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import never_slower_grid as grid
from rows import Rows
from tables import filled, table

from forerun.bench.simulate.sweep import BAR

Row = grid.Row
ALWAYS_WRONG = 0.0
CLAIMS = {
    "over_plain": ("plain decoding", "over_plain", BAR, grid.ACCEPTANCES[1:]),
    "over_plain_always_wrong": (
        "plain decoding, nothing ever accepted", "over_plain", grid.ALWAYS_WRONG_BAR, (ALWAYS_WRONG,)
    ),
    "over_best_fixed": ("the best fixed K", "over_best_fixed", BAR, grid.ACCEPTANCES),
}  # fmt: skip
"""{name: rival, ratio, its bar, acceptances it is about}."""


def write(out: Path, page: Path, data: Path) -> None:
    """Writes `page` and its `data`.

    Raises:
        ValueError: no row has been simulated.
    """
    found = collect(out)
    for path in (page, data):
        path.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(as_json(found), encoding="utf-8")
    page.write_text(markdown(found, data.name), encoding="utf-8")


def collect(out: Path) -> dict[str, Any]:
    """Everything the page says, as data. Ratios have four places."""
    rows = [_shown(row) for row in Rows(out, grid.cell_of)]
    if not rows:
        raise ValueError(f"{out} holds no rows; simulate some with `never_slower.py run --out {out}`")
    setup = json.loads((out / "setup.json").read_text(encoding="utf-8"))
    rows.sort(key=lambda row: [row[name] for name in asdict(grid.cell_of(row))])
    return {
        "what": "speed of scheduled decoding over that of plain decoding and of the best fixed K; costs are scripted",
        "cells": len({json.dumps(asdict(grid.cell_of(row)) | {"seed": 0}) for row in rows}),
        "cells_of_the_grid": grid.SIZE,
        "seeds": sorted({row["seed"] for row in rows}),
        "setup": setup,
        "command": command(rows, setup["effort"]),
        "worst": {name: _worst(rows, name) for name in CLAIMS},
        "rows": rows,
    }


def _shown(row: Row) -> Row:
    shown = asdict(grid.cell_of(row)) | grid.compared(row)
    shown |= {name: row[name] for name in ("bypass_share", "verify_budget")}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in shown.items()}


def command(rows: Sequence[Row], effort: float) -> str:
    """The one that simulates these rows, if it is not stopped first."""
    texts = [f"python benchmarks/never_slower.py run --out results --effort {effort:g}"]
    texts.append(f"--seeds {_list(sorted({row['seed'] for row in rows}))}")
    axes = {"policies": grid.POLICIES, "drafters": grid.DRAFTERS, "requests": grid.REQUESTS}
    axes |= {"curves": grid.CURVES, "acceptances": grid.ACCEPTANCES}
    singular = {"policies": "policy", "requests": "requests"}
    for flag, values in axes.items():
        there = {row[singular.get(flag, flag.removesuffix("s"))] for row in rows}
        if there != set(values):
            texts.append(f"--{flag} {_list([value for value in values if value in there])}")
    return " ".join(texts)


def _list(values: Sequence[Any]) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _prose(values: Sequence[Any]) -> str:
    return _list(values).replace(",", ", ")


def _worst(rows: Sequence[Row], claim: str) -> Row | None:
    """The row with the least ratio of a claim, and how many there are below its bar; None without any row."""
    _, ratio, bar, acceptances = CLAIMS[claim]
    mine = [row for row in rows if row["acceptance"] in acceptances]
    if not mine:
        return None
    least = min(mine, key=lambda row: row[ratio])
    below = sum(row[ratio] < bar for row in mine)
    return {"ratio": least[ratio], "bar": bar, "rows": len(mine), "below": below, "cell": asdict(grid.cell_of(least))}


def as_json(found: Mapping[str, Any]) -> str:
    """One line for each row: a changed row is a changed line."""
    head = json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=1)
    lines = ",\n  ".join(json.dumps(row) for row in found["rows"])
    return head.removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n'


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(found: Mapping[str, Any], data: str) -> str:
    """The page's text; `data` is the name of its JSON."""
    rows, setup = found["rows"], found["setup"]
    fields = {
        "json": data,
        "lengths": ", ".join(way.removeprefix("fixed:") for way in grid.FIXED),
        "looked": _looked(found),
        "worst": _worst_table(found["worst"]),
        "below": _below(rows),
        "accepted": _margins([row for row in rows if row["acceptance"] != ALWAYS_WRONG]),
        "wrong": _margins([row for row in rows if row["acceptance"] == ALWAYS_WRONG]),
        "conditions": _conditions(setup["effort"]),
        "command": found["command"],
    }
    return filled("never-slower.md", fields | {name: setup[name] for name in ("numpy", "code")})


def _looked(found: Mapping[str, Any]) -> str:
    cells, size = found["cells"], found["cells_of_the_grid"]
    of_policy = [f"`{name}` {sum(row['policy'] == name for row in found['rows'])}" for name in grid.POLICIES]
    rest = "" if cells == size else ". Cells come in a shuffled order, so those that are missing were not chosen"
    return (
        f"{cells} of {size} cells ({100 * cells / size:.0f} %), seeds of the texts: {_prose(found['seeds'])};\n"
        f"rows by policy: {', '.join(of_policy)}{rest}"
    )


def _worst_table(worst: Mapping[str, Row | None]) -> str:
    cells = []
    for name, (rival, *_) in CLAIMS.items():
        if (one := worst[name]) is not None:
            counts = [str(one["rows"]), str(one["below"])]
            cells.append([rival, f"**{one['ratio']:.3f}**", _place(one["cell"]), f"{one['bar']:.2f}", *counts])
    return table(("least speed over", "", "where", "bar", "rows", "below the bar"), cells)


def _place(row: Row) -> str:
    return (
        f"{row['curve']}, `{row['drafter']}`, acceptance {row['acceptance']:g}, {row['requests']} requests, "
        f"`{row['policy']}`, seed {row['seed']}"
    )


def _below(rows: Sequence[Row]) -> str:
    """Every row that fails, if any does."""
    bad = sorted((row for row in rows if row["margin"] < grid.cell_of(row).bar), key=lambda row: row["margin"])
    if not bad:
        return "No row lies below its bar."
    cells = [
        [_place(row), f"{row['over_plain']:.3f}", f"{row['over_best_fixed']:.3f}", row["best_fixed"]] for row in bad
    ]
    return "Below their bar:\n\n" + table(("", "over plain", "over the best fixed K", "which is"), cells)


def _margins(rows: Sequence[Row]) -> str:
    """Least margin, policies and drafters down, requests across."""
    if not rows:
        return "Not looked at."
    lines = []
    for policy, drafter in itertools.product(grid.POLICIES, grid.DRAFTERS):
        mine = [row for row in rows if (row["policy"], row["drafter"]) == (policy, drafter)]
        by_load = [[row["margin"] for row in mine if row["requests"] == n] for n in grid.REQUESTS]
        if mine:
            lines.append([f"`{policy}`", f"`{drafter}`", *(f"{min(m):.3f}" if m else "" for m in by_load)])
    return table(("", "", *(f"{n} requests" if n > 1 else "1 request" for n in grid.REQUESTS)), lines)


def _conditions(effort: float) -> str:
    """Machines, drafters, acceptances and texts, as a list."""
    curves = [f"`{name}` {', '.join(f'{n}: {cost:g}' for n, cost in c.items())}" for name, c in grid.CURVES.items()]
    drafters = [
        f"`{name}` (`{one.text.format('ACCEPTANCE')}`, prompts of {_range(one.lengths.prompt)} tokens, answers of "
        f"{_range(one.lengths.output)})"
        for name, one in grid.DRAFTERS.items()
    ]
    return "\n".join(
        [
            "- machines, as rows of a step and its cost in plain steps of one row: " + "; ".join(curves),
            f"- drafters, as `forerun simulate --drafter` takes them, and their texts: {'; '.join(drafters)};",
            "  what their calls cost is in `benchmarks/never_slower_grid.py`",
            f"- acceptance at every position, averaged over texts, which differ: {_prose(grid.ACCEPTANCES)}",
            f"- requests at once, each replaced when it ends: {_prose(grid.REQUESTS)}",
            f"- effort {effort:g}",
        ]
    )


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]} to {bounds[1]}"
