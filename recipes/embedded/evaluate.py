"""The page of the embedded drafters: all of them beside `ngram` and `small`, on prompts from the held-out modules.

    python recipes/embedded/evaluate.py --work DIR --page docs/benchmarks/embedded.md [--runs DIR]

`benchmarks/learned.py` with the flags of this page: rows go to DIR and are measured once; --runs is the work folder of
`drafters.py`, for what training took. Further flags of its `run` may follow, such as `--minutes 20`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # what the recipes share

from commands import Command, run_or_exit

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "learned.py"
PACKAGE = ROOT / "src" / "forerun" / "embedded"
KINDS = ("eagle", "eagle3", "dflash", "dspark")


def measuring(work: Path, kinds: Sequence[str], further: Sequence[str]) -> list[object]:
    """The command that measures. One thread: more gain nothing on a target of this size."""
    absent = [kind for kind in kinds if not (PACKAGE / kind / "model.safetensors").is_file()]
    if absent:
        raise ValueError(f"--kinds: the package has no {', '.join(absent)}; train with recipes/embedded/drafters.py")
    drafters = [word for method in ("ngram", "small", *kinds) for word in ("--drafter", method)]
    prompts = ("--set", f"held-out={PACKAGE / 'prompts.jsonl'}:40")
    limits = ("--threads", 1, "--max-tokens", 96)
    return [
        sys.executable,
        PROGRAM,
        "run",
        "--target",
        "embedded",
        *drafters,
        *prompts,
        *limits,
        "--out",
        work,
        *further,
    ]


def reporting(work: Path, page: Path, runs: Path | None, remarks: Path | None, kinds: Sequence[str]) -> list[object]:
    """The command that writes the page."""
    trained = [] if runs is None else [word for kind in kinds for word in ("--trained", f"{kind}={runs / kind}")]
    said = [] if remarks is None else ["--remarks", remarks]
    title = ("--title", "The embedded drafters")
    return [sys.executable, PROGRAM, "report", "--out", work, "--page", page, *title, *trained, *said]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file; pictures and data go beside it")
    parser.add_argument("--runs", type=Path, help="work folder of recipes/embedded/drafters.py")
    parser.add_argument("--remarks", type=Path, help="Markdown for what the numbers do not say")
    parser.add_argument("--kinds", default=",".join(KINDS))
    options, further = parser.parse_known_args()
    kinds = options.kinds.split(",")
    try:
        run_or_exit(Command(measuring(options.work.resolve(), kinds, further), ROOT))
        runs, remarks = (None if path is None else path.resolve() for path in (options.runs, options.remarks))
        words = reporting(options.work.resolve(), options.page.resolve(), runs, remarks, kinds)
        run_or_exit(Command(words, ROOT))
    except ValueError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
