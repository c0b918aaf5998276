"""Pictures of trained drafters: speed by draft length, acceptance by position, accepted length while training."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.bench.plots import COLOURS, OTHER, PLAIN

STYLES = {"forerun": ("-", "o"), "transformers": ("--", "s")}
Sets = Mapping[str, Mapping[str, Any]]
"""Set of prompts -> its `configs`, as the page has them."""


@contextmanager
def _figure(path: Path, rows: int, columns: int, caption: str) -> Iterator[Any]:
    """The panels of a picture, which is written behind the block; the legend is the last panel's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.6 * columns), 3.6 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    yield axes
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        shown = {"loc": "outside upper center", "ncol": 4, "frameon": False, "fontsize": 8}
        figure.legend(list(handles.values()), list(handles), **shown)
    lines = textwrap.wrap(caption, 70 * max(2, columns), break_on_hyphens=False)
    figure.supxlabel("\n".join(lines), fontsize=6, color="#555555")
    figure.savefig(path, dpi=140)


def _panels(sets: Sets, axes: Any) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """A panel for every set (row) and temperature (column), with its entries."""
    temperatures = _temperatures(sets)
    for row, (name, one) in zip(axes, sets.items(), strict=True):
        for axis, temperature in zip(row, temperatures, strict=True):
            axis.set_title(f"{name}, temperature {temperature:g}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            yield axis, [entry for entry in one["configs"].values() if entry["temperature"] == temperature]


def _temperatures(sets: Sets) -> list[float]:
    return sorted({entry["temperature"] for one in sets.values() for entry in one["configs"].values()})


def draw_speed(sets: Sets, path: Path, caption: str) -> None:
    """Times as fast as our own plain decoding, by K; bars are 95 % intervals of the median over prompts."""
    text = f"Median over prompts with its 95 % interval. {caption}"
    with _figure(path, len(sets), len(_temperatures(sets)), text) as axes:
        for axis, entries in _panels(sets, axes):
            axis.axhline(1, color=PLAIN, linewidth=1.5, label="plain")
            for engine, method in dict.fromkeys((e["engine"], e["method"]) for e in entries):
                mine = [e for e in entries if (e["engine"], e["method"]) == (engine, method) and e["k"]]
                mine = sorted((e for e in mine if e["speedup"]), key=lambda e: e["k"])
                if mine:
                    _line(axis, engine, method, mine)
            axis.set_xlabel("K, draft tokens per round")
            axis.set_xticks(sorted({e["k"] for e in entries if e["k"]}))
        for row in axes:  # of all panels, now that all of them are drawn
            row[0].set_ylim(bottom=0)
            row[0].set_ylabel("times as fast as plain decoding\nof the same engine")


def _line(axis: Any, engine: str, method: str, entries: list[dict[str, Any]]) -> None:
    line, marker = STYLES[engine]
    colour, line = _look(method, line)
    middle = [e["speedup"]["median"] for e in entries]
    below = [m - e["speedup"]["low"] for m, e in zip(middle, entries, strict=True)]
    above = [e["speedup"]["high"] - m for m, e in zip(middle, entries, strict=True)]
    options = {"color": colour, "linestyle": line, "marker": marker, "capsize": 2}
    axis.errorbar([e["k"] for e in entries], middle, yerr=[below, above], label=f"{engine}, {method}", **options)


def _look(method: str, line: str) -> tuple[str, str]:
    """Colour and line: those of its kind, dotted where prompt lookup is mixed in."""
    kind, mixed, _ = method.partition("+")
    return COLOURS.get(kind, OTHER), ":" if mixed else line


def draw_acceptance(sets: Sets, path: Path, caption: str) -> None:
    """Acceptance by position, each drafter at its longest K."""
    from matplotlib.ticker import MaxNLocator

    with _figure(path, len(sets), len(_temperatures(sets)), caption) as axes:
        for axis, entries in _panels(sets, axes):
            for method in dict.fromkeys(e["method"] for e in entries if e["engine"] == "forerun" and e["k"]):
                longest = max((e for e in entries if e["engine"] == "forerun" and e["method"] == method), key=_length)
                rates = longest["acceptance"].get("acceptance_by_position", ())
                known = [(k, rate) for k, rate in enumerate(rates, 1) if rate is not None]
                colour, line = _look(method, "-")
                rates = [rate for _, rate in known]
                axis.plot([k for k, _ in known], rates, line, marker="o", color=colour, label=method)
            axis.set_ylim(0, 1.02)
            axis.set_xlabel("draft position")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for row in axes:
            row[0].set_ylabel("accepted, given all before it were")


def _length(entry: Mapping[str, Any]) -> int:
    return entry["k"] or 0


def draw_training(trained: Mapping[str, Mapping[str, Any]], path: Path, caption: str) -> None:
    """Held-out accepted length (mean over temperatures) by tokens trained on."""
    with _figure(path, 1, 1, caption) as axes:
        axis = axes[0][0]
        for method, one in trained.items():
            points = [(e["tokens"], e["score"]) for e in one["evaluations"] if e["score"] is not None]
            colour = COLOURS.get(method)  # of a variant whichever is next
            axis.plot([t for t, _ in points], [s for _, s in points], marker="o", color=colour, label=method)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set(xlabel="tokens trained on", ylabel="held-out mean accepted length")
        axis.set_ylim(bottom=1)
