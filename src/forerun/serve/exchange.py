"""An answer that is computed while its client waits: it ends when done, when the client leaves, when time is up."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.gate import Deadline, Gate, Pass

logger = logging.getLogger("forerun.serve")

Events = AsyncIterator[dict[str, Any]]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def as_json(document: Mapping[str, Any]) -> bytes:
    """JSON of an answer: compact, UTF-8, no NaN."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: ApiError) -> Response:
    """The whole answer of a request that failed."""
    content = json.dumps(error.body).encode()  # in ASCII: it may repeat what was sent, broken characters included
    return Response(content, error.status, error.headers, "application/json")


class ClientLeft(Exception):
    """Nobody reads what is written any more."""


class Exchange(Response, ABC):
    """Runs `work` while the client is there.

    Args:
        gate: lets it in, or not.
        samples: places it takes at the gate.
        deadline: when it must be done; None: whenever it is.
        write_timeout: seconds the client may leave what was written unread.
        generates: whether the engine computes it, so that what it takes says how long others will wait.
    """

    def __init__(
        self, gate: Gate, samples: int, deadline: Deadline | None, write_timeout: float, generates: bool = True
    ):
        super().__init__()
        self._gate = gate
        self._samples = samples
        self._deadline = deadline
        self._write_timeout = write_timeout
        self._generates = generates
        self._started = False
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            with self._gate.enter(self._samples, self._deadline) as entered:
                error = await self._run(entered, receive)
        except ApiError as refused:
            error = refused
        if error is None:
            return
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        with suppress(ClientLeft):
            await self._fail(error)

    async def _run(self, entered: Pass, receive: Receive) -> ApiError | None:
        """The error to answer with; None: it is done, or nobody is there to be told."""
        work = asyncio.ensure_future(self.work())
        gone = asyncio.ensure_future(_disconnected(receive))
        stopped = asyncio.ensure_future(entered.stopped())
        try:
            await asyncio.wait({work, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                error = await _outcome(work)
                entered.answered = self._generates and error is None
                return error
            return stopped.result() if stopped.done() and not gone.done() else None
        finally:
            await _end(work, gone, stopped)

    @abstractmethod
    async def work(self) -> None:
        """Computes and writes the answer."""

    async def _fail(self, error: ApiError) -> None:
        """An error after the answer began."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, content: bytes, more: bool = True) -> None:
        """Writes as fast as the client reads; a client that reads nothing for too long is left."""
        message = {"type": "http.response.body", "body": content, "more_body": more}
        try:
            # Not wait_for: until Python 3.12 it loses a cancellation that comes when the inner call has just returned.
            async with asyncio.timeout(self._write_timeout):
                await self._send(message)
        except TimeoutError:  # before OSError, of which it is a kind
            logger.warning("a client read nothing for %g s; its request is cancelled", self._write_timeout)
            raise ClientLeft from None
        except OSError as error:
            raise ClientLeft from error


class WholeAnswer(Exchange):
    """One JSON document."""

    def __init__(self, compute: Callable[[], Awaitable[dict[str, Any]]], **options: Any):
        super().__init__(**options)
        self._compute = compute

    async def work(self) -> None:
        content = as_json(await self._compute())
        await self.begin(200, {"content-type": "application/json", "content-length": str(len(content))})
        await self.write(content, more=False)


class EventStream(Exchange):
    """Server-sent events, the last of them `[DONE]`.

    The status is sent with the first event, so that a request the engine refuses gets a status of its own; after
    `ping` seconds of silence a comment keeps proxies from giving up.
    """

    def __init__(self, prepare: Callable[[], Awaitable[Events]], ping: float, **options: Any):
        super().__init__(**options)
        self._prepare = prepare
        self._ping = ping

    async def work(self) -> None:
        # Without pings: what is wrong with a prompt gets a status of its own, however long its text waited.
        async with aclosing(await self._prepare()) as events:  # type: ignore[type-var]
            while True:
                event = await self._next(events)
                if event is None:
                    break
                await self._write_event(b"data: " + as_json(event) + b"\n\n")
        await self._write_event(DONE, more=False)

    async def _next(self, events: Events) -> dict[str, Any] | None:
        """The next event; pings while there is none."""
        coming = asyncio.ensure_future(_next_of(events))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=self._ping)
                if done:
                    return coming.result()
                await self._write_event(PING)
        finally:
            if not coming.done():
                await _end(coming)

    async def _write_event(self, content: bytes, more: bool = True) -> None:
        if not self._started:
            # Proxies that buffer (nginx) would turn a stream into one late answer.
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await self.begin(200, {**headers, "x-accel-buffering": "no"})
        await self.write(content, more)

    async def _fail(self, error: ApiError) -> None:
        await self.write(b"data: " + json.dumps(error.body).encode() + b"\n\n")
        await self.write(DONE, more=False)


async def _next_of(events: Events) -> dict[str, Any] | None:
    return await anext(events, None)


async def _outcome(work: asyncio.Future[None]) -> ApiError | None:
    try:
        await work
    except ClientLeft:
        return None
    except Exception as error:
        return as_api_error(error)
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs and waits until it has let go."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["DONE", "EventStream", "Exchange", "WholeAnswer", "as_json", "error_response"]
