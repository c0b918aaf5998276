"""What `scheduling.py run` measured, as claims that hold, have failed or were not measured. Functions of the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tables import table

from forerun.bench.load.protocol import ALPHA, LEAST_PAIRS, bound, geometric_mean, holm, p_value
from forerun.bench.load.study import BAR, families
from forerun.bench.verdicts import NOT_PROVEN

WRONG_BAR = 0.95
"""Speed over plain decoding's with a drafter that is always wrong."""
BARS = {"load": BAR, "wrong": WRONG_BAR}
"""Of the two measurements under load."""
DRAFTERS = ("ngram", "dspark", "eagle3")
"""That must have been measured, and some of them together; `small` where the model has a pair."""
LOADS = ("1", "4", "16", "32")
"""Requests together that must have been measured."""
PREDICTED_LOADS, PREDICTED = (1, 4, 16), 0.10
"""Loads whose speed is predicted, and by how much that may be off."""
ROUNDS, EXCESS, POSITIONS = 10_000, 0.02, 5
"""Held-out rounds of a calibration, how far its error may lie above the floor, and at which first positions."""

State = Literal["holds", "FAILED", "not measured"]


@dataclass(frozen=True)
class Claim:
    """One line of what is claimed."""

    words: str
    state: State
    details: Sequence[str] = ()
    """What it rests on, or what is missing."""


class Cell(NamedTuple):
    """A ratio of speeds that has a bar."""

    words: str
    bar: float
    ratios: Sequence[float]


