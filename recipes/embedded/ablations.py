"""What each part of DSpark is worth: one change at a time on the embedded target, as one table with its spread.

    python recipes/embedded/ablations.py run --data DIR/data --work DIR/ablations [--jobs 2]
    python recipes/embedded/ablations.py report --work DIR/ablations --page docs/benchmarks/ablations.md

`run` trains the base with three seeds and every variant with one, all on the same samples for the same number of steps,
and evaluates each by real decoding of held-out prompts. The number of steps follows from a short trial of the base, so
that no run takes more than --minutes of processor time; one that would is ended there and marked. Run again, it goes on
where it stopped. `report` makes page, picture and JSON of the runs that are finished, and of nothing else.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # what the recipes share

from commands import TRIAL, Command, flags, newest, pace_of, run_or_exit, setting, store_of

from forerun.errors import ForerunError

SHARED: dict[str, object] = {
    "tokens-per-step": 2048,
    "learning-rate": 2e-3,
    "optimizer": "muon",
    "mixed-precision": "bf16",
    "eval-prompts": 64,
    "eval-tokens": 64,
}
BASE: dict[str, object] = {
    "draft.layers": 2, "draft.taps": "2,4,6,8,10", "draft.block-size": 8, "draft.anchors": 64, "draft.init": "target",
    "draft.markov-rank": 64, "draft.markov-head-type": "vanilla", "draft.confidence-head-with-markov": "true",
    "draft.ce": "soft", "draft.ce-weight": 1.0, "draft.l1-weight": 0.0, "draft.confidence-weight": 1.0,
}  # fmt: skip
SHARE = 0.55
"""Of the processor time allowed that the base is planned to take: a block of 16 has twice its slots."""


@dataclass(frozen=True)
class Variant:
    """The base with a change."""

    group: str
    """What is varied."""
    value: str
    """What it is here."""
    change: dict[str, object] = field(default_factory=dict)
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its run's folder."""
        words = f"{self.group} {self.value}".lower().replace(",", " ").split()
        return "-".join(words).replace(".", "_")

    def settings(self, given: Mapping[str, object]) -> dict[str, object]:
        """Of its run, `given` ones in place of the base's. Its own change goes before both."""
        return SHARED | BASE | given | {"seed": self.seed} | self.change


SEEDS = [Variant("base", f"seed {seed}", {}, seed) for seed in range(3)]
CHANGES = [
    Variant("Markov rank", "0", {"draft.markov-rank": 0}),
    Variant("Markov rank", "16", {"draft.markov-rank": 16}),
    Variant("Markov rank", "256", {"draft.markov-rank": 256}),
    Variant("Markov head", "gated", {"draft.markov-head-type": "gated"}),
    Variant("Markov head", "rnn", {"draft.markov-head-type": "rnn"}),
    Variant("loss", "soft ce 0.5, l1 0.5", {"draft.ce-weight": 0.5, "draft.l1-weight": 0.5}),
    Variant("loss", "soft ce 0.1, l1 0.9", {"draft.ce-weight": 0.1, "draft.l1-weight": 0.9}),
    Variant("loss", "ce first, then l1 0.9",
            {"draft.ce-weight": 0.1, "draft.l1-weight": 0.9, "draft.ce-first": 0.5}),
    Variant("loss", "hard ce 1.0", {"draft.ce": "hard"}),
    Variant("loss", "hard ce 0.1, l1 0.9", {"draft.ce": "hard", "draft.ce-weight": 0.1, "draft.l1-weight": 0.9}),
    Variant("loss", "confidence 0.1", {"draft.confidence-weight": 0.1}),
    Variant("confidence", "without the Markov feature", {"draft.confidence-head-with-markov": "false"}),
    Variant("taps", "10", {"draft.taps": "10"}),
    Variant("taps", "2,6,10", {"draft.taps": "2,6,10"}),
    Variant("depth", "1", {"draft.layers": 1}),
    Variant("depth", "3", {"draft.layers": 3}),
    Variant("start", "random", {"draft.init": "random"}),
    Variant("block", "4", {"draft.block-size": 4}),
    Variant("block", "16", {"draft.block-size": 16}),
]  # fmt: skip
VARIANTS = [*SEEDS, *CHANGES]


