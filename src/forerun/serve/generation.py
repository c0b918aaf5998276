"""One answer while it is generated: as a whole body, or as the events of a stream. Both are made of the same chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forerun.engine import Completion
from forerun.serve.account import Account, metrics_of, timings_of, usage_of
from forerun.serve.answer import THINK, THINK_END
from forerun.serve.answers import Envelope, Reading, Writer, parted
from forerun.serve.fields import GenerationFields, StreamOptions
from forerun.serve.parameters import Ask
from forerun.serve.service import Arrival, Service


@dataclass
class Generation:
    """One request on its way through the engine.

    Args:
        service: the server.
        fields: of the request.
        ask: what the engine is asked.
        arrival: when and under which id it came.
        envelope: what every part of the answer begins with.
        make_writer: makes the choices; awaited first, since it may need the target (to score a prompt).
        reading: how a chat's answer is taken apart.
        said_once: more for the root of the body, or of the first event.
    """

    service: Service
    fields: GenerationFields
    ask: Ask
    arrival: Arrival
    envelope: Envelope
    make_writer: Callable[[], Awaitable[Writer]]
    reading: Reading = field(default_factory=Reading)
    said_once: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = [len(prompt) for prompt in self.ask.prompts]
        self.account = Account(self.service.metrics, self.arrival.at, lengths)

    @property
    def _timed(self) -> bool:
        return self.service.options.timings or bool(self.fields.timings_per_token)

    async def whole(self) -> dict[str, Any]:
        """The body of the answer."""
        writer = await self._writer()
        done: list[Completion] = []
        async with aclosing(self._chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.completion is not None:
                    done.append(chunk.completion)
        done.sort(key=writer.index)
        body = self.envelope.body([writer.whole(completion) for completion in done])
        return body | {"usage": await self._usage(done)} | self._measured() | self.said_once

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, in order."""
        options = self.fields.stream_options or StreamOptions()
        with_usage = options.include_usage or self.service.options.enable_force_include_usage
        writer = await self._writer()
        done: list[Completion] = []
        once = self.said_once
        async with aclosing(self._chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.completion is not None:
                    done.append(chunk.completion)
                for choice in parted(writer.piece(chunk)):
                    event, once = self.envelope.event([choice]) | once, {}
                    if options.continuous_usage_stats:
                        event["usage"] = self.account.usage()
                    elif with_usage:
                        event["usage"] = None
                    last = choice["finish_reason"] and len(done) == self.ask.samples and not with_usage
                    if self.fields.timings_per_token or (last and self._timed):
                        event["timings"] = timings_of(self.account)
                    yield event
        if with_usage:
            yield self.envelope.event([]) | {"usage": await self._usage(done)} | self._measured()

    async def _writer(self) -> Writer:
        with self.service.spelled(self.ask):
            return await self.make_writer()

    def _chunks(self) -> AsyncIterator[Any]:
        return self.service.chunks(self.ask, self.account, self.arrival)

    async def _usage(self, done: list[Completion]) -> dict[str, Any]:
        count = None
        if self.reading.reasoning:
            count = await self.service.lanes.text(0, self._reasoning_tokens, done)
        return usage_of(self.account, count, self.fields.prediction is not None)

    def _reasoning_tokens(self, done: list[Completion]) -> int:
        """Tokens up to the one that ends the reasoning; none where there is no reasoning."""
        decode = self.service.target.tokenizer.decode
        total = 0
        for completion in done:
            ids = completion.token_ids
            text = decode(ids, False)
            if self.reading.thinking or text.lstrip().startswith(THINK):
                total += _tokens_until(THINK_END, ids, decode) if THINK_END in text else len(ids)
        return total

    def _measured(self) -> dict[str, Any]:
        """`metrics` and `timings`, where they are wanted; null for several answers."""
        options, most = self.service.options, self.service.most_drafted
        level = options.per_request_spec_decode_metrics
        found: dict[str, Any] = {}
        if options.enable_per_request_metrics or (level != "none" and most is not None):
            found["metrics"] = metrics_of(self.account, level, options.enable_per_request_metrics, most)
        if self._timed:
            found["timings"] = timings_of(self.account)
        return found


def _tokens_until(tag: str, ids: Sequence[int], decode: Callable[[Sequence[int], bool], str]) -> int:
    """The fewest tokens whose text holds a tag, by halving: decoding once for each would grow with the square."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tag in decode(ids[:middle], False) else (middle + 1, high)
    return low


__all__ = ["Generation"]
