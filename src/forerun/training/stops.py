"""Why a run ends before its last step: somebody asked, or it cannot go on."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from forerun.errors import ForerunError, OptionError, TrainingFailed

INSIST = 3
"""Signals after which the process no longer waits for the end of a step."""


class StopRequest:
    """SIGTERM and SIGINT while training: the step is finished and a checkpoint written. `number` is the first one."""

    def __init__(self) -> None:
        self.number = 0
        self._count = 0
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.number != 0

    def ask(self, number: int) -> None:
        """As if the signal had come; from the third on the process ends at once."""
        self.number = self.number or number
        self._count += 1
        if self._count >= INSIST:
            self._restore()
            signal.raise_signal(number)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Within, the signals come here."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, lambda n, _frame: self.ask(n))
        try:
            yield self
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()


@contextmanager
def writing(what: str, advice: str = "run the same command again to go on") -> Iterator[None]:
    """Turns a failure to write into one line: what could not be written, why, and how to go on. TrainingFailed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
        reason = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
        raise TrainingFailed(f"{what} could not be written: {reason}; {advice}") from error


@contextmanager
def reading(option: str) -> Iterator[None]:
    """Turns a file that cannot be read into an OptionError which names it."""
    try:
        yield
    except OSError as error:
        raise OptionError(option, f"cannot read {error.filename or 'it'}: {error.strerror or error}") from error


MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "storage size calculation overflowed")
"""How torch's allocators say it: they have no class of error of their own but on a GPU."""


@contextmanager
def fitting(what: str, advice: str, error_class: type[ForerunError] = TrainingFailed) -> Iterator[None]:
    """Turns an allocation that failed into one line: what needs more memory than there is, and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        first = " ".join(str(error).split("\n")[0].split())
        if not isinstance(error, MemoryError) and not any(text in first.lower() for text in MEMORY):
            raise
        raise error_class(f"{what} needs more memory than there is ({first or 'MemoryError'}); {advice}") from error
