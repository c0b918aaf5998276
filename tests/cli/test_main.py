"""The table of commands, flags of other engines, and `forerun` as a process."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Run
from forerun import __version__
from forerun.cli.foreign import FLAGS
from forerun.cli.main import COMMANDS

Refused = Callable[..., str]

IMPORTED = (
    "import sys; from forerun.cli.main import main; code = main({args}); print(*sorted(sys.modules)); sys.exit(code)"
)


def process(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A real run of `python -m forerun`."""
    command = [sys.executable, "-m", "forerun", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_does_not_import_torch(args: list[str]) -> None:
    """Help is a matter of a moment: neither torch nor transformers nor numpy is loaded for it."""
    code = IMPORTED.format(args=args)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *shown, modules = done.stdout.splitlines()
    assert not {"torch", "transformers", "numpy"} & set(modules.split())
    assert any("Usage: forerun" in line for line in shown)


def test_help_lists_every_command(run: Run) -> None:
    """Also without arguments."""
    for ran in (run("--help"), run()):
        assert ran.code == 0
        assert all(name in ran.out for name in COMMANDS)


def test_help_takes_under_a_second() -> None:
    """Processor time of the whole process, so that other work on the machine does not count."""
    before = os.times()
    assert process("--help").returncode == 0
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0


def test_version(run: Run) -> None:
    """The package's own."""
    assert run("--version").out == f"forerun {__version__}\n"


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS.values()])
def test_the_table_names_functions(path: str) -> None:
    """Every command can be imported, and says what it does."""
    module, _, name = path.partition(":")
    assert getattr(importlib.import_module(module), name).__doc__


def test_an_unknown_command_names_the_nearest(refused: Refused) -> None:
    """A typo of a command is one line."""
    assert refused("genrate") == "no command is called 'genrate'; did you mean 'generate'?"


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--temprature", "--temperature"),
        ("--max_tokens", "--max-tokens"),
        ("--topp", "--top-p"),
        ("--draftr", "--drafter"),
    ],
)
def test_an_unknown_flag_names_the_nearest(refused: Refused, typed: str, near: str) -> None:
    """Mistyped, or with vLLM's underscores."""
    assert refused("generate", "--prompt", "x", typed, 1) == f"{typed}: unknown option; did you mean '{near}'?"


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_engines_are_translated(refused: Refused, flag: str) -> None:
    """The answer says what to type here; `--x=value` and `--x_y` count as well."""
    for typed in ((flag, "3"), (f"{flag}=3",), (flag.replace("-", "_").replace("__", "--", 1), "3")):
        if flag.startswith("--") or typed == (flag, "3"):
            assert FLAGS[flag] in refused("generate", "--prompt", "x", *typed)


def test_a_translation_names_flags_that_exist(run: Run) -> None:
    """No advice leads to another unknown option."""
    import re

    known = set(re.findall(r"--[\w.-]+", run("generate", "--help").out))
    for answer in FLAGS.values():
        for flag in re.findall(r"--[\w-]+", answer):
            assert flag in known or any(k.startswith(flag) for k in known), (flag, answer)


def test_a_missing_value_and_a_stray_argument(refused: Refused) -> None:
    """What typer itself refuses is one line too."""
    assert refused("generate", "--prompt").startswith("--prompt: ")
    assert "extra" in refused("generate", "--prompt", "x", "stray")


# ----------------------------------------------------------------------------------------------------- real processes


def test_as_a_process(tiny_qwen3_dir: Path) -> None:
    """Text on stdout, the rest on stderr, exit code 0; a wrong value is one line and exit code 2."""
    common = ("generate", "--target", tiny_qwen3_dir, "--prompt", "def f", "--max-tokens", 4, "--temperature", 0)
    done = process(*common, "--drafter", "ngram")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stdout.endswith("\n")
    wrong = process(*common, "--top-p", 0)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: --top-p: must be in (0, 1], got 0.0\n"


def _long_generation(target: Path, folder: Path) -> subprocess.Popen[str]:
    """A process that streams far more text than a busy machine could finish before it is disturbed."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"x{i}"}) + "\n" for i in range(500)))
    args = ["generate", "--target", str(target), "--prompts", str(prompts), "--max-tokens", "240", "--ignore-eos"]
    return subprocess.Popen(
        [sys.executable, "-m", "forerun", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite run in the background of a shell inherits SIGINT as ignored, and so would the process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_closed_pipe_is_quiet(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """The reader of our output goes away: no traceback, no message."""
    process = _long_generation(tiny_qwen3_dir, tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert error == ""


def test_an_interrupt_ends_the_process_with_130(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A real SIGINT in the middle of the text: what was printed stays, no traceback."""
    process = _long_generation(tiny_qwen3_dir, tmp_path)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert first
    assert process.returncode == 130
    assert "Traceback" not in error
