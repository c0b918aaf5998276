"""Several processes, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun.target.load import load_target
from training.killing import arguments
from training.runs import random_samples, records, write_data

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def job(tiny_qwen3_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    data = write_data(folder / "data", load_target(tiny_qwen3_dir).tokenizer, random_samples(30), held_out=0.1)
    return {"target": str(tiny_qwen3_dir), "data": str(data), "out": str(folder)}


def command(processes: int, *args: str) -> list[str]:
    if processes == 1:
        return [sys.executable, "-m", "forerun", *args]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
    return [sys.executable, *torchrun, "-m", "forerun", *args]


def launch(processes: int, *args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command(processes, *args), **options)  # type: ignore[call-overload, no-any-return]


def finish(process: subprocess.Popen[str]) -> str:
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return error


@pytest.mark.slow
def test_two_processes_train_what_one_does(job):
    """Real processes over gloo: the same weights and losses to float32's rounding, every line of the metrics and every
    setting written once, and the evaluation is of the same samples."""
    errors = {n: finish(launch(n, *arguments(job, f"by{n}"))) for n in (1, 2)}
    folder = Path(job["out"])
    one, two = (load_file(folder / f"by{n}" / "last" / "model.safetensors") for n in (1, 2))
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6), name
    assert errors[2].count("learning-rate") == 1
    for event in ("step", "evaluation"):
        lines = [records(folder / f"by{n}", event) for n in (1, 2)]
        assert [r["step"] for r in lines[0]] == [r["step"] for r in lines[1]]
    losses = [[r["loss"] for r in records(folder / f"by{n}", "step")] for n in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_stop_together_and_go_on_as_one(job):
    """SIGTERM to the launcher reaches both; a checkpoint is written; one process alone ends the run where two would."""
    folder = Path(job["out"])
    long = ["--steps", "400", "--eval-every", "400", "--save-every", "400"]
    process = launch(2, *arguments(job, "stopped"), *long)
    metrics = folder / "stopped" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    [checkpoint] = (folder / "stopped" / "checkpoints").iterdir()
    steps = int(checkpoint.name.removeprefix("step-"))
    assert 5 <= steps < 400
    again = launch(1, *arguments(job, "stopped"), *long)
    while metrics.read_text().count("\n") < steps + 3:
        assert again.poll() is None, again.communicate()
        time.sleep(0.05)
    again.send_signal(signal.SIGTERM)
    assert again.wait(120) == 143
    assert [r["step"] for r in records(folder / "stopped", "step")][: steps + 2] == list(range(1, steps + 3))


@pytest.mark.slow
def test_two_processes_end_with_the_same_step(job):
    """Each has its own clock; where --cpu-seconds are used up, both take the step as their last one, and none waits for
    the other in vain."""
    finish(launch(2, *arguments(job, "budget"), "--steps", "4000", "--cpu-seconds", "4", "--eval-every", "4000"))
    folder = Path(job["out"]) / "budget"
    last = records(folder, "step")[-1]["step"]
    assert 1 <= last < 4000
    assert [r["step"] for r in records(folder, "evaluation")] == [last]
