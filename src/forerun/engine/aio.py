"""The asyncio front: one thread owns the engine and steps it; coroutines wait for their own chunks."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from forerun.engine.engine import Engine
from forerun.engine.intake import Ask, Prompt, Speculative
from forerun.engine.request import Chunk, Completion, Request
from forerun.engine.scoring import Scoring
from forerun.errors import EngineClosed, RequestCancelled
from forerun.sampling import Sampling, TokenLogprob

logger = logging.getLogger("forerun")

MOST_UNREAD = 4096
"""Chunks per sample that may wait for a slow reader before its requests are cancelled; memory would grow otherwise."""


WAIT_FOR_MEMORY = 0.01
"""Seconds between two looks whether KV memory is free."""


class AsyncEngine:
    """Many callers, one engine. The event loop never waits for a step, nor a step for the event loop.

    Callers may live in different event loops and threads.

    >>> async with AsyncEngine.load("embedded", drafter="ngram") as engine:
    ...     async for chunk in engine.stream("def area("):
    ...         print(chunk.text, end="")
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pieces: deque[Callable[[], None]] = deque()  # the engine's thread alone looks at it
        self._closed = False
        # Held while a command is queued, so that none comes behind the one that ends the thread.
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, *args: Any, **options: Any) -> AsyncEngine:
        """`Engine.load`, wrapped. It loads in a thread that ends: the engine's own computes faster if no other one that
        lives has computed (OpenMP would have more workers than there are cores)."""
        with ThreadPoolExecutor(1, "forerun-load") as loader:
            return cls(loader.submit(Engine.load, *args, **options).result())

    def _run(self) -> None:
        """Steps while there is work; between steps, and only there, it takes commands."""
        idle = True
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                idle = not self._advance()
                continue
            if command is None:
                self.engine.close()
                for piece in self._pieces:
                    piece()  # nothing is computed any more, but somebody waits
                return
            command()
            idle = False

    def _advance(self) -> bool:
        """A piece of the computing that is no step, and a step: neither has to wait for more than one of the other,
        however many wait. False if there is nothing left to do."""
        if self._pieces:
            self._pieces.popleft()()
        return self._step() or bool(self._pieces)

    def _step(self) -> bool:
        """A step that breaks off is a bug of ours. Whoever waits is told; the thread serves those who come later."""
        try:
            return self.engine.step()
        except Exception as error:
            logger.error("a step broke off; everything that runs fails with it", exc_info=True)
            self.engine.fail(error)
            return False

    async def _call(self, function: Callable[[], Any], computes: bool = False) -> Any:
        """Runs a function between two steps, on the engine's thread; one that `computes` alone of its kind there."""
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
            _post(loop, settle, result, error)

        with self._closing:
            if self._closed:
                raise EngineClosed("the engine is closed")
            self._commands.put(partial(self._pieces.append, command) if computes else command)
        return await future

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Chunk]:
        """Yields what each step adds. Leaving the iteration cancels what is unfinished before the next step.

        Raises:
            PromptError, OptionError: before anything is computed. RequestCancelled: the reader fell too far behind.
            EngineClosed: before or during the stream. Any error of the target: after the step it hit.
        """
        asked = Ask(speculative, prediction, priority, cache_salt)
        # Texts are tokenised and ids looked at where neither a step nor the event loop waits for a long one.
        requests = await asyncio.to_thread(self.engine.intake.requests, prompts, sampling, asked)
        reader = _Reader(self.engine, requests, asyncio.get_running_loop())
        try:
            await self._call(partial(self.engine.start, requests, reader.listen))
            left = len(requests)
            while left:
                chunk = await reader.next()
                left -= chunk.finished
                yield chunk
        finally:
            # Queued behind `start`, which may not have run yet if the caller was cancelled while it waited.
            self._commands.put(reader.cancel)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Completes prompts together; results in the order of (prompt, sample)."""
        chunks = self.stream(prompts, sampling, speculative=speculative, prediction=prediction, cache_salt=cache_salt)
        done = [chunk.completion async for chunk in chunks if chunk.completion is not None]
        return sorted(done, key=lambda completion: (completion.prompt_index, completion.sample_index))

    async def score(self, tokens: Sequence[int], top: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of every token of a text behind the first, and of the `top` best ones there.

        Raises:
            PromptError: a token outside the vocabulary, or more than the KV memory holds. EngineClosed.
        """
        made: list[Scoring] = []

        def begin() -> None:
            made.append(Scoring(self.engine.core, self.engine.intake, tokens, top))

        def end() -> None:
            for scoring in made:
                scoring.close()

        try:
            await self._call(begin)
            while not made[0].done:
                if not await self._call(made[0].step, computes=True):
                    await asyncio.sleep(WAIT_FOR_MEMORY)
            return made[0].values
        finally:
            self._commands.put(end)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function between two steps, on the engine's thread: the only place where its state may be looked at as
        a whole."""
        return await self._call(function)

    async def close(self) -> None:
        """Cancels everything and ends the engine's thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Reader:
    """The way of one stream's chunks from the engine's thread to an event loop."""

    def __init__(self, engine: Engine, requests: Sequence[Request], loop: asyncio.AbstractEventLoop):
        self._requests = requests
        self._engine = engine
        self._loop = loop
        self._arrived: asyncio.Queue[Chunk | RequestCancelled] = asyncio.Queue()
        self._sent = 0
        self._read = 0

    def listen(self, chunk: Chunk) -> None:
        """On the engine's thread, after a step."""
        self._sent += 1
        behind = self._sent - self._read
        if behind > MOST_UNREAD * len(self._requests):
            logger.warning("a reader is %d chunks behind; its requests are cancelled", behind)
            self._put(RequestCancelled(f"the reader fell {behind} chunks behind"))
            self.cancel()
        elif not self._put(chunk):
            self.cancel()  # nobody is left to read

    def _put(self, item: Chunk | RequestCancelled) -> bool:
        return _post(self._loop, self._arrived.put_nowait, item)

    def cancel(self) -> None:
        self._engine.cancel(self._requests)

    async def next(self) -> Chunk:
        item = await self._arrived.get()
        self._read += 1
        if isinstance(item, RequestCancelled):
            raise item
        if item.finished and item.completion is None:
            place = (item.prompt_index, item.sample_index)
            own = next(r for r in self._requests if (r.prompt_index, r.sample_index) == place)
            raise own.error or EngineClosed("the engine was closed before the request finished")
        return item


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> bool:
    """Calls a function in an event loop from the engine's thread; False if that loop has been closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
