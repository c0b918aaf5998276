"""The lines a server writes every few seconds of activity, worded as vLLM words them, so that existing recipes work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from forerun.engine import DecodingStats
from forerun.serve.metrics import Metrics, difference

logger = logging.getLogger("forerun.serve")


@dataclass(frozen=True)
class Levels:
    """How full the engine is."""

    running: int
    waiting: int
    kv_usage: float
    cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache so far."""
    cache_hits: int = 0
    predicted_gain: float | None = None
    """Plain time over speculative time, as last estimated; None: without measured costs."""


class StatsLog:
    """Says what happened since it last said something.

    Args:
        metrics: of the server.
        levels: reads how full the engine is.
        clock: seconds.
    """

    def __init__(self, metrics: Metrics, levels: Callable[[], Levels], clock: Callable[[], float] = time.monotonic):
        self._metrics = metrics
        self._levels = levels
        self._clock = clock
        self._at = clock()
        self._stats = DecodingStats()
        self._prompt = 0
        self._generated = 0
        self._cache = (0, 0)

    def lines(self) -> list[str]:
        """The lines of this interval; none if nothing happened."""
        metrics, now = self._metrics, self._clock()
        metrics.settle()
        seconds, self._at = max(now - self._at, 1e-9), now
        prompt, generated = metrics.prompt_tokens - self._prompt, metrics.generation_tokens - self._generated
        stats = difference(metrics.totals, self._stats)
        self._prompt, self._generated = metrics.prompt_tokens, metrics.generation_tokens
        self._stats = metrics.totals
        levels = self._levels()
        if not (prompt or generated or levels.running or levels.waiting):
            return []
        queries, hits = levels.cache_queries - self._cache[0], levels.cache_hits - self._cache[1]
        self._cache = levels.cache_queries, levels.cache_hits
        said = [engine_line(prompt / seconds, generated / seconds, levels, hits / queries if queries else 0.0)]
        return (
            [drafting_line(stats, seconds), own_line(stats, levels.predicted_gain), *said] if stats.verified else said
        )

    async def run(self, interval: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(interval)
            for line in self.lines():
                logger.info(line)


def engine_line(prompt: float, generation: float, levels: Levels, hit_rate: float) -> str:
    """vLLM's line about the engine. Its hit rate is that of the tokens looked up in this interval."""
    return (
        f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generation:.1f} tokens/s, Running: {levels.running} reqs, "
        f"Waiting: {levels.waiting} reqs, KV cache usage: {100 * levels.kv_usage:.1f}%, "
        f"Prefix cache hit rate: {100 * hit_rate:.1f}%"
    )


def drafting_line(stats: DecodingStats, seconds: float) -> str:
    """vLLM's line about drafting, with its formulas: a draft is a round that verified something."""
    drafts = stats.verified_by_position[0]
    rates = ", ".join(f"{count / drafts:.3f}" for count in stats.accepted_by_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + stats.accepted / drafts:.2f}, "
        f"Accepted throughput: {stats.accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {stats.verified / seconds:.2f} tokens/s, Accepted: {stats.accepted} tokens, "
        f"Drafted: {stats.verified} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * stats.accepted / stats.verified:.1f}%"
    )


def own_line(stats: DecodingStats, predicted_gain: float | None = None) -> str:
    """What vLLM's line does not say, in the words of our metrics."""
    said = [
        f"Drafting: {stats.drafting_rounds} of {stats.target_steps} rounds drafted",
        f"{stats.drafted} tokens drafted",
        f"{stats.verified} verified",
        f"{stats.emitted} emitted",
        f"{stats.discarded} behind a stop",
        f"{stats.emitted / stats.target_steps:.2f} tokens per step",
        f"mean planned K {stats.planned / stats.target_steps:.2f}",
        f"rounds by verified length {_by_length(stats)}",
    ]
    if predicted_gain is not None:
        said.append(f"predicted gain {predicted_gain:.2f}")
    skipped = [f"{reason} {rounds}" for reason, rounds in stats.skipped_steps.items() if rounds]
    return ", ".join(said) + (f", K = 0 for: {', '.join(skipped)}" if skipped else "")


def _by_length(stats: DecodingStats) -> str:
    """How many rounds verified so many tokens, as `0: 12 4: 40`."""
    at_least = [stats.target_steps, *stats.verified_by_position, 0]
    exactly = {length: more - fewer for length, (more, fewer) in enumerate(pairwise(at_least))}
    return " ".join(f"{length}: {rounds}" for length, rounds in exactly.items() if rounds)


__all__ = ["Levels", "StatsLog", "drafting_line", "engine_line", "own_line"]
