"""Series that the engine itself keeps: nothing is counted for them, they are read when somebody asks for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from forerun.engine.step_times import BOUNDS, PHASES

if TYPE_CHECKING:
    from forerun.engine import Engine

STEP_SECONDS = "step_seconds"
PREDICTED_GAIN = "spec_decode_predicted_gain"
ENGINE_SERIES: Mapping[str, str] = {
    STEP_SECONDS: "Time of a step by phase; each step counts once in every phase.",
    PREDICTED_GAIN: "Last estimate of plain time over speculative time; there is none without measured costs.",
}
"""Our own."""
CACHE_SERIES: Mapping[str, str] = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
}
"""Counters that vLLM has too."""


class EngineSeries(Collector):
    """The engine's own series.

    The engine's thread goes on while they are read: two numbers of one page may be a step apart.

    Args:
        engine: to read.
        labels: of every series.
        prefixes: under which the shared ones are published, ours first.
    """

    def __init__(self, engine: Engine, labels: Mapping[str, str], prefixes: Sequence[str]):
        self._engine = engine
        self._names, self._values = list(labels), list(labels.values())
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        yield self._step_seconds()
        gain = GaugeMetricFamily(self._prefixes[0] + PREDICTED_GAIN, ENGINE_SERIES[PREDICTED_GAIN], labels=self._names)
        predicted = self._engine.core.schedule.predicted_gain
        if predicted is not None:
            gain.add_metric(self._values, predicted)
        yield gain
        for name, value in zip(CACHE_SERIES, cache_counts(self._engine), strict=True):
            for prefix in self._prefixes:
                counter = CounterMetricFamily(prefix + name, CACHE_SERIES[name], labels=self._names)
                counter.add_metric(self._values, value)
                yield counter

    def _step_seconds(self) -> Metric:
        name, times = self._prefixes[0] + STEP_SECONDS, self._engine.core.times
        found = HistogramMetricFamily(name, ENGINE_SERIES[STEP_SECONDS], labels=[*self._names, "phase"])
        bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
        for phase in PHASES:
            counts = accumulate(times.counts[phase])
            found.add_metric([*self._values, phase], list(zip(bounds, counts, strict=True)), times.sums[phase])
        return found


def cache_counts(engine: Engine) -> tuple[int, int]:
    """Prompt tokens looked up in the prefix cache, and those found there."""
    cache = engine.core.prefix_cache
    return cache.queries, cache.hits


__all__ = ["CACHE_SERIES", "ENGINE_SERIES", "EngineSeries", "cache_counts"]
