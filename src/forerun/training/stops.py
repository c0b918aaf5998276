"""Why a run ends before its last step: somebody asked, or it cannot go on."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from forerun.errors import TrainingFailed

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