# ----------------------------------------------------------------------------------------------------------------- run


def run(options: argparse.Namespace) -> None:
    """`ablations.py run`."""
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    data = work / "data"  # below the work folder, so that no card names a place of this machine
    if not data.exists():
        data.symlink_to(options.data.resolve())
    if data.resolve() != options.data.resolve():
        raise ValueError(f"--data: the runs in {work} were begun with other samples; name another --work")
    wanted = [v for v in VARIANTS if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in options.variants)]
    if not wanted:
        raise ValueError(f"--variants: none is called so; there are {', '.join(v.name for v in VARIANTS)}")
    plan = _plan(options)
    commands = [_training(variant, plan, options) for variant in wanted if not _finished(work / "runs" / variant.name)]
    run_or_exit(*commands, at_once=options.jobs)


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of every run and what was asked for, decided once for a work folder."""
    file: Path = options.work / "plan.json"
    asked = {"minutes": options.minutes, "target": options.target, "set": sorted(options.set)}
    if file.exists():
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if plan["asked"] != asked:
            raise ValueError(f"--work: {options.work} was planned with {plan['asked']}; name another folder")
        return plan
    trial = Path("trial")
    settings = SEEDS[0].settings(dict(map(setting, options.set))) | TRIAL
    run_or_exit(_train(trial, settings, options))
    pace = pace_of(options.work / trial)
    budget = 60 * options.minutes
    # The one evaluation comes after the last step, and counts for nothing here.
    plan = {"asked": asked, "cpu_seconds": budget, "step": pace.step, "steps": max(1, int(SHARE * budget / pace.step))}
    file.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    return plan


def _training(variant: Variant, plan: dict[str, Any], options: argparse.Namespace) -> Command:
    every = {"steps": plan["steps"], "eval-every": plan["steps"], "save-every": max(1, plan["steps"] // 4)}
    length = every | {"keep": 1, "cpu-seconds": f"{plan['cpu_seconds']:g}"}
    settings = variant.settings(dict(map(setting, options.set))) | length
    return _train(Path("runs") / variant.name, settings, options)


def _train(out: Path, settings: dict[str, object], options: argparse.Namespace) -> Command:
    # Half of a step would be the target's own passes.
    store = {"feature-store": store_of(str(settings["draft.taps"])), "store-gb": options.store_gb}
    words = ("--target", options.target, "--data", "data", "--out", out, "--threads", 1, *flags(settings | store))
    log = options.work / "logs" / f"{out.name}.log"
    return Command.forerun("train", "dspark", *words, cwd=options.work, log=log)


def _finished(folder: Path) -> bool:
    return found(folder) is not None


# -------------------------------------------------------------------------------------------------------------- numbers


def found(folder: Path) -> dict[str, Any] | None:
    """What a finished run came to, flat; None: it is not finished.

    A run is finished when it was evaluated after its last step: only then is there an evaluation at all.
    """
    last = newest(folder)
    if last is None or last.progress.evaluation is None or last.progress.evaluated != last.progress.step:
        return None
    evaluation, used = last.progress.evaluation, last.progress.used
    forced = evaluation["teacher_forced"]
    return {
        "score": evaluation["score"],
        "loss": forced["loss"],
        "soft_ce": forced["soft_ce"],
        "forced": forced["teacher_forced_acceptance"],
        "decoding": evaluation["decoding"],
        "steps": last.progress.step, "planned_steps": last.run["settings"]["steps"], "tokens": used.tokens,
        "cpu_seconds": used.cpu_seconds, "peak_memory": used.peak_memory,
    }  # fmt: skip


METRICS = {
    "accepted length, T = 0": lambda row: row["decoding"][0].get("mean_accepted_length"),
    "accepted length, T = 1": lambda row: row["decoding"][1].get("mean_accepted_length"),
    "accepted by position (T = 1): 1": lambda row: _at(row["decoding"][1], 0),
    "2": lambda row: _at(row["decoding"][1], 1),
    "3": lambda row: _at(row["decoding"][1], 2),
    "4": lambda row: _at(row["decoding"][1], 3),
    "1 - TV at position 1": lambda row: row["forced"][0],
    "soft cross entropy": lambda row: row["soft_ce"],
    "confidence error (ECE, T = 1)": lambda row: row["decoding"][1].get("confidence_ece"),
}
"""Column -> its number in a run. The objective itself is not among them: other loss weights make it another number."""


def _at(decoding: dict[str, Any], place: int) -> float | None:
    rates = decoding.get("acceptance_by_position", ())
    return rates[place] if place < len(rates) else None


@dataclass(frozen=True)
class Column:
    """One metric of the base, over its seeds."""

    mean: float
    spread: float
    """Largest minus smallest."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Column | None:
        """None where fewer than two seeds have the number: a spread cannot be told."""
        known = [value for value in values if value is not None]
        return cls(sum(known) / len(known), max(known) - min(known)) if len(known) > 1 else None

    def resolved(self, value: float) -> bool:
        """Whether a variant differs from the base by at least two spreads."""
        difference = abs(value - self.mean)
        return difference > 0 and difference >= 2 * self.spread


