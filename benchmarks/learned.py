"""Trained drafters against plain decoding, `ngram`, `small` and transformers, on prompts they were not trained on.

    python benchmarks/learned.py run --target TARGET --drafter ngram --drafter dspark=FOLDER --transformers \
        --set humaneval=humaneval.jsonl:40 --set mt-bench=mt-bench.jsonl:40 --out results
    python benchmarks/learned.py report --out results --trained dspark=RUN --page docs/benchmarks/learned.md

`run` measures every configuration on the first prompt of the first set, then on the next, in an order shuffled anew for
each prompt, one request at a time; each finished row is appended to OUT/rows.jsonl, and the same command goes on where
the last one ended. `report` makes page, pictures, JSON and CSV from the rows and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import Alone, Config, Contenders, Transformers, model_folder
from machine import cores, describe_machine
from measuring import Measurement, add_measuring_flags, rendered, run, sum_of

from forerun.drafters.lookup import USUAL
from forerun.errors import ForerunError

LENGTHS = [1, 2, 3, 4, 5, 7]
SET_SIZE = 1000
"""Prompt i of set s is number SET_SIZE * s + i: a set can be measured further without moving another one's numbers."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one kind."""

    name: str
    path: Path
    count: int

    @classmethod
    def of(cls, text: str) -> PromptSet:
        """`NAME=FILE` or `NAME=FILE:COUNT`; 40 prompts if nothing is said. ValueError: it is neither."""
        name, equal, rest = text.partition("=")
        path, colon, count = rest.rpartition(":")
        if not (name and equal and rest) or (colon and not count.isdigit()):
            raise ValueError(f"--set: expected NAME=FILE or NAME=FILE:COUNT, got {text!r}")
        made = cls(name, Path(path if colon else rest), int(count) if colon else 40)
        if not 0 < made.count <= SET_SIZE:
            raise ValueError(f"--set: {name} needs between 1 and {SET_SIZE} prompts, got {made.count}")
        if not made.path.is_file():
            raise ValueError(f"--set: {made.path} is not a file")
        return made


@dataclass(frozen=True)
class Contestant:
    """A drafter of ours."""

    method: str
    folder: str | None
    """What `model` of `--speculative-config` takes; None: the drafter needs nothing, or comes with the package."""
    lookup: bool = False
    """Prompt lookup is mixed into its laws."""

    @classmethod
    def of(cls, text: str) -> Contestant:
        """`METHOD`, `METHOD=FOLDER` or either with `METHOD+lookup`. ValueError: no drafter is called so."""
        from forerun.drafters import DRAFTERS, drafter_class

        name, _, folder = text.partition("=")
        method, plus, mixed = name.partition("+")
        if method not in DRAFTERS:
            raise ValueError(f"--drafter: no drafter is called {method!r}; there are {', '.join(DRAFTERS)}")
        if plus and (mixed != "lookup" or method == "ngram" or not drafter_class(method).config_keys >= set(USUAL)):
            raise ValueError(f"--drafter: {name}: only '+lookup' can be added, to a drafter with a law of its own")
        return cls(method, folder or None, bool(plus))

    @property
    def name(self) -> str:
        """In rows and tables."""
        return f"{self.method}+lookup" if self.lookup else self.method

    @property
    def options(self) -> dict[str, Any]:
        """What `--speculative-config` takes."""
        own = {"method": self.method} | ({} if self.folder is None else {"model": self.folder})
        return own | (USUAL if self.lookup else {})

    def place(self, target: str) -> Path | None:
        """The folder of its files; None if it has none."""
        from forerun.target.load import EMBEDDED, find_folder

        packaged = f"embedded-{self.method}"
        if self.folder is None and target == "embedded" and packaged in EMBEDDED:
            return find_folder(packaged)
        return None if self.folder is None else find_folder(self.folder)

    def longest(self, target: str) -> int | None:
        """The largest K it can make; None: any. Of a block drafter that is what it was trained for."""
        from forerun.drafters import drafter_class

        place, kind = self.place(target), getattr(drafter_class(self.method), "config_class", None)
        if place is None or kind is None:
            return None
        config = kind(**json.loads((place / "config.json").read_text(encoding="utf-8")))
        longest: int | None = getattr(config, "max_draft", None)
        return longest


def configurations(
    contestants: Mapping[str, int | None], lengths: Sequence[int], temperatures: Sequence[float], transformers: bool
) -> list[Config]:
    """Every way to decode a prompt.

    Args:
        contestants: name -> the largest K it can make; None: any.
        lengths: K.
        temperatures: of the target.
        transformers: with its plain decoding and its prompt lookup.
    """
    found = []
    for temperature in temperatures:
        found.append(Config("forerun", "plain", 0, temperature))
        for method, longest in contestants.items():
            found += [Config("forerun", method, k, temperature) for k in lengths if longest is None or k <= longest]
        if transformers:
            found.append(Config("transformers", "plain", 0, temperature))
            found += [Config("transformers", "ngram", k, temperature) for k in lengths]
    return found


