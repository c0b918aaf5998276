"""Calibration as a table, as reliability diagrams, and as one page of HTML that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.calibrating.assessment import Assessment, Position
from forerun.bench.plots import PLAIN, Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

COLUMNS = ("k", "survival", "T", "shift", "ECE before", "by T", "after", "[95 %]", "floor", "Brier before", "after",
           "AUROC before", "after")  # fmt: skip
DEFINITIONS = {
    "T, shift": "a score z is read as sigmoid(z / T + shift)",
    "survival": "rounds in which drafts 1 .. k were accepted / rounds; what is predicted is c_1 * .. * c_k",
    "ECE": "mean distance between predicted and observed survival over 15 bins; 95 % by drawing whole prompts",
    "by T": "with temperatures alone (sequential temperature scaling)",
    "floor": "the ECE of a perfect predictor with as many rounds: less cannot be reached",
    "Brier": "mean squared error of predicted survival",
    "AUROC": "chance that a surviving draft was given more than one that does not survive",
}
NAME = "calibration.html"


def title(assessment: Assessment) -> str:
    return f"{assessment.drafter}: {assessment.table.key}"


def counts(assessment: Assessment) -> str:
    one = assessment
    return (
        f"fitted on {one.table.num_samples:,} rounds of {one.fitted_prompts} prompts, judged on "
        f"{one.held_out_rounds:,} rounds of {one.held_out_prompts} others; {one.left_out:,} rounds with shorter drafts "
        "left out"
    )


def table(assessment: Assessment) -> Table:
    """One line per position of the draft."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        grid.add_column(name, justify="right", no_wrap=True)
    for row in rows(assessment):
        grid.add_row(*row)
    return grid


def rows(assessment: Assessment) -> list[list[str]]:
    """[K] cells of `COLUMNS`."""
    return [_cells(position, *assessment.table.scaling.at(position.position)) for position in assessment.positions]


def _cells(position: Position, temperature: float, shift: float) -> list[str]:
    before, after = position.before, position.after
    low, high = after.ece_interval
    return [
        str(position.position),
        f"{position.survival:.3f}",
        f"{temperature:.2f}",
        f"{shift:+.2f}",
        *(_percent(value) for value in (before.ece, position.by_temperatures.ece, after.ece)),
        f"{_percent(low)}-{_percent(high)}",
        _percent(after.floor),
        *(f"{value:.3f}" for value in (before.brier, after.brier)),
        *("-" if value is None else f"{value:.3f}" for value in (before.auroc, after.auroc)),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


# ------------------------------------------------------------------------------------------------------------ pictures


def draw_calibrations(
    assessments: Sequence[Assessment], folder: Path, command: str, made_with: Mapping[str, Any]
) -> list[Path]:
    """Writes a reliability diagram per assessment, its data as CSV, and the page; the paths of pictures and page.

    Args:
        assessments: what to draw.
        folder: made if it is not there.
        command: that made them.
        made_with: `provenance` of the engine.

    Raises:
        OptionError: the folder cannot be written.
    """
    pictures = [_picture(assessment) for assessment in assessments]
    written = draw(pictures, folder, command)
    page_path = folder / NAME
    page_path.write_text(page(assessments, written, command, made_with), encoding="utf-8")
    return [*written, page_path]


def _picture(assessment: Assessment) -> Picture:
    key = assessment.table.key
    filters = "" if key.filters == "none" else f"-{key.filters.replace(' ', '-')}"
    name = f"reliability-{assessment.drafter}-{key.temperature}-{key.verify_mode}-{key.draft_sample_method}{filters}"
    return name, f"Reliability of survival: {title(assessment)}", _painter(assessment), bins(assessment)


def bins(assessment: Assessment) -> list[Mapping[str, Any]]:
    """The bars of all diagrams, empty ones left out."""
    return [
        {
            "position": position.position,
            "when": when,
            "rounds": bar.rounds,
            "predicted": bar.predicted,
            "observed": bar.observed,
        }
        for position in assessment.positions
        for when in ("before", "after")
        for bar in getattr(position, when).bins
        if bar.rounds
    ]


def _painter(assessment: Assessment) -> Any:
    def paint(axes: Axes) -> None:
        from matplotlib import colormaps

        axes.plot([0, 1], [0, 1], color=PLAIN, linewidth=1)
        colours = colormaps["viridis"].resampled(len(assessment.positions) + 1)
        for i, position in enumerate(assessment.positions):
            for when, style in (("before", ":"), ("after", "-")):
                bars = [bar for bar in getattr(position, when).bins if bar.rounds]
                xs, ys = [bar.predicted for bar in bars], [bar.observed for bar in bars]
                label = f"k = {position.position}" if when == "after" else None
                axes.plot(xs, ys, style, marker=".", color=colours(i), label=label)
        axes.set(xlabel="predicted survival (dotted: before scaling)", ylabel="observed", xlim=(0, 1), ylim=(0, 1))

    return paint


# ---------------------------------------------------------------------------------------------------------------- page


def page(
    assessments: Sequence[Assessment], pictures: Sequence[Path], command: str, made_with: Mapping[str, Any]
) -> str:
    """One file of HTML with the pictures inside."""
    return "\n".join([*_head(made_with), *_body(assessments, pictures), *_foot(command)]) + "\n"


def setting(made_with: Mapping[str, Any]) -> str:
    """Model and machine in a line: confidences are theirs."""
    target, hardware, versions = made_with["target"], made_with["hardware"], made_with["versions"]
    return (
        f"{target['name']}, {target['dtype']}, on {hardware['name']} ({hardware['device']}, {hardware['threads']} "
        f"threads); forerun {versions['forerun']}, torch {versions['torch']}; {made_with['created']}"
    )


def _head(made_with: Mapping[str, Any]) -> Iterator[str]:
    yield "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>Calibration of confidences</title>"
    yield (
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #ddd}"
        "img{max-width:42rem;width:100%}code,.dim{color:#555}</style>"
    )
    yield f"<h1>Calibration of confidences</h1>\n<p>{html.escape(setting(made_with))}</p>"


def _body(assessments: Sequence[Assessment], pictures: Sequence[Path]) -> Iterator[str]:
    for assessment, picture in zip(assessments, pictures, strict=True):
        yield f"<h2>{html.escape(title(assessment))}</h2>"
        yield f"<p>{html.escape(counts(assessment))}</p>"
        yield "<table><tr>" + "".join(f"<th>{html.escape(name)}" for name in COLUMNS) + "</tr>"
        yield from ("<tr>" + "".join(f"<td>{cell}" for cell in row) + "</tr>" for row in rows(assessment))
        yield "</table>"
        data = base64.b64encode(picture.read_bytes()).decode()
        yield f'<p><img alt="reliability diagram" src="data:image/png;base64,{data}"></p>'


def _foot(command: str) -> Iterator[str]:
    yield "<dl class=dim>"
    yield from (f"<dt>{name}<dd>{html.escape(meaning)}" for name, meaning in DEFINITIONS.items())
    yield f"</dl>\n<p>ECE in per cent. Made by <code>{html.escape(command)}</code></p>\n</html>"


__all__ = ["COLUMNS", "DEFINITIONS", "bins", "counts", "draw_calibrations", "page", "rows", "setting", "table", "title"]
