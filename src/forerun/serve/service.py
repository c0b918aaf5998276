"""One loaded engine as the endpoints use it: from a request's fields to an answer that is being computed."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import forerun
from forerun.engine import AsyncEngine, Chunk
from forerun.engine.intake import default_mode
from forerun.errors import OptionError
from forerun.sampling import Sampling, TokenLogprob
from forerun.serve.account import Account
from forerun.serve.answers import Envelope
from forerun.serve.cards import promises
from forerun.serve.errors import ApiError, invalid
from forerun.serve.exchange import Events, EventStream, Exchange, WholeAnswer
from forerun.serve.fields import GenerationFields
from forerun.serve.gate import Deadline, Gate
from forerun.serve.grammar import Form, Grammar, Grammars, Reasoning
from forerun.serve.lanes import LONG, Lanes
from forerun.serve.metrics import Metrics
from forerun.serve.options import ServeOptions, sampling_defaults
from forerun.serve.parameters import Ask, Parameters, prediction_of, speculative_of
from forerun.serve.prompt import Prompts, with_template
from forerun.serve.reliability import Reliability
from forerun.serve.tokens import TokenText
from forerun.serve.tools import ToolCalls
from forerun.serve.tracing import Tracer, no_tracer
from forerun.target.hf import HFTarget
from forerun.target.other_tokenizer import other_tokenizer

if TYPE_CHECKING:
    from forerun.serve.generation import Generation

logger = logging.getLogger("forerun.serve")


@dataclass(frozen=True)
class Arrival:
    """One HTTP request as it came."""

    at: float
    """On the clock of `time.perf_counter`."""
    id: str
    trace: dict[str, str]
    """Headers of a distributed trace."""
    key: str | None = None
    """Stands for the key it came with, if the server has any."""
    size: int = 0
    """Bytes of its body."""


class Service:
    """What a running server consists of.

    Args:
        engine: open; the service does not close it.
        options: of the server.

    Raises:
        OptionError, ModelError: an option does not fit this model.
    """

    def __init__(self, engine: AsyncEngine, options: ServeOptions):
        self.engine = engine
        self.options = options
        self.target = engine.engine.target
        if options.tokenizer is not None:
            self.target.tokenizer = other_tokenizer(
                options.tokenizer, self.target, engine.engine.options.trust_remote_code
            )
        self.loaded = engine.engine.core.loaded
        self.names = options.served_model_name or (self.target.name,)
        self.created = int(time.time())
        tokenizer = with_template(self.target.tokenizer, options.chat_template)
        self.prompts = Prompts(tokenizer, options.trust_request_chat_template)
        self.tools = ToolCalls(tokenizer, options.tool_call_parser)
        self.tokens = TokenText(tokenizer)
        self.grammars = Grammars(tokenizer, self.target.vocab_size, self.target.eos_token_ids)
        self.parameters = Parameters(
            sampling_defaults(options, self.target.sampling_defaults),
            options.max_logprobs,
            self.target.window,
            None if options.seed is None else random.Random(options.seed),
            options.logprobs_mode,
        )
        self.metrics = Metrics(self.names[0], options.metrics_compat == "vllm", promises(self.loaded))
        self.metrics.watch(engine.engine)
        self.reliability = Reliability()
        engine.engine.core.on_round = self.reliability.add
        running = engine.engine.options.limits.max_num_seqs
        self.gate = Gate(running, options.max_queue, lambda: self.metrics.count("requests_refused"))
        self.tracer: Tracer = no_tracer
        if options.otlp_traces_endpoint is not None:
            self.tracer = Tracer.to(options.otlp_traces_endpoint)
        self.fingerprint = self._fingerprint()
        self.lanes = Lanes()

    @property
    def most_drafted(self) -> int | None:
        """K; None without a drafter."""
        lengths = [entry.config.draft_length(entry.drafter.default_draft, 1) for entry in self.loaded]
        return max(lengths, default=None)

    @property
    def verify_mode(self) -> str:
        return default_mode(self.loaded, self.engine.engine.options.verify_mode)

    def _fingerprint(self) -> str:
        """Changes when the same request and seed may get another answer."""
        parts = [forerun.__version__, self.verify_mode, str(self.target.dtype), self.target.name]
        if isinstance(self.target, HFTarget):
            from forerun.target.fingerprint import fingerprint

            parts += fingerprint(self.target).to_dict().values()
        return f"fp_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"

    def close(self) -> None:
        self.lanes.close()

    # ---------------------------------------------------------------------------------------------------- a request

    def check_model(self, name: str | None) -> str:
        """The name to answer with. ApiError: 404, no such model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"model: {name[:100]!r} is not served here; served: {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def ask(
        self,
        fields: GenerationFields,
        prompts: list[list[int]],
        sampling: Sampling,
        form: Form | None,
        reasoning: Reasoning | None = None,
    ) -> Ask:
        """What the engine is asked. Each prompt has a sampling of its own: a form depends on the prompt's length, and
        seeds of the server on the order of prompts. `reasoning` may stand before what has the form."""
        samplings = []
        for index, prompt in enumerate(prompts):
            own = sampling
            if index and fields.seed is None and self.parameters.seeds is not None:
                own = replace(own, seed=self.parameters.seeds.getrandbits(63))
            if form is not None:
                constraint = form.of(len(prompt), reasoning)
                own = replace(own, logits_processors=(constraint,), stop_when=(constraint.complete,))
            samplings.append(own)
        drafting = speculative_of(fields), prediction_of(fields)
        return Ask(prompts, samplings, *drafting, fields.priority or 0, form, fields.cache_salt)

    async def compiled(self, grammar: Grammar | None) -> Form | None:
        """ApiError: 400, the grammar cannot be read."""
        return None if grammar is None else await self.lanes.form(self.grammars.compile, grammar)

    async def check_prediction(self, fields: GenerationFields, size: int) -> None:
        """ApiError: 400, it is longer than any answer. The engine would say so too, but tokenises it among those of all
        requests, whatever its length; a long one is counted among the long texts first."""
        text, window = prediction_of(fields) or "", self.target.window
        if len(text) < LONG:
            return
        count = len(await self.lanes.text(size, self.target.tokenizer.encode, text, False))
        if count > window:
            raise invalid("prediction", f"has {count} tokens; the window is {window}, so no answer is as long")

    def envelope(self, arrival: Arrival, model: str, kind: str) -> Envelope:
        """`kind` is `chat.completion` or `text_completion`."""
        chat = kind == "chat.completion"
        prefix = "chatcmpl" if chat else "cmpl"
        event_kind = "chat.completion.chunk" if chat else kind
        return Envelope(
            f"{prefix}-{arrival.id}", int(time.time()), model, self.fingerprint, kind=kind, event_kind=event_kind
        )

    async def chunks(self, ask: Ask, account: Account, arrival: Arrival) -> AsyncIterator[Chunk]:
        """What the engine makes of it. Leaving the iteration cancels what is unfinished before the next step."""
        stream = self.engine.stream(
            ask.prompts,
            ask.samplings,
            speculative=ask.speculative,
            prediction=ask.prediction,
            priority=ask.priority,
            cache_salt=self._salt(ask, arrival),
        )
        expected = ask.samples
        account.open()
        try:
            with self.spelled(ask):
                async with aclosing(stream) as coming:  # type: ignore[type-var]
                    async for chunk in coming:
                        account.add(chunk)
                        yield chunk
        except ApiError:
            expected = len(account.samples)  # most likely refused before it began
            raise
        finally:
            account.close(expected)
            self.tracer.record(account, ask, arrival, self.names[0])

    @contextmanager
    def spelled(self, ask: Ask) -> Iterator[None]:
        """What the engine refuses, by the field that asked for it. ApiError in place of OptionError."""
        try:
            yield
        except OptionError as error:
            if error.option == "logits_processors" and ask.form is not None:
                raise invalid(ask.form.param, ask.form.nothing_left) from None
            option = ask.names.get(error.option, error.option)
            raise invalid(option, error.reason) from None

    def _salt(self, ask: Ask, arrival: Arrival) -> str | None:
        """Who finds prefixes of whom: those with the same salt of their own and, if asked, the same key."""
        key = arrival.key if self.options.salt_cache_per_key else None
        return None if key is None and ask.cache_salt is None else f"{key or ''}:{ask.cache_salt or ''}"

    async def scores(self, prompts: Sequence[Sequence[int]], top: int) -> list[list[TokenLogprob]]:
        """Log-probabilities of the tokens of each prompt behind the first."""
        return [await self.engine.score(prompt, top) for prompt in prompts]

    def exchange(
        self,
        fields: GenerationFields,
        samples: int,
        arrival: Arrival,
        prepare: Callable[[], Awaitable[Generation]],
    ) -> Exchange:
        """The answer as it was asked for, streamed or whole. Its text is not touched before the gate lets it in."""

        async def whole() -> dict[str, Any]:
            return await (await prepare()).whole()

        async def events() -> Events:
            return (await prepare()).events()

        terms = self._terms(samples, arrival, fields.deadline)
        if fields.stream:
            return EventStream(events, self.options.sse_ping_interval, **terms)
        return WholeAnswer(whole, **terms)

    def beside(self, arrival: Arrival, compute: Callable[[], Awaitable[dict[str, Any]]]) -> Exchange:
        """What needs no engine, only text: it takes a place like any other request, and ends like one."""
        return WholeAnswer(compute, generates=False, **self._terms(1, arrival, None))

    def _terms(self, samples: int, arrival: Arrival, deadline: float | None) -> dict[str, Any]:
        """On which an exchange is let in, and ended."""
        limits = [seconds for seconds in (deadline, self.options.request_timeout) if seconds is not None]
        return {
            "gate": self.gate,
            "samples": samples,
            "deadline": Deadline(arrival.at, min(limits)) if limits else None,
            "write_timeout": self.options.write_timeout,
        }

    def log_request(self, arrival: Arrival, ask: Ask) -> None:
        """Only if asked: prompts are not logged otherwise."""
        if self.options.enable_log_requests:
            for prompt in ask.prompts:
                text = self.target.tokenizer.decode(prompt, False)
                logger.info("request %s: %d tokens, %r, %s", arrival.id, len(prompt), text, ask.samplings[0])


__all__ = ["Arrival", "Service"]
