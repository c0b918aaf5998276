"""POST /v1/chat/completions: from a conversation to an answer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from forerun.serve.answer import THINK, THINK_END
from forerun.serve.answers import ChatWriter, Envelope, Reading, Wanted, Writer
from forerun.serve.errors import invalid
from forerun.serve.exchange import Exchange
from forerun.serve.generation import Generation
from forerun.serve.grammar import Grammar, Reasoning
from forerun.serve.logprobs import of_prompt
from forerun.serve.parameters import form_of, refuse_unbuilt
from forerun.serve.schemas import ChatRequest
from forerun.serve.service import Arrival, Service


def answer_chat(service: Service, request: ChatRequest, arrival: Arrival) -> Exchange:
    """The answer, which begins to be computed when it is sent. ApiError: the request cannot be served."""
    model = service.check_model(request.model)
    _check(service, request)
    tools = service.tools.grammar(request)
    form = form_of(request)
    if tools is not None and form is not None:
        raise invalid(form.param, "cannot be combined with a tool that must be called")
    envelope = service.envelope(arrival, model, "chat.completion")
    held = tools or form or service.tools.strict_grammar(request)
    prepare = partial(_prepare, service, request, arrival, envelope, held)
    return service.exchange(request, request.n or 1, arrival, prepare)


async def _prepare(
    service: Service, request: ChatRequest, arrival: Arrival, envelope: Envelope, form: Grammar | None
) -> Generation:
    """From messages to what the engine is asked."""
    await service.check_prediction(request, arrival.size)
    rendered, ids = await service.lanes.text(arrival.size, _prompt, service, request)
    most = _max_tokens(service, request, ids)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    marks = () if service.options.reasoning_parser is None else (THINK, THINK_END)
    sampling = service.parameters.sampling(service.tools.readable(request, marks), most, logprobs)
    compiled = await service.compiled(form)
    reading, ahead = _reading(service, request, rendered, compiled is not None)
    ask = replace(service.ask(request, [ids], sampling, compiled, ahead), names=_names(request))
    shown = bool(request.logprobs), bool(request.return_token_ids), request.wants_provenance
    wanted = Wanted(request.n or 1, *shown)
    once: dict[str, Any] = {"prompt_token_ids": ids} if request.return_token_ids else {}

    async def writer() -> Writer:
        if request.prompt_logprobs is not None:
            [scores] = await service.scores([ids], request.prompt_logprobs)
            once["prompt_logprobs"] = of_prompt(ids, scores, service.tokens)
        return ChatWriter(wanted, service.tokens, reading)

    service.log_request(arrival, ask)
    return Generation(service, request, ask, arrival, envelope, writer, reading, once)


def _names(request: ChatRequest) -> dict[str, str]:
    """What a chat calls what the engine is asked."""
    newer = request.max_completion_tokens is not None
    return {"prompt": "messages", "max_tokens": "max_completion_tokens" if newer else "max_tokens"}


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
    if asked is None and (request.min_tokens or request.min_new_tokens or 0) > most:
        name = "min_new_tokens" if request.min_tokens is None else "min_tokens"
        raise invalid(name, f"{getattr(request, name)} is more than the {most} tokens there is room for")
    return most if asked is not None else None  # None: as much as there is room for, KV memory included


def _reading(service: Service, request: ChatRequest, rendered: str, formed: bool) -> tuple[Reading, Reasoning | None]:
    """How the answer is taken apart, and the reasoning that may stand before what is of a form, if it is `formed`."""
    parser, calls = service.options.reasoning_parser, service.tools.notation_for(request)
    if parser is None:
        return Reading(calls=calls), None
    begun = _begun(parser, rendered, bool(request.continue_final_message))
    ahead = _ahead(service, begun) if formed else None
    # Without a token that ends it the form begins with the answer: nothing there is reasoning.
    return Reading(True, bool(begun) and not (formed and ahead is None), calls), ahead


def _begun(parser: str, rendered: str, continued: bool) -> bool | None:
    """Whether the prompt leaves the answer in the middle of reasoning; None: the model begins it, or does not."""
    if continued:
        return rendered.rfind(THINK) > rendered.rfind(THINK_END)
    end = rendered.rstrip()
    if end.endswith((THINK, THINK_END)):
        return end.endswith(THINK)
    return True if parser == "deepseek_r1" else None


def _ahead(service: Service, begun: bool | None) -> Reasoning | None:
    """Reasoning by its tokens; None: there is none, or its marks are no tokens of this model."""
    ids = service.prompts.tokenizer.vocabulary()
    begin, end = ids.get(THINK), ids.get(THINK_END)
    if begun is False or end is None or (begun is None and begin is None):
        return None
    return Reasoning(None if begun else begin, end)
