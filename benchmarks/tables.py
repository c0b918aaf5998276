"""Markdown that the pages of the benchmarks share: tables, templates, how a number with its spread reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

TEMPLATES = Path(__file__).with_name("templates")


def filled(name: str, fields: Mapping[str, str]) -> str:
    """A template of this folder with its fields; KeyError names one that is missing."""
    return Template((TEMPLATES / name).read_text(encoding="utf-8")).substitute(fields)


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def filled_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same without the columns that no row has anything in."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def span(spread: Mapping[str, float] | None) -> str:
    """Median with the smallest and the largest."""
    return "" if spread is None else f"{spread['median']:.2f} [{spread['min']:.2f} - {spread['max']:.2f}]"


def interval(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['low']:.2f} - {spread['high']:.2f}"


def reach(values: Iterable[float]) -> str:
    kept = list(values)
    return f"{min(kept):.1f} - {max(kept):.1f}"


def speed_table(entries: Sequence[Mapping[str, Any]], labels: Mapping[tuple[str, str], str]) -> str:
    """Configurations of one batch and temperature, in the order of the labels, then of K."""
    head = ("", "K", "tokens/s", "over transformers' plain", "speed-up", "interval", "mean accepted length")
    head += ("tokens per step", "first token", "gap p50", "gap p95", "same ids")
    order, rows = list(labels), []
    for e in sorted(entries, key=lambda e: (order.index((e["engine"], e["method"])), 99 if e["k"] is None else e["k"])):
        own = None if e["method"] == "plain" else e["speedup"]
        cells = [labels[e["engine"], e["method"]], "default" if e["k"] is None else str(e["k"])]
        cells += [f"{e['tokens_per_second']['median']:.2f}", span(e["over_transformers_plain"]), span(own)]
        cells += [interval(own), number(e["acceptance"].get("mean_accepted_length"))]
        cells += [number(e["acceptance"].get("tokens_per_step"))]
        cells += [number(e[name]) for name in ("seconds_to_first_token", "gap_p50", "gap_p95")]
        same = e["same_ids"]
        rows.append([*cells, "/".join(map(str, same)) if same and same[1] else ""])
    return filled_table(head, rows)


def acceptance_table(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Acceptance by position, of the configurations that have any."""
    rows = [(name, e["acceptance"].get("acceptance_by_position")) for name, e in configs.items()]
    known = [(name, positions) for name, positions in rows if positions]
    width = max((len(positions) for _, positions in known), default=0)
    cells = [[f"`{name}`", *map(number, own), *[""] * (width - len(own))] for name, own in known]
    return table(["configuration", *(f"k = {k}" for k in range(1, width + 1))], cells)
