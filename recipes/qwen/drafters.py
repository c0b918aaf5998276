"""Trains `eagle3`, `dflash` and `dspark` for Qwen2.5-Coder 0.5B on equal terms; run again, it goes on where it stopped.

    python recipes/qwen/drafters.py --target models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --work DIR

prompts -> the target's own answers -> data -> features, once for all -> a trial of each kind -> a run of each kind, all
on the same samples in the same order, of the same processor time -> the best DSpark checkpoint as an artefact

Every stage is skipped once its product lies in DIR; Ctrl-C and SIGTERM write a checkpoint first. `--answers` takes a
file of `forerun data regenerate` that may still be growing: what is whole in it now is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # what the recipes share

from commands import TRIAL, Command, flags, pace_of, publish, run_or_exit, setting, store_of, whole_lines
from sizes import Measures, check_size

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
ARTEFACT = ROOT / "artefacts" / "qwen2.5-coder-0.5b-instruct-dspark"
PROMPTS, ANSWER_TOKENS, MAX_LENGTH = 6000, 320, 1024
SAMPLING = ("--temperature", "0.7", "--seed", "1")
HELD_OUT = 0.03
EVALUATIONS = 8
"""In a run; the last one comes after the budget."""

SHARED: dict[str, object] = {
    "optimizer": "muon",
    "learning-rate": 6e-4,
    "tokens-per-step": 2048,
    "micro-batch-tokens": 2048,
    "mixed-precision": "bf16",
    "dtype": "bfloat16",
    "seed": 0,
    "eval-prompts": 16,
    "eval-tokens": 64,
    "draft.taps": "2,7,12,17,22",
    "draft.draft-vocab-size": 16_384,
}
"""Settings of all kinds: equal terms. One store serves all of them, since all read the same taps. Small steps: a run
has few, and the noise of a step's few samples is not yet what limits it."""
BLOCKS: dict[str, object] = {"draft.layers": 3, "draft.intermediate-size": 1824, "draft.anchors": 128}
KINDS: dict[str, dict[str, object]] = {
    "eagle3": {"draft.ttt-steps": 5},
    "dflash": {**BLOCKS, "draft.block-size": 6},
    "dspark": {
        **BLOCKS, "draft.block-size": 5, "draft.markov-rank": 32, "draft.ce-weight": 1.0, "draft.l1-weight": 0.0,
    },
}  # fmt: skip
"""Settings of their own. Blocks of 5 drafts each: with this much training a sixth is hardly ever accepted, and each
slot costs the same. Feed-forward parts and Markov rank are what 60 MB allow with a third layer, which is worth most
(docs/benchmarks/ablations.md). Soft cross entropy alone: in short trials it learned faster than an l1-heavy loss. The
start is fitted (the default), which 2e-3 would undo (docs/benchmarks/qwen-starts.md)."""


