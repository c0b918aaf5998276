"""Trains the embedded drafters with the commands a user has; run again, it goes on where it stopped.

    python recipes/embedded/drafters.py --out src/forerun/embedded --work DIR [--kinds eagle,eagle3,dflash,dspark]

prompts -> the target's own continuations -> data -> one run per kind on the same data and tokens -> OUT/KIND

`--answers` takes a file of `forerun data regenerate` that may still be growing: what is whole in it now is used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # what the recipes share

from commands import Command, flags, publish, run_or_exit, whole_lines

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
PROMPTS, ANSWER_TOKENS = 5200, 200
SAMPLING = ("--temperature", "0.8", "--seed", "1")
HELD_OUT = 0.03
LIMIT_MB = 48
"""Of all models in the package together."""

SHARED: dict[str, object] = {
    "tokens-per-step": 2048,
    "learning-rate": 2e-3,
    "optimizer": "muon",
    "mixed-precision": "bf16",
    "epochs": 3,
    "eval-prompts": 32,
    "draft.init": "target",
}
"""Settings of all kinds: equal terms."""
STORE_GB = 8
"""Bound of each store of features: half of a step would be the target's own passes."""
KINDS: dict[str, dict[str, object]] = {
    "eagle": {},
    "eagle3": {"draft.ttt-steps": 5},
    "dflash": {"draft.layers": 2, "draft.block-size": 8, "draft.anchors": 64},
    "dspark": {
        "draft.layers": 2, "draft.block-size": 7, "draft.anchors": 64, "draft.markov-rank": 64,
        "draft.ce-weight": 1.0, "draft.l1-weight": 0.0,
    },
}  # fmt: skip
"""Settings of their own. Soft cross entropy alone: it learns faster than an l1-heavy loss at this size."""


class Recipe:
    """The stages, each a no-op once its product lies in the work folder. Commands run there, with paths below it: the
    cards in the package then name no place of the machine that trained them."""

    def __init__(self, out: Path, work: Path, threads: int) -> None:
        self.out, self.work, self.threads = out, work, threads

    def samples(self, answers: Path | None = None) -> None:
        """Prepared data in work/data, of given answers or of the target's own to the recipe's prompts."""
        if (self.work / "data" / "train").exists():
            return
        if answers is None:
            answers = self.work / "answers.jsonl"
            self._answers()
        whole_lines(answers, self.work / "samples.jsonl")
        self._forerun("data", "prepare", "samples.jsonl", "--out", "data", "--held-out", HELD_OUT)

    def _answers(self) -> None:
        if not (self.work / "prompts.jsonl").exists():
            words = ["--out", "prompts.jsonl", "--tokenizer", self.out.resolve() / "target", "--count", PROMPTS]
            run_or_exit(Command([sys.executable, HERE / "drafter_prompts.py", *words], self.work))
        limits = ("--max-tokens", ANSWER_TOKENS, "--max-num-seqs", 64, "--threads", self.threads)
        self._forerun("data", "regenerate", "prompts.jsonl", "--out", "answers.jsonl", *SAMPLING, *limits)

    def train(self, kind: str) -> None:
        store = "blocks" if kind in ("dflash", "dspark") else kind  # these two read the same layers
        stored = {"feature-store": f"features/{store}", "store-gb": STORE_GB}
        settings = {**SHARED, **KINDS[kind], **stored, "threads": self.threads}
        self._forerun("train", kind, "--data", "data", "--out", kind, *flags(settings))
        private = [self.work.resolve(), ROOT, Path.home()]
        publish(self.work / kind / "best", self.out / kind, private)

    def check_size(self) -> None:
        """ValueError: the package's models are larger than it should be."""
        sizes = {
            folder.name: sum(file.stat().st_size for file in folder.iterdir())
            for folder in sorted(self.out.iterdir())
            if folder.is_dir() and folder.name != "__pycache__"
        }
        said = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items())
        print(f"models in the package, MB: {said}", file=sys.stderr)
        if sum(sizes.values()) > 1e6 * LIMIT_MB:
            raise ValueError(f"together they have more than {LIMIT_MB} MB: lower draft.markov-rank or draft.layers")

    def _forerun(self, *words: object) -> None:
        run_or_exit(Command.forerun(*words, cwd=self.work))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="package folder that holds target/ and receives KIND/")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: samples and runs")
    parser.add_argument("--answers", type=Path, help="answers that are there already, or are still being made")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--threads", type=int, default=1, help="more gain nothing on a target of this size")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(options.out, options.work, options.threads)
    try:
        recipe.samples(options.answers)
        for kind in options.kinds.split(","):
            recipe.train(kind)
        recipe.check_size()
    except ValueError as error:
        print(f"drafters.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
