"""What every request passes first: its origin, the key, and an id of its own. Plain ASGI: streams are not buffered."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.errors import ApiError
from forerun.serve.exchange import error_response

OPEN = frozenset({"/health", "/version"})
"""Routes without a key: probes have none."""
ID_HEADER = "x-request-id"
_READ = frozenset({b"authorization", b"origin", b"sec-fetch-site", ID_HEADER.encode()})

CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""Methods that make the server do something."""

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def is_id(text: str) -> bool:
    """Whether a request's own id can be used: it goes into headers and logs."""
    return _ID.fullmatch(text) is not None


class Entrance:
    """Checks `Authorization: Bearer KEY`, and that no foreign page asks; answers with the id of the request.

    A browser sends what any page asks, also to a server that listens to its own machine alone; CORS keeps the page from
    the answer, not the server from the work. Browsers say of each request whether its page is another's
    (`Sec-Fetch-Site`, https://www.w3.org/TR/fetch-metadata/); other clients say nothing and are let in.

    Args:
        app: what stands behind.
        keys: any of them opens; none: everything is open.
        origins: pages elsewhere that may ask; `*`: any.
        open_page: whether the page at `/`, which asks for the key itself, is served without one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = (), origins: Sequence[str] = (), open_page: bool = False):
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._origins = frozenset(origins)
        self._open_page = open_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = {name: value for name, value in scope["headers"] if name in _READ}
        own = given.get(ID_HEADER.encode(), b"").decode("latin-1")
        number = own if is_id(own) else secrets.token_hex(16)
        scope["state"] = {**scope.get("state", {}), "request_id": number}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (ID_HEADER.encode(), number.encode())]
                message = {**message, "headers": headers}
            await send(message)

        if self._is_foreign(scope["method"], given):
            foreign = ApiError(
                403, "pages of other sites may not ask this server; --allowed-origins names those that may"
            )
            await error_response(foreign)(scope, receive, answer)
            return
        kind, _, key = given.get(b"authorization", b"").partition(b" ")
        digest = _digest(key.strip()) if self._keys else b""
        if self._lets_in(scope, kind, digest):
            if self._keys:
                scope["state"]["key"] = digest.hex()  # it stands for the key from here on
            await self._app(scope, receive, answer)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        refused = ApiError(
            401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key", headers=headers
        )
        await error_response(refused)(scope, receive, answer)

    def _is_foreign(self, method: str, given: Mapping[bytes, bytes]) -> bool:
        if method not in CHANGING or given.get(b"sec-fetch-site") not in (b"cross-site", b"same-site"):
            return False
        return "*" not in self._origins and given.get(b"origin", b"").decode("latin-1") not in self._origins

    def _lets_in(self, scope: Scope, kind: bytes, digest: bytes) -> bool:
        path = scope["path"]
        if not self._keys or path in OPEN or scope["method"] == "OPTIONS":
            return True
        if self._open_page and scope["method"] == "GET" and (path == "/" or path.startswith("/static/")):
            return True
        # Every key is compared, each in constant time: how long it takes says nothing.
        matches = [hmac.compare_digest(digest, own) for own in self._keys]
        return kind.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    """Of equal length for every key, so that not even that is told."""
    return hashlib.sha256(key).digest()
