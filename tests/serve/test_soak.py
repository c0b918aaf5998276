"""Everything at once and for long: who leaves, what is wrong, what breaks, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch

from drafters.kinds import drafting
from engine.conftest import bytes_for
from forerun.drafters.fake import Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.request import Request
from serve.kit import VOCAB, Call, Reply, Site, ascii_model

REQUESTS, AT_ONCE = 2000, 32
WARM, CLOSING = 600, 1800
"""Requests after which memory may no longer grow, and after which the server begins to stop."""
GROWTH = 24 * 2**20
"""Bytes by which it may: the allocator's own comings and goings (measured: a few MiB)."""
PROMPTS = [
    "one",
    "two",
    "three",
    "a prompt that begins like the next one, alpha",
    "a prompt that begins like the next one, beta",
]
FIELDS = {"max_tokens": 30, "temperature": 0}
METHODS = [None, None, False, {"method": "ngram"}, {"method": "small", "max_draft": 2}, {"method": "dspark"}]


class Faulty(Script):
    """Has nothing to propose, and now and then breaks."""

    name = "faulty"

    def __init__(self) -> None:
        super().__init__(lambda view: [])
        self.calls = 0

    def propose(self, views, keep_drafting):
        self.calls += 1
        if self.calls % 23 == 0:
            raise RuntimeError("a drafter fails on purpose")
        return super().propose(views, keep_drafting)


def _engine() -> Engine:
    """Four drafters, and memory for fewer requests than may run: some are preempted again and again."""
    target = ascii_model()
    drafters = [
        Faulty(),
        Ngram(prompt_lookup_min=1, prompt_lookup_max=3),
        Small(ascii_model(), VOCAB),
        drafting("dspark", target),
    ]
    options = EngineOptions(
        max_num_seqs=16, max_num_batched_tokens=128, kv_cache_memory_bytes=bytes_for(18, target, *drafters)
    )
    return Engine(target, load_drafters(drafters, target, options), options)


class Troubles:
    """What goes wrong inside, on the engine's thread."""

    def __init__(self, site: Site):
        self.raised = self.scribbled = 0
        engine = site.engine
        self._forward, self._passes = engine.target.forward, itertools.count(1)
        self._drafter = next(entry.drafter for entry in engine.core.loaded if entry.name == "dspark")
        engine.target.forward = self._broken

    def _broken(self, *args: Any) -> Any:
        number = next(self._passes)
        if number % 397 == 0:
            self.raised += 1
            raise RuntimeError("the target fails on purpose")
        if number % 101 == 0:
            self.scribbled += 1
            self._scribble()
        return self._forward(*args)

    def _scribble(self) -> None:
        """Wrong keys and values in every block of a drafter, those in the prefix cache included."""
        with torch.inference_mode():
            for store in self._drafter.context._cache._stores.values():
                store.keys.normal_()
                store.values.normal_()


@dataclass
class Soak:
    """The clients of one server, and what became of them."""

    site: Site
    want: dict[str, str]
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    ends: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    done: int = 0
    closing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        await asyncio.gather(*(self.one() for _ in range(REQUESTS)))

    async def one(self) -> None:
        """A client: a tenth sends nonsense, a twentieth too much, a fifth leaves, a twentieth reads slowly."""
        kind, name = self.rng.random(), self.rng.choice(PROMPTS)
        fields = {"prompt": name, "stream": self.rng.random() < 0.5, "speculative": self.rng.choice(METHODS), **FIELDS}
        if kind < 0.1:
            fields |= self.rng.choice([{"temperatur": 1}, {"max_tokens": -1}, {"prompt": []}, {"n": "x"}])
        elif kind < 0.15:
            fields |= self.rng.choice([{"prompt": "z" * 1000}, {"max_tokens": 5000}, {"prompt": "z" * 380}])
        call = self.site.call("POST", "/v1/completions", fields)
        if 0.35 <= kind < 0.4:
            call.reads = lambda: asyncio.sleep(0.01)
        async with self.limit:
            reply = await self._sent(call, leaves=0.15 <= kind < 0.35)
        self.ends[self._end(kind, name, fields, reply)] += 1
        await self._passed()

    async def _sent(self, call: Call, leaves: bool) -> Reply:
        running = asyncio.ensure_future(call.run())
        if leaves:
            await asyncio.sleep(self.rng.random() * 0.2)
            call.leave()
        return await running

    async def _passed(self) -> None:
        self.done += 1
        if self.done in (WARM, CLOSING - 1):
            gc.collect()
            self.memory.append(psutil.Process().memory_info().rss)
        if self.done == CLOSING:
            self.closing = asyncio.ensure_future(self.site.server.drain())

    def _end(self, kind: float, name: str, fields: dict[str, Any], reply: Reply) -> str:
        """What became of a request; an answer that is neither whole nor a clear error fails the test."""
        if 0.15 <= kind < 0.35:
            return "left"
        if reply.status == 503:
            return "closed"
        if kind < 0.15:
            assert reply.status == 400, reply.body
            assert reply.error["param"]
            return "refused"
        if reply.status == 500:
            assert reply.error["type"] == "server_error"
            return "failed"
        assert reply.status == 200, reply.body
        text = self._streamed(reply) if fields["stream"] else reply.json["choices"][0]["text"]
        if text is None:
            return "failed"
        assert text == self.want[name]
        return "whole"

    @staticmethod
    def _streamed(reply: Reply) -> str | None:
        """The text of a stream; None: it ended with an error, said as one."""
        *_, last, done = reply.body.decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: ")).get("error")
        if error is not None:
            assert error["type"] in ("server_error", "unavailable_error")
            return None
        assert reply.events[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(event["choices"][0]["text"] for event in reply.events)


@pytest.mark.slow
def test_soak(caplog):
    """2,000 mixed requests, 32 at a time: a fifth leaves at random moments, a tenth is malformed, a twentieth too long,
    some read slowly; the target raises, a drafter raises, memory is short, what a drafter keeps in cached blocks is
    overwritten, and before the end the server begins to stop. Every answer is whole, to the last token that of plain
    decoding, or a clear error; nothing is held of any request afterwards, no block is lost, memory is flat."""
    caplog.set_level("CRITICAL", "forerun")  # each fault is logged with its traceback
    with Site(_engine, max_queue=64, drain_timeout=30) as site:
        want = {name: site.complete(prompt=name, speculative=False, **FIELDS)["choices"][0]["text"] for name in PROMPTS}
        troubles, soak = Troubles(site), Soak(site, want)
        site.run(soak.run(), 900)
        site.run(_finished(soak), 60)
        site.settle()
        drafted = {
            word: site.metric(f"forerun:spec_decode_{word}_total") for word in ("accepted_tokens", "drafter_faults")
        }
        hits, preempted = (site.metric(f"forerun:{name}_total") for name in ("prefix_cache_hits", "num_preemptions"))
        service = site.server.service
        assert not service.metrics.open
        assert not service.engine.engine._listeners
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is Request]
    assert {"whole", "refused", "left", "failed", "closed"} == {*soak.ends}, soak.ends
    assert soak.ends["whole"] > REQUESTS / 2
    assert min(troubles.raised, troubles.scribbled, hits, preempted, *drafted.values()) > 0
    warm, late = soak.memory
    print(f"{soak.ends}; memory after {WARM} requests {warm >> 20} MiB, after {CLOSING} {late >> 20} MiB")
    assert late - warm < GROWTH


async def _finished(soak: Soak) -> None:
    """The stop that was begun."""
    assert soak.closing is not None
    await soak.closing
