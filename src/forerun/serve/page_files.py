"""The page at `/`: its files, read once. It loads nothing from anywhere else, and browsers are told so."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
"""Folder of the page that `forerun serve` shows: index.html, and what that asks for under `static/`."""

INDEX = "index.html"
KEY_OPEN, KEY_NEEDED = 'data-key="open"', 'data-key="needed"'
"""An attribute of the page's root: whether it has to ask for a key before anything else."""

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, but asked for each time: a page of another version would not fit the server
}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def add_page(app: FastAPI, folder: Path, needs_key: bool) -> None:
    """Adds `/` and `/static/NAME`.

    Args:
        app: without a route of these names.
        folder: of files whose ending is one of `TYPES`, index.html among them.
        needs_key: whether the other routes want one.
    """
    files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in TYPES}
    index = files.pop(INDEX)
    if needs_key:
        assert index.content.count(KEY_OPEN.encode()) == 1, "index.html does not say whether a key is needed"
        index = _File(index.content.replace(KEY_OPEN.encode(), KEY_NEEDED.encode()), index.kind)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, index)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _answer(request, files[name])


def _read(path: Path) -> _File:
    return _File(path.read_bytes(), TYPES[path.suffix])


def _answer(request: Request, file: _File) -> Response:
    headers = {**HEADERS, "etag": file.tag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.tag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


__all__ = ["PAGE", "add_page"]
