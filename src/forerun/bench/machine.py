"""What this machine is and what it can do: versions, cores, memory bandwidth, matrix rate, the cost of a verify pass.

Decoding one token reads every weight once, so bandwidth bounds it; verifying many tokens is a matrix product, so the
matrix rate bounds that. Where the two meet is where drafting stops being free.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import blocks_for

BUFFER_BYTES = 256 << 20
"""Read by the bandwidth measurement: beyond the caches of most CPUs."""
MATRIX = {"cpu": 1024, "cuda": 8192, "mps": 4096}
"""Rows of the square matrices of the GEMM measurement: big enough to reach the rate, small enough for a second."""
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing."""

    median: float
    low: float
    high: float
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> Spread:
        return cls(statistics.median(values), min(values), max(values), unit)

    def __str__(self) -> str:
        return f"{self.median:.3g} {self.unit} [{self.low:.3g} .. {self.high:.3g}]"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def versions() -> dict[str, str]:
    """Package -> version of what decides the results."""
    from forerun import __version__

    own = {"forerun": __version__, "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in PACKAGES}


def usable_cores() -> int:
    """Cores this process may run on: its affinity, within the container's quota (cgroup version 2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup/cpu.max"), cores)))


def _quota(file: Path, unlimited: int) -> int:
    if not file.is_file():
        return unlimited
    quota, _, period = file.read_text().strip().partition(" ")
    return unlimited if quota == "max" else round(int(quota) / int(period))


# -------------------------------------------------------------------------------------------------------------- rates


def read_bandwidth(device: torch.device, repeats: int = 7) -> Spread:
    """GB/s of a matrix-vector product, which reads its matrix once and is what decoding one token does."""
    columns = 8192
    matrix = torch.ones(BUFFER_BYTES // 4 // columns, columns, device=device)
    vector = torch.ones(columns, device=device)
    seconds = timed(lambda: torch.mv(matrix, vector), device, repeats)
    return Spread.of([BUFFER_BYTES / s / 1e9 for s in seconds], "GB/s")


def matrix_rate(dtype: torch.dtype, device: torch.device, repeats: int = 5) -> Spread:
    """GFLOP/s of a square matrix product in that dtype."""
    n = MATRIX.get(device.type, 1024)
    matrix = torch.randn(n, n, device=device).to(dtype)
    seconds = timed(lambda: matrix @ matrix, device, repeats)
    return Spread.of([2 * n**3 / s / 1e9 for s in seconds], "GFLOP/s")


def timed(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each call, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        wait_for(device)
        start = time.perf_counter()
        function()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# ------------------------------------------------------------------------------------------------------- verify cost


def verify_cost(
    target: Target,
    rows: Sequence[int] = (1, 2, 3, 5, 9, 17),
    context: int = 256,
    repeats: int = 5,
    advance: Callable[[], object] = lambda: None,
) -> dict[int, Spread]:
    """Milliseconds of one pass over `rows` tokens of one request behind `context` others. It takes the target's KV
    storage: call it before an engine is made.

    The numbers of rows are measured in turns, so that a disturbance of the machine does not hit one of them alone.

    Returns:
        {rows: ms}, without numbers of rows that do not fit the window.
    """
    context = min(context, target.window // 2)
    rows = [n for n in rows if context + n <= target.window]
    blocks = list(range(blocks_for(context + max(rows))))
    target.allocate(len(blocks))
    token = min(4, target.vocab_size - 1)
    if context:
        target.forward(Batch([Segment([token] * context, 0, blocks, 1)]))
    seconds: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1):
        for n in rows:
            batch = Batch([Segment([token] * n, context, blocks, n)])
            wait_for(target.device)
            start = time.perf_counter()
            target.forward(batch)
            wait_for(target.device)
            if repeat:
                seconds[n].append(time.perf_counter() - start)
            advance()
    return {n: Spread.of([1e3 * s for s in values], "ms") for n, values in seconds.items()}
