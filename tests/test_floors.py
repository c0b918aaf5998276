"""Imports go down: floors of the architecture, read from the source text of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun

ROOT = Path(forerun.__file__).parent
FLOORS = {
    "errors": 0, "folders": 0, "journal": 0, "parsing": 0, "sampling": 0, "embedded": 0, "verify": 1, "target": 1,
    "budget": 1, "drafters": 2, "engine": 3, "interop": 3, "serve": 4, "bench": 4, "training": 4, "cli": 5,
    "__main__": 6,
}  # fmt: skip
SIDEWAYS = {
    ("sampling", "errors"),
    ("folders", "errors"),
    ("drafters.dspark", "drafters.dflash"),
}  # DSpark has a DFlash backbone
SHARED = {
    "__init__", "base", "cache", "chain", "checkpoint", "config", "copying", "features", "layers", "learned", "lookup",
    "losses", "tables", "vocabulary",
}  # fmt: skip
"""What every drafter may use of the drafters' own floor."""
MODULES = sorted(ROOT.rglob("*.py"))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, wherever it is imported, and whether that is for types alone."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or "", id(node) in for_types
            yield from ((f"{node.module}.{alias.name}", id(node) in for_types) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_lower_floors(path):
    """A module uses its own package and lower floors; drafters do not know each other; transformers belongs to the
    target (and the rendering of training data), the web framework to the server.
    """
    own = list(path.relative_to(ROOT).with_suffix("").parts)
    for name, for_types in _imports(path):
        package, *other = name.split(".")
        if package == "transformers" and not for_types:
            assert own[0] == "target" or own[:2] == ["training", "data"], f"{name} is the target's"
        if package in ("fastapi", "starlette", "uvicorn"):
            assert own[0] == "serve", f"{name} is the server's"
        if package == "forerun" and other and own != ["__init__"]:
            assert _allowed(own, other), f"{'.'.join(own)} imports {name}"


def _allowed(own: list[str], other: list[str]) -> bool:
    if other[0].startswith("__"):
        return True  # the version
    if own[0] == other[0] == "drafters" and own[1] not in SHARED:
        drafters = {path.stem for path in (ROOT / "drafters").iterdir()}
        inner = other[1] if len(other) > 1 and other[1] in drafters else own[1]
        return inner in SHARED | {own[1]} or (f"drafters.{own[1]}", f"drafters.{inner}") in SIDEWAYS
    return own[0] == other[0] or FLOORS[other[0]] < FLOORS[own[0]] or (own[0], other[0]) in SIDEWAYS


@pytest.mark.parametrize(
    ("own", "other", "allowed"),
    [
        ("engine.core", "drafters.base", True),
        ("drafters.base", "engine.core", False),
        ("target.hf", "budget", False),
        ("drafters.ngram", "drafters.base", True),
        ("drafters.ngram", "drafters.small", False),
        ("cli.doctor", "bench.measure", True),
        ("serve.app", "bench.measure", False),
    ],
)
def test_the_rule_tells_up_from_down(own, other, allowed):
    """The rule itself, on edges known to be right and wrong."""
    assert _allowed(own.split("."), other.split(".")) == allowed


@pytest.mark.parametrize(
    "code", ["import forerun", "from forerun import Sampling; Sampling()", "import forerun.cli.main"]
)
def test_torch_is_imported_only_when_it_is_used(code):
    """`import forerun`, and what `forerun --help` needs, load neither torch nor transformers."""
    if "cli" in code and not (ROOT / "cli" / "main.py").exists():
        pytest.skip("there is no command line yet")
    check = f"import sys; {code}; sys.exit(str({{'torch', 'transformers'}} & set(sys.modules) or '') or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{code} loads {done.stderr}"
