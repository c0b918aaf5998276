"""The synchronous front: load a pair, generate, stream, hold a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.drafters.base import Drafter
from forerun.drafters.config import SpeculativeConfig
from forerun.engine.conversation import Conversation
from forerun.engine.core import EngineCore
from forerun.engine.intake import Ask, Intake, Prompt, Speculative
from forerun.engine.load import EngineOptions, check_ready, load_drafters, ready_target
from forerun.engine.memory import num_blocks_for
from forerun.engine.propose import Clock, LoadedDrafter
from forerun.engine.request import Chunk, Completion, Progress, Request
from forerun.engine.schedule import Scheduling
from forerun.engine.tuning import scheduling_of
from forerun.errors import EngineClosed, RequestCancelled
from forerun.sampling import Sampling
from forerun.target.allocator import keep_freed_memory
from forerun.target.base import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Listener = Callable[[Chunk], None]


class Engine:
    """A target with its drafters, decoding any number of requests together.

    >>> engine = Engine.load("embedded", drafter="ngram", num_speculative_tokens=4)
    >>> [completion] = engine.generate("def area(", Sampling(temperature=0, max_tokens=8))
    >>> completion.finish_reason
    'length'

    An engine belongs to one thread; `AsyncEngine` is the front for many callers.

    Args:
        target: loaded.
        drafters: loaded for it, in the order they are asked.
        options: limits, and how much to draft and verify. Measured costs are not looked for unless a policy asks for
            them: by default every request drafts as configured.
        scheduling: instead of what the options make.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[LoadedDrafter] = (),
        options: EngineOptions | None = None,
        *,
        scheduling: Scheduling | None = None,
        clock: Clock | None = None,
    ):
        self.target = target
        self.options = options or EngineOptions()
        check_ready(target, self.options)
        if target.device.type == "cpu":
            keep_freed_memory()
        scheduling = scheduling or scheduling_of(target, drafters, self.options, look_up=False)
        limits = self.options.limits
        per_block = target.block_bytes + sum(entry.drafter.block_bytes for entry in drafters)
        num_blocks = num_blocks_for(limits, per_block, target)
        target.allocate(num_blocks)
        for entry in drafters:
            entry.drafter.allocate(num_blocks)
        cached = self.options.enable_prefix_caching
        self.core = EngineCore(target, drafters, limits, num_blocks, scheduling, clock, prefix_caching=cached)
        self.intake = Intake(target, drafters, num_blocks, self.options.verify_mode, scheduling.exposed)
        self._listeners: dict[int, Listener] = {}
        self._closed = False

    @classmethod
    def load(
        cls,
        target: str | Target | PreTrainedModel = "embedded",
        drafter: str | Mapping[str, Any] | SpeculativeConfig | Drafter | Sequence[Any] | None = None,
        *,
        tokenizer: Any = None,
        **options: Any,
    ) -> Engine:
        """Loads a target and the drafters that run ahead of it.

        How much is drafted and verified follows the costs of this machine where `forerun profile` has measured them,
        and the configured K where not.

        Args:
            target: hub id, directory of safetensors, .gguf file, `embedded`, a loaded `PreTrainedModel` (with
                `tokenizer`) or a `Target`.
            drafter: what `--speculative-config` takes (a method name, a model, JSON, a mapping), a `Drafter`, or a list
                of these; None is plain decoding.
            tokenizer: only with a loaded `PreTrainedModel`.
            options: see `EngineOptions`. A loaded model keeps its dtype and device, a `Target` its window as well:
                asking for others is an error.

        Raises:
            OptionError: an unknown or unusable option, named. ModelError: a model cannot be used. DoesNotFit: too big.
        """
        chosen = EngineOptions.of(options)
        model = ready_target(target, tokenizer, chosen)
        loaded = load_drafters(drafter, model, chosen)
        return cls(model, loaded, chosen, scheduling=scheduling_of(model, loaded, chosen, look_up=True))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Completes prompts together; results in the order of (prompt, sample).

        Args:
            prompts: one prompt or several, each text or token ids.
            sampling: one for all, or one per prompt; None: the model's own defaults.
            speculative: per-request control, see `Speculative`.
            prediction: text expected in the answer, offered to the n-gram drafter.
            cache_salt: prompts that begin alike share their rows only if this is the same.

        Raises:
            PromptError, OptionError: before anything is computed. Any error of the target: after the step it hit.
        """
        requests = self.submit(prompts, sampling, speculative=speculative, prediction=prediction, cache_salt=cache_salt)
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            self.cancel(requests)
        return [self.result(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[Chunk]:
        """Like `generate`, yielding what each step adds. Closing the iterator cancels what is unfinished."""
        self.check_open()
        asked = Ask(speculative, prediction, cache_salt=cache_salt)
        return self.follow(self.intake.requests(prompts, sampling, asked))

    def follow(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Queues requests made by `intake` and yields their chunks until all are done."""
        self.check_open()
        chunks: list[Chunk] = []
        for request in requests:
            self._start(request, chunks.append)
        try:
            while chunks or any(request.finish_reason is None for request in requests):
                if not chunks:
                    self.step()
                arrived, chunks[:] = list(chunks), []
                yield from arrived
            for request in requests:
                self.result(request)
        finally:
            self.cancel(requests)

    def conversation(self) -> Conversation:
        """A chat whose keys and values stay between turns, so that a turn computes only what is new."""
        self.check_open()
        return Conversation(self)

    def default_sampling(self, **changes: Any) -> Sampling:
        """The model's own sampling defaults (its generation config) with changes."""
        return self.intake.default_sampling(**changes)

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        speculative: Speculative = None,
        prediction: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        listener: Listener | None = None,
    ) -> list[Request]:
        """Queues requests; they advance with every `step`. All are checked before the first one is queued.

        Of waiting requests those with the lowest `priority` are admitted first.
        """
        self.check_open()
        asked = Ask(speculative, prediction, priority, cache_salt)
        requests = self.intake.requests(prompts, sampling, asked)
        self.start(requests, listener)
        return requests

    def start(self, requests: Sequence[Request], listener: Listener | None = None) -> None:
        """Queues requests made by `intake`, which may have been asked in another thread."""
        self.check_open()
        for request in requests:
            self._start(request, listener)

    def step(self) -> bool:
        """One step of everything that is queued; False if there is nothing left to do."""
        for one in self.core.step():
            self._deliver(one)
        if not self.core.busy:
            self.core.audit()  # a block lost or held twice is found here, and not when memory runs out days later
        return self.core.busy

    def cancel(self, requests: Sequence[Request]) -> None:
        """Takes unfinished requests out, quietly; their memory is free at once."""
        for request in requests:
            self._listeners.pop(request.id, None)
            self.core.cancel(request)

    def fail(self, error: Exception) -> None:
        """Ends everything that is queued with this error, telling whoever listens: after a `step` that broke off."""
        for request in [*self.core.admission.running, *self.core.admission.waiting]:
            self._deliver(self.core.fail(request, error))

    @staticmethod
    def result(request: Request) -> Completion:
        """The completion of a finished request; raises the error it failed with."""
        if request.error is not None:
            raise request.error
        if request.finish_reason in (None, "abort"):
            raise RequestCancelled(f"request {request.id} was cancelled after {len(request.output)} tokens")
        return request.completion()

    def audit(self) -> None:
        """Asserts that no KV block is lost or held twice, here and in the drafters."""
        self.core.audit()

    def close(self) -> None:
        """Cancels everything, telling whoever listens; further calls raise EngineClosed."""
        self._closed = True
        for request in [*self.core.admission.running, *self.core.admission.waiting]:
            self.core.cancel(request)
            self._deliver(Progress(request))
        for number in list(self.core.kept):
            self.core.drop_kept(number)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """EngineClosed after `close`."""
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _start(self, request: Request, listener: Listener | None) -> None:
        if listener is not None:
            self._listeners[request.id] = listener
        if len(request.tokens) >= request.limit:  # max_tokens = 0: nothing to emit
            request.finish_reason = "length"
            self.core.release(request)
            self._deliver(Progress(request))
        else:
            self.core.add(request)

    def _deliver(self, progress: Progress) -> None:
        request = progress.request
        done = request.finish_reason is not None
        listener = self._listeners.pop(request.id, None) if done else self._listeners.get(request.id)
        # An incomplete character at the end becomes U+FFFD, unless a stop string has cut the text before it.
        whole = request.finish_reason != "abort" and not isinstance(request.stop_reason, str)
        text = request.text.finish(flush=whole) if done else request.text.release()
        if listener is not None:
            listener(Chunk.of(request, text, progress))


__all__ = ["Engine", "Listener", "Prompt", "Speculative"]
