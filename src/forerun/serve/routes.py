"""The routes, and their bodies in the OpenAPI document."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

import forerun
from forerun.serve.body import Reader
from forerun.serve.chat import answer_chat
from forerun.serve.completions import answer_completion
from forerun.serve.effective import effective
from forerun.serve.errors import invalid, unavailable
from forerun.serve.exchange import Exchange, as_json
from forerun.serve.fields import Fields
from forerun.serve.page_data import profile_document
from forerun.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from forerun.serve.server import Server, info
from forerun.serve.service import Arrival, Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")

OF_A_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
"""Fields of /tokenize that say nothing about a text."""

BODIES: dict[str, type[Fields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""POST route -> what its body is."""


def add_routes(app: FastAPI, server: Server) -> None:
    """All routes of the server."""
    reader = Reader(server.options.max_body_bytes, server.options.ignore_unknown_fields)
    _add_generation(app, server, reader)
    _add_tokens(app, server, reader)
    _add_reports(app, server)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]


def _add_generation(app: FastAPI, server: Server, reader: Reader) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Exchange:
        arrived = time.perf_counter()
        service = server.service
        body = await reader.read(request, ChatRequest)
        return answer_chat(service, body, _arrival(request, arrived, body.request_id))

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Exchange:
        arrived = time.perf_counter()
        service = server.service
        body = await reader.read(request, CompletionRequest)
        return answer_completion(service, body, _arrival(request, arrived, body.request_id))


def _arrival(request: Request, at: float, own_id: str | None) -> Arrival:
    trace = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
    state = request.state
    return Arrival(at, own_id or state.request_id, trace, getattr(state, "key", None), state.size)


def _add_tokens(app: FastAPI, server: Server, reader: Reader) -> None:
    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Exchange:
        arrived = time.perf_counter()
        service = server.service
        body = await reader.read(request, TokenizeRequest)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        for name in OF_A_CHAT if body.prompt is not None else ():
            if getattr(body, name) is not None:
                raise invalid(name, "belongs to messages")
        arrival = _arrival(request, arrived, None)
        return service.beside(arrival, partial(service.lanes.text, arrival.size, _tokenized, service, body))

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Exchange:
        arrived = time.perf_counter()
        service = server.service
        body = await reader.read(request, DetokenizeRequest)
        service.check_model(body.model)
        outside = [token for token in body.tokens if token >= service.target.vocab_size]
        if outside:
            raise invalid("tokens", f"{outside[0]} is outside the vocabulary of {service.target.vocab_size}")
        arrival = _arrival(request, arrived, None)
        return service.beside(arrival, partial(service.lanes.text, arrival.size, _detokenized, service, body))


def _tokenized(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    encode = service.prompts.tokenizer.encode
    if body.prompt is not None:
        ids = encode(body.prompt, body.add_special_tokens is not False)
    else:
        ids = encode(service.prompts.of_tokenize(body), bool(body.add_special_tokens))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.target.window, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [service.tokens.text_of(token) for token in ids]
    return found


def _detokenized(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": service.prompts.tokenizer.decode(body.tokens, False)}


def _add_reports(app: FastAPI, server: Server) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        if not server.ready:
            raise unavailable("the server is loading or shutting down")
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": forerun.__version__}

    @app.get("/server_info", response_model=None)
    async def server_info() -> Response:
        return _json(info(server) | effective(server))

    @app.get("/forerun/profile", response_model=None)
    async def profile() -> Response:
        return _json(await profile_document(server.service))

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(server.service, name) for name in server.service.names]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        return _json(_model(server.service, server.service.check_model(name)))

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        service = server.service
        levels = server.levels()
        service.metrics.set("num_requests_running", levels.running)
        service.metrics.set("num_requests_waiting", levels.waiting)
        service.metrics.set("kv_cache_usage_perc", levels.kv_usage)
        return Response(service.metrics.text(), headers={"content-type": METRICS_TYPE})


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "forerun",
        "root": service.target.name, "parent": None, "max_model_len": service.target.window,
    }  # fmt: skip


def _json(document: dict[str, Any]) -> Response:
    return Response(as_json(document), media_type="application/json")


# ------------------------------------------------------------------------------------------------------------ OpenAPI


def _described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. Bodies are read by `Reader`, so the framework does not know them."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path, kind in BODIES.items():
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
            operation = document["paths"][path]["post"]
            operation["requestBody"] = {"required": True, "content": content}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                operation["responses"] = _responses(path)
        app.openapi_schema = document
    return app.openapi_schema


def _responses(path: str) -> dict[str, Any]:
    """Statuses of a route: with a body or a name anything can be wrong with it, and any may be closed or loading."""
    error = {"content": {"application/json": {"schema": _ERROR}}}
    found: dict[str, Any] = {"200": {"description": "The answer."}, "401": {"description": "No valid key.", **error}}
    if path in BODIES:
        found |= {
            "400": {"description": "A field cannot be used; it is named.", **error},
            "404": {"description": "No such model.", **error},
            "408": {"description": "The deadline of the request.", **error},
            "413": {"description": "The body is too large.", **error},
            "429": {"description": "The queue is full; see Retry-After.", **error},
            "500": {"description": "A fault in a step.", **error},
        }
    elif "{" in path:
        found["404"] = {"description": "No such model.", **error}
    found["503"] = {"description": "Loading, or shutting down.", **error}
    return found


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
