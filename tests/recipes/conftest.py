"""The scripts of recipes/ as modules, and a runner that needs no process of its own for every command."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scripts import script

REPOSITORY = Path(__file__).parents[2]
ROOT, BENCHMARKS = REPOSITORY / "recipes", REPOSITORY / "benchmarks"


@contextmanager
def folder(name: str) -> Iterator[Path]:
    """Puts recipes/, a folder of it and benchmarks/ on the path, and takes their modules out again: names recur."""
    before, place = list(sys.path), ROOT / name
    sys.path[:0] = [str(place), str(ROOT), str(BENCHMARKS)]
    try:
        yield place
    finally:
        sys.path[:] = before
        for known, module in list(sys.modules.items()):
            if {ROOT, BENCHMARKS} & set(Path(getattr(module, "__file__", None) or "/").parents):
                del sys.modules[known]


def recipe(path: Path) -> ModuleType:
    """A script as a module of a name that no other has: `drafters` is also a package of these tests."""
    return script(path, f"recipe_{path.parent.name}_{path.stem}")


@pytest.fixture
def commands() -> Iterator[ModuleType]:
    with folder("embedded"):
        import commands

        yield commands


@pytest.fixture
def qwen() -> Iterator[ModuleType]:
    """recipes/qwen/drafters.py."""
    with folder("qwen") as place:
        yield recipe(place / "drafters.py")


@pytest.fixture
def target_recipe() -> Iterator[SimpleNamespace]:
    """What makes the embedded target and the small model: config, corpus, data, train."""
    with folder("embedded"):
        names = ("config", "corpus", "data", "train")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def embedded() -> Iterator[ModuleType]:
    """recipes/embedded/drafters.py."""
    with folder("embedded") as place:
        yield recipe(place / "drafters.py")


@pytest.fixture
def ablations() -> Iterator[ModuleType]:
    with folder("embedded"):
        import ablations

        yield ablations


@pytest.fixture
def evaluate() -> Iterator[ModuleType]:
    with folder("embedded"):
        import evaluate

        yield evaluate


@pytest.fixture
def study() -> Iterator[ModuleType]:
    """recipes/embedded/data_study.py."""
    with folder("embedded"):
        import data_study

        yield data_study


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[list[str]]]:
    """`here(recipe)` lets a recipe's commands run in this process, one after the other; the words of each are noted."""

    def patch(recipe: ModuleType) -> list[list[str]]:
        noted: list[list[str]] = []

        def run(*given: Any, at_once: int = 1) -> None:
            for command in given:
                words = [str(word) for word in command.words[1:]]
                noted.append(words)
                with contextlib.chdir(command.cwd):
                    code = _forerun(words[2:]) if words[:2] == ["-m", "forerun"] else _program(words, monkeypatch)
                if code:
                    sys.exit(code)

        monkeypatch.setattr(recipe, "run_or_exit", run)
        return noted

    return patch


def _forerun(words: list[str]) -> int:
    from forerun.cli.main import main

    return main(words)


def _program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0
