"""The asyncio front: one thread owns the engine and steps it; coroutines wait for their own chunks."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt, Speculative
from forerun.engine.request import Chunk, Completion, Request
from forerun.errors import EngineClosed
from forerun.sampling import Sampling


class AsyncEngine:
    """Many callers, one engine. The event loop never waits for a step, nor a step for the event loop.

    >>> async with AsyncEngine(Engine.load("embedded", drafter="ngram")) as engine:
    ...     async for chunk in engine.stream("def area("):
    ...         print(chunk.text, end="")
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, *args: Any, **options: Any) -> AsyncEngine:
        """`Engine.load`, wrapped."""
        return cls(Engine.load(*args, **options))

    def _run(self) -> None:
        """Steps while there is work; between steps, and only there, it takes commands."""
        idle = True
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                idle = not self.engine.step()
                continue
            if command is None:
                self.engine.close()
                return
            command()
            idle = False

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Runs a function between two steps, on the engine's thread."""
        if self._closed:
            raise EngineClosed("the engine is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def command() -> None:
            try:
                result, error = function(), None
            except Exception as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(settle, result, error)

        self._commands.put(command)
        return await future

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
    ) -> AsyncIterator[Chunk]:
        """Yields what each step adds. Leaving the iteration cancels what is unfinished before the next step."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk] = asyncio.Queue()

        def listener(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunk)

        requests: list[Request] = await self._call(
            lambda: self.engine.submit(
                prompts, sampling, speculative=speculative, prediction=prediction, listener=listener
            )
        )
        left = len(requests)
        try:
            while left:
                chunk = await arrived.get()
                if chunk.finished and chunk.completion is None:
                    raise self._reason(requests, chunk)
                left -= chunk.finished
                yield chunk
        finally:
            self._commands.put(lambda: self.engine.cancel(requests))

    @staticmethod
    def _reason(requests: Sequence[Request], chunk: Chunk) -> BaseException:
        own = (r for r in requests if (r.prompt_index, r.sample_index) == (chunk.prompt_index, chunk.sample_index))
        return next(own).error or EngineClosed("the engine was closed before the request finished")

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
    ) -> list[Completion]:
        """Completes prompts together; results in the order of (prompt, sample)."""
        chunks = self.stream(prompts, sampling, speculative=speculative, prediction=prediction)
        done = [chunk.completion async for chunk in chunks if chunk.completion is not None]
        return sorted(done, key=lambda completion: (completion.prompt_index, completion.sample_index))

    async def close(self) -> None:
        """Cancels everything and ends the engine's thread."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
