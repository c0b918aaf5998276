"""POST /v1/chat/completions: from a conversation to an answer."""

from __future__ import annotations

from typing import Any

from forerun.serve.answer import THINK
from forerun.serve.answers import ChatWriter, Reading, Wanted, Writer
from forerun.serve.errors import invalid
from forerun.serve.exchange import Exchange
from forerun.serve.generation import Generation
from forerun.serve.logprobs import of_prompt
from forerun.serve.parameters import form_of, refuse_unbuilt
from forerun.serve.schemas import ChatRequest
from forerun.serve.service import Arrival, Service


async def answer_chat(service: Service, request: ChatRequest, arrival: Arrival) -> Exchange:
    """The answer, which begins to be computed when it is sent. ApiError: the request cannot be served."""
    model = service.check_model(request.model)
    _check(service, request)
    tools = service.tools.grammar(request)
    form = form_of(request)
    if tools is not None and form is not None:
        raise invalid(form.param, "cannot be combined with a tool that must be called")
    service.gate.check(request.n or 1)
    rendered, ids = await service.in_text(_prompt, service, request)
    most = _max_tokens(service, request, ids)
    shown = bool(request.logprobs), bool(request.return_token_ids), request.wants_provenance
    wanted = Wanted(request.n or 1, *shown)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = service.parameters.sampling(service.tools.readable(request), most, logprobs)
    compiled = await service.in_text(service.compiled, tools or form)
    ask = service.ask(request, [ids], sampling, compiled)
    reading = _reading(service, request, rendered)

    once: dict[str, Any] = {"prompt_token_ids": ids} if request.return_token_ids else {}

    async def writer() -> Writer:
        if request.prompt_logprobs is not None:
            [scores] = await service.scores([ids], request.prompt_logprobs)
            once["prompt_logprobs"] = of_prompt(ids, scores, service.tokens)
        return ChatWriter(wanted, service.tokens, reading)

    envelope = service.envelope(arrival, model, "chat.completion")
    generation = Generation(service, request, ask, arrival, envelope, writer, reading, once)
    service.log_request(arrival, ask)
    return service.exchange(request, ask, arrival, generation.whole, generation.events)


def _check(service: Service, request: ChatRequest) -> None:
    refuse_unbuilt(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    service.parameters.check_logprobs("top_logprobs", request.top_logprobs)
    service.parameters.check_logprobs("prompt_logprobs", request.prompt_logprobs)
    ours, older = request.max_completion_tokens, request.max_tokens
    if ours is not None and older is not None and ours != older:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
    if ours is None and older == 0:
        raise invalid("max_tokens", "must be at least 1 for a chat, got 0")


def _prompt(service: Service, request: ChatRequest) -> tuple[str, list[int]]:
    rendered = service.prompts.of_chat(request)
    ids = service.prompts.tokenizer.encode(rendered, bool(request.add_special_tokens))
    return rendered, service.parameters.truncated(request, ids)


def _max_tokens(service: Service, request: ChatRequest, ids: list[int]) -> int | None:
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    most = service.parameters.max_tokens("messages", [ids], asked, None)
    return most if asked is not None else None  # None: as much as there is room for, KV memory included


def _reading(service: Service, request: ChatRequest, rendered: str) -> Reading:
    options = service.options
    reasoning = options.reasoning_parser is not None
    opened = rendered.rstrip().endswith(THINK)
    return Reading(
        reasoning=reasoning,
        thinking=reasoning and (opened or options.reasoning_parser == "deepseek_r1"),
        calls=service.tools.notation_for(request),
    )
