"""The web application: routes, and what stands before them.

    app = create_app(lambda: Engine.load("embedded"), ServeOptions())

The model is loaded while the application already answers: `/health` is 503 until it is ready.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import forerun
from forerun.engine import Engine
from forerun.errors import ForerunError
from forerun.serve.errors import ApiError, as_api_error
from forerun.serve.exchange import error_response
from forerun.serve.options import ServeOptions
from forerun.serve.page_files import add_page
from forerun.serve.routes import add_routes
from forerun.serve.security import Entrance
from forerun.serve.server import Server


def create_app(
    load: Callable[[], Engine],
    options: ServeOptions | None = None,
    *,
    failed: Callable[[], None] = lambda: None,
    page: Path | None = None,
) -> FastAPI:
    """The application; its `state.server` is a `Server`.

    Args:
        load: makes the engine.
        options: of the server.
        failed: told when `load` raises.
        page: folder of the page at `/` (`add_page`); None: there is none.
    """
    chosen = options or ServeOptions()
    server = Server(load, chosen, failed)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.stop()

    app = FastAPI(
        title="forerun",
        version=forerun.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages come from elsewhere and would not work offline
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = server
    add_routes(app, server)
    for kind in (ApiError, ForerunError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http)
    origins = list(chosen.allowed_origins)
    app.add_middleware(Entrance, keys=chosen.api_key, origins=origins, open_page=page is not None)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    if page is not None:
        add_page(app, page, needs_key=bool(chosen.api_key))
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


async def _answer_http(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: an unknown route, a wrong method."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path[:200]}" if error.status_code in (404, 405) else ""
    return error_response(ApiError(error.status_code, message or str(error.detail), headers=error.headers))


__all__ = ["create_app"]
