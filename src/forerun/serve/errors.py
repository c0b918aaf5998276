"""What can go wrong with a request, as OpenAI's clients expect it: a status and `{"error": {...}}`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.errors import EngineClosed, ForerunError, OptionError, OutOfBlocks, RequestCancelled, nearest

logger = logging.getLogger("forerun.serve")

INVALID = "invalid_request_error"
CLOSING = "the server is shutting down"
LONGEST_NAME = 64
"""Characters of a name that a client made up which are compared, repeated or remembered."""


class ApiError(Exception):
    """An answer that is an error. `param` is the path of the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: a value that cannot be used."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: a field that this model, drafter or server cannot honour."""
    return invalid(param, message, "unsupported_parameter")


def unknown(param: str, known: Iterable[str]) -> ApiError:
    """400: a field nobody knows, with the nearest one that exists. A name without end is cut before it is compared."""
    place, dot, name = param.rpartition(".")
    name = name[:LONGEST_NAME]
    return invalid(f"{place}{dot}{name}", f"unknown field; {nearest(name, known)}", "unknown_parameter")


def too_long(param: str, count: int, new: int, window: int) -> ApiError:
    """400: prompt and answer do not fit the model's context."""
    asked = f"{count} tokens in {param}" + (f" and {new} for the answer" if new else "")
    message = f"the context of this model is {window} tokens; the request asks for {asked}"
    return invalid(param, message, "context_length_exceeded")


def busy(message: str, retry_after: int) -> ApiError:
    """429: the queue is full."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def unavailable(message: str) -> ApiError:
    """503: loading, or shutting down."""
    return ApiError(503, message, kind="unavailable_error")


def expired(seconds: float) -> ApiError:
    """408: the deadline of the request. Sent again as it is it would expire again, which clients are told."""
    message = f"the answer was not complete within {seconds:g} s"
    return ApiError(408, message, kind="timeout_error", code="deadline_exceeded", headers={"x-should-retry": "false"})


def as_api_error(error: BaseException) -> ApiError:
    """The answer to whatever was raised while a request was read or run."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OptionError):
        return invalid(error.option, error.reason)
    if isinstance(error, RecursionError):
        return invalid(None, "the request is nested too deeply")
    if isinstance(error, EngineClosed):
        return unavailable(CLOSING)
    if isinstance(error, OutOfBlocks):
        return unavailable("the KV memory is in use; try again later")
    if isinstance(error, (RequestCancelled, ForerunError)):
        return ApiError(500, str(error), kind="server_error")
    # Its text may hold paths or parts of prompts: it belongs into the log and not into an answer.
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed at this request ({type(error).__name__})", kind="server_error")