@dataclass
class Recipe:
    """The stages."""

    target: Path
    work: Path
    answers: Path | None
    artefact: Path | None
    options: argparse.Namespace

    def __post_init__(self) -> None:
        """Commands run in the work folder, with paths below it: cards and manifests then name no place of a machine."""
        if not self.target.exists():
            raise ValueError(f"--target: {self.target} does not exist; benchmarks/fetch.py qwen-0.5b fetches it")
        self.model = Path("models") / self.target.name
        link = self.work / self.model
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(self.target.resolve())
        if link.resolve() != self.target.resolve():
            raise ValueError(f"--work: {self.work} was begun with {link.resolve().name}; name another folder")

    def settings(self, kind: str) -> dict[str, object]:
        """Of a kind, `--set` included."""
        given = dict(setting(text) for text in self.options.set)
        own = SHARED | KINDS[kind]
        # What one kind alone knows goes to that one; a misspelt name goes to all, and `forerun train` refuses it.
        known = [name for name in given if name in own or not any(name in other for other in KINDS.values())]
        return own | {name: given[name] for name in known} | {"threads": self.options.threads}

    def check_size(self) -> None:
        """ValueError: the artefact would be too large. Before anything is computed, not after the training."""
        size = check_size(self._measures, self.settings("dspark"), 1e6 * self.options.limit_mb)
        print(f"the DSpark artefact will have {size / 1e6:.1f} MB", file=sys.stderr)

    @cached_property
    def _measures(self) -> Measures:
        from transformers import AutoConfig

        from forerun.target.gguf import converted

        folder = self.target
        if not folder.is_dir():
            import torch

            folder = converted(self.target, torch.bfloat16)
        return Measures.of(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config())

    # ---------------------------------------------------------------------------------------------------------- stages

    def prompts(self) -> None:
        if self.answers is None and not (self.work / "prompts.jsonl").exists():
            words = [sys.executable, HERE / "prompts.py", "--out", "prompts.jsonl", "--count", self.options.prompts]
            run_or_exit(Command(words, self.work))

    def answer(self) -> None:
        if self.answers is None and not self._prepared:
            limits = ("--max-tokens", ANSWER_TOKENS, "--max-num-seqs", 64, "--threads", self.options.threads)
            asked = ("--target", self.model, "--out", "answers.jsonl", *SAMPLING, *limits)
            self._forerun("data", "regenerate", "prompts.jsonl", *asked)

    def data(self) -> None:
        if self._prepared:
            return
        count = whole_lines(self.answers or self.work / "answers.jsonl", self.work / "samples.jsonl")
        if count < self.options.least:
            raise ValueError(f"--least: there are {count} answers so far, and {self.options.least} are asked for")
        print(f"{count} answers are learned from", file=sys.stderr)
        limits = ("--held-out", HELD_OUT, "--max-length", MAX_LENGTH)
        self._forerun("data", "prepare", "samples.jsonl", "--target", self.model, "--out", "data", *limits)

    def held_out(self) -> None:
        """Prompts that no drafter has learned from, to calibrate on: `forerun calibrate --prompts`."""
        file = self.work / "held_out.jsonl"
        ids = (self.work / "data" / "held_out" / "ids.jsonl").read_text(encoding="utf-8").splitlines()
        kept = {json.loads(line) for line in ids}
        samples = map(json.loads, (self.work / "samples.jsonl").read_text(encoding="utf-8").splitlines())
        asked = [{"id": one["id"], "messages": one["messages"][:-1]} for one in samples if one["id"] in kept]
        lines = "".join(json.dumps(one) + "\n" for one in asked)
        if file.exists() and file.read_text(encoding="utf-8") == lines:
            return
        new = file.with_suffix(".new")
        new.write_text(lines, encoding="utf-8")
        new.replace(file)

    @property
    def _prepared(self) -> bool:
        return (self.work / "data" / "train").exists()

    def features(self) -> None:
        """Into a store that all runs share: the first one would otherwise pay for the others."""
        place = self._store
        done = place.with_suffix(".jsonl")
        if (self.work / done).exists():
            return
        words = ["--target", self.model, "--data", "data", "--taps", self._taps, "--store", place, "--report", done]
        words += [*self._bound, "--threads", self.options.threads]
        run_or_exit(Command([sys.executable, HERE / "features.py", *words], self.work))

    @property
    def _taps(self) -> str:
        taps = {str(self.settings(kind)["draft.taps"]) for kind in self.options.kinds}
        if len(taps) > 1:
            raise ValueError(f"--set draft.taps: a store holds one choice of taps, not {' and '.join(sorted(taps))}")
        return taps.pop()

    @property
    def _store(self) -> Path:
        return store_of(self._taps)

    @property
    def _bound(self) -> tuple[object, ...]:
        return "--store-gb", self.options.store_gb, "--store-dtype", self.options.store_dtype

    def train(self) -> None:
        for kind in self.options.kinds:
            self._train(kind)

    def _train(self, kind: str) -> None:
        budget, name = 60 * self.options.cpu_minutes, self._name(kind)
        steps = self._steps(kind, budget)
        every = {"steps": steps, "eval-every": -(-steps // EVALUATIONS), "cpu-seconds": f"{budget:g}"}
        self._forerun("train", kind, "--out", Path("runs") / name, *self._learning(kind), *flags(every))

    def _steps(self, kind: str, budget: float) -> int:
        """Planned once, by a short trial, and kept: the learning rate of a run goes by them."""
        file = self.work / "trials" / f"{self._name(kind)}.json"
        if not file.exists():
            trial = Path("trials") / self._name(kind)
            self._forerun("train", kind, "--out", trial, *self._learning(kind), *flags(dict(TRIAL)))
            pace = pace_of(self.work / trial)
            plan = {**vars(pace), "cpu_seconds": budget, "steps": pace.steps(budget, EVALUATIONS)}
            file.write_text(json.dumps(plan) + "\n", encoding="utf-8")
        plan = json.loads(file.read_text(encoding="utf-8"))
        if plan["cpu_seconds"] != budget:
            raise ValueError(
                f"--cpu-minutes: {file} was planned for {plan['cpu_seconds'] / 60:g}, {budget / 60:g} are asked for; "
                "name another --variant"
            )
        said = f"{plan['step']:.2f} CPU-seconds a step, {plan['evaluation']:.0f} an evaluation"
        print(f"{kind}: {said}, {plan['steps']} steps planned", file=sys.stderr)
        steps: int = plan["steps"]
        return steps

    def _learning(self, kind: str) -> list[object]:
        """What a trial and its run have in common."""
        return [*self._place, *flags(self.settings(kind))]

    @property
    def _place(self) -> list[object]:
        return ["--target", self.model, "--data", "data", "--feature-store", self._store, *self._bound]

    def _name(self, kind: str) -> str:
        return kind if self.options.variant is None else f"{kind}-{self.options.variant}"

    def starts(self) -> None:
        """How good each kind is before it is taught: a run of one step that moves next to nothing, for each start."""
        for kind in self.options.kinds:
            for init in ("fitted", "target", "random"):
                still = {**self.settings(kind), "learning-rate": "1e-12", "draft.init": init, "steps": 1}
                out = Path("starts") / f"{kind}-{init}"
                self._forerun("train", kind, "--out", out, *self._place, *flags(still))

    def export(self) -> None:
        """The best checkpoint of DSpark; of a variant only where --artefact says to what place."""
        if "dspark" not in self.options.kinds or self.artefact is None:
            return
        best = self.work / "runs" / self._name("dspark") / "best"
        limit = 1e6 * self.options.limit_mb
        size = (best / "model.safetensors").stat().st_size
        if size > limit:
            raise ValueError(f"{best} has {size / 1e6:.1f} MB, --limit-mb allows {self.options.limit_mb:g}")
        private = [self.work.resolve(), self.target.resolve().parent, ROOT, Path.home()]
        size = publish(best, self.artefact, private)
        print(f"{self.artefact}: {size / 1e6:.1f} MB", file=sys.stderr)

    def _forerun(self, *words: object) -> None:
        run_or_exit(Command.forerun(*words, cwd=self.work))


STAGES: dict[str, Callable[[Recipe], None]] = {
    "prompts": Recipe.prompts,
    "answers": Recipe.answer,
    "data": Recipe.data,
    "held-out": Recipe.held_out,
    "features": Recipe.features,
    "starts": Recipe.starts,
    "train": Recipe.train,
    "export": Recipe.export,
}
ASIDE = ("starts",)
"""Not on the way to the artefact: only where it is asked for."""


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    options.kinds, stages = options.kinds.split(","), options.stages.split(",")
    try:
        for name, known in ((",".join(options.kinds), KINDS), (options.stages, STAGES)):
            odd = set(name.split(",")) - known.keys()
            if odd:
                raise ValueError(f"{', '.join(sorted(odd))}: there are {', '.join(known)}")
        work = options.work
        work.mkdir(parents=True, exist_ok=True)
        artefact = options.artefact or (ARTEFACT if options.variant is None else None)
        recipe = Recipe(options.target, work, options.answers, artefact, options)
        if "dspark" in options.kinds:
            recipe.check_size()
        for stage in stages:
            print(f"stage {stage}", file=sys.stderr, flush=True)
            STAGES[stage](recipe)
    except ValueError as error:
        print(f"drafters.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="GGUF file (benchmarks/fetch.py) or folder")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: samples, features, runs")
    parser.add_argument("--answers", type=Path, help="answers that are there already, or are still being made")
    parser.add_argument("--least", type=int, default=1000, help="answers that are worth training on")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts to make where no --answers are given")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--stages", default=",".join(stage for stage in STAGES if stage not in ASIDE))
    parser.add_argument(
        "--cpu-minutes", type=float, default=180, help="processor time of each run, all threads together"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store-gb", type=float, default=30, help="bound of the feature store")
    parser.add_argument("--store-dtype", choices=("bfloat16", "fp8"), default="bfloat16")
    parser.add_argument("--limit-mb", type=float, default=60, help="of the artefact, in 10^6 bytes")
    parser.add_argument("--artefact", type=Path, metavar="DIR", help=f"default: {ARTEFACT.relative_to(ROOT)}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of `forerun train`: draft.layers=1"
    )
    parser.add_argument("--variant", help="name of the runs that --set or another budget makes: runs/KIND-VARIANT")
    return parser


if __name__ == "__main__":
    sys.exit(main())
