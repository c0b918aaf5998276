"""Pictures: files, data beside them, axes from 0, one colour per drafter."""

from __future__ import annotations

import csv

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bench.clocks import engine, pass_clock
from forerun.bench import plots
from forerun.bench.benchmark import Benchmark, Grid
from forerun.bench.measurement import Workload
from forerun.errors import OptionError


@pytest.fixture(scope="module")
def rows():
    made = engine()
    grid = Grid(["small", "ngram"], [1, 3])
    return Benchmark(made, grid, Workload([[1, 2, 3], [4, 1]], 9, 1), None, pass_clock(made)).run().rows


def test_every_picture_is_written_with_its_data(rows, tmp_path):
    """Three PNG files per batch and temperature, each with a CSV of the same name."""
    written = plots.draw_plots(rows, tmp_path / "plots", "forerun bench --k 1,3")
    assert [path.name for path in written] == [f"{n}-batch1-T0.png" for n in ("speedup", "acceptance", "histogram")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    with open(written[0].with_suffix(".csv")) as file:
        data = list(csv.DictReader(file))
    assert [(point["drafter"], int(point["k"])) for point in data] == [(row["drafter"], row["k"]) for row in rows]
    assert [float(point["speedup"]) for point in data] == [row["speedup"] for row in rows]


def test_speedups_start_at_zero_with_plain_as_a_grey_line_at_one(rows):
    """Bars in the drafters' colours, the baseline in grey."""
    figure = Figure()
    axes = figure.subplots()
    plots._speedup(rows)(axes)
    plots._finish(figure, axes, "forerun bench")
    assert axes.get_ylim()[0] == 0
    [line] = [line for line in axes.get_lines() if line.get_label() == "plain"]
    assert set(line.get_ydata()) == {1.0}
    assert line.get_color() == plots.PLAIN
    colours = {to_hex(bar.get_facecolor()) for bar in axes.patches}
    assert colours == {plots.COLOURS["small"], plots.COLOURS["ngram"]}
    assert figure._supxlabel.get_text() == "forerun bench"


def test_shares_of_the_histogram_sum_to_one(rows):
    """Per drafter, over rounds in which something was verified."""
    data = plots.histogram_data(rows[1:2])
    assert sum(point["share"] for point in data) == pytest.approx(1.0)
    assert [point["accepted"] for point in data] == [0, 1, 2, 3]


def test_positions_nothing_reached_are_left_out():
    """A rate that does not exist is not drawn as 0."""
    row = {"drafter": "small", "acceptance_by_position": [0.5, None]}
    assert plots.acceptance_data([row]) == [{"drafter": "small", "position": 1, "acceptance": 0.5}]


def test_a_folder_that_cannot_be_made_is_refused(rows, tmp_path):
    """The message names the option."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="--plots"):
        plots.draw_plots(rows, tmp_path / "file", "")
