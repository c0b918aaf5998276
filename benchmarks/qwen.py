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
import json
import sys
from pathlib import Path
from typing import Any

from contenders import batch_one, batched, model_folder, pair
from machine import cores, describe_machine
from measuring import Measurement, add_measuring_flags, rendered, run, sum_of
from summary import best_drafted

BATCH = 4
"""Prompts together in the second stage."""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
        return code
    except ValueError as error:
        print(f"qwen.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{run,costs,report}")
    measure = commands.add_parser("run", help="measure; a second call continues")
    _add_models(measure)
    measure.add_argument(
        "--prompts", type=Path, required=True, help='JSONL of {"turns": ["..."]}; the first turn is used'
    )
    measure.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    measure.add_argument("--limit", type=int, help="prompts (default 20; 10 in float32)")
    add_measuring_flags(measure)
    measure.set_defaults(command=run_rows)
    costs = commands.add_parser("costs", help="measure forward passes and bandwidth for the roofline")
    _add_models(costs)
    costs.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    costs.add_argument("--repeats", type=int, default=15)
    costs.set_defaults(command=measure_costs)
    report = commands.add_parser("report", help="write page, picture, JSON and CSV")
    report.add_argument("--out", type=Path, required=True, help="folder of the rows")
    report.add_argument("--exact", type=Path, help="folder of the float32 rows")
    report.add_argument("--page", type=Path, required=True, help="Markdown file; picture and data go beside it")
    report.add_argument("--remarks", type=Path, help="Markdown that follows the answers: what the numbers do not say")
    report.set_defaults(command=write_report)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="GGUF file or folder of safetensors")
    parser.add_argument("--draft", type=Path, required=True, help="the smaller model, likewise")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--threads", type=int, default=cores())


# --------------------------------------------------------------------------------------------------------------- rows


def run_rows(args: argparse.Namespace) -> int:
    """`qwen.py run`. 0 when everything asked for is measured, 3 when the time was up first."""
    folders = [model_folder(path, args.dtype) for path in (args.target, args.draft)]
    exact = args.dtype == "float32"
    prompts = dict(enumerate(rendered(args.prompts, folders[0], args.limit or (10 if exact else 20))))
    contenders = pair(*folders, args.dtype, args.threads)
    return run(args, _setup(args, folders), prompts, contenders, _all_rows, margins=exact)


def _all_rows(measurement: Measurement) -> None:
    exact = measurement.args.dtype == "float32"
    single = measurement.wanted(batch_one((0.0,) if exact else (0.0, 1.0)))
    for prompt in measurement.prompts:
        measurement.measure(single, (prompt,))
    if exact:
        return
    together = measurement.wanted(batched(best_drafted(measurement.rows), BATCH))
    for first in range(0, len(measurement.prompts) - BATCH + 1, BATCH):
        measurement.measure(together, tuple(range(first, first + BATCH)))


def _setup(args: argparse.Namespace, folders: list[Path]) -> dict[str, Any]:
    """What rows must share to be compared. No path and no name of a machine: the page prints it."""
    return describe_machine() | {
        "models": [path.name for path in (args.target, args.draft)],
        "configs": [sum_of(folder / "config.json") for folder in folders],
        "prompts": args.prompts.name,
        "prompts_sha256": sum_of(args.prompts),
        "dtype": args.dtype,
        "threads": args.threads,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
    }


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

    remarks = "" if args.remarks is None else args.remarks.read_text(encoding="utf-8")
    write(args.out, args.exact, args.page, remarks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
