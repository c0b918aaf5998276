"""Training runs side by side: what each took and how it went, out of the folders that `forerun train` wrote.

    python benchmarks/trained.py runs/dspark runs/dspark-one-layer --page docs/benchmarks/qwen-study.md

The first run of a kind is what the others of that kind are compared with: the page names the settings in which they
differ. Numbers are those of each run's best evaluation, by real decoding of its held-out prompts. The JSON of a page
stands for the runs on it: their folders are large and need not be kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tables import number, table

from forerun.errors import ForerunError
from forerun.training.checkpoints import Checkpoints

SHOWN = ("tokens_per_step", "learning_rate", "optimizer", "seed", "mixed_precision", "dtype")
"""Settings of all kinds that a page prints; those of the kind are all printed."""


def training(run: Path) -> dict[str, Any]:
    """Cost, settings and held-out evaluations of a run.

    Raises:
        ValueError: the folder holds no run with a checkpoint.
    """
    found, _ = Checkpoints(run / "checkpoints", keep=1).newest()
    if found is None:
        raise ValueError(f"{run} holds no checkpoint of a training run")
    progress, settings = found.progress, found.run["settings"]
    parameters = sum(tensor.numel() for name, tensor in found.tensors.items() if name.startswith("network."))
    chosen = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return {
        "kind": settings["kind"],
        "threads": chosen["threads"],
        "device": chosen["device"],
        "cpu_seconds_allowed": chosen["cpu_seconds"],
        "steps": progress.step,
        "planned_steps": settings["steps"],
        "tokens": progress.used.tokens,
        "seconds": progress.used.seconds,
        "cpu_seconds": progress.used.cpu_seconds,
        "peak_memory": progress.used.peak_memory,
        "parameters": parameters,
        "best_step": progress.best_step,
        "data": found.run["data"],
        "settings": {name: settings[name] for name in settings if name in SHOWN or name.startswith("draft.")},
        "evaluations": _evaluations(run / "metrics.jsonl"),
    }


def runs_of(place: Path) -> dict[str, dict[str, Any]]:
    """The run of a folder, or all those of a page, by its JSON.

    Raises:
        ValueError: it is neither.
    """
    if place.is_dir():
        return {place.resolve().name: training(place)}
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        found = found.get("trained", found)  # the page of benchmarks/learned.py has more than runs
        if found and all("evaluations" in run for run in found.values()):
            return dict(found)
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    raise ValueError(f"{place} is neither the folder of a training run nor the JSON of a page of runs")


def together(places: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """All runs of some places. ValueError: two are called the same, and one of them would be missing."""
    runs: dict[str, dict[str, Any]] = {}
    for place in places:
        found = runs_of(place)
        if twice := runs.keys() & found.keys():
            raise ValueError(f"{place}: there is a run {', '.join(sorted(twice))} already; call its folder otherwise")
        runs |= found
    return runs


def run_of(place: Path, name: str) -> dict[str, Any]:
    """The run of a folder, whatever it is called, or the one of this name in the JSON of a page.

    Raises:
        ValueError: there is none.
    """
    runs = runs_of(place)
    if place.is_dir():
        return runs.popitem()[1]
    if name not in runs:
        raise ValueError(f"{place} has no run {name}, but {', '.join(runs) or 'none'}")
    return runs[name]


def _evaluations(metrics: Path) -> list[dict[str, Any]]:
    """Step, tokens trained on until then, and what was found, of each evaluation."""
    tokens, found = 0, []
    with metrics.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["event"] == "step":
                tokens += record["tokens"]
            elif record["event"] == "evaluation":
                found.append({**record, "tokens": tokens})
    return found


def best_evaluation(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the checkpoint that was kept; None if there was no evaluation."""
    return next((one for one in run["evaluations"] if one["step"] == run["best_step"]), None)


def cost_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """What each run took, as it counted that itself."""
    head = ("", "parameters", "steps", "tokens", "CPU-seconds", "seconds", "threads", "tokens/s", "peak memory")
    rows = [
        [
            f"`{name}`", f"{one['parameters']:,}", f"{one['steps']:,} of {one['planned_steps']:,}",
            f"{one['tokens']:,}", f"{one['cpu_seconds']:,.0f}{_allowed(one)}", f"{one['seconds']:,.0f}",
            str(one["threads"] or "torch's own"), f"{one['tokens'] / one['seconds']:,.0f}",
            f"{one['peak_memory'] / 1e9:.2f} GB", str(one["best_step"]),
        ]
        for name, one in runs.items()
    ]  # fmt: skip
    return table([*head, "best step"], rows)


