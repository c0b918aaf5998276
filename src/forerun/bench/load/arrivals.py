"""When requests come: so many at once (closed loop), or a Poisson stream (open loop)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from forerun.errors import OptionError


@dataclass(frozen=True, slots=True)
class Load:
    """One of the two is given."""

    concurrency: int | None = None
    """Requests in the system: each that ends is replaced at once."""
    rate: float | None = None
    """Requests a second, whatever happens to them."""

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise OptionError("--concurrency", "give either this or --rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise OptionError("--concurrency", f"must be at least 1, got {self.concurrency}")
        if self.rate is not None and not self.rate > 0:
            raise OptionError("--rate", f"must be positive, got {self.rate}")

    @property
    def is_open(self) -> bool:
        return self.rate is not None

    @property
    def level(self) -> float:
        return self.rate if self.rate is not None else float(self.concurrency or 0)

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else str(self.concurrency)

    def as_dict(self) -> dict[str, Any]:
        kind = "open" if self.is_open else "closed"
        return {"load": kind, "concurrency": self.concurrency, "rate": self.rate}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Load:
        """From a row's fields."""
        return cls(row["concurrency"], row["rate"])


def arrival_times(load: Load, count: int, seed: int) -> list[float]:
    """[count] seconds of an open loop's arrivals: exponential gaps, the same for the same seed.

    Drawn once for a rate of 1 and scaled, so that two rates see the same pattern, slower or faster.
    """
    assert load.rate is not None, "a closed loop has no times of arrival"
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0)
        times.append(now / load.rate)
    return times


__all__ = ["Load", "arrival_times"]
