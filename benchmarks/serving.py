"""`forerun serve` under a standard load tool, and what it adds to the bare engine.

    python benchmarks/serving.py load --target embedded --drafter ngram --drafter small --out results
    python benchmarks/serving.py overhead --target embedded --drafter ngram --drafter small --out results
    python benchmarks/serving.py report --out results --page docs/benchmarks/serving.md

`load` installs GuideLLM into a virtual environment under OUT (once) and runs it unchanged at every number of streams,
with drafts and without. `overhead` measures pairs of rounds: the same prompts through HTTP and by one call. Finished
results are on disk at once; the same command goes on where the last one ended. `report` makes the page from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import serving_overhead as overhead
from filelock import FileLock
from machine import cores, describe_machine
from rows import Rows, settle_setup
from serving_load import Load, measure, tool
from serving_process import served

import forerun
from forerun.errors import ForerunError


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
        return 0
    except (ValueError, RuntimeError, OSError, ForerunError) as error:
        print(f"serving.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{load,overhead,report}")
    load = commands.add_parser("load", help="GuideLLM against the server")
    _add_model_flags(load)
    load.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="requests at any time")
    load.add_argument("--requests", type=int, default=64, help="of each run")
    load.add_argument("--prompt-tokens", type=int, default=128)
    load.add_argument("--output-tokens", type=int, default=64)
    load.add_argument("--venv", type=Path, help="where GuideLLM lives; OUT/guidellm if not given")
    load.set_defaults(command=run_load)
    bare = commands.add_parser("overhead", help="the server and the bare engine in turn")
    _add_model_flags(bare)
    bare.add_argument("--prompts", type=Path, help='JSONL of {"prompt": "..."}; those of the package if not given')
    bare.add_argument("--concurrency", type=int, default=16)
    bare.add_argument("--max-tokens", type=int, default=64)
    bare.add_argument("--pairs", type=int, default=8, help="of each way of decoding")
    same = "how much is drafted; what adapts to measured times would decide differently on the two sides"
    bare.add_argument("--policy", default="fixed", help=same)
    bare.set_defaults(command=run_overhead)
    report = commands.add_parser("report", help="write page and JSON")
    report.add_argument("--out", type=Path, required=True)
    report.add_argument("--page", type=Path, required=True, help="Markdown file; its data goes beside it")
    report.set_defaults(command=write_report)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="embedded", help="as for forerun serve")
    again = {"action": "append", "default": [], "metavar": "DRAFTER"}
    parser.add_argument("--drafter", dest="drafters", **again, help="as for forerun serve; once for each")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")


def _setup(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What results depend on; names of models, not where they lie."""
    names = [label(name) for name in (args.target, *args.drafters)]
    models = {"target": names[0], "drafters": names[1:], "dtype": args.dtype, "threads": args.threads}
    return {**models, **more, "machine": describe_machine()}


def label(name: str) -> str:
    """Of a model, without the place where it lies; a trained drafter's folder is `best`, whatever it is."""
    place = Path(name)
    return f"{place.parent.name}/{place.name}" if place.name in ("best", "last") else place.name


def _flags(args: argparse.Namespace) -> list[str]:
    """Those of `forerun serve`. Nothing is cached between requests: every one of them is computed."""
    flags = ["--dtype", args.dtype, "--threads", str(args.threads), "--no-enable-prefix-caching"]
    for drafter in args.drafters:
        flags += ["--drafter", drafter]
    return [*flags, "--disable-log-stats", "--max-num-seqs", str(_seats(args)), "--max-queue", "1024"]


def _seats(args: argparse.Namespace) -> int:
    """Every stream has one: what is measured is not a queue."""
    return max(args.streams) if hasattr(args, "streams") else int(args.concurrency)


def _ways(args: argparse.Namespace) -> dict[str, bool]:
    return dict(overhead.WAYS) if args.drafters else {"plain": False}


# ---------------------------------------------------------------------------------------------------------------- load


def runs(ways: Iterable[str], loads: Iterable[Load]) -> list[tuple[str, Load]]:
    """In the order they are measured: both ways of a load behind each other, as near as they can be."""
    names = list(ways)
    return [(way, load) for load in loads for way in names]