def _allowed(run: Mapping[str, Any]) -> str:
    """The budget of a run, where it had one: its last evaluation came on top."""
    return "" if run["cpu_seconds_allowed"] is None else f" (of {run['cpu_seconds_allowed']:,.0f})"


def features_cost(report: Path) -> str:
    """What the features that all runs read had cost before, by the report of recipes/qwen/features.py."""
    calls = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines() if line]
    if not calls:
        raise ValueError(f"--features: {report} is empty")
    seconds, last = sum(one["cpu_seconds"] for one in calls), calls[-1]
    return (
        f"The target's states of all {last['samples']:,} samples, {last['tokens']:,} tokens, had been computed before, "
        f"once for all runs, in {seconds:,.0f} CPU-seconds; {last['bytes_per_token']:,} bytes a token."
    )


def same_samples(runs: Mapping[str, Mapping[str, Any]]) -> str:
    return "all on the same samples" if len({one["data"] for one in runs.values()}) == 1 else "**on different samples**"


# --------------------------------------------------------------------------------------------------- a page of its own


def changes(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of each run that are not those of the first run of its kind."""
    first: dict[str, Mapping[str, Any]] = {}
    out = {}
    for name, run in runs.items():
        base = first.setdefault(run["kind"], run["settings"])
        out[name] = {key: value for key, value in run["settings"].items() if base.get(key) != value}
    return out


def _result_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for every run: what is different in it, and how good its drafter is."""
    head = ("", "changed", "accepted length, T = 0", "T = 1", "accepted by position, T = 1", "1 - TV, given text")
    rows, changed = [], changes(runs)
    for name, run in runs.items():
        said = ", ".join(f"{key.removeprefix('draft.')} {value}" for key, value in changed[name].items()) or "-"
        evaluation = best_evaluation(run)
        cells = ["", "", "", ""]
        if evaluation is not None:
            decoding = {one["temperature"]: one for one in evaluation["decoding"]}
            lengths = [decoding.get(t, {}).get("mean_accepted_length") for t in (0.0, 1.0)]
            positions = decoding.get(1.0, {}).get("acceptance_by_position", ())
            forced = evaluation["teacher_forced"].get("teacher_forced_acceptance") or ()
            known = [[value for value in values if value is not None] for values in (positions, forced)]
            cells = [*map(number, lengths), *(" ".join(map(number, values)) for values in known)]
        rows.append([f"`{name}`", said, *cells])
    return table(head, rows)


def write(runs: Mapping[str, Mapping[str, Any]], page: Path, title: str, remarks: str) -> None:
    """Writes the page, its .json and, where a run was looked at more than once, its .png beside it."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".json").write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    parts = [
        f"# {title}",
        "At the best evaluation of each run, by real decoding of held-out prompts; 1 - TV over their text as given.",
        _result_table(runs),
        _picture(runs, page.with_suffix(".png")),
        remarks.strip(),
        f"## What it took\n\nAs each run counted it, evaluations included; {same_samples(runs)}.",
        cost_table(runs),
    ]
    page.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _picture(runs: Mapping[str, Mapping[str, Any]], file: Path) -> str:
    """How the runs went on; nothing where that is one point each."""
    from learned_picture import draw_training

    if all(len(one["evaluations"]) < 2 for one in runs.values()):
        return ""
    draw_training(runs, file, f"python benchmarks/trained.py {' '.join(f'runs/{name}' for name in runs)}")
    return f"![Held-out accepted length while training]({file.name})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of training runs, or JSON of earlier pages")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file; picture and data go beside it")
    parser.add_argument("--title", default="Training runs side by side")
    parser.add_argument("--remarks", type=Path, help="Markdown that follows the table: what it teaches")
    options = parser.parse_args(argv)
    try:
        remarks = "" if options.remarks is None else options.remarks.read_text(encoding="utf-8")
        write(together(options.runs), options.page, options.title, remarks)
    except (ValueError, ForerunError) as error:
        print(f"trained.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
