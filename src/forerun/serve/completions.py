"""POST /v1/completions: from prompts to their continuations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from forerun.serve.answers import CompletionWriter, Envelope, Wanted, Writer
from forerun.serve.errors import invalid, unsupported
from forerun.serve.exchange import Exchange
from forerun.serve.generation import Generation
from forerun.serve.grammar import Grammar
from forerun.serve.parameters import form_of, refuse_unbuilt
from forerun.serve.schemas import CompletionRequest
from forerun.serve.service import Arrival, Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def answer_completion(service: Service, request: CompletionRequest, arrival: Arrival) -> Exchange:
    """The answer, which begins to be computed when it is sent. ApiError: the request cannot be served."""
    model = service.check_model(request.model)
    _check(service, request)
    form = form_of(request)
    given = _prompts(request)
    envelope = service.envelope(arrival, model, "text_completion")
    prepare = partial(_prepare, service, request, arrival, envelope, given, form)
    return service.exchange(request, (request.n or 1) * len(given), arrival, prepare)


async def _prepare(
    service: Service,
    request: CompletionRequest,
    arrival: Arrival,
    envelope: Envelope,
    given: Sequence[str | list[int]],
    form: Grammar | None,
) -> Generation:
    """From prompts to what the engine is asked. Each takes its turn among the texts: between two of them others have
    theirs, and a client that has left costs no more."""
    size = arrival.size
    await service.check_prediction(request, size)
    prompts = [await service.lanes.text(size, _ids, service, request, prompt) for prompt in given]
    most = service.parameters.max_tokens("prompt", prompts, request.max_tokens, DEFAULT_MAX_TOKENS)
    sampling = service.parameters.sampling(request, most, request.logprobs)
    ask = service.ask(request, prompts, sampling, await service.compiled(form))
    echoed: list[str] = []
    if request.echo:
        both = zip(given, prompts, strict=True)
        echoed = [await service.lanes.text(size, _echoed, service, request, prompt, ids) for prompt, ids in both]
    shown = request.logprobs is not None, bool(request.return_token_ids), request.wants_provenance
    wanted, top = Wanted(request.n or 1, *shown), _scored(request)

    async def writer() -> Writer:
        scores = await service.scores(prompts, top) if top is not None else []
        return CompletionWriter(
            wanted, service.tokens, prompts, echoed, scores, show_scores=request.prompt_logprobs is not None
        )

    service.log_request(arrival, ask)
    return Generation(service, request, ask, arrival, envelope, writer)


def _check(service: Service, request: CompletionRequest) -> None:
    refuse_unbuilt(request)
    for name in ("logprobs", "prompt_logprobs"):
        service.parameters.check_logprobs(name, getattr(request, name))
    if request.suffix is not None and not isinstance(request.prompt, str):
        raise invalid("suffix", "needs a prompt that is one text")
    if request.suffix is not None and request.echo:
        raise unsupported("echo", "cannot be combined with suffix")
    if request.suffix is not None and request.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "cannot be combined with suffix: it would cut its marks off")


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


def _ids(service: Service, request: CompletionRequest, prompt: str | list[int]) -> list[int]:
    special = request.add_special_tokens is not False
    if isinstance(prompt, str) and request.suffix is not None:
        ids = service.prompts.of_gap(prompt, request.suffix, special)
    else:
        ids = service.prompts.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
    if not ids:
        raise invalid("prompt", "is empty; give at least one token")
    return service.parameters.truncated(request, ids)


def _echoed(service: Service, request: CompletionRequest, prompt: str | list[int], ids: list[int]) -> str:
    """The text of a prompt: as it was sent, or of its ids where those were sent or cut."""
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    return service.prompts.tokenizer.decode(ids, False)
