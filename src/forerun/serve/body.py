"""From the bytes of a request to its fields: everything wrong with them is a 400 that names the field."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from forerun.serve.errors import LONGEST_NAME, ApiError, invalid, unknown, unsupported
from forerun.serve.fields import NEUTRAL, REFUSED, Fields

logger = logging.getLogger("forerun.serve")

_Body = TypeVar("_Body", bound=Fields)

FOREIGN = {"max_new_tokens": "max_tokens", "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Fields of other servers' own routes, and what they are called here."""


class Reader:
    """Reads bodies. It remembers which unknown fields it has warned about."""

    def __init__(self, max_bytes: int, ignore_unknown: bool = False):
        self._max_bytes = max_bytes
        self._ignore_unknown = ignore_unknown
        self._warned: set[str] = set()

    async def read(self, request: Request, kind: type[_Body]) -> _Body:
        """The body as `kind`. ApiError: too large, no JSON, or a field that cannot be used."""
        found = _parse(await self._bytes(request))
        if not isinstance(found, dict):
            raise invalid(None, f"the body must be a JSON object, got {_shown(found)}")
        dropped = self._warn if self._ignore_unknown else None
        try:
            return kind.model_validate(self._known(found, kind), context=dropped)
        except ValidationError as error:
            raise _first(error, kind) from None
        except RecursionError:
            raise invalid(None, "the body is nested too deeply") from None

    async def _bytes(self, request: Request) -> bytes:
        too_large = ApiError(413, f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > self._max_bytes:
                    raise too_large
                parts.append(part)
            request.state.size = size
        except ClientDisconnect:
            raise invalid(None, "the body ended early") from None
        return b"".join(parts)

    def _known(self, found: dict[str, Any], kind: type[Fields]) -> dict[str, Any]:
        """The fields that exist; others are refused, or dropped with one warning for each name."""
        known = kind.names()
        kept: dict[str, Any] = {}
        for name, value in found.items():
            if name in known:
                kept[name] = value
            elif value is None or _is_neutral(name, value, found):
                continue
            elif self._ignore_unknown:
                self._warn(name)
            elif name in REFUSED:
                raise unsupported(name, REFUSED[name])
            elif name in FOREIGN:
                raise invalid(name, f"unknown field; here it is {FOREIGN[name]!r}", "unknown_parameter")
            else:
                raise unknown(name, known)
        return kept

    def _warn(self, name: str) -> None:
        name = name[:LONGEST_NAME]
        if name not in self._warned and len(self._warned) < 1000:
            self._warned.add(name)
            logger.warning("the unknown field %r of requests is ignored (--ignore-unknown-fields)", name)


def _is_neutral(name: str, value: Any, found: Mapping[str, Any]) -> bool:
    """Whether another server's field has a value that asks for nothing."""
    if name == "best_of" and type(value) is int:
        return value == (found.get("n") or 1)
    return any(value == harmless and type(value) is type(harmless) for harmless in NEUTRAL.get(name, ()))


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=_no_constant)
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, NaN, or an integer of thousands of digits
        digits = "set_int_max_str_digits" in str(error)  # advice for whoever writes Python
        said = "a number has too many digits" if digits else error
        raise invalid(None, f"the body is no JSON: {said}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _first(error: ValidationError, kind: type[Fields]) -> ApiError:
    """The first complaint. Of a field with alternatives the one that got furthest speaks."""
    complaints = error.errors(include_url=False, include_context=False)
    field = complaints[0]["loc"][:1]
    firsts: dict[tuple[int | str, ...], ErrorDetails] = {}
    for complaint in complaints:
        if complaint["loc"][:1] == field:
            firsts.setdefault(complaint["loc"][:-1], complaint)
    deepest = max(firsts.values(), key=_reach)
    if deepest["type"] == "extra_forbidden":
        *place, name = deepest["loc"]
        path, inner = f"{_path(place)}.{name}", _names_at(kind, place)
        return unknown(path, inner) if inner else invalid(path, "unknown field", "unknown_parameter")
    path = _path(deepest["loc"])
    if deepest["type"] == "missing":
        return invalid(path, "is required")
    message = "input should be an object" if deepest["type"] == "model_type" else deepest["msg"]
    return invalid(path, f"{message[0].lower()}{message[1:]}, got {_shown(deepest['input'])}")


def _reach(complaint: ErrorDetails) -> tuple[int, int, bool]:
    """How far an alternative got: how deep, up to which place of a list, and whether it was of the right type there."""
    last = complaint["loc"][-1]
    return len(complaint["loc"]), last if isinstance(last, int) else -1, not complaint["type"].endswith("_type")


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content`. The names of the alternatives of a field, which pydantic puts in between, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _is_field(part):
            path += f".{part}" if path else part
    return path or "body"


def _is_field(part: str) -> bool:
    """Whether a part of pydantic's location is a key of the body: alternatives are written as types (`list[str]`,
    `StructuredOutputs`, `constrained-str`), keys as snake case."""
    return part.replace("_", "").isalnum() and part.lower() == part and part not in ("str", "bool", "int", "float")


def _names_at(kind: type[Fields], location: Sequence[int | str]) -> list[str]:
    """The fields of the object at a place in the body, if it is one of ours."""
    from forerun.serve import fields, schemas

    named = [part for part in location if isinstance(part, str) and part[:1].isupper()]
    if named:
        inner = getattr(schemas, named[-1], None) or getattr(fields, named[-1], None)
        return inner.names() if inner is not None else []
    keys = [part for part in location if isinstance(part, str)]
    for key in keys:
        found = next((f for name, f in kind.model_fields.items() if (f.alias or name) == key), None)
        inner = None if found is None else _model_in(found.annotation)
        if inner is None:
            return []
        kind = inner
    return kind.names()


def _model_in(annotation: Any) -> type[Fields] | None:
    """The one of our objects that an annotation such as `list[Message] | None` holds."""
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        return annotation
    found = (_model_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((model for model in found if model is not None), None)


def _shown(value: Any) -> str:
    """A value in a message, short enough for a log line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
