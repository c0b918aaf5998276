"""Tiny prepared data and tiny runs for tests of the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun.target.base import Tokenizer
from forerun.target.fingerprint import template_hash, tokenizer_hash
from forerun.training.config import Chosen, choose
from forerun.training.data import Sample
from forerun.training.data.writer import write_dataset
from forerun.training.evaluation import Evaluation
from forerun.training.metrics import Usage
from forerun.training.step import StepReport

KIND = "training.linear:Linear"
SMALL = {
    "steps": 6, "tokens_per_step": 120, "micro_batch_tokens": 50, "learning_rate": 1e-2, "eval_every": 3,
    "eval_prompts": 2, "eval_tokens": 8, "save_every": 2, "threads": 1, "device": "cpu",
}  # fmt: skip
"""Settings of a run that takes a second."""


def sample(name: str, tokens: Sequence[int], prompt: int) -> Sample:
    """Everything after the prompt is learned."""
    mask = np.arange(len(tokens)) >= prompt
    return Sample(name, np.array(tokens, np.int32), mask)


def random_samples(count: int, vocab_size: int = 256, seed: int = 0, longest: int = 40) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [
        sample(f"s{i}", generator.integers(0, vocab_size, generator.integers(8, longest + 1)).tolist(), 4)
        for i in range(count)
    ]


def write_data(
    folder: Path, tokenizer: Tokenizer, samples: Iterable[Sample], held_out: float = 0.0, **template: Any
) -> Path:
    """As `forerun data prepare` writes it; `template` changes what the manifest says of the chat template."""
    folder.mkdir(parents=True)
    about = {
        "target": "tiny",
        "tokenizer": {"hash": tokenizer_hash(tokenizer)},
        "template": {"hash": template_hash(tokenizer), "options": {}, "rendered": 1, **template},
    }
    write_dataset(folder, ((one, one.id) for one in samples), lambda: about, held_out)
    return folder


def configured(
    target: Path | str, data: Path, out: Path, draft: dict[str, Any] | None = None, **changes: Any
) -> Chosen:
    """`SMALL` with changes, as flags; None takes one away."""
    flags = {**SMALL, "target": str(target), "data": str(data), "out": str(out), **changes}
    return choose(KIND, {name: value for name, value in flags.items() if value is not None}, draft or {})


def records(out: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


TIMES = {"seconds", "tokens_per_second", "peak_memory"}


def without_times(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be equal in two runs of the same thing."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


class Notes:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.chosen: Chosen | None = None
        self.reports: list[StepReport] = []
        self.evaluations: list[tuple[Evaluation, bool]] = []
        self.ended = False

    def settings(self, chosen: Chosen) -> None:
        self.chosen = chosen

    def note(self, text: str) -> None:
        self.texts.append(text)

    def begin(self, step: int, steps: int) -> None:
        self.first, self.steps = step, steps

    def stepped(self, report: StepReport, used: Usage) -> None:
        self.reports.append(report)

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        self.evaluations.append((evaluation, best))

    def end(self) -> None:
        self.ended = True
