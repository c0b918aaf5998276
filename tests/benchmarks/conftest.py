"""The scripts of benchmarks/ as modules, as they see each other when one of them is run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session", autouse=True)
def scripts() -> Iterator[None]:
    """Puts benchmarks/ on the path for these tests and takes its modules out again."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)
