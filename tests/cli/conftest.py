"""Running the command line in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from forerun.cli.main import main


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("generate", "--prompt", "x", stdin=b"...")`: neither stream is a terminal."""

    def call(*args: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        streams = capsys.readouterr()
        return Ran(code, streams.out, streams.err)

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Runs a command that must be refused: exit code 2 and exactly one line, on stderr. Returns the line."""

    def call(*args: object, stdin: bytes = b"") -> str:
        ran = run(*args, stdin=stdin)
        assert ran.code == 2, ran
        assert ran.out == ""
        assert ran.err.count("\n") == 1, ran.err
        assert ran.err.startswith("error: "), ran.err
        assert "Traceback" not in ran.err
        return ran.err.strip().removeprefix("error: ")

    return call
