"""The lines a server writes every few seconds of activity, worded as vLLM words them, so that existing recipes work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from forerun.engine import DecodingStats
from forerun.serve.metrics import Metrics, difference

logger = logging.getLogger("forerun.serve")


@dataclass(frozen=True)
class Levels:
    """How full the engine is."""

    running: int
    waiting: int
    kv_usage: float


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
        said = [engine_line(prompt / seconds, generated / seconds, levels)]
        return [drafting_line(stats, seconds), own_line(stats), *said] if stats.verified else said

    async def run(self, interval: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(interval)
            for line in self.lines():
                logger.info(line)


def engine_line(prompt: float, generation: float, levels: Levels) -> str:
    """vLLM's line about the engine. There is no prefix cache yet, so its hit rate is 0."""
    return (
        f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generation:.1f} tokens/s, Running: {levels.running} reqs, "
        f"Waiting: {levels.waiting} reqs, KV cache usage: {100 * levels.kv_usage:.1f}%, Prefix cache hit rate: 0.0%"
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


def own_line(stats: DecodingStats) -> str:
    """What vLLM's line does not say, in the words of our metrics."""
    return (
        f"Drafting: {stats.drafting_rounds} of {stats.target_steps} rounds drafted, {stats.drafted} tokens drafted, "
        f"{stats.verified} verified, {stats.emitted} emitted, {stats.discarded} behind a stop, "
        f"{stats.emitted / stats.target_steps:.2f} tokens per step"
    )


__all__ = ["Levels", "StatsLog", "drafting_line", "engine_line", "own_line"]
