"""How many requests are let in, until when each may take, and how the last ones leave."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forerun.serve.errors import CLOSING, ApiError, busy, expired, invalid, unavailable


@dataclass(frozen=True)
class Deadline:
    """When a request must be done. Its time began when it came, on the clock of `time.perf_counter`."""

    arrived: float
    seconds: float

    @property
    def left(self) -> float:
        return max(0.0, self.arrived + self.seconds - time.perf_counter())


class Pass:
    """What a request holds while it is served. `stopped` ends it from outside: its deadline, or the end of draining."""

    def __init__(self, samples: int, deadline: Deadline | None):
        self.samples = samples
        self.answered = False
        """Whether it had an answer of the engine: only those tell how long a place is taken."""
        self._deadline = deadline
        self._closing = asyncio.Event()

    async def stopped(self) -> ApiError:
        """Waits until the request must end, and says why."""
        deadline = self._deadline
        try:
            async with asyncio.timeout(None if deadline is None else deadline.left):
                await self._closing.wait()
        except TimeoutError:
            assert deadline is not None
            return expired(deadline.seconds)
        return unavailable(CLOSING)

    def close(self) -> None:
        self._closing.set()


class Gate:
    """A bounded queue before the engine. It belongs to one event loop.

    Args:
        running: samples the engine decodes at once.
        queue: samples that may wait beside them.
        refused: told of each request that finds it full.
    """

    def __init__(self, running: int, queue: int, refused: Callable[[], None] = lambda: None):
        self._running = running
        self._capacity = running + queue
        self._passes: set[Pass] = set()
        self._inside = 0
        self._seconds = 1.0  # what an answer takes, smoothed: for Retry-After
        self._empty = asyncio.Event()
        self._empty.set()
        self._refused = refused
        self.draining = False

    @property
    def inside(self) -> int:
        """Samples that run or wait."""
        return self._inside

    @contextmanager
    def enter(self, samples: int, deadline: Deadline | None) -> Iterator[Pass]:
        """Lets a request in for as long as the context lasts.

        Raises:
            ApiError: 503 while draining, 429 with Retry-After if the queue is full, 400 if it could never fit.
        """
        self._check(samples)
        entered, start = Pass(samples, deadline), time.monotonic()
        self._passes.add(entered)
        self._inside += samples
        self._empty.clear()
        try:
            yield entered
        finally:
            if entered.answered:
                self._seconds += 0.1 * (time.monotonic() - start - self._seconds)
            self._passes.discard(entered)
            self._inside -= samples
            if not self._passes:
                self._empty.set()

    def _check(self, samples: int) -> None:
        if self.draining:
            raise unavailable(CLOSING)
        if samples > self._capacity:
            raise invalid("n", f"{samples} answers in one request; this server holds {self._capacity} (--max-queue)")
        if self._inside + samples > self._capacity:
            self._refused()
            raise busy(f"{self._inside} answers run or wait, which is all there is room for", self._retry_after())

    def _retry_after(self) -> int:
        """Seconds until a place is likely to be free: the rounds of requests ahead, times what an answer takes."""
        waiting = max(0, self._inside - self._running) / self._running
        return min(60, max(1, math.ceil(waiting * self._seconds)))

    async def drain(self, seconds: float) -> None:
        """Lets nobody in any more and waits for those inside; who is not done by then is ended with a clear error."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            self.close()
            await self._empty.wait()

    def close(self) -> None:
        """Ends those inside, each with a clear error, instead of waiting for them."""
        for one in self._passes:
            one.close()
