"""Commands as processes of their own: streams, pipes, signals. All are forked off one that has imported everything."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.processes import Child, starter
from forerun.engine import Engine
from forerun.training.data.regenerate import AnswerFile, Regeneration
from training.test_data_regenerate import answerer, answers, prompts

Start = Callable[..., Child]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """`start("generate", ..)`: the command in a process of its own."""
    with starter() as begin:
        yield begin


def test_as_a_process(start: Start, tiny_qwen3_dir: Path) -> None:
    """Text on stdout, the rest on stderr, exit code 0."""
    common = ("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", "--max-tokens", 4, "--temperature", 0)
    done = start(*common, "--drafter", "ngram")
    assert done.stdout.read().endswith("\n")
    assert done.stderr.read().count("\n") == 1
    assert done.wait() == 0


@pytest.fixture
def endless(tiny_qwen3_dir: Path, tmp_path: Path) -> list[str]:
    """A command that streams far more text than a busy machine could finish before it is disturbed."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"x{i}"}) + "\n" for i in range(500)))
    flags = ["--target", str(tiny_qwen3_dir), "--prompts", str(file), "--max-tokens", "240", "--ignore-eos"]
    return ["generate", *flags]


def test_a_closed_pipe_is_quiet(start: Start, endless: list[str]) -> None:
    """The reader of our output goes away: no traceback, no message."""
    child = start(*endless)
    assert child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 141


def test_an_interrupt_ends_the_process_with_130(start: Start, endless: list[str]) -> None:
    """A real SIGINT in the middle of the text: what was printed stays, no traceback."""
    child = start(*endless)
    assert child.stdout.read(1)
    os.kill(child.pid, signal.SIGINT)
    child.stdout.read()
    assert "Traceback" not in child.stderr.read()
    assert child.wait() == 130


def test_a_killed_regeneration_leaves_a_file_to_go_on_with(start: Start, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a real run."""
    sources = prompts(tmp_path, *({"id": f"k{i}", "turns": [f"{i}"]} for i in range(60)))
    path = tmp_path / "answers.jsonl"
    flags = f"--target {tiny_qwen3_dir} --out {path} --temperature 0 --max-tokens 40 --ignore-eos --max-num-seqs 4"
    child = start("data", "regenerate", sources.names[0], *flags.split())
    try:
        deadline = time.monotonic() + 120
        while not (path.exists() and path.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    name = json.loads(path.read_bytes().split(b"\n")[0])["model"]
    run = Regeneration(sources)
    with Engine.load(str(tiny_qwen3_dir), max_num_seqs=4) as engine:
        by = answerer(engine, max_tokens=40, ignore_eos=True)
        with AnswerFile(path, name, by.sampling) as file:
            before = len(file.done)
            run.run(by, file)
    assert 0 < before < 60
    assert len(answers(tmp_path)) == 60
    assert run.answered == 60 - before
