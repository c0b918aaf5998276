"""Is scheduled decoding ever slower than plain decoding, or than the best fixed K? The grid of cells, in the simulator.

    python benchmarks/never_slower.py run --out results
    python benchmarks/never_slower.py report --out results --page docs/simulation/never-slower.md

A finished row is on disk at once; the same command goes on where the last one ended, in an order that shuffles the
cells of a policy, so that a run that was stopped is a smaller grid and not a skewed one. Plain decoding and the fixed K
of a cell are simulated once for all policies. A row is a function of its cell, the effort and the code: no time is
measured, so whatever else runs on the machine does not matter. `report` makes the page from what is there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import never_slower_grid as grid
import numpy as np
from filelock import FileLock
from rows import Rows, settle_setup

import forerun
from forerun.errors import ForerunError

Job = tuple[grid.Cell, dict[str, float] | None]
"""A cell, and its baselines where they are known."""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        args.command(args)
        return 0
    except (ValueError, ForerunError) as error:
        print(f"never_slower.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="{run,report}")
    run = commands.add_parser("run", help="simulate cells of the grid")
    run.add_argument("--out", type=Path, required=True, help="folder of the rows")
    run.add_argument("--effort", type=float, default=2.0, help="factor on the tokens that are decoded (%(default)s)")
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--seeds", type=_integers, default=(0,), metavar="LIST", help="of the texts (0)")
    for name, values in _CHOICES.items():
        known = ",".join(map(str, values))
        run.add_argument(f"--{name}", type=_listed(values), default=values, metavar="LIST", help=f"of {known}")
    run.set_defaults(command=run_grid)
    report = commands.add_parser("report", help="write page and JSON")
    report.add_argument("--out", type=Path, required=True)
    report.add_argument("--page", type=Path, required=True, help="Markdown file")
    report.add_argument("--json", type=Path, help="its data; beside the page if not given")
    report.set_defaults(command=write_report)
    return parser


_CHOICES: dict[str, Sequence[Any]] = {
    "policies": grid.POLICIES,
    "drafters": tuple(grid.DRAFTERS),
    "requests": grid.REQUESTS,
    "curves": tuple(grid.CURVES),
    "acceptances": grid.ACCEPTANCES,
}


def _listed(values: Sequence[Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of lists of these values."""
    known = {f"{value:g}" if isinstance(value, float) else str(value): value for value in values}

    def parsed(text: str) -> tuple[Any, ...]:
        strange = [name for name in text.split(",") if name not in known]
        if strange:
            raise argparse.ArgumentTypeError(f"{strange[0]!r} is none of {', '.join(known)}")
        return tuple(known[name] for name in text.split(","))

    return parsed


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


# ----------------------------------------------------------------------------------------------------------------- run


def run_grid(args: argparse.Namespace) -> None:
    """`never_slower.py run`."""
    for name in ("effort", "processes"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}: must be positive, got {getattr(args, name)}")
    versions = {"forerun": forerun.__version__, "numpy": np.__version__}
    settle_setup(args.out, {"effort": args.effort, "code": _code(), **versions})
    measured = functools.partial(_measured, effort=args.effort)
    with FileLock(args.out / "run.lock", timeout=0), _workers(args.processes) as each:
        rows = Rows(args.out, grid.cell_of)
        for policy in args.policies:
            # What the last policy simulated is in the rows by now.
            for row in each(measured, list(_missing(args, policy, rows))):
                rows.append(row)
                _say(len(rows), row)


def _code() -> str:
    """sha256 over what a row is a function of: scheduler, simulator and grid, by name and content."""
    package = Path(forerun.__file__).parent
    files = [file for part in ("budget", "bench/simulate") for file in (package / part).rglob("*.py")]
    files += [package / name for name in ("bench/load/arrivals.py", "engine/admission.py", "engine/request.py")]
    digest = hashlib.sha256()
    for path in [*sorted(files), Path(grid.__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _missing(args: argparse.Namespace, policy: str, rows: Rows) -> Iterator[Job]:
    """Cells of a policy that have no row, in an order that depends on nothing but their names."""
    chosen = (args.curves, args.drafters, args.acceptances, args.requests)
    cells = [cell for seed in args.seeds for cell in grid.cells(policy, seed, *chosen)]
    for cell in sorted(set(cells), key=lambda cell: random.Random(str(cell)).random()):
        if cell not in rows:
            others = (rows.get(replace(cell, policy=other)) for other in grid.POLICIES)
            yield cell, next((row["baselines"] for row in others if row), None)


def _measured(job: Job, effort: float) -> grid.Row:
    cell, known = job
    return grid.measure(cell, effort, known)


@contextmanager
def _workers(processes: int) -> Iterator[Callable[..., Iterator[grid.Row]]]:
    """A `map` over so many processes, whose results come as they are ready."""
    if processes == 1:
        yield map
    else:
        with multiprocessing.Pool(processes) as pool:
            yield pool.imap_unordered


def _say(count: int, row: grid.Row) -> None:
    found = grid.compared(row)
    place = " ".join(f"{row[name]!s:8s}" for name in ("policy", "curve", "drafter", "acceptance", "requests"))
    ratios = f"{found['over_plain']:.3f} of plain, {found['over_best_fixed']:.3f} of {found['best_fixed']}"
    print(f"{count:4d}  {place} {ratios}", file=sys.stderr, flush=True)


def write_report(args: argparse.Namespace) -> None:
    """`never_slower.py report`."""
    from never_slower_page import write

    write(args.out, args.page, args.json or args.page.with_suffix(".json"))


if __name__ == "__main__":
    sys.exit(main())
