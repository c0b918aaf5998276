"""Trains the embedded drafters with the commands a user has; run again, it goes on where it stopped.

python recipes/embedded/drafters.py --out src/forerun/embedded --work DIR [--kinds eagle,eagle3,dflash,dspark]

prompts -> the target's own continuations -> data -> one run per kind on the same data and tokens -> OUT/KIND
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

PROMPTS, ANSWER_TOKENS = 8000, 200
SAMPLING = ("--temperature", "0.8", "--seed", "1")
HELD_OUT = 0.03

SHARED = {
    "tokens-per-step": 2048,
    "learning-rate": 2e-3,
    "optimizer": "muon",
    "mixed-precision": "bf16",
    "epochs": 4,
    "eval-prompts": 32,
}
"""Settings of all kinds: equal terms."""
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


def forerun(*words: object) -> None:
    """A command, with its output; ends this program as it ended if it failed or was stopped."""
    command = [sys.executable, "-m", "forerun", *map(str, words)]
    print("$ forerun", *map(str, words), file=sys.stderr, flush=True)
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        sys.exit(code)


class Recipe:
    """The stages, each a no-op once its product lies in the work folder."""

    def __init__(self, out: Path, work: Path, threads: int) -> None:
        self.out, self.work, self.threads = out, work, threads
        self.answers, self.data = work / "answers.jsonl", work / "data"

    def samples(self) -> None:
        prompts = self.work / "prompts.jsonl"
        if not prompts.exists():
            maker = Path(__file__).parent / "drafter_prompts.py"
            words = ["--out", prompts, "--tokenizer", self.out / "target", "--count", PROMPTS]
            subprocess.run([sys.executable, maker, *map(str, words)], check=True)
        if not (self.data / "train").exists():
            limits = ("--max-tokens", ANSWER_TOKENS, "--max-num-seqs", 64, "--threads", self.threads)
            forerun("data", "regenerate", prompts, "--out", self.answers, *SAMPLING, *limits)
            forerun("data", "prepare", self.answers, "--out", self.data, "--held-out", HELD_OUT)

    def train(self, kind: str) -> None:
        run = self.work / kind
        settings = {**SHARED, **KINDS[kind], "threads": self.threads}
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        forerun("train", kind, "--data", self.data, "--out", run, *words)
        self._publish(kind, run / "best")

    def _publish(self, kind: str, best: Path) -> None:
        """The best drafter into the package; the name of its target there is the one users type."""
        config = json.loads((best / "config.json").read_text(encoding="utf-8"))
        assert config["target_name"] == "embedded", config["target_name"]
        folder = self.out / kind
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        for name in ("config.json", "model.safetensors", "README.md"):
            shutil.copyfile(best / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="package folder that holds target/ and receives KIND/")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: samples and runs")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--threads", type=int, default=1, help="more gain nothing on a target of this size")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(options.out, options.work, options.threads)
    recipe.samples()
    for kind in options.kinds.split(","):
        recipe.train(kind)


if __name__ == "__main__":
    main()
