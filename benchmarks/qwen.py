"""forerun against transformers' own assisted generation, on a real pair of models.

    python benchmarks/qwen.py run --target TARGET --draft DRAFT --prompts PROMPTS --out results
    python benchmarks/qwen.py run --target TARGET --draft DRAFT --prompts PROMPTS --out results32 --dtype float32
    python benchmarks/qwen.py costs --target TARGET --draft DRAFT --out results
    python benchmarks/qwen.py report --out results --exact results32 --page docs/benchmarks/qwen.md

`run` measures every configuration on prompt 1, then on prompt 2, ..., in an order shuffled anew for each prompt; each
finished row is appended to OUT/rows.jsonl, and the same command goes on where the last one ended. In float32 it checks
instead of comparing: temperature 0, and the lead of the best token is recorded at every position. `costs` measures the
forward passes and the memory bandwidth of the roofline. `report` writes page, picture, JSON and CSV.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contenders import Config, Contenders, Job, batch_one, batched, model_folder
from filelock import FileLock
from machine import cores, describe_machine
from rows import Rows, settle_setup
from summary import best_drafted, busy

BATCH = 4
"""Prompts together in the second stage."""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except ValueError as error:
        print(f"qwen.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{run,costs,report}")
    run = commands.add_parser("run", help="measure; a second call continues")
    _add_models(run)
    run.add_argument("--prompts", type=Path, required=True, help='JSONL of {"turns": ["..."]}; the first turn is used')
    run.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    run.add_argument("--limit", type=int, help="prompts (default 20; 10 in float32)")
    run.add_argument("--max-tokens", type=int, default=128)
    run.add_argument("--configs", nargs="+", default=["*"], metavar="PATTERN", help="e.g. 'forerun-small-*' '*-t0-b1'")
    run.add_argument("--trials", type=int, default=1, help="times every row is measured")
    run.add_argument("--minutes", type=float, help="stop before the first row that would begin after this")
    run.add_argument("--seed", type=int, default=0, help="of the order and of sampling")
    run.add_argument(
        "--again-below",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="measure a row again that got less than this share of its threads' processor time (a busy machine)",
    )
    run.set_defaults(command=run_rows)
    costs = commands.add_parser("costs", help="measure forward passes and bandwidth for the roofline")
    _add_models(costs)
    costs.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    costs.add_argument("--repeats", type=int, default=15)
    costs.set_defaults(command=measure_costs)
    report = commands.add_parser("report", help="write page, picture, JSON and CSV")
    report.add_argument("--out", type=Path, required=True, help="folder of the rows")
    report.add_argument("--exact", type=Path, help="folder of the float32 rows")
    report.add_argument("--page", type=Path, required=True, help="Markdown file; picture and data go beside it")
    report.set_defaults(command=write_report)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="GGUF file or folder of safetensors")
    parser.add_argument("--draft", type=Path, required=True, help="the smaller model, likewise")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--threads", type=int, default=cores())


# --------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Measurement:
    """One call of `run`: what is measured, on what, until when."""

    args: argparse.Namespace
    prompts: list[list[int]]
    contenders: Contenders
    rows: Rows
    deadline: float

    def measure(self, configs: list[Config], group: tuple[int, ...]) -> None:
        """Measures what is missing of these configurations on one group of prompts, in an order of its own.

        Raises:
            TimeoutError: time is up.
        """
        for trial in range(self.args.trials):
            for config in shuffled(configs, f"{self.args.seed}/{group[0]}/{trial}"):
                before = self.rows.get((group, config.name, trial))
                if before is not None and busy(before, self.args.threads) >= self.args.again_below:
                    continue
                if time.monotonic() > self.deadline:
                    raise TimeoutError
                row = {"prompts": list(group), "config": config.name, "trial": trial}
                row |= self._run(config, self._job(config, group, trial))
                self.rows.append(row)
                speed = sum(map(len, row["ids"])) / row["seconds"]
                print(
                    f"{len(self.rows):5d}  prompt {group[0]:3d}  {config.name:36s} {speed:6.2f} tok/s", file=sys.stderr
                )

    def _job(self, config: Config, group: tuple[int, ...], trial: int) -> Job:
        margins = self.args.dtype == "float32" and config.engine == "forerun"
        seed = self.args.seed + 1000 * trial + group[0]
        return Job([self.prompts[i] for i in group], self.args.max_tokens, seed, margins)

    def _run(self, config: Config, job: Job) -> dict[str, Any]:
        run = self.contenders.run(config, job)
        return {
            "seconds": round(run.seconds, 4),
            "cpu_seconds": round(run.cpu_seconds, 3),
            "prompt_tokens": [len(prompt) for prompt in job.prompts],
            "ids": run.ids,
            "arrivals": run.arrivals,
            "target_passes": run.target_passes,
            "draft_passes": run.draft_passes,
            "counters": run.counters,
            "margins": [[round(margin, 6) for margin in line] for line in run.margins],
            "load_average": round(os.getloadavg()[0], 2),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def run_rows(args: argparse.Namespace) -> int:
    """`qwen.py run`. 0 when everything asked for is measured, 3 when the time was up first."""
    folders = [model_folder(path, args.dtype) for path in (args.target, args.draft)]
    limit = args.limit or (10 if args.dtype == "float32" else 20)
    prompts = rendered(args.prompts, folders[0], limit)
    args.out.mkdir(parents=True, exist_ok=True)
    with FileLock(args.out / "run.lock", timeout=0):
        settle_setup(args.out, _setup(args, folders))
        deadline = float("inf") if args.minutes is None else time.monotonic() + 60 * args.minutes
        contenders = Contenders(*folders, args.dtype, args.threads)
        measurement = Measurement(args, prompts, contenders, Rows(args.out), deadline)
        try:
            _all_rows(measurement)
        except TimeoutError:
            print(f"--minutes {args.minutes:g} are over; the same command goes on from here", file=sys.stderr)
            return 3
    return 0


def _all_rows(measurement: Measurement) -> None:
    exact = measurement.args.dtype == "float32"
    single = _wanted(measurement.args, batch_one((0.0,) if exact else (0.0, 1.0)))
    for prompt in range(len(measurement.prompts)):
        measurement.measure(single, (prompt,))
    if exact:
        return
    together = _wanted(measurement.args, batched(best_drafted(measurement.rows), BATCH))
    for first in range(0, len(measurement.prompts) - BATCH + 1, BATCH):
        measurement.measure(together, tuple(range(first, first + BATCH)))


def _wanted(args: argparse.Namespace, configs: list[Config]) -> list[Config]:
    return [c for c in configs if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in args.configs)]


def shuffled(configs: list[Config], key: str) -> list[Config]:
    """An order that depends on the key alone: a continued run goes on in the one it began with."""
    order = sorted(configs, key=lambda config: config.name)
    random.Random(key).shuffle(order)
    return order


def rendered(path: Path, folder: Path, limit: int) -> list[list[int]]:
    """Token ids of the first turns, in the target's chat template where it has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with path.open(encoding="utf-8") as file:
        texts = [json.loads(line)["turns"][0] for line in file if line.strip()][:limit]
    if len(texts) < limit:
        raise ValueError(f"--prompts: {path} has {len(texts)} prompts, --limit asks for {limit}")
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in texts]
    turns = [[{"role": "user", "content": text}] for text in texts]
    plain = [tokenizer.apply_chat_template(t, add_generation_prompt=True, tokenize=False) for t in turns]
    return [tokenizer.encode(text, add_special_tokens=False) for text in plain]


def _setup(args: argparse.Namespace, folders: list[Path]) -> dict[str, Any]:
    """What rows must share to be compared. No path and no name of a machine: the page prints it."""
    return describe_machine() | {
        "models": [path.name for path in (args.target, args.draft)],
        "configs": [_sum(folder / "config.json") for folder in folders],
        "prompts": args.prompts.name,
        "prompts_sha256": _sum(args.prompts),
        "dtype": args.dtype,
        "threads": args.threads,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
    }


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------------------- costs and the page


def measure_costs(args: argparse.Namespace) -> int:
    """`qwen.py costs`."""
    from costs import measure

    folders = [model_folder(path, args.dtype) for path in (args.target, args.draft)]
    args.out.mkdir(parents=True, exist_ok=True)
    result = measure(folders[0], folders[1], args.dtype, args.threads, args.repeats)
    (args.out / "costs.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def write_report(args: argparse.Namespace) -> int:
    """`qwen.py report`."""
    from page import write

    write(args.out, args.exact, args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
