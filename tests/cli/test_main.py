"""The table of commands, flags of other engines, and `python -m forerun`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Run
from forerun import __version__
from forerun.cli.foreign import FLAGS, TRAINING
from forerun.cli.main import COMMANDS

Refused = Callable[..., str]

HELPS = """
import sys
from forerun.cli.main import main
for args in {commands}:
    code = main([*args, "--help"])
    heavy = {{"torch", "transformers", "numpy"}} & set(sys.modules)
    if code or heavy:
        sys.exit(f"forerun {{' '.join(args)}} --help: exit code {{code}}, loads {{heavy}}")
"""


def process(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A real run of `python -m forerun`."""
    command = [sys.executable, "-m", "forerun", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore


def test_help_does_not_import_torch() -> None:
    """Help is a matter of a moment: neither torch nor transformers nor numpy is loaded for that of any command."""
    code = HELPS.format(commands=[[], *([name] for name in COMMANDS)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: forerun") == 1 + len(COMMANDS)


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


def test_flags_of_other_trainers_are_translated(refused: Refused, run: Run) -> None:
    """For `train` alone, to flags that it has; beside an engine `--resume` and `--batch-size` mean something else."""
    import re

    known = set(re.findall(r"--[\w-]+", run("train", "--help").out))
    for flag, answer in TRAINING.items():
        assert refused("train", "dspark", flag, 3) == f"{flag}: {answer}"
        assert known.issuperset(re.findall(r"--[\w-]+", answer)), answer
    assert refused("bench", "--batch_size", 3) == "--batch_size: unknown option; did you mean '--batch'?"


def test_what_the_operating_system_refuses_is_one_line(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where nobody thought of it: a disk that is full in the middle of writing, a file that went away."""

    def fails() -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "rows.jsonl"))

    monkeypatch.setattr("forerun.cli.demo.demo", fails)
    assert refused("demo") == f"{tmp_path / 'rows.jsonl'}: No space left on device"


def test_a_missing_value_and_a_stray_argument(refused: Refused) -> None:
    """What typer itself refuses is one line too."""
    assert refused("generate", "--prompt").startswith("--prompt: ")
    line = refused("generate", "--prompt", "x", "stray", "words")
    assert line == "unexpected extra 'stray words': generate takes options only; quote a value that has blanks"
    line = refused("doctor", "embedded", "ngram", "stray")
    assert line == "unexpected extra 'stray': doctor takes TARGET DRAFTER and options; quote a value that has blanks"


def test_a_wrong_value_of_a_process() -> None:
    """As `python -m forerun`: one line on stderr, nothing on stdout, exit code 2."""
    wrong = process("generate", "--prompt", "def f", "--top-p", 0)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: --top-p: must be in (0, 1], got 0.0\n"
