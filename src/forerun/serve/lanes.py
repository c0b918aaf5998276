"""Threads for what takes time with text: neither the event loop nor the engine's steps wait for it, nor short texts for
long ones."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")

LONG = 1 << 17
"""Bytes of a request from which on its text takes its turn among the long ones."""


class Lanes:
    """One queue for short texts, one for long ones, one for forms, which are compiled one at a time anyway.

    What has begun is not stopped; what has not is left out if whoever waits for it is cancelled.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="forerun-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="forerun-long-text")
        self._forms = ThreadPoolExecutor(1, thread_name_prefix="forerun-form")

    async def text(self, size: int, function: Callable[..., _Result], *args: Any) -> _Result:
        """Renders, tokenises or decodes for a request of this many bytes."""
        return await _run(self._long if size >= LONG else self._short, function, *args)

    async def form(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Compiles."""
        return await _run(self._forms, function, *args)

    def close(self) -> None:
        for lane in (self._short, self._long, self._forms):
            lane.shutdown(wait=False, cancel_futures=True)


async def _run(lane: ThreadPoolExecutor, function: Callable[..., _Result], *args: Any) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(lane, functools.partial(function, *args))


__all__ = ["LONG", "Lanes"]
