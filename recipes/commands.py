"""What the recipes share: `forerun` commands as users type them, and what a training run has used so far."""

from __future__ import annotations

import lzma
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from forerun.training.checkpoints import Checkpoint, Checkpoints

POLL_SECONDS = 0.2
PACE_STEPS = 6
"""Steps between the checkpoints of a trial run: the second such stretch is the one that is timed."""
LATE = 1.03
"""Steps planned beyond those the trial promises, so that a run ends by its budget and not just before it. The learning
rate has then fallen to next to nothing: a cosine is at 0.2 % of its peak 3 % before its end."""


@dataclass(frozen=True)
class Command:
    """A process to be run."""

    words: Sequence[object]
    cwd: Path
    log: Path | None = None
    """Where it writes, appended; None: to this program's own streams."""

    @classmethod
    def forerun(cls, *words: object, cwd: Path, log: Path | None = None) -> Command:
        return cls([sys.executable, "-m", "forerun", *words], cwd, log)

    def start(self) -> subprocess.Popen[bytes]:
        """In a group of its own: what a terminal sends goes to this program alone, which passes it on once."""
        print("$", *_shown(self.words), file=sys.stderr, flush=True)
        words = [str(word) for word in self.words]
        if self.log is None:
            return subprocess.Popen(words, cwd=self.cwd, start_new_session=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(words, cwd=self.cwd, stdout=log, stderr=log, start_new_session=True)


def _shown(words: Sequence[object]) -> list[str]:
    first = ["forerun"] if list(map(str, words[1:3])) == ["-m", "forerun"] else ["python"]
    return first + [str(word) for word in words[3 if first == ["forerun"] else 1 :]]


class Runner:
    """Runs commands, some of them side by side. SIGTERM and Ctrl-C are passed on to what runs, no other one is started,
    and all of it is waited for: `forerun` writes a checkpoint before it ends."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked = 0

    def run(self, commands: Sequence[Command], at_once: int = 1) -> int:
        """0 when all have ended well; else the exit code of the first that has not, after which none is started."""
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._run(deque(commands), at_once)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, waiting: deque[Command], at_once: int) -> int:
        failed = 0
        while self._running or (waiting and not failed):
            while waiting and not failed and len(self._running) < at_once:
                self._running.append(waiting.popleft().start())
                if self._asked:  # while it was started
                    self._running[-1].send_signal(self._asked)
            time.sleep(POLL_SECONDS)
            for child in [child for child in self._running if child.poll() is not None]:
                self._running.remove(child)
                failed = failed or _exit_code(child.returncode)
            failed = failed or (128 + self._asked if self._asked else 0)
        return failed

    def _ask(self, number: int, _: FrameType | None) -> None:
        self._asked = number
        for child in self._running:
            if child.poll() is None:
                child.send_signal(number)


def _exit_code(code: int) -> int:
    """A process ended by a signal has that signal's number, negated."""
    return code if code >= 0 else 128 - code


def run_or_exit(*commands: Command, at_once: int = 1) -> None:
    """Runs them; ends this program with the exit code of the first that failed or was stopped."""
    code = Runner().run(commands, at_once)
    if code != 0:
        sys.exit(code)


def flags(settings: dict[str, object]) -> list[str]:
    """`{"draft.layers": 2}` -> `--draft.layers 2`."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def setting(text: str) -> tuple[str, str]:
    """`NAME=VALUE` of a flag of `forerun train`. ValueError: it is none."""
    name, equal, value = text.partition("=")
    if not (name and equal and value):
        raise ValueError(f"--set: expected NAME=VALUE, such as draft.layers=1, got {text!r}")
    return name.removeprefix("--").replace("_", "-"), value


# ----------------------------------------------------------------------------------------------------- what runs used


def store_of(taps: str) -> Path:
    """The store of features below a work folder: one for each choice of taps, as a store holds no other."""
    return Path("features") / f"h{taps.replace(',', '-')}"


def newest(run: Path) -> Checkpoint | None:
    """The last checkpoint of a run; None: it has none yet."""
    folder = run / "checkpoints"
    return Checkpoints(folder, keep=1).newest()[0] if folder.is_dir() else None


@dataclass(frozen=True)
class Pace:
    """CPU-seconds that a run takes: for a step, and for an evaluation."""

    step: float
    evaluation: float

    def steps(self, cpu_seconds: float, evaluations: int) -> int:
        """So many that a run of a budget ends by it, its evaluations (the last one comes after it) paid."""
        left = cpu_seconds - (evaluations - 1) * self.evaluation
        if left < self.step:
            raise ValueError(
                f"{cpu_seconds:g} CPU-seconds are used up by {evaluations} evaluations of {self.evaluation:.0f}; raise "
                "the budget or lower eval-prompts"
            )
        return math.ceil(LATE * left / self.step)


TRIAL = {"steps": 3 * PACE_STEPS, "save-every": PACE_STEPS, "eval-every": 3 * PACE_STEPS, "keep": 3}
"""Settings of a trial run, beside those of the run it is for."""


def pace_of(trial: Path) -> Pace:
    """Read off a finished trial run. The first stretch is left out: there the allocator and the store warm up."""
    checkpoints = Checkpoints(trial / "checkpoints", keep=3)
    found = [checkpoints.of_step(k * PACE_STEPS) for k in (1, 2, 3)]
    first, second, third = (0.0 if one is None else one.progress.used.cpu_seconds for one in found)
    if not 0 < first < second < third:
        raise ValueError(f"{trial} is no finished trial run; remove it and run the same command again")
    step = (second - first) / PACE_STEPS
    return Pace(step, max(0.0, third - second - PACE_STEPS * step))


# ------------------------------------------------------------------------------------------------------------- files


def whole_lines(source: Path, copy: Path) -> int:
    """Copies the lines of a file that another process may be writing to, a torn last one left out; their number.

    A file that ends in `.xz` is unpacked.
    """
    content = source.read_bytes()
    if source.suffix == ".xz":
        content = lzma.decompress(content)
    whole = content[: content.rfind(b"\n") + 1]
    new = copy.with_name(f"{copy.name}.new")
    new.write_bytes(whole)
    os.replace(new, copy)
    return whole.count(b"\n")


def publish(best: Path, folder: Path, private: Sequence[Path]) -> int:
    """Copies a trained drafter to where it is shipped, in place of what is there; bytes of its weights.

    Raises:
        ValueError: a text file of it names one of these paths, which is nobody else's business.
    """
    names = ("config.json", "model.safetensors", "README.md")
    for name in (name for name in names if not name.endswith("safetensors")):
        text = (best / name).read_text(encoding="utf-8")
        named = [path for path in private if len(path.parts) > 1 and str(path) in text]
        if named:
            raise ValueError(f"{best / name} names {named[0]}; train with relative paths, as the recipe does")
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in names:
        (new / name).write_bytes((best / name).read_bytes())
    shutil.rmtree(folder, ignore_errors=True)  # with what belonged to the one before, such as its calibration
    new.rename(folder)
    return (folder / "model.safetensors").stat().st_size
