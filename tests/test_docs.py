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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATED = {"README.zh-CN.md"}
"""Their code is that of the original, line by line: `test_the_readmes_say_the_same`."""
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
    """Exit code and standard output. A plain `forerun` command (its output may go to a file) runs here: a process would
    import torch every time."""
    plain, _, place = command.partition(" > ")
    if plain.startswith("forerun ") and not SHELL & set(plain + place):
        from forerun.cli.main import main

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main(shlex.split(plain)[1:])
        if not place:
            return code, out.getvalue()
        Path(place).write_text(out.getvalue(), encoding="utf-8")
        return code, ""
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


def first_of(many: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: many()[:1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates try less and draw fewer samples, costs are measured in a quarter of the time, `doctor` measures
    smaller buffers: how thorough they are by default has tests of its own."""
    from forerun.bench import agreement, certificate, controls, exact, machine, parameters, sampled
    from forerun.bench.profiling import profiler

    for module, name in ((exact, "cases"), (controls, "honest"), (controls, "cheating")):
        monkeypatch.setattr(module, name, first_of(getattr(module, name)))
    monkeypatch.setattr(agreement, "PAIRS", agreement.PAIRS[1:2])
    monkeypatch.setattr(agreement, "exact_agreement", lambda real=agreement.exact_agreement: real((5,)))
    monkeypatch.setattr(agreement, "coupled_noise", lambda real=agreement.coupled_noise: real(2_000))
    monkeypatch.setattr(agreement, "uniform_noise", lambda real=agreement.uniform_noise: real(1_000))
    monkeypatch.setattr(sampled.Power, "samples", lambda self, tests: 100)
    monkeypatch.setattr(certificate.Certifier, "_parameter_tokens", 4)
    monkeypatch.setattr(parameters, "MODES", {"coupled": parameters.MODES["coupled"]})
    monkeypatch.setattr("forerun.cli.verify.MOST_DRAFTED", 2)
    monkeypatch.setattr(profiler, "Effort", lambda seconds, real=profiler.Effort: real(seconds / 4))
    monkeypatch.setattr(machine, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "MATRIX", {"cpu": 64})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("file", [file for file in FILES if file.name not in TRANSLATED], ids=lambda file: file.name)
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


def serve_options() -> dict[str, Any]:
    """Every spelling of every option of `forerun serve`."""
    import typer

    from forerun.cli.main import _app

    command: Any = typer.main.get_command(_app(["serve"]))
    params = command.commands["serve"].params
    spelt = [(name, param) for param in params for name in (*param.opts, *param.secondary_opts)]
    return {name: param for name, param in spelt if name.startswith("--")}


def test_the_options_of_the_server_are_documented() -> None:
    """All of them, on its page or where those of every command are; and its page names none that there is not."""
    pages = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("serving", "cli", "scheduling")]
    options = serve_options()
    said = {name for page in pages for name in re.findall(r"--[\w-]+(?:\.KEY)?", page)}
    assert not set(options) - said
    before, _, _ = pages[0].partition("## As a service")  # behind it other programs have options too
    prose = re.sub(r"^```.*?^```$", "", before, flags=re.MULTILINE | re.DOTALL)
    assert not set(re.findall(r"`(--[\w-]+)", prose)) - set(options)


def test_defaults_in_the_help_of_the_server_are_those_it_has() -> None:
    """The number in brackets behind a text of `forerun serve --help`."""
    from forerun.serve.options import ServeOptions

    told = 0
    for name, param in serve_options().items():
        found = re.search(r"\((\d+)( MiB)?\)", param.help or "")
        if found:
            told += 1
            number = int(found[1]) * (2**20 if found[2] else 1)
            assert getattr(ServeOptions(), name.removeprefix("--").replace("-", "_")) == number, name
    assert told >= 6


def test_the_fields_of_a_request_are_documented() -> None:
    """Each by its name on the server's page: a new one cannot be forgotten there."""
    from forerun.serve.fields import Speculative, StreamOptions
    from forerun.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    forms = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, Speculative, StreamOptions)
    missing = {name for form in forms for name in form.names() if not re.search(rf'[`"]{name}[`":]', page)}
    assert not missing


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    """Until the package is published, a stranger could give anything under it: all is installed from a clone."""
    for page in PAGES:
        assert not re.search(r"pip install(?: --?[\w-]+)* '?forerun\b", page.read_text(encoding="utf-8")), page.name


def skeleton(text: str) -> dict[str, list[str]]:
    """What must be the same in every language: headings by level, code without its comments, links, table rows."""
    code = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        "headings": re.findall(r"^(#+) ", prose, re.MULTILINE),
        "code": [re.sub(r"\s+#.*", "", line) for _, block in code for line in block.splitlines()],
        "links": sorted(set(re.findall(r"\]\(([^)]+)\)", prose)) - {file.name for file in FILES}),
        "rows": re.findall(r"^\| (`.*?`) \|", prose, re.MULTILINE),
        "names": sorted(set(re.findall(r"`(forerun [^`]+|[\w.]+)`", prose))),
    }


def test_the_readmes_say_the_same() -> None:
    """README.zh-CN.md has the sections, code, links, drafters and commands of README.md."""
    ours, chinese = (skeleton((ROOT / name).read_text("utf-8")) for name in ("README.md", "README.zh-CN.md"))
    for part, content in ours.items():
        assert content, part
        rows = [row.replace("、", ", ") for row in chinese[part]]
        assert rows == content, part


PAGES = [*FILES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]


def anchors(text: str) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of the repository: the file is there, and so is the heading."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place.read_text(encoding="utf-8")), link


def test_an_example_that_is_wrong_fails() -> None:
    """The harness itself: another output, another exit code, and a Python block that raises."""
    [right, wrong, failing] = examples("$ echo a b\na ...\n$ echo a\nb\n$ exit 3  # exit 4\n")
    check(right)
    for example in (wrong, failing):
        with pytest.raises(AssertionError):
            check(example)
    assert blocks("```python run\nx\n```\n```python\ny\n```\n") == [("python", "x\n")]


def test_make_says_what_it_does_before_pip_works_without_a_word() -> None:
    """Minutes of silence look like a hang; what is said is echoed, not the command that says it."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    before = [earlier for earlier, line in pairwise(lines) if "pip install --quiet" in line]
    assert before
    assert set(before) == {"\t$(INSTALLING)"}
    assert any(line.startswith("INSTALLING := @echo ") for line in lines)
