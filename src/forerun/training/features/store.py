"""A bounded folder of features: read while others write, evicted by use, healed by computing anew."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from forerun.errors import OptionError
from forerun.training.features.layout import GB, Layout, Parts
from forerun.training.features.manifest import LOCK, OPTION
from forerun.training.features.shards import DATA, INDEX, Damaged, Entry, Item, Shard, size_of, space_of

logger = logging.getLogger("forerun")

LARGEST_SHARD = 1 << 28
SHARDS = 16
"""A store has at least so many shards when it is full: what is evicted at a time is a small share of it."""

LOCK_SECONDS = 60.0
"""How long to wait for another process that is storing a batch; then this batch is not stored."""


@dataclass
class Counts:
    """Samples since the store was opened."""

    read: int = 0
    stored: int = 0
    declined: int = 0
    """Not stored: the bound is reached and all that is there is in use, or it could not be written."""
    evicted_shards: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    """By kind."""


class FeatureStore:
    """Samples by key, in a folder of at most so many bytes.

    Any number of processes may read the folder and write to it: each appends to shards of its own, one at a time under
    a lock, and sees what the others wrote with its next `refresh`.

    Eviction: the least recently used shard that nobody used since this store was opened. If all were used, new
    samples are not stored. Training reads every sample once per epoch in a new order; plain least-recently-used
    would then evict just what comes next (a store of half the data served 15 % of the reads), keeping what is there
    serves the half that it holds.

    Args:
        folder: with a manifest.
        layout: the manifest's.
        limit: bytes of all files together, what is being written included.
        read_only: never writes.
    """

    def __init__(self, folder: Path, layout: Layout, limit: int, read_only: bool = False):
        self.folder, self.layout, self.limit = folder, layout, limit
        self.counts = Counts()
        self._read_only = read_only
        self._opened = time.time_ns()
        self._lock = FileLock(folder / LOCK, timeout=LOCK_SECONDS)
        self._shard_bytes = min(LARGEST_SHARD, limit // SHARDS)
        self._shards: dict[str, Shard] = {}
        self._places: dict[str, tuple[Shard, Entry]] = {}
        self._own: Shard | None = None
        self._said: set[str] = set()
        self.refresh()

    def __len__(self) -> int:
        """Samples that are there, as of the last refresh."""
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    # --------------------------------------------------------------------------------------------------------- reading

    def refresh(self) -> None:
        """Takes note of what was stored and evicted since, here and by other processes."""
        names = {path.stem for path in self.folder.glob(f"*{INDEX}")}
        gone = self._shards.keys() - names
        for name in gone:
            self._forget(self._shards.pop(name))
        for name in sorted(names):
            self._note(self._shards.setdefault(name, Shard(self.folder, name)))

    def _note(self, shard: Shard) -> None:
        try:
            entries, damaged = shard.news()
        except FileNotFoundError:  # evicted just now; the next refresh drops it
            return
        self._places.update((entry.key, (shard, entry)) for entry in entries)
        for _ in range(damaged):
            self._damage("unreadable index line", shard)

    def read(self, key: str, tokens: int) -> Parts | None:
        """What is stored of a sample; None if it is not there or not sound, and then has to be computed.

        The parts are views of the file: copy what is to last.
        """
        place = self._places.get(key)
        if place is None:
            return None
        shard, entry = place
        try:
            parts = self._checked(shard, entry, tokens)
        except FileNotFoundError:
            if shard.exists:
                self._damage("missing shard", shard)
            self._forget(shard)
            return None
        except (Damaged, OSError) as error:
            self._damage(error.kind if isinstance(error, Damaged) else "unreadable", shard)
            del self._places[key]
            self._own = None  # what is stored instead lies in a later shard, which counts when they are opened again
            return None
        shard.touch()
        self.counts.read += 1
        return parts

    def _checked(self, shard: Shard, entry: Entry, tokens: int) -> Parts:
        if entry.tokens != tokens:
            raise Damaged("wrong length")
        parts = self.layout.decode(shard.read(entry, tokens * self.layout.bytes_per_token), tokens)
        if not parts.finite:
            raise Damaged("not finite")
        return parts

    def _forget(self, shard: Shard) -> None:
        self._places = {key: place for key, place in self._places.items() if place[0] is not shard}

    def _damage(self, kind: str, shard: Shard) -> None:
        self.counts.damaged[kind] += 1
        self._say(kind, f"a sample in {shard.data} is damaged ({kind}); such samples are computed anew")

    def _say(self, kind: str, message: str) -> None:
        """Once per kind: a broken disk would otherwise fill the log."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s %s", OPTION, message)

    # --------------------------------------------------------------------------------------------------------- writing

    def append(self, items: Sequence[Item]) -> None:
        """Stores what fits. That something could not be stored is counted and said, and costs only time later."""
        stored = 0
        if not self._read_only:
            try:
                with self._lock:
                    stored = self._append(items)
            except Timeout:
                self._say("busy", f"{self.folder} is locked by another process; this batch is not stored")
            except OSError as error:  # disk full, no permission, a failing disk: the features are there all the same
                self._read_only = True
                self._say("unwritable", f"{self.folder}: {error.strerror}; nothing more is stored in this run")
        self.counts.stored += stored
        self.counts.declined += len(items) - stored

    def _append(self, items: Sequence[Item]) -> int:
        self.refresh()
        # Another process may have computed the same sample meanwhile; a batch may hold one twice.
        new = {item.key: item for item in items if item.key not in self._places}
        fitting = self._make_room(list(new.values()))
        if fitting:
            if self._own is None or not self._own.exists or self._own.size >= self._shard_bytes:
                self._own = Shard.fresh(self.folder)
                self._shards[self._own.name] = self._own
            self._own.append(fitting)
            self._note(self._own)
        return len(items) - len(new) + len(fitting)

    def _make_room(self, items: Sequence[Item]) -> list[Item]:
        """Evicts until these fit, or nothing more may be evicted; those that fit now."""
        used = self._swept()
        needed = sum(space_of(item) for item in items)
        while used + needed > self.limit:
            oldest = min(self._shards.values(), key=Shard.used_ns, default=None)
            if oldest is None or oldest.used_ns() >= self._opened:
                break
            used -= oldest.size
            oldest.remove()
            self._forget(self._shards.pop(oldest.name))
            self.counts.evicted_shards += 1
        fitting = []
        for item in items:
            used += space_of(item)
            if used > self.limit:
                self._say("full", f"{self.folder} is full; samples it does not hold are computed in every epoch")
                break
            fitting.append(item)
        return fitting

    def _swept(self) -> int:
        """Bytes of all files, after what a writer left behind that died is removed. Under the lock nobody writes."""
        files = list(self.folder.iterdir())
        stems = {suffix: {f.stem for f in files if f.suffix == suffix} for suffix in (DATA, INDEX)}
        used = 0
        for file in files:
            if file.suffix in stems and file.stem not in stems[DATA] & stems[INDEX]:
                file.unlink()
            else:
                used += file.stat().st_size
        return used


def check_bound(folder: Path, gb: float | None) -> int:
    """The bound in bytes. OptionError if there is none, or if the disk cannot hold it."""
    if gb is None or not gb > 0:
        raise OptionError("--store-gb", f"a feature store needs a bound in gigabytes (10^9 bytes), got {gb}")
    limit = int(gb * GB)
    there = sum(size_of(file) for file in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if limit > there + free:
        raise OptionError(
            "--store-gb",
            f"{gb:g} GB, but {folder} has {there / GB:.2f} GB and its disk {free / GB:.2f} GB more to give",
        )
    return limit


__all__ = ["Counts", "FeatureStore", "Item", "check_bound"]
