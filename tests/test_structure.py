"""Functions fit a screen, files a sitting, and no module is called after what it is not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import forerun

ROOT = Path(forerun.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_nine_functions_of_ten_fit_a_screen():
    """The 90th percentile of all functions of the package is at most 30 lines, docstring included."""
    lengths = sorted((_lines(f), f"{path.name}:{f.name}") for path in MODULES for f in _functions(path))
    length, name = lengths[int(0.9 * len(lengths))]
    assert length <= 30, f"{name} has {length} lines; the longest: {lengths[-8:]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(path):
    """At most 500 lines a file and 8 parameters a function (a command's are its options: typer reads them there)."""
    assert len(path.read_text().splitlines()) <= 500, "make it a folder; its import path stays"
    assert path.stem not in ("utils", "util", "helpers", "misc", "common"), "name it after what it does"
    for function in _functions(path):
        command = path.is_relative_to(ROOT / "cli") and any(
            "command" in ast.unparse(d) for d in function.decorator_list
        )
        assert command or _parameters(function) <= 8, f"{function.name} has {_parameters(function)} parameters"
