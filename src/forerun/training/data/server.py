"""JSON to OpenAI-compatible servers over connections that are kept, by the standard library's client.

`http.client` and not one of the clients among our dependencies' dependencies: huggingface_hub has changed its own twice
within the versions we support, and one blocking connection per thread is all that is needed here.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from forerun.errors import OptionError
from forerun.parsing import json_of

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Answers of a server that may be different next time."""
LONGEST_PAUSE = 30.0
FIRST_PAUSE = 0.5


class ServerError(Exception):
    """A request that failed. `again`: it may succeed later; `status` is None where there was no answer at all."""

    def __init__(self, message: str, again: bool, status: int | None = None, pause: float | None = None):
        super().__init__(message)
        self.again = again
        self.status = status
        self.pause = pause
        """Seconds that the server asks to wait."""


class Server:
    """One base URL. Connections belong to threads; how long to leave the server alone is common to them.

    Args:
        url: http or https, with or without `/v1`.
        key: sent as `Authorization: Bearer`, if any.
        timeout: seconds to connect, and between bytes of an answer.

    Raises:
        OptionError: not such a URL.
    """

    def __init__(self, url: str, key: str | None, timeout: float):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise OptionError("--url", f"must be like http://HOST:PORT/v1, got {url!r}")
        self.url = url
        self._parts, self._timeout = parts, timeout
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._own = threading.local()
        self._lock = threading.Lock()
        self._reaching = threading.Lock()
        self._failures = 0
        self._failing = False
        self._open_at = 0.0

    @property
    def failing(self) -> bool:
        """Its last request got no usable answer, and it has not been reached since."""
        return self._failing

    def pause(self) -> float:
        """Seconds from now during which no request should be made."""
        return max(0.0, self._open_at - time.monotonic())

    def get(self, path: str) -> Any:
        """ServerError if it fails."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """ServerError if it fails; the server is then left alone for a while, longer each time it fails again."""
        try:
            found = self._request("POST", path, json.dumps(body).encode())
        except ServerError as error:
            if error.again:
                self._back_off(error.pause)
            raise
        with self._lock:
            self._failures, self._failing = 0, False
        return found

    def reach(self) -> bool:
        """Whether a server that failed can be talked to again; of threads that ask at one time only one finds out."""
        if not self._reaching.acquire(blocking=False):
            return False
        try:
            if self.failing and self.pause() == 0:
                try:
                    self._request("GET", "/models", None)
                    self._failing = False
                except ServerError as error:
                    self._failing = error.status is None
                    if self._failing:
                        self._back_off(None)
            return not self.failing
        finally:
            self._reaching.release()

    def _back_off(self, asked: float | None) -> None:
        """Requests that fail together count as one failure."""
        with self._lock:
            self._failing = True
            if self.pause() > 0:
                return
            wait = min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._failures) * random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 16)
            self._open_at = time.monotonic() + max(wait, asked or 0.0)

    def _request(self, method: str, path: str, body: bytes | None) -> Any:
        try:
            status, headers, data = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            self._drop()
            again = not isinstance(error, ssl.SSLCertVerificationError)
            raise ServerError(f"{self.url}: {_said(error)}", again) from error
        if status != 200:
            message = f"{self.url}: HTTP {status}: {_message(data)}"
            raise ServerError(message, status in AGAIN, status, _seconds(headers.get("Retry-After")))
        try:
            return json_of(data)
        except ValueError as error:
            raise ServerError(f"{self.url}: an answer that is not JSON", False, status) from error

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, Mapping[str, str], bytes]:
        """A request on this thread's connection; once more on a fresh one if the server had closed a kept one."""
        kept = getattr(self._own, "connection", None)
        try:
            return self._once(kept or self._connect(), method, path, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if kept is None:
                raise
            self._drop()
            return self._once(self._connect(), method, path, body)

    def _once(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        connection.request(method, f"{self._base}{path}", body, self._headers)
        response = connection.getresponse()
        data = response.read()
        return response.status, dict(response.headers), data

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=self._timeout)
        self._own.connection = connection
        return connection

    def _drop(self) -> None:
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
        self._own.connection = None


def _said(error: Exception) -> str:
    return f"no answer in time ({error})" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _message(data: bytes) -> str:
    """The words of an error in OpenAI's shape, or the beginning of whatever came."""
    text = data.decode("utf-8", "replace")
    try:
        found = json_of(text)
        error = found.get("error", found.get("detail", found.get("message")))
        text = error.get("message", text) if isinstance(error, Mapping) else str(error or text)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300] or "no message"


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.isdigit() else None