def judged(folders: Sequence[Path]) -> list[Claim]:
    """Every claim over everything in these folders."""
    plain = [cell for f in folders for name, bar in BARS.items() for cell in _cells(f, name, bar, 0)]
    fixed = [cell for f in folders for cell in _cells(f, "load", BAR, 1)]
    gaps = [gap for folder in folders for name in BARS for gap in _gaps(folder, name)]
    over_plain = f"scheduled against plain decoding: no cell below {BAR:g}, always wrong {WRONG_BAR:g}"
    over_fixed = f"scheduled against the best fixed K, chosen on half of the pairs: no cell below {BAR:g}"
    return [
        _never_slower(over_plain, plain, gaps, LEAST_PAIRS),
        _never_slower(over_fixed, fixed, [], LEAST_PAIRS // 2),
        _calibrated(folders),
        _predicted(folders),
        _compared(folders),
        _same_text(folders),
    ]


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _claim(words: str, failed: Sequence[str], missing: Sequence[str], found: Sequence[str]) -> Claim:
    state: State = "FAILED" if failed else "not measured" if missing else "holds"
    return Claim(words, state, [*failed, *(f"missing: {one}" for one in missing), *found])


# -------------------------------------------------------------------------------------------------------- never slower


def _cells(folder: Path, name: str, bar: float, family: int) -> Iterator[Cell]:
    """Of one family: over plain decoding, over the best fixed K."""
    for claim, ratios in families(_rows(folder, name))[family].items():
        words = f"{folder.name}, {claim.drafter} at load {claim.load}: {claim.way} against {claim.rival}"
        yield Cell(words, bar, ratios)


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (_read(folder / f"{name}.json") or {"rows": []})["rows"]
    return rows


def _gaps(folder: Path, name: str) -> Iterator[str]:
    """Drafters and loads that were not measured."""
    there = [(row["drafter"], str(row["concurrency"])) for row in _rows(folder, name)]
    found = list(dict.fromkeys(drafter for drafter, _ in there))
    wanted = [*DRAFTERS, *([] if any("+" in drafter for drafter in found) else ["the mixed choice"])]
    for drafter in dict.fromkeys([*(wanted if name == "load" else ["wrong"]), *found]):
        yield from (f"{folder.name}, {drafter} at load {load}" for load in LOADS if (drafter, load) not in there)


def _never_slower(words: str, cells: Sequence[Cell], gaps: Sequence[str], least: int) -> Claim:
    """A cell has failed if its upper bound, corrected by Holm over all of them, is below its bar. Nothing is concluded
    from one with fewer than the `least` pairs."""
    few = [f"{cell.words}: {len(cell.ratios)} of {least} pairs" for cell in cells if len(cell.ratios) < least]
    cells = [cell for cell in cells if len(cell.ratios) >= least]
    levels, failed = holm([p_value(cell.ratios, cell.bar) for cell in cells])
    lines = [
        f"{cell.words}: {geometric_mean(cell.ratios):.3f}, upper bound {bound(cell.ratios, level):.3f} "
        f"(bar {cell.bar:g}, {len(cell.ratios)} pairs)"
        for cell, level in zip(cells, levels, strict=True)
    ]
    below = [line for line, cell in zip(lines, cells, strict=True) if geometric_mean(cell.ratios) < cell.bar]
    lost = [line for line, one in zip(lines, failed, strict=True) if one]
    counted = f"{len(cells)} cells: {len(below)} with a mean below the bar, {len(lost)} failed (Holm, {ALPHA:.0%})"
    unsure = [f"below, not refuted: {line}" for line in below if line not in lost]
    missing = [*gaps, *few, *([] if cells else ["every cell"])]
    return _claim(words, lost, missing, [counted, *unsure])


# --------------------------------------------------------------------------------------------------------- calibration


def _calibrated(folders: Sequence[Path]) -> Claim:
    failed, missing, found = [], [], []
    for folder in folders:
        tables = [one for path in sorted(folder.glob("calibrate-*.json")) for one in _read(path)["calibrations"]]
        missing += [] if tables else [f"{folder.name}: any calibration"]
        for one in tables:
            words = f"{folder.name}, {one['drafter']}, temperature {one['table']['key']['temperature']}"
            if one["held_out_rounds"] < ROUNDS:
                missing.append(f"{words}: {one['held_out_rounds']:,} held-out rounds of {ROUNDS:,}")
                continue
            for position in one["positions"][:POSITIONS]:
                after = position["after"]
                low, high = after["ece_interval_95"]
                line = f"{words}, position {position['position']}: ECE {after['ece']:.2%} [{low:.2%}-{high:.2%}]"
                line += f", floor {after['floor']:.2%}"
                (failed if after["excess"] > EXCESS else found).append(line)
    return _claim(f"ECE after calibration at most {EXCESS:.0%} above the floor", failed, missing, found)


# ---------------------------------------------------------------------------------------------------------- prediction


def _predicted(folders: Sequence[Path]) -> Claim:
    failed, missing, found = [], [], []
    for folder in folders:
        rows = (_read(folder / "predict.json") or {"predictions": []})["predictions"]
        there = {row["concurrency"] for row in rows}
        missing += [f"{folder.name} at {n} requests" for n in PREDICTED_LOADS if n not in there]
        for row in rows:
            if row["concurrency"] in PREDICTED_LOADS:
                line = f"{folder.name}, {row['drafter']}, {row['policy']}, {row['concurrency']} requests: "
                line += f"{row['error']:+.1%}"
                (failed if abs(row["error"]) > PREDICTED else found).append(line)
    return _claim(f"simulated within {PREDICTED:.0%} of measured", failed, missing, found)


# ---------------------------------------------------------------------------------------------------------------- text


def _compared(folders: Sequence[Path]) -> Claim:
    files = [folder / "compare" / f"compare.{kind}" for folder in folders for kind in ("md", "html", "json")]
    return _claim("a report of `forerun compare`", [], [str(f) for f in files if not f.exists()], [])


def _same_text(folders: Sequence[Path]) -> Claim:
    """Float32 and coupled: every id. Lower precision: the margin rule of `compare`. The law: `verify`."""
    failed, missing, found = [], [], []
    for folder in folders:
        coupled, compare, certificate = (
            _read(folder / name) for name in ("coupled.json", "compare/compare.json", "verify.json")
        )
        for name, one in (("coupled", coupled), ("compare", compare), ("verify", certificate)):
            missing += [] if one is not None else [f"{folder.name}: {name}"]
        for row in _rows(folder, "coupled"):
            for way, rates in row["ways"].items():
                line = f"{folder.name}, coupled, {row['drafter']} at {row['concurrency']}, {way}: "
                line += f"{rates['outputs_identical']} of {rates['outputs']} identical"
                (found if rates["outputs_identical"] == rates["outputs"] else failed).append(line)
        for name, one in (("compare", compare), ("verify", certificate)):
            if one is not None:
                line = f"{folder.name}, {name}: lossless: {one['lossless']}"
                unproven = one.get("verdict") == NOT_PROVEN  # nothing was drafted, so nothing was checked
                (missing if unproven else found if one["lossless"] else failed).append(line)
    return _claim("scheduling changes no output", failed, missing, found)


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(claims: Sequence[Claim], folders: Sequence[Path]) -> str:
    """The same as a page."""
    told = table(["claim", ""], [[claim.words, claim.state] for claim in claims])
    parts = [
        "\n".join([f"## {claim.words}\n", f"**{claim.state}**\n", *(f"- {d}" for d in claim.details)])
        for claim in claims
    ]
    commands = [path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.glob("*.command"))]
    how = "## How it was measured\n\n```sh\n" + "\n".join(commands) + "\n```"
    return "\n\n".join(["# Never slower, measured", told, *parts, how]) + "\n"
