"""Pictures of decoding under load: the frontier, and what became of every draft token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench import plots
from forerun.bench.load.arrivals import Load
from forerun.bench.measurement import Row
from forerun.bench.plots import PLAIN as GREY
from forerun.bench.plots import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEDULED = {"delayed": "#0072b2", "prefix": "#009e73", "threshold": "#cc79a7", "global": "#000000"}
FIXED = ("#f6c78f", "#f0a04b", "#d55e00", "#9c4300", "#5e2800")
"""Fixed K, from the smallest up: darker is longer."""

ACCEPTED, REJECTED, BEHIND, LEFT = range(1, 5)
GRID_COLOURS = ("#ffffff", "#0072b2", "#d55e00", "#f6c78f", "#dddddd")
GRID_WORDS = ("not drafted", "accepted", "rejected", "behind a rejection", "drafted, not verified")


def style(policy: str, policies: Sequence[str]) -> dict[str, Any]:
    """How a policy is drawn, the same in every picture: plain grey, fixed dashed."""
    if policy == "plain":
        return {"color": GREY, "marker": "o", "label": policy}
    fixed = sorted({p for p in policies if p.startswith("fixed")}, key=_length)
    if policy in fixed:
        return {"color": FIXED[min(fixed.index(policy), len(FIXED) - 1)], "ls": "--", "marker": ".", "label": policy}
    return {"color": SCHEDULED.get(policy.partition(":")[0], "#56b4e9"), "marker": "o", "lw": 2, "label": policy}


def _length(policy: str) -> int:
    return int(policy.partition(":")[2] or 1 << 30)


# ------------------------------------------------------------------------------------------------------------- frontier


def frontier(name: str, title: str, points: Sequence[Mapping[str, Any]]) -> Picture:
    """Total against per-user tokens a second; each point is a load: `policy`, `load`, `per_user`, `total`."""
    policies = list(dict.fromkeys(point["policy"] for point in points))

    def paint(axes: Axes) -> None:
        for policy in policies:
            mine = [point for point in points if point["policy"] == policy]
            axes.plot([p["per_user"] for p in mine], [p["total"] for p in mine], **style(policy, policies))
            if policy == "plain":
                for point in mine:
                    axes.annotate(str(point["load"]), (point["per_user"], point["total"]), fontsize=7, color=GREY)
        if max(p["total"] for p in points) > 20 * min(p["total"] for p in points):
            axes.set_yscale("log")
        axes.set(xlabel="tokens a second for each user", ylabel="tokens a second in all")

    return name, title, paint, list(points)


# ----------------------------------------------------------------------------------------------------------- token grid


def cells_of(rounds: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Codes [R, width] of rounds (drafted, verified, accepted): 0 where nothing was drafted."""
    grid = []
    for drafted, verified, accepted in rounds:
        row = [ACCEPTED] * accepted
        row += [REJECTED] * (verified > accepted) + [BEHIND] * max(0, verified - accepted - 1)
        row += [LEFT] * (drafted - verified)
        grid.append(row + [0] * (width - len(row)))
    return grid


def token_grid(name: str, title: str, grids: Mapping[str, Sequence[Sequence[int]]]) -> Picture:
    """Rows are requests, columns draft positions; the ways side by side, over one step of each."""
    width = max((drafted for rounds in grids.values() for drafted, _, _ in rounds), default=0) or 1
    height = max(map(len, grids.values()), default=0) or 1

    def paint(axes: Axes) -> None:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        whole: list[list[int]] = [[] for _ in range(height)]
        for number, rounds in enumerate(grids.values()):
            block = cells_of(rounds, width) + [[0] * width] * (height - len(rounds))
            for line, cells in zip(whole, block, strict=True):
                line += [0] * (number > 0) + cells
        axes.imshow(whole, cmap=ListedColormap(GRID_COLOURS), vmin=0, vmax=4, aspect="auto", interpolation="nearest")
        middles = [number * (width + 1) + (width - 1) / 2 for number in range(len(grids))]
        axes.set_xticks(middles, [_summary(way, rounds) for way, rounds in grids.items()], fontsize=8)
        axes.set_ylabel("requests of one step")
        boxes = [Patch(color=c, label=w) for c, w in zip(GRID_COLOURS[1:], GRID_WORDS[1:], strict=True)]
        axes.figure.legend(handles=boxes, fontsize=7, loc="outside upper center", ncols=4, frameon=False)

    data: list[Mapping[str, Any]] = [
        {"policy": way, "request": i, "drafted": drafted, "verified": verified, "accepted": accepted}
        for way, rounds in grids.items()
        for i, (drafted, verified, accepted) in enumerate(rounds)
    ]
    return name, title, paint, data


def _summary(way: str, rounds: Sequence[Sequence[int]]) -> str:
    verified, accepted = (sum(one[i] for one in rounds) for i in (1, 2))
    return f"{way}: {verified} verified, {accepted} accepted"


# ------------------------------------------------------------------------------------------------------ measured rows


def draw(rows: Sequence[Row], folder: Path, command: str) -> list[Path]:
    """Writes the pictures of `forerun bench load`; their paths. OptionError: the folder cannot be written."""
    return plots.draw(_pictures(rows), folder, command)


def _pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        mine = [row for row in rows if row["drafter"] == drafter]
        for kind in dict.fromkeys(row["load"] for row in mine):
            points = list(points_of([row for row in mine if row["load"] == kind]))
            yield frontier(
                f"frontier-{drafter}-{kind}", f"{drafter}: total against per-user speed ({kind} loop)", points
            )
        for row in mine:
            load = str(Load.of(row))
            grids = {way: found["grid"] for way, found in row["ways"].items() if way != "plain" and found["grid"]}
            if grids:
                name = f"tokens-{drafter}-{load.replace('/', 'per')}"
                yield token_grid(name, f"{drafter}: draft tokens of one step (load {load})", grids)


def points_of(rows: Sequence[Row]) -> Iterator[Mapping[str, Any]]:
    """Speeds of every way and load: what a frontier is drawn from."""
    for row in rows:
        for way, found in row["ways"].items():
            yield {
                "drafter": row["drafter"],
                "policy": way,
                "load": str(Load.of(row)),
                "per_user": found["tokens_per_second_per_user"],
                "total": found["tokens_per_second"],
            }


__all__ = ["cells_of", "draw", "frontier", "points_of", "style", "token_grid"]
