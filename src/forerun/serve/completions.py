"""POST /v1/completions: from prompts to their continuations."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.serve.answers import CompletionWriter, Wanted, Writer
from forerun.serve.errors import invalid, unsupported
from forerun.serve.exchange import Exchange
from forerun.serve.generation import Generation
from forerun.serve.parameters import form_of, refuse_unbuilt
from forerun.serve.schemas import CompletionRequest
from forerun.serve.service import Arrival, Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def answer_completion(service: Service, request: CompletionRequest, arrival: Arrival) -> Exchange:
    """The answer, which begins to be computed when it is sent. ApiError: the request cannot be served."""
    model = service.check_model(request.model)
    _check(service, request)
    form = form_of(request)
    given = _prompts(request)
    n = request.n or 1
    service.gate.check(n * len(given))
    prompts = await service.in_text(_ids, service, request, given)
    most = service.parameters.max_tokens("prompt", prompts, request.max_tokens, DEFAULT_MAX_TOKENS)
    sampling = service.parameters.sampling(request, most, request.logprobs)
    compiled = await service.in_text(service.compiled, form)
    ask = service.ask(request, prompts, sampling, compiled)
    echoed = await service.in_text(_echoed, service, request, given, prompts) if request.echo else []
    shown = request.logprobs is not None, bool(request.return_token_ids), request.wants_provenance
    wanted = Wanted(n, *shown)

    async def writer() -> Writer:
        scores = await service.scores(prompts, top) if top is not None else []
        return CompletionWriter(
            wanted, service.tokens, prompts, echoed, scores, show_scores=request.prompt_logprobs is not None
        )

    top = _scored(request)
    envelope = service.envelope(arrival, model, "text_completion")
    generation = Generation(service, request, ask, arrival, envelope, writer)
    service.log_request(arrival, ask)
    return service.exchange(request, ask, arrival, generation.whole, generation.events)


def _check(service: Service, request: CompletionRequest) -> None:
    refuse_unbuilt(request)
    for name in ("logprobs", "prompt_logprobs"):
        service.parameters.check_logprobs(name, getattr(request, name))
    if request.suffix is not None and not isinstance(request.prompt, str):
        raise invalid("suffix", "needs a prompt that is one text")
    if request.suffix is not None and request.echo:
        raise unsupported("echo", "cannot be combined with suffix")


def _scored(request: CompletionRequest) -> int | None:
    """How many best log-probabilities of the prompt's tokens are wanted; None: not even their own."""
    wanted = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((count for count in wanted if count is not None), default=None)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request. ApiError: an empty list."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "is empty")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _ids(service: Service, request: CompletionRequest, given: Sequence[str | list[int]]) -> list[list[int]]:
    special = request.add_special_tokens is not False
    found = []
    for prompt in given:
        if isinstance(prompt, str) and request.suffix is not None:
            ids = service.prompts.of_gap(prompt, request.suffix)
        else:
            ids = service.prompts.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("prompt", "is empty; give at least one token")
        found.append(service.parameters.truncated(request, ids))
    return found


def _echoed(
    service: Service, request: CompletionRequest, given: Sequence[str | list[int]], prompts: Sequence[list[int]]
) -> list[str]:
    """The text of each prompt: as it was sent, or of its ids where those were sent or cut."""
    decode = service.prompts.tokenizer.decode
    whole = request.truncate_prompt_tokens is None
    return [
        text if isinstance(text, str) and whole else decode(ids, False)
        for text, ids in zip(given, prompts, strict=True)
    ]
