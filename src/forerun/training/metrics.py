"""Sums that become metrics, the file they are written to, and what a run has used."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

POSITIONS = "teacher_forced_acceptance"
"""Reported by position: 1 - TV over given text, nothing sampled. It is never called acceptance (methods, 9)."""


@dataclass
class Sums:
    """Numerators and denominators of metrics over any number of micro-batches and devices."""

    objective: float = 0.0
    weight: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)
    """name -> [sum, weight]; `name@k` for position k."""

    def add(self, objective: float, weight: float, metrics: Mapping[str, tuple[float, float]]) -> None:
        self.objective += objective
        self.weight += weight
        for name, (value, own) in metrics.items():
            mine = self.parts.setdefault(name, [0.0, 0.0])
            mine[0] += value
            mine[1] += own

    @classmethod
    def of(cls, parts: Iterable[Sums]) -> Sums:
        """The sum of several."""
        result = cls()
        for part in parts:
            metrics = {name: (value, weight) for name, (value, weight) in part.parts.items()}
            result.add(part.objective, part.weight, metrics)
        return result

    def as_dict(self) -> dict[str, Any]:
        """`loss` and the other means; a metric by position is a list, from position 1 on. Weight 0: None."""
        out: dict[str, Any] = {"loss": _mean(self.objective, self.weight)}
        by_position: dict[str, dict[int, float | None]] = {}
        for name, (value, weight) in self.parts.items():
            base, at, position = name.partition("@")
            if at:
                by_position.setdefault(base, {})[int(position)] = _mean(value, weight)
            else:
                out[name] = _mean(value, weight)
        for base, values in by_position.items():
            out[base] = [values.get(k) for k in range(1, max(values) + 1)]
        return out


def _mean(value: float, weight: float) -> float | None:
    return value / weight if weight else None


# ---------------------------------------------------------------------------------------------------------- the file


class MetricsLog:
    """`metrics.jsonl`: one object per optimiser step and per evaluation, in order, each once.

    A checkpoint remembers how long the file was. A run that resumes there cuts off what was written after it (a torn
    last line included), because those steps are taken again.
    """

    def __init__(self, path: Path, length: int = 0):
        self.path = path
        self.lost = 0
        """Bytes that the file should have had and has not: somebody has shortened it."""
        size = path.stat().st_size if path.exists() else 0
        self.lost = max(0, length - size)
        self._file = path.open("ab")
        if size > length:
            self._file.truncate(length)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def length(self) -> int:
        """Bytes of the file, all of them on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


# ---------------------------------------------------------------------------------------------------- what is used


@dataclass
class Usage:
    """What the steps of a run took, over all its parts and devices."""

    tokens: int = 0
    """Tokens trained on, the target's passes over them included."""
    seconds: float = 0.0
    """On the wall, evaluations included."""
    cpu_seconds: float = 0.0
    device_seconds: float = 0.0
    """Of GPUs: seconds times their number."""
    peak_memory: int = 0
    """Bytes, of the largest process: on a GPU its memory, else the process's own."""


class Meter:
    """Adds the time since it was last read to a `Usage`."""

    def __init__(self, usage: Usage, device: torch.device, ranks: int):
        self._usage, self._device, self._ranks = usage, device, ranks
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def read(self) -> Usage:
        wall, cpu = time.monotonic(), time.process_time()
        passed = wall - self._wall
        self._usage.seconds += passed
        self._usage.cpu_seconds += (cpu - self._cpu) * self._ranks
        self._usage.device_seconds += passed * self._ranks if self._device.type != "cpu" else 0.0
        self._usage.peak_memory = max(self._usage.peak_memory, peak_memory(self._device))
        self._wall, self._cpu = wall, cpu
        return self._usage


def resident_memory() -> int:
    """Bytes that this process takes now, in memory of its own and of files it has mapped."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU, the most that this process took elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