def results(work: Path) -> dict[str, Any]:
    """Everything the page says, as data. ValueError: no run is finished."""
    rows = {variant.name: found(work / "runs" / variant.name) for variant in VARIANTS}
    done = {name: row for name, row in rows.items() if row is not None}
    if not done:
        raise ValueError(f"--work: no run in {work} is finished; begin with `ablations.py run`")
    seeds = [done[variant.name] for variant in SEEDS if variant.name in done]
    columns = {name: Column.of([metric(row) for row in seeds]) for name, metric in METRICS.items()}
    return {
        "plan": json.loads((work / "plan.json").read_text(encoding="utf-8")),
        "base": {name: None if column is None else vars(column) for name, column in columns.items()},
        "runs": {
            variant.name: {
                "group": variant.group, "value": variant.value, "change": variant.change, "seed": variant.seed,
                "metrics": {n: _judged(metric(done[variant.name]), columns[n]) for n, metric in METRICS.items()},
                **done[variant.name],
            }
            for variant in VARIANTS if variant.name in done
        },
        "missing": [name for name, row in rows.items() if row is None],
    }  # fmt: skip


def _judged(value: float | None, base: Column | None) -> dict[str, Any]:
    """A number with its difference from the base's mean, and whether that is resolved; None where it cannot be told."""
    if value is None or base is None:
        return {"value": value, "difference": None, "resolved": None}
    return {"value": value, "difference": value - base.mean, "resolved": base.resolved(value)}


# ------------------------------------------------------------------------------------------------------------- command


def report(options: argparse.Namespace) -> None:
    """`ablations.py report`."""
    from ablations_page import write

    write(results(options.work), options.page, options.remarks)


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        options.command(options)
    except (ValueError, ForerunError) as error:
        print(f"ablations.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{run,report}")
    train = commands.add_parser("run", help="train what is missing; a second call goes on")
    train.add_argument("--data", type=Path, required=True, help="folder of `forerun data prepare`")
    train.add_argument("--work", type=Path, required=True, help="folder of the runs")
    train.add_argument("--target", default="embedded")
    train.add_argument("--minutes", type=float, default=8, help="processor time of a run, at most")
    train.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    train.add_argument("--store-gb", type=float, default=8, help="bound of each store of features in --work")
    train.add_argument("--variants", nargs="+", default=["*"], metavar="PATTERN", help="e.g. 'base-*' 'markov-*'")
    train.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all runs, for a trial"
    )
    train.set_defaults(command=run)
    page = commands.add_parser("report", help="write page, picture and JSON")
    page.add_argument("--work", type=Path, required=True, help="folder of the runs")
    page.add_argument("--page", type=Path, required=True, help="Markdown file; picture and data go beside it")
    page.add_argument("--remarks", type=Path, help="Markdown that goes below the table: what it teaches")
    page.set_defaults(command=report)
    return parser


if __name__ == "__main__":
    sys.exit(main())
