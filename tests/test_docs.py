"""The examples of README and docs/ run, and give what they show.

A fenced block whose language is followed by the word `run` is executed: ```python run and ```console run. Blocks of one
file share a working folder and, in Python, their names. In a console block the lines after a `$ ` command are its
expected standard output, in which `...` stands for anything; without such lines only the exit code is checked, which
must be 0 unless the command ends with a comment `# exit 1`.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console) run[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SHELL = set("|<>&;$`*")


@dataclass(frozen=True)
class Example:
    """A command and what it should print; None: anything."""

    command: str
    expected: str | None
    codes: frozenset[int]


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every block that is marked as runnable."""
    return BLOCK.findall(text)


def examples(block: str) -> Iterator[Example]:
    """The commands of a console block; a line ending in a backslash goes on."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        command = lines.pop(0)
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        command, _, comment = command.partition(" # ")
        codes = re.findall(r"\d+", comment) if comment.startswith("exit ") else ["0"]
        expected = "\n".join(lines) if any(line.strip() for line in lines) else None
        yield Example(command.strip(), expected, frozenset(map(int, codes)))


def run_command(command: str) -> tuple[int, str]:
    """Exit code and standard output. A plain `forerun` command runs here: a process would import torch every time."""
    words = shlex.split(command)
    if words[0] == "forerun" and not SHELL & set(command):
        from forerun.cli.main import main

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main(words[1:])
        return code, out.getvalue()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    return done.returncode, done.stdout


def check(example: Example) -> None:
    code, out = run_command(example.command)
    assert code in example.codes, (example.command, code)
    if example.expected is None:
        return
    checker = doctest.OutputChecker()
    wanted = f"{example.expected.strip()}\n"
    fine = checker.check_output(wanted, f"{out.strip()}\n", FLAGS)
    assert fine, checker.output_difference(doctest.Example(example.command, wanted), f"{out.strip()}\n", FLAGS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_examples_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every runnable block of the file, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))  # what an example measures is for this file alone
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, block in blocks(file.read_text(encoding="utf-8")):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, file.name, "exec"), names)
        else:
            for example in examples(block):
                check(example)


def test_the_command_line_is_documented_by_running_it() -> None:
    """docs/cli.md shows runnable examples: the pattern above has not come to match nothing."""
    found = blocks((ROOT / "docs" / "cli.md").read_text(encoding="utf-8"))
    assert sum(len(list(examples(block))) for language, block in found if language == "console") >= 5


def test_an_example_that_is_wrong_fails() -> None:
    """The harness itself: another output, another exit code, and a Python block that raises."""
    [right, wrong, failing] = examples("$ echo a b\na ...\n$ echo a\nb\n$ exit 3  # exit 4\n")
    check(right)
    for example in (wrong, failing):
        with pytest.raises(AssertionError):
            check(example)
    assert blocks("```python run\nx\n```\n```python\ny\n```\n") == [("python", "x\n")]
