"""Recorded rounds in a file that survives an interruption: one line a prompt, on disk before the next is begun."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.errors import OptionError
from forerun.journal import Journal, whole_lines
from forerun.parsing import json_of

OPTION = "--rows"


@dataclass(frozen=True, slots=True)
class PromptRounds:
    """The rounds of one prompt with one drafter at one temperature."""

    drafter: str
    temperature: float
    prompt: int
    """Its number."""
    logits: Sequence[Sequence[float]]
    """[n][K] raw confidences of drafts that were drafted and verified whole, as logits."""
    accepted: Sequence[int]
    """[n] drafts kept."""
    left_out: int = 0
    """Rounds with a shorter draft, as near the end of a request, or one that broke off."""

    @property
    def place(self) -> tuple[str, float, int]:
        return self.drafter, self.temperature, self.prompt


class RoundsFile:
    """Prompts that are done, under one key.

    The first line holds the key; every further line is a prompt. A last line without its end was being written when the
    run was interrupted: it is dropped.

    Args:
        path: made if it is not there. Rounds of another key are kept beside it, in `PATH.old`. None: kept nowhere.
        key: of this run: model, code, prompts, options.

    Raises:
        OptionError: it cannot be read or written, or holds something else.
    """

    def __init__(self, path: Path | None, key: str):
        self.note: str | None = None
        """What the user should know about the file as it was found."""
        self._path = path
        self._done: dict[tuple[str, float, int], PromptRounds] = {}
        if path is None:
            return
        try:
            if not self._continue(path, key):
                path.unlink(missing_ok=True)
                self._write({"key": key, "rounds": "of confidences"})
        except OSError as error:
            raise OptionError(OPTION, f"{path}: {error.strerror or error}") from error

    def _continue(self, path: Path, key: str) -> bool:
        if not path.exists() or not path.stat().st_size:
            return False
        header, *prompts = _parsed(path)
        if header["key"] != key:
            old = path.with_name(f"{path.name}.old")
            os.replace(path, old)
            self.note = f"{path} has rounds of another model, prompt set or option; they are now in {old}"
            return False
        done = [_prompt(path, line) for line in prompts]
        self._done = {one.place: one for one in done}
        if done:
            self.note = f"{path}: {len(done)} finished prompts are kept"
        return True

    def get(self, drafter: str, temperature: float, prompt: int) -> PromptRounds | None:
        return self._done.get((drafter, temperature, prompt))

    def add(self, prompt: PromptRounds) -> None:
        """On disk when this returns."""
        try:
            self._write(asdict(prompt))
        except OSError as error:
            raise OptionError(OPTION, f"{self._path}: {error.strerror or error}") from error
        self._done[prompt.place] = prompt

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._path is not None:
            with Journal(self._path) as journal:
                journal.add(content)


def _parsed(path: Path) -> list[dict[str, Any]]:
    try:
        parsed = [json_of(line) for line in whole_lines(path)]
    except ValueError:  # no JSON, or no UTF-8
        parsed = []
    if not parsed or not all(isinstance(one, dict) for one in parsed) or not {"key", "rounds"} <= parsed[0].keys():
        raise OptionError(OPTION, f"{path} is not a file of recorded rounds; name another one or remove it")
    return parsed


def _prompt(path: Path, line: Mapping[str, Any]) -> PromptRounds:
    try:
        return PromptRounds(**line)
    except TypeError as error:
        raise OptionError(OPTION, f"{path} is damaged ({error}); remove it") from None


__all__ = ["PromptRounds", "RoundsFile"]
