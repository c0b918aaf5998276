"""`serve`: the application on a socket, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable
from errno import EADDRNOTAVAIL
from types import FrameType

import uvicorn

from forerun.engine import Engine
from forerun.errors import OptionError
from forerun.serve.app import create_app
from forerun.serve.options import ServeOptions
from forerun.serve.page_files import PAGE
from forerun.serve.server import Server

logger = logging.getLogger("forerun.serve")


class _Uvicorn(uvicorn.Server):
    """Stops in two steps: first nobody is let in any more and who is inside finishes, then the process ends."""

    server: Server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        # Not super(): it would raise the signal again at the end, and a stop that was asked for is no failure.
        if self.server.loading:
            logger.info("stopping while the model loads")
        elif not self.should_exit:
            seconds = self.server.options.drain_timeout
            logger.info("stopping; running requests have %g s to finish (Ctrl-C again: they end now)", seconds)
        elif sig == signal.SIGINT:
            # Not `force_exit`: it cancels what runs, which clients see as half an answer and the log as tracebacks.
            logger.info("running requests are ended")
            self.server.hurry()
        self.should_exit = True


def serve(
    load: Callable[[], Engine],
    options: ServeOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    listening: Callable[[str], None] = lambda _: None,
) -> bool:
    """Serves until SIGTERM or SIGINT.

    Args:
        load: makes the engine, while `/health` is already answered with 503.
        options: of the server.
        host: address to listen at.
        port: 0: any that is free.
        listening: told the address once requests are taken.

    Returns:
        Whether the model is still being loaded, in a thread that nothing can stop and that Python waits for at its end.

    Raises:
        OptionError: the address cannot be used. Whatever `load` raised.
    """
    sock = _listen(host, port)
    app = create_app(load, options, failed=lambda: setattr(web, "should_exit", True), page=PAGE)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=None if math.isinf(options.drain_timeout) else int(options.drain_timeout) + 5,
        lifespan="on",
    )
    web = _Uvicorn(config)
    web.server = app.state.server
    web.server.address = host, sock.getsockname()[1]
    listening(f"http://{host}:{web.server.address[1]}")
    asyncio.run(_run(web, sock, app.state.server))
    if app.state.server.error is not None:
        raise app.state.server.error
    loading: bool = app.state.server.loading
    return loading


async def _run(web: _Uvicorn, sock: socket.socket, server: Server) -> None:
    """uvicorn, and beside it the drain that begins when it is told to stop."""

    async def drain() -> None:
        while not web.should_exit:
            await asyncio.sleep(0.05)
        await server.drain()

    draining = asyncio.create_task(drain())
    try:
        await web.serve(sockets=[sock])
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise OptionError("--port", f"must be in 0 .. 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that no name server could be asked for
        sock.close()
        about_host = isinstance(error, (UnicodeError, socket.gaierror)) or error.errno == EADDRNOTAVAIL
        option = "--host" if about_host else "--port"
        raise OptionError(option, f"cannot listen at {host}:{port}: {error}") from None
    sock.set_inheritable(True)
    return sock


__all__ = ["serve"]
