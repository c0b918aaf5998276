"""When the tokens of a request came: time to first token, gaps between emissions, time per output token.

With drafts several tokens come at once, so the gap between two emissions (ITL) is not the time per token (TPOT). Both
are kept, each under its own name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Timeline:
    """Emissions of one request, in seconds of one monotonic clock."""

    start: float
    """When it was submitted."""
    emissions: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of each step that emitted something."""

    def arrived(self, time: float, tokens: int) -> None:
        if tokens > 0:
            self.emissions.append((time, tokens))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.emissions)

    @property
    def time_to_first_token(self) -> float | None:
        return self.emissions[0][0] - self.start if self.emissions else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Gaps between two emissions, one per step after the first."""
        times = [time for time, _ in self.emissions]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def time_per_output_token(self) -> float | None:
        """(t_last - t_first) / (n - 1); None for fewer than two tokens."""
        if self.tokens < 2:
            return None
        return (self.emissions[-1][0] - self.emissions[0][0]) / (self.tokens - 1)

    @property
    def whole(self) -> float | None:
        """Submission to last token."""
        return self.emissions[-1][0] - self.start if self.emissions else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between order statistics, as numpy's default; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def latencies(timelines: Iterable[Timeline]) -> dict[str, dict[str, float | None]]:
    """p50 and p95 in milliseconds: `ttft_ms`, `itl_ms`, `tpot_ms`, `e2e_ms`."""
    lines = list(timelines)
    samples: dict[str, list[float | None]] = {
        "ttft_ms": [line.time_to_first_token for line in lines],
        "itl_ms": [gap for line in lines for gap in line.inter_token_latencies],
        "tpot_ms": [line.time_per_output_token for line in lines],
        "e2e_ms": [line.whole for line in lines],
    }
    return {name: _milliseconds([v for v in values if v is not None]) for name, values in samples.items()}


def _milliseconds(values: Sequence[float]) -> dict[str, float | None]:
    points = {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95)}
    return {name: None if value is None else 1e3 * value for name, value in points.items()}
