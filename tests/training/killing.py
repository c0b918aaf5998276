"""`python killing.py '{"target": .., "data": .., "out": .., "places": [..]}'`: training processes that are killed.

One process imports everything and forks a child for each run, so that many real kills cost one start. Prints, as JSON,
how the children of each place ended: the one that was killed and the one that went on.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forerun.cli.main import main
from forerun.target.load import load_target
from forerun.training import checkpoints, trainer
from forerun.training.evaluation import Evaluator
from forerun.training.metrics import MetricsLog
from training.linear import Linear
from training.runs import KIND, SMALL

SETTINGS = {**SMALL, "eval_prompts": 1, "eval_tokens": 4, "eval_temperature": "1", "ema": 0.9, "keep": 1}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, owner: Any, name: str, last_words: Callable[..., None] = lambda *_: None) -> None:
    """Dies in the given call of a function, after some last words."""
    own, calls = getattr(owner, name), []

    def wrapped(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            last_words(*args)
            die()
        return own(*args, **options)

    setattr(owner, name, wrapped)


def half_a_file(tensors: Any, path: Path) -> None:
    from safetensors.torch import save

    content = save(tensors)
    path.write_bytes(content[: len(content) // 2])


def half_a_line(log: MetricsLog, record: Any) -> None:
    line = json.dumps(record)
    log._file.write(line[: len(line) // 2].encode())
    log._file.flush()


PLACES: dict[str, Callable[[], None]] = {
    "before the first step": lambda: at_call(1, Linear, "losses"),
    "between two micro-batches": lambda: at_call(9, Linear, "losses"),
    "right after the optimiser": lambda: at_call(4, trainer.Trainer, "_record"),
    "in a line of the metrics": lambda: at_call(6, MetricsLog, "write", half_a_line),
    "in an evaluation": lambda: at_call(1, Evaluator, "_decode"),
    "in the file of a checkpoint": lambda: at_call(2, checkpoints, "save_file", half_a_file),
    "before a checkpoint has its name": lambda: at_call(2, Path, "rename"),
    "while an old checkpoint goes": lambda: at_call(4, checkpoints.shutil, "rmtree", remove_one),
    "between drafter and card": lambda: at_call(2, trainer, "write_card"),
}


def small_files() -> None:
    """No file may become as large as a checkpoint: what a full disk does, by the system itself."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAILURES = {"no room for a checkpoint": (small_files, 1)}
"""place -> how it comes about, and the exit code."""


def remove_one(folder: Path, *_: Any) -> None:
    files = sorted(Path(folder).iterdir()) if Path(folder).exists() else []
    for file in files[:1]:
        file.unlink()


def run(job: dict[str, Any], out: str, sabotage: Callable[[], None] | None = None) -> int:
    """A training process; its wait status."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if sabotage is not None:
            sabotage()
        os._exit(main(arguments(job, out)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def arguments(job: dict[str, Any], out: str) -> list[str]:
    flags = {**SETTINGS, "target": job["target"], "data": job["data"], "out": f"{job['out']}/{out}"}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", KIND, *words]


def terminated(job: dict[str, Any], out: str, number: int, lines: int) -> int:
    """A process that gets a signal once its metrics have some lines."""
    metrics = Path(job["out"]) / out / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at_each_step_wait(0.05)
        os._exit(main(arguments(job, out)))
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        time.sleep(0.01)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_each_step_wait(seconds: float) -> None:
    """So that a signal that comes from outside finds the run unfinished."""
    own = Linear.prepare

    def prepare(self: Linear, batch: Any, generator: Any) -> Any:
        time.sleep(seconds)
        return own(self, batch, generator)

    Linear.prepare = prepare  # type: ignore[method-assign]


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    load_target(job["target"])  # with it comes what every child would import for itself: most of what one takes
    ended: dict[str, list[int]] = {"whole": [run(job, "whole")]}
    for number, place in enumerate(job["places"]):
        out = f"run{number}"
        if place.startswith("SIG"):
            killed = terminated(job, out, getattr(signal, place), 2)
        else:
            killed = run(job, out, PLACES[place] if place in PLACES else FAILURES[place][0])
        ended[place] = [killed, run(job, out)]
    print(json.dumps(ended))
