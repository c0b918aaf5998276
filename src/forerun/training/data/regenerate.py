"""`forerun data regenerate`: answers by the target itself, in a file that any interruption leaves usable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from forerun.errors import OptionError
from forerun.journal import Journal, whole_lines
from forerun.parsing import json_of
from forerun.training.data.jobs import Answerer, Job, jobs_of
from forerun.training.data.records import read_records
from forerun.training.data.report import Dropped, Tally
from forerun.training.data.sources import Sources

SYNC_EVERY = 1.0
"""Seconds of answers that a power cut may take; a killed process takes the line it was writing."""


class AnswerFile:
    """Answers on disk, each under its id, once. Only one process writes a file at a time.

    Args:
        path: made if it is not there; otherwise gone on with.
        model: of all its answers.
        sampling: of all its answers.

    Raises:
        OptionError: it holds something else, answers of another model or sampling, is being written, or cannot be.
    """

    def __init__(self, path: Path, model: str, sampling: Mapping[str, Any]):
        from filelock import FileLock, Timeout

        self.path = path
        self._made = {"model": model, "sampling": json.loads(json.dumps(sampling))}
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise OptionError("--out", f"{path} is being written by another process") from error
        except OSError as error:
            raise OptionError("--out", f"cannot write {path}: {error.strerror or error}") from error
        try:
            self.done = self._read()
            self._journal = Journal(path, SYNC_EVERY)
        except OSError as error:
            self._lock.release()
            raise OptionError("--out", f"{path}: {error.strerror or error}") from error
        except BaseException:
            self._lock.release()
            raise

    def _read(self) -> set[str]:
        """Ids of the answers that are there."""
        if not self.path.exists():
            return set()
        done: set[str] = set()
        size = 0
        for line in whole_lines(self.path):
            size += len(line)
            done.add(self._checked(line))
        with open(self.path, "rb") as file:
            file.seek(size)
            if (rest := file.read(7)) and not b'{"id": '.startswith(rest[:7]):
                raise self._foreign()
        return done

    def _checked(self, line: bytes) -> str:
        try:
            found = json_of(line)
            made = {"model": found["model"], "sampling": found["sampling"]}
            name = found["id"]
        except (ValueError, TypeError, KeyError):
            raise self._foreign() from None
        if made != self._made:
            differs = next(key for key in made if made[key] != self._made[key])
            raise OptionError(
                "--out",
                f"{self.path} has answers of another {differs} ({json.dumps(made[differs])}, not "
                f"{json.dumps(self._made[differs])}); name another file",
            )
        return str(name)

    def _foreign(self) -> OptionError:
        return OptionError("--out", f"{self.path} is not a file of answers; name another one")

    def add(self, record: Mapping[str, Any]) -> None:
        """OptionError: the disk is full, or the like."""
        assert record["id"] not in self.done
        try:
            self._journal.add({**record, **self._made})
        except OSError as error:
            raise OptionError("--out", f"cannot write {self.path}: {error.strerror or error}") from error
        self.done.add(record["id"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._journal.close()
        finally:
            self._lock.release()


@dataclass
class Regeneration:
    """One run over the prompts of some sources."""

    sources: Sources
    samples: int = 1
    """Answers per prompt."""
    as_chat: bool = False
    limit: int | None = None
    """Only the first so many prompts."""
    left_out: Tally = field(default_factory=Tally)
    """Records that ask nothing."""
    answered: int = 0
    tokens: int = 0
    failed: Tally = field(default_factory=Tally)
    """Prompts without an answer; trying again may help."""
    cut: Tally = field(default_factory=Tally)
    """Conversations that ended before their last turn."""

    def jobs(self, done: set[str], left_out: Tally | None = None) -> Iterator[Job]:
        """What is left to answer. `left_out` counts the records that ask nothing."""
        found = 0
        for record in read_records(iter(self.sources), self.sources.option, self.as_chat):
            try:
                if isinstance(record, tuple):
                    raise record[1]
                made = jobs_of(record, self.samples)
            except Dropped as dropped:
                if left_out is not None:
                    where = record[0] if isinstance(record, tuple) else record.where
                    left_out.add(dropped.reason, where, dropped.detail)
                continue
            yield from (job for job in made if job.id not in done)
            found += 1
            if found == self.limit:
                return

    def run(self, answerer: Answerer, out: AnswerFile, advance: Callable[[Job], None] = lambda _: None) -> None:
        """Answers what `out` does not have yet; each answer is in the file when `advance` is called with its job."""
        with closing(answerer.run(self.jobs(set(out.done)))) as ended:
            for job in ended:
                self._settle(job, out)
                advance(job)

    def _settle(self, job: Job, out: AnswerFile) -> None:
        if job.answers:
            out.add(job.record())
            self.answered += 1
            self.tokens += sum(answer.tokens for answer in job.answers)
        if job.failure is not None:
            tally = self.cut if job.answers else self.failed
            tally.add(job.failure.reason, job.id, job.failure.detail)