# ------------------------------------------------------------------------------------------------------------- command


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
        return code
    except (ValueError, ForerunError) as error:
        print(f"learned.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{run,report}")
    measure = commands.add_parser("run", help="measure; a second call continues")
    measure.add_argument("--target", required=True, help="folder of safetensors, GGUF file or 'embedded'")
    again = {"action": "append", "default": [], "metavar": "METHOD[+lookup][=FOLDER]"}
    measure.add_argument(
        "--drafter",
        **again,
        help="a drafter of ours, once for each: ngram, dspark=runs/dspark/best; +lookup: prompt lookup mixed in",
    )
    text = 'NAME=FILE[:COUNT], once for each: JSONL of {"turns": ["..."]} (the first turn) or {"prompt": "..."}'
    measure.add_argument("--set", action="append", default=[], required=True, dest="sets", help=text)
    measure.add_argument("--transformers", action="store_true", help="its plain decoding and its prompt lookup as well")
    measure.add_argument(
        "--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7], metavar="K", help="draft lengths"
    )
    measure.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    measure.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    measure.add_argument("--out", type=Path, required=True, help="folder of the rows")
    measure.add_argument("--threads", type=int, default=cores())
    add_measuring_flags(measure)
    measure.set_defaults(command=run_rows)
    report = commands.add_parser("report", help="write page, pictures, JSON and CSV")
    report.add_argument("--out", type=Path, required=True, help="folder of the rows")
    report.add_argument("--page", type=Path, required=True, help="Markdown file; pictures and data go beside it")
    report.add_argument("--title", help="of the page")
    trained = {"action": "append", "default": [], "metavar": "METHOD=RUN"}
    report.add_argument("--trained", **trained, help="its training run, for what it took: the folder, or a page's JSON")
    report.add_argument("--features", type=Path, help="what recipes/qwen/features.py reported, for what that took")
    report.add_argument("--remarks", type=Path, help="Markdown that follows the answers: what the numbers do not say")
    report.set_defaults(command=write_report)
    return parser


def run_rows(args: argparse.Namespace) -> int:
    """`learned.py run`. 0 when everything asked for is measured, 3 when the time was up first."""
    sets = [PromptSet.of(text) for text in args.sets]
    contestants = [Contestant.of(text) for text in args.drafter]
    for name, kinds in (("--set", [one.name for one in sets]), ("--drafter", [one.name for one in contestants])):
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"{name}: every name once, got {', '.join(kinds)}")
    source, folder = _target(args.target, args.dtype)
    prompts = {
        SET_SIZE * number + i: ids
        for number, one in enumerate(sets)
        for i, ids in enumerate(rendered(one.path, folder, one.count))
    }
    most = {one.name: one.longest(source) for one in contestants}
    configs = configurations(most, args.lengths, args.temperatures, args.transformers)
    drafters = {one.name: one.options for one in contestants}
    contenders = Contenders(
        {
            "forerun": lambda: Alone(source, drafters, max(args.lengths), args.dtype, args.threads),
            "transformers": lambda: Transformers(str(folder), None, args.dtype, args.threads),
        }
    )

    def all_rows(measurement: Measurement) -> None:
        for number in prompts:
            measurement.measure(measurement.wanted(configs), (number,))

    return run(args, _setup(args, sets, contestants, folder), prompts, contenders, all_rows)


def _target(name: str, dtype: str) -> tuple[str, Path]:
    """What our engine loads, and the folder that transformers loads: the same weights."""
    from forerun.target.load import EMBEDDED, find_folder

    if name in EMBEDDED:
        return name, find_folder(name)
    if not Path(name).exists():
        raise ValueError(f"--target: {name} does not exist")
    folder = model_folder(Path(name), dtype)
    return str(folder), folder


def _setup(
    args: argparse.Namespace, sets: Sequence[PromptSet], contestants: Sequence[Contestant], folder: Path
) -> dict[str, Any]:
    """What rows must share to be compared. No path and no name of a machine: the page prints it."""
    return describe_machine() | {
        "target": Path(args.target).name,
        "target_config": sum_of(folder / "config.json"),
        "drafters": {one.name: _files(one, args.target) for one in contestants},
        "sets": [{"name": one.name, "file": one.path.name, "sha256": sum_of(one.path)} for one in sets],
        "dtype": args.dtype,
        "threads": args.threads,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
    }


def _files(contestant: Contestant, target: str) -> dict[str, Any] | None:
    """Which very drafter was measured: hashes, the size of its weights, and whether it comes with the package."""
    place = contestant.place(target)
    if place is None:
        return None
    weights = place / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"--drafter: {place} holds no model.safetensors")
    return {
        "config": sum_of(place / "config.json"), "weights": sum_of(weights), "bytes": weights.stat().st_size,
        "packaged": contestant.folder is None,
    }  # fmt: skip


def write_report(args: argparse.Namespace) -> int:
    """`learned.py report`."""
    from learned_page import Page

    runs = dict(text.partition("=")[::2] for text in args.trained)
    remarks = None if args.remarks is None else args.remarks.read_text(encoding="utf-8")
    folders = {method: Path(run) for method, run in runs.items()}
    Page(args.out, folders, args.title, remarks, args.features).write(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