def run_load(args: argparse.Namespace) -> None:
    """`serving.py load`."""
    folder = args.out / "load"
    loads = [Load(n, args.requests, args.prompt_tokens, args.output_tokens) for n in args.streams]
    settle_setup(folder, _setup(args, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens))
    with FileLock(folder / "run.lock", timeout=0):
        left = [(way, load) for way, load in runs(_ways(args), loads) if not _done(folder, way, load).exists()]
        if not left:
            return
        command = tool(args.venv or args.out / "guidellm")
        with served(args.target, _flags(args), folder / "server.log") as server:
            for drafted in _ways(args).values():
                overhead.served_round(server, ["warm"] * _seats(args), 8, drafted)
            for way, load in left:
                body = {} if overhead.WAYS[way] else {"speculative": False}
                report = folder / f"{_name(way, load)}.json"
                found = measure(command, server, _tokenizer(args), load, body, report)
                row = {"way": way, "load": dataclasses.asdict(load), **found}
                _done(folder, way, load).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
                rate = found["output_tokens_per_second"]["mean"]
                print(f"{way:8s} {load.streams:3d} streams: {rate:.1f} tokens/s", file=sys.stderr)


def _name(way: str, load: Load) -> str:
    return f"{way}-{load.streams}-streams-{load.requests}-requests"


def _done(folder: Path, way: str, load: Load) -> Path:
    """Written when a run is whole."""
    return folder / f"{_name(way, load)}.row.json"


def _tokenizer(args: argparse.Namespace) -> Path:
    """A folder that GuideLLM can count prompt tokens with."""
    import torch

    from forerun.target.load import resolve

    return resolve(args.target, args.dtype, torch.device("cpu"), None, False)[0].folder


# ------------------------------------------------------------------------------------------------------------ overhead


def run_overhead(args: argparse.Namespace) -> None:
    """`serving.py overhead`."""
    folder, prompts = args.out / "overhead", _prompts(args.prompts)
    for name in ("concurrency", "max_tokens", "pairs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(args, name)}")
    more = {"policy": args.policy, "concurrency": args.concurrency, "max_tokens": args.max_tokens}
    settle_setup(folder, _setup(args, **more, prompts=len(prompts)))
    with FileLock(folder / "run.lock", timeout=0):
        rows = Rows(folder)
        missing = [pair for pair in range(args.pairs) if _missing(rows, args, pair, len(prompts))]
        if not missing:
            return
        options = {"dtype": args.dtype, "threads": args.threads, "enable_prefix_caching": False}
        policy = {"policy": args.policy} if args.drafters else {}
        engine = forerun.Engine.load(args.target, args.drafters or None, max_num_seqs=_seats(args), **options, **policy)
        flags = [*_flags(args), *(word for name, value in policy.items() for word in (f"--{name}", value))]
        with engine, served(args.target, flags, folder / "server.log") as server:
            sides = {
                "bare": lambda *job: overhead.bare_round(engine, *job),
                "served": lambda *job: overhead.served_round(server, *job),
            }
            for side, way in ((side, way) for side in sides for way in _ways(args).values()):
                sides[side](prompts[: args.concurrency], 8, way)  # warm
            for pair in missing:
                _measure_pair(args, rows, prompts, sides, pair)


def _missing(rows: Rows, args: argparse.Namespace, pair: int, count: int) -> list[tuple[str, str]]:
    """(side, way) of a pair that are not measured yet. A pair with one side is measured again as a whole."""
    numbers = overhead.group(pair, args.concurrency, count)
    return [
        (side, way)
        for way in _ways(args)
        if not all((numbers, overhead.config(side, way), pair) in rows for side in overhead.SIDES)
        for side in overhead.order(pair)
    ]


def _measure_pair(args: argparse.Namespace, rows: Rows, prompts: Sequence[str], sides: Any, pair: int) -> None:
    numbers = overhead.group(pair, args.concurrency, len(prompts))
    for side, way in _missing(rows, args, pair, len(prompts)):
        found = sides[side]([prompts[i] for i in numbers], args.max_tokens, overhead.WAYS[way])
        rows.append({"prompts": list(numbers), "config": overhead.config(side, way), "trial": pair, **found})
        rate = found["tokens"] / found["seconds"]
        print(f"pair {pair:2d}  {way:8s} {side:7s} {rate:8.1f} tokens/s", file=sys.stderr)


def _prompts(path: Path | None) -> list[str]:
    """ValueError: the file holds none."""
    from importlib.resources import files

    source = path or files("forerun") / "embedded" / "prompts.jsonl"
    found = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError(f'--prompts: {path}: line {number} has no "prompt" that is a text')
            found.append(row["prompt"])
    if not found:
        raise ValueError(f"--prompts: {path} holds none")
    return found


def write_report(args: argparse.Namespace) -> None:
    """`serving.py report`."""
    from serving_page import write

    write(args.out, args.page)


if __name__ == "__main__":
    sys.exit(main())
