"""A profile as a table and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.bench.plots import COLOURS, OTHER, PLAIN, Picture, draw
from forerun.budget.costs import DraftCost
from forerun.budget.curve import lower_envelope
from forerun.budget.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

LONG = 1024
"""Context whose extra cost is shown."""


def target_table(profile: Profile) -> Table:
    """One line per measured number of rows, of a single request."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in ("rows in a step", "ms", "times one row", "each further row, ms"):
        grid.add_column(name, justify="right", no_wrap=True)
    curve, (request,) = profile.verify.tokens, profile.verify.context.at([1]).request
    one, before = curve(1) + request, (1, curve(1) + request)
    for n, seconds in zip(curve.counts, np.array(curve.seconds) + request, strict=True):
        further = "" if n == before[0] else f"{1e3 * (seconds - before[1]) / (n - before[0]):.3g}"
        grid.add_row(str(n), f"{1e3 * seconds:.3g}", f"{seconds / one:.2f}" if one else "-", further)
        before = n, seconds
    return grid


def drafter_table(profile: Profile) -> Table:
    """One line per drafter and K: milliseconds of a call, by requests that draft together."""
    from rich.table import Table

    counts = sorted({n for cost in profile.drafts.values() for curve in cost.curves for n in curve.counts})
    grid = Table(box=None, pad_edge=False)
    grid.add_column("drafter", no_wrap=True)
    for name in ("K", *(f"R = {n}" for n in counts)):
        grid.add_column(name, justify="right", no_wrap=True)
    for name, cost in sorted(profile.drafts.items()):
        for k, curve in zip(cost.lengths, cost.curves, strict=True):
            cells = (f"{1e3 * curve(n):.3g}" if n in curve.counts else "" for n in counts)
            grid.add_row(name, str(k), *cells)
    return grid


def remarks(profile: Profile) -> Iterator[str]:
    """What the tables do not show, a line each."""
    key, verify = profile.key, profile.verify
    yield f"measured with {key.dtype} on {key.device}, {key.threads} threads"
    if profile.drafts:
        yield "drafters: ms of a call that drafts K tokens for each of R requests"
    request, row = (float(part[0]) for part in verify.context.at([LONG]))
    base = max(verify(1, 1, context=1), 1e-12)
    yield (
        f"beside the rows, a request behind {LONG:,} tokens adds {100 * request / base:.2g} % of a plain step, and "
        f"each of its rows {100 * row / base:.2g} %"
    )
    for name, cost in sorted(profile.drafts.items()):
        yield f"{name}: {_following(cost, base)}"


def _following(cost: DraftCost, base: float) -> str:
    if cost.follow == 0:
        return "following a request that does not draft is free"
    return f"following a request that does not draft takes {100 * cost.follow / base:.2g} % of a plain step a token"


# ------------------------------------------------------------------------------------------------------------ pictures


def draw_profile(profile: Profile, folder: Path, command: str) -> list[Path]:
    """Writes PNG and CSV of the target's curve and, if there are drafters, of theirs; the paths of the pictures."""
    return draw(_pictures(profile), folder, command)


def _pictures(profile: Profile) -> Iterator[Picture]:
    yield "target", "Seconds of a step by its rows", _target(profile), target_data(profile)
    if profile.drafts:
        yield "drafters", "Seconds of a drafting call (longest K)", _drafters(profile), drafter_data(profile)


def target_data(profile: Profile) -> list[Mapping[str, Any]]:
    curve = profile.verify.tokens
    return [{"rows": n, "seconds": s} for n, s in zip(curve.counts, curve.seconds, strict=True)]


def drafter_data(profile: Profile) -> list[Mapping[str, Any]]:
    return [
        {"drafter": name, "k": k, "requests": n, "seconds": s}
        for name, cost in sorted(profile.drafts.items())
        for k, curve in zip(cost.lengths, cost.curves, strict=True)
        for n, s in zip(curve.counts, curve.seconds, strict=True)
    ]


def _target(profile: Profile) -> Any:
    def paint(axes: Axes) -> None:
        curve = profile.verify.tokens
        counts = np.arange(1, curve.counts[-1] + 1)
        seconds = curve.over(1, curve.counts[-1])
        axes.plot(counts, 1e3 * seconds, color=COLOURS["ngram"], label="as planning reads it")
        axes.plot(curve.counts, [1e3 * s for s in curve.seconds], "o", color=COLOURS["ngram"], label="measured")
        axes.plot(counts, 1e3 * lower_envelope(seconds), "--", color=PLAIN, label="lower convex envelope")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="rows in the step", ylabel="ms")

    return paint


def _drafters(profile: Profile) -> Any:
    def paint(axes: Axes) -> None:
        for name, cost in sorted(profile.drafts.items()):
            curve = cost.curves[-1]
            label = f"{name}, K = {cost.lengths[-1]}"
            axes.plot(curve.counts, [1e3 * s for s in curve.seconds], "o-", color=COLOURS.get(name, OTHER), label=label)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="requests that draft together", ylabel="ms")

    return paint


__all__ = ["drafter_data", "drafter_table", "draw_profile", "remarks", "target_data", "target_table"]
