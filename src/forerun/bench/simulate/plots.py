"""Pictures of a sweep: the budget under load, the cliff of static drafts, the frontier, and where each policy gains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench import plots
from forerun.bench.load.arrivals import Load
from forerun.bench.load.plots import frontier, style, token_grid
from forerun.bench.plots import PLAIN as GREY
from forerun.bench.plots import Picture
from forerun.bench.simulate.books import GRID_ROWS
from forerun.bench.simulate.specs import PLAIN
from forerun.bench.simulate.sweep import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID_LOAD = 64
"""Requests of the load whose tokens are shown, as near as there is one."""
LIMIT = 1.0
"""Gains and losses from this on have the same colour in the heat map."""


def draw(rows: Sequence[Row], folder: Path, command: str) -> list[Path]:
    """Writes the pictures of a sweep; their paths. OptionError: the folder cannot be written."""
    return plots.draw(_pictures(rows), folder, command)


def _pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    labels = list(dict.fromkeys(row["label"] for row in rows if row["policy"] != PLAIN))
    where = rows[0]["system"]
    for label in labels:
        mine = [row for row in rows if row["label"] in (label, PLAIN) and row["load"] == "closed"]
        drafting = [row for row in mine if row["policy"] != PLAIN]
        if not drafting:
            continue
        slug = re.sub(r"[^a-z0-9.]+", "-", label)
        yield _budget(f"budget-{slug}", f"{where}, {label}: draft tokens verified per request and step", drafting)
        yield _cliff(f"speed-{slug}", f"{where}, {label}: speed over plain decoding", drafting)
        yield frontier(f"frontier-{slug}", f"{where}, {label}: total against per-user speed", list(_points(mine)))
        yield from _tokens(slug, where, label, drafting)
    yield from _heat_maps(where, [row for row in rows if row["load"] == "closed"])


def _lines(axes: Axes, rows: Sequence[Row], y: str) -> None:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy in policies:
        mine = [row for row in rows if row["policy"] == policy]
        axes.plot([row["concurrency"] for row in mine], [row[y] for row in mine], **style(policy, policies))
    axes.set_xscale("log", base=2)
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")


def _budget(name: str, title: str, rows: Sequence[Row]) -> Picture:
    def paint(axes: Axes) -> None:
        _lines(axes, rows, "verify_budget")
        axes.set_ylabel("draft tokens verified, per request and step")

    return name, title, paint, _columns(rows, "verify_budget")


def _cliff(name: str, title: str, rows: Sequence[Row]) -> Picture:
    def paint(axes: Axes) -> None:
        _lines(axes, rows, "speedup")
        axes.axhline(1.0, color=GREY, linewidth=2, label=PLAIN)
        axes.set_ylabel("tokens a second over those of plain decoding")

    return name, title, paint, _columns(rows, "speedup", "best_fixed", "over_best_fixed")


def _columns(rows: Sequence[Row], *names: str) -> list[Mapping[str, Any]]:
    return [{name: row[name] for name in ("concurrency", "label", "policy", *names)} for row in rows]


def _points(rows: Sequence[Row]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        speeds = {"per_user": row["tokens_per_second_per_user"], "total": row["tokens_per_second"]}
        yield {"policy": row["policy"], "load": str(Load.of(row)), **speeds}


def _tokens(slug: str, where: str, label: str, rows: Sequence[Row]) -> Iterator[Picture]:
    """The longest fixed K beside each scheduled policy, at one load."""
    loads = {row["concurrency"] for row in rows}
    load = min(loads, key=lambda n: abs(n - GRID_LOAD))
    mine = {row["policy"]: row for row in rows if row["concurrency"] == load}
    fixed = [policy for policy in mine if policy.startswith("fixed")]
    shown = [*fixed[-1:], *(policy for policy in mine if policy not in fixed)]
    if shown:
        grids = {policy: mine[policy]["grid"] for policy in shown}
        seen = f"{min(load, GRID_ROWS)} of {load} requests"
        yield token_grid(f"tokens-{slug}", f"{where}, {label}: draft tokens of one step, {seen}", grids)


# ------------------------------------------------------------------------------------------------------------ heat maps


def _heat_maps(where: str, rows: Sequence[Row]) -> Iterator[Picture]:
    """For each drafter that was simulated at several acceptances, and each policy: gain by load and acceptance."""
    single = [row for row in rows if row["acceptance"] is not None]
    for drafter in dict.fromkeys(row["drafter"] for row in single):
        mine = [row for row in single if row["drafter"] == drafter]
        if len({row["acceptance"] for row in mine}) < 2 or len({row["concurrency"] for row in mine}) < 2:
            continue
        for policy in dict.fromkeys(row["policy"] for row in mine):
            same = [row for row in mine if row["policy"] == policy]
            title = f"{where}, {drafter}, {policy}: gain over plain decoding"
            yield _heat_map(f"gain-{drafter}-{policy.replace(':', '')}", title, same)


def _heat_map(name: str, title: str, rows: Sequence[Row]) -> Picture:
    def paint(axes: Axes) -> None:
        loads = sorted({row["concurrency"] for row in rows})
        levels = sorted({row["acceptance"] for row in rows})
        gains = {(row["acceptance"], row["concurrency"]): row["gain"] for row in rows}
        values = [[gains.get((level, load), float("nan")) for load in loads] for level in levels]
        axes.imshow(values, cmap="RdBu", vmin=-LIMIT, vmax=LIMIT, aspect="auto", origin="lower")
        axes.set_xticks(range(len(loads)), [str(load) for load in loads])
        axes.set_yticks(range(len(levels)), [f"{level:.2g}" for level in levels])
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                shade = "white" if abs(value) > 0.6 * LIMIT else "black"
                axes.text(x, y, f"{value:+.0%}", ha="center", va="center", fontsize=8, color=shade)
        axes.set(xlabel="concurrent requests", ylabel="acceptance (mean over positions)")

    return name, title, paint, _columns(rows, "acceptance", "gain")


__all__ = ["draw"]
