"""Pictures of a benchmark, one message each, with the data beside them and the command that made them underneath."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.measurement import Row
from forerun.bench.report import as_csv
from forerun.drafters.config import methods_of
from forerun.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN = "#8c8c8c"
COLOURS = {
    "ngram": "#0072b2",
    "small": "#d55e00",
    "eagle": "#56b4e9",
    "eagle3": "#009e73",
    "dflash": "#cc79a7",
    "dspark": "#e69f00",
}
"""Okabe and Ito's palette: one colour per drafter, the same in every picture."""
OTHER = "#000000"

Group = tuple[int, float]
"""Rows of one batch and temperature share a picture."""
Picture = tuple[str, str, Any, list[Mapping[str, Any]]]
"""(file name, title, painter, data)"""


def draw_plots(rows: Sequence[Row], folder: Path, command: str) -> list[Path]:
    """Writes PNG and CSV files into a folder, which is made; the paths of the pictures.

    Raises:
        OptionError: the folder cannot be written.
    """
    return draw(_pictures(rows), folder, command)


def draw(pictures: Iterable[Picture], folder: Path, command: str) -> list[Path]:
    """Writes each picture as a PNG and its data as a CSV beside it.

    Args:
        pictures: what to draw.
        folder: made if it is not there.
        command: written under each.

    Returns:
        The paths of the pictures.

    Raises:
        OptionError: the folder cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, title, paint, data in pictures:
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            paint(axes)
            axes.set_title(title, fontsize=11)
            _finish(figure, axes, command)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=150)
            (folder / f"{name}.csv").write_text(as_csv(data), encoding="utf-8")
    except OSError as error:
        raise OptionError("--plots", f"{folder}: {error.strerror or error}") from error
    return written


def _pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    for batch, temperature in dict.fromkeys((row["batch"], row["temperature"]) for row in rows):
        mine = [row for row in rows if (row["batch"], row["temperature"]) == (batch, temperature)]
        where = f"batch {batch}, temperature {temperature:g}"
        suffix = f"batch{batch}-T{temperature:g}"
        longest = _longest(mine)
        yield f"speedup-{suffix}", f"Speed-up over plain decoding ({where})", _speedup(mine), speedup_data(mine)
        yield (
            f"acceptance-{suffix}",
            f"Accepted by draft position ({where})",
            _acceptance(longest),
            acceptance_data(longest),
        )
        yield (
            f"histogram-{suffix}",
            f"Drafts accepted per round ({where})",
            _histogram(longest),
            histogram_data(longest),
        )


def _longest(rows: Sequence[Row]) -> list[Row]:
    """Each drafter's row with the largest K: it has every position."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["drafter"] not in best or row["k"] > best[row["drafter"]]["k"]:
            best[row["drafter"]] = row
    return list(best.values())


# ---------------------------------------------------------------------------------------------------------------- data


def speedup_data(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [
        {
            "drafter": row["drafter"],
            "k": row["k"],
            "speedup": row["speedup"],
            "low": row["speedup_spread"]["interval_95"][0],
            "high": row["speedup_spread"]["interval_95"][1],
            "plain_tokens_per_second": row["plain_tokens_per_second"],
        }
        for row in rows
    ]


def acceptance_data(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [
        {"drafter": row["drafter"], "position": position, "acceptance": rate}
        for row in rows
        for position, rate in enumerate(row["acceptance_by_position"], start=1)
        if rate is not None
    ]


def histogram_data(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [
        {"drafter": row["drafter"], "accepted": accepted, "share": count / sum(row["accepted_histogram"])}
        for row in rows
        for accepted, count in enumerate(row["accepted_histogram"])
        if sum(row["accepted_histogram"]) > 0
    ]


# ------------------------------------------------------------------------------------------------------------ painting


def _colour(drafter: str) -> str:
    return COLOURS.get(methods_of(drafter)[0], OTHER)


def _by_drafter(data: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    names = dict.fromkeys(point["drafter"] for point in data)
    return {name: [point for point in data if point["drafter"] == name] for name in names}


def _bars(axes: Axes, data: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[str, tuple[list[float], list[float]]]:
    """Side by side, one colour per drafter; the places and heights drawn."""
    groups, drawn = _by_drafter(data), {}
    ticks = sorted({point[x] for point in data})
    width = 0.8 / max(1, len(groups))
    for i, (drafter, points) in enumerate(groups.items()):
        places = [ticks.index(point[x]) + (i - (len(groups) - 1) / 2) * width for point in points]
        heights = [point[y] for point in points]
        axes.bar(places, heights, width, color=_colour(drafter), label=drafter)
        drawn[drafter] = places, heights
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    return drawn


def _speedup(rows: Sequence[Row]) -> Any:
    def paint(axes: Axes) -> None:
        data = speedup_data(rows)
        drawn = _bars(axes, data, "k", "speedup")
        for drafter, points in _by_drafter(data).items():
            places, heights = drawn[drafter]
            below = [max(0.0, h - p["low"]) for h, p in zip(heights, points, strict=True)]
            above = [max(0.0, p["high"] - h) for h, p in zip(heights, points, strict=True)]
            axes.errorbar(places, heights, [below, above], fmt="none", ecolor="#333333", capsize=3)
        axes.axhline(1.0, color=PLAIN, linewidth=2, label="plain")
        axes.set(xlabel="K, drafted per round", ylabel="plain / speculative seconds per token")

    return paint


def _acceptance(rows: Sequence[Row]) -> Any:
    from matplotlib.ticker import MaxNLocator

    def paint(axes: Axes) -> None:
        for drafter, points in _by_drafter(acceptance_data(rows)).items():
            xs, ys = [p["position"] for p in points], [p["acceptance"] for p in points]
            axes.plot(xs, ys, marker="o", color=_colour(drafter), label=drafter)
        axes.set(xlabel="draft position", ylabel="accepted, given all before it were", ylim=(0, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return paint


def _histogram(rows: Sequence[Row]) -> Any:
    def paint(axes: Axes) -> None:
        _bars(axes, histogram_data(rows), "accepted", "share")
        axes.set(xlabel="drafts accepted in a round", ylabel="share of rounds")

    return paint


def _finish(figure: Figure, axes: Axes, command: str) -> None:
    """Ratios start at 0; what made the picture is written under it."""
    if axes.get_yscale() == "linear" and not axes.images:
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.supxlabel("\n".join(textwrap.wrap(command, 110)), fontsize=6, color="#555555", family="monospace")
