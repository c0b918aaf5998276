"""Everything at once and for long: who leaves, what is wrong, what breaks, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
from collections import Counter
from collections.abc import Sequence
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
from forerun.serve.account import Account
from forerun.serve.exchange import Exchange
from forerun.serve.gate import Pass
from forerun.target.table import ByteTokenizer, TableTarget
from serve.kit import VOCAB, Call, Site, ascii_model, engine, seen
from serve.options import ALPHABET
from serve.traffic import LONG, Judge, Plan, behaving, plans, references

AT_ONCE = 32
GROWTH = 12 * 2**20
"""Bytes by which memory may grow: the allocator's own comings and goings (measured: a few MiB)."""
METHODS = [
    None,
    None,
    False,
    {"method": "ngram"},
    {"method": ["faulty", "small"], "max_draft": 2},
    {"method": "dspark"},
    {"confidence_threshold": 0.05},
]


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Args:
        requests: in all.
        warm: after how many memory may no longer grow; None: it is not looked at.
        closing: after how many the server begins to stop.
        fails: every which pass of the target fails.
        scribbles: before every which pass the rows of a drafter are overwritten.
    """

    requests: int
    warm: int | None
    closing: int
    fails: int
    scribbles: int


SMALL = Size(72, None, 30, fails=31, scribbles=19)
FULL = Size(2000, 600, 1800, fails=397, scribbles=101)


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


def _target() -> TableTarget:
    """Few letters and nearly as likely, so that there are stop strings, their beginnings, and ends."""
    return ascii_model(eos_level=3, gap=0.25, alphabet=ALPHABET, memory=1)


def _engine() -> Engine:
    """Four drafters, and memory for fewer requests than may run: some are preempted again and again."""
    target = _target()
    letters = {"counts": torch.bincount(torch.tensor([*ALPHABET, 256])), "draft_vocab_size": len(ALPHABET) + 1}
    drafters = [
        Faulty(),
        Ngram(prompt_lookup_min=1, prompt_lookup_max=3),
        Small(_target(), VOCAB),
        drafting("dspark-pruned", target, **letters),
    ]
    memory = bytes_for(10, target, *drafters)
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=128, kv_cache_memory_bytes=memory)
    return Engine(target, load_drafters(drafters, target, options), options)


class Troubles:
    """What goes wrong inside, on the engine's thread."""

    def __init__(self, site: Site, size: Size, streaming: Any):
        self.raised = self.scribbled = self.passes = 0
        self._size, self._streaming = size, streaming
        self._due = False
        self._forward = site.engine.target.forward
        self._drafter = next(entry.drafter for entry in site.engine.core.loaded if entry.name == "dspark")
        site.engine.target.forward = self._broken

    def _broken(self, *args: Any) -> Any:
        self.passes += 1
        self._due = self._due or self.passes % self._size.fails == 0
        if self._due and self._streaming():
            self._due = False
            self.raised += 1
            raise RuntimeError("the target fails on purpose")
        if self.passes % self._size.scribbles == 0:
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
    """The clients of one server."""

    site: Site
    judge: Judge
    size: Size
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    running: dict[int, tuple[Plan, Call]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    """Those under way when the server began to stop."""
    places: int = 0
    """How many of them it had let in."""
    late: Counter[str] = field(default_factory=Counter)
    """What became of them."""
    done: int = 0
    closing: asyncio.Task[None] | None = None

    async def run(self, made: Sequence[Plan]) -> None:
        async with asyncio.TaskGroup() as group:
            for plan in made:
                group.create_task(self.one(plan))

    async def one(self, plan: Plan) -> None:
        call = self.site.call("POST", plan.path, plan.content, plan.headers)
        async with self.limit:
            self.running[plan.number] = plan, call
            reply = await asyncio.wait_for(behaving(plan, call), 300)
            del self.running[plan.number]
        end = self.judge.judge(plan, reply)
        assert end != "closed" or self.closing is not None, "nobody had told the server to stop"
        if plan.number in self.inside:
            self.late[end] += 1
        self.done += 1
        if self.done == self.size.closing:
            self.inside = {*self.running}
            self.places = len(self.site.server.service.gate._passes)
            self.closing = asyncio.ensure_future(self.site.server.drain())

    def streaming(self) -> bool:
        """Whether somebody who stays is in the middle of a stream: a fault must now and then end one."""
        return any(
            plan.stream and plan.conduct == "stays" and plan.fields["max_tokens"] == LONG
            for plan, call in list(self.running.values())
            if 0 < len(call.reply.parts) < 4
        )


async def _reference(site: Site, asked: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    """The right answers: whole, undrafted, on a server without drafters on which nothing goes wrong."""
    calls = [site.call("POST", plan.path, plan.content) for plan in asked.values()]
    replies = await asyncio.gather(*(call.run() for call in calls))
    return {key: seen(reply, plan.fields, False) for (key, plan), reply in zip(asked.items(), replies, strict=True)}


def _plain(made: Sequence[Plan]) -> dict[str, dict[str, Any]]:
    with Site(lambda: engine(target=_target(), max_num_seqs=16), max_queue=10_000) as site:
        return site.run(_reference(site, references(made)), 600)


def _there() -> list[object]:
    """What is there of requests."""
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), (Request, Exchange, Account, Pass))]


def _resident() -> int:
    """Bytes that are in use. An engine on a CPU has the allocator keep what is freed: that is given back first, or it
    would be counted where other tests have left gaps in the heap."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return psutil.Process().memory_info().rss


def _let_go(site: Site, before: Sequence[object]) -> None:
    """Asserts that nothing of requests is there, but for what other tests had left, as soon as the threads' own frames
    have moved on."""
    known = {id(one) for one in before}  # they are held, so that no id comes again
    left: Counter[str] = Counter()
    for _ in range(100):
        left = Counter(type(one).__name__ for one in _there() if id(one) not in known)
        if not left:
            return
        site.run(asyncio.sleep(0.05))
    assert not left, "something of a request is still there"


def _soak(size: Size) -> None:
    before = _there()
    made = plans(size.requests, METHODS)
    judge = Judge(_plain(made), ByteTokenizer().decode)
    memory: list[int] = []
    objects: list[int] = []
    with Site(_engine, max_queue=44, max_body_bytes=2 << 20, drain_timeout=60) as site:
        soak = Soak(site, judge, size)
        troubles = Troubles(site, size, soak.streaming)
        parts = [0, size.requests] if size.warm is None else [0, size.warm, size.closing - AT_ONCE, size.requests]
        for start, end in itertools.pairwise(parts):
            site.run(soak.run(made[start:end]), 2000)
            site.settle()
            _let_go(site, before)
            memory.append(_resident())
            objects.append(len(gc.get_objects()))
        site.run(_finished(soak), 60)
        assert not site.server.service.metrics.open
        assert not site.engine._listeners
        counts = _counts(site)
    print(
        f"sent {dict(judge.sent)}\ncame {dict(judge.ends)}, of those under way at the stop {dict(soak.late)}\n{counts}"
    )
    print(f"the target raised {troubles.raised} times in {troubles.passes} passes")
    print(f"resident {[rss >> 20 for rss in memory]} MiB and {objects} objects, with nothing running")
    _had_everything(judge, soak, [troubles.raised, troubles.scribbled, *counts.values()])
    if size.warm is not None:
        assert memory[1] - memory[0] < GROWTH
        assert objects[1] - objects[0] < 2 * (parts[2] - parts[1]), "two for each request"


def _counts(site: Site) -> dict[str, float | None]:
    names = [f"spec_decode_{name}" for name in ("accepted_tokens", "drafter_faults")]
    return {name: site.metric(f"forerun:{name}_total") for name in (*names, "prefix_cache_hits", "num_preemptions")}


def _had_everything(judge: Judge, soak: Soak, counts: Sequence[float | None]) -> None:
    """What was meant to happen did."""
    assert {"whole", "refused", "left", "broken", "closed"} <= judge.ends.keys(), judge.ends
    assert judge.ends["whole"] > soak.size.requests / 4
    assert soak.late["closed"] <= len(soak.inside) - soak.places, "who was let in is served"
    assert soak.places
    assert min(count or 0 for count in counts) > 0, counts


async def _finished(soak: Soak) -> None:
    """The stop that was begun."""
    assert soak.closing is not None
    await soak.closing


def test_a_small_soak(caplog):
    """Mixed requests, 32 at a time, more than fit: a fifth leaves, at random points; a tenth is malformed, a twentieth
    too long, some read slowly; the target raises, a drafter raises, memory is short, what a drafter keeps in cached
    blocks is overwritten, and before the end the server begins to stop. Every answer is whole, its text that of its ids
    and, where there is one right answer, to the last token that of plain decoding; or it is a clear error. What came of
    one that was left or broke is its beginning. Nothing is held of any request afterwards, and no block is lost."""
    caplog.set_level("CRITICAL", "forerun")  # each fault is logged with its traceback
    _soak(SMALL)


@pytest.mark.slow
def test_soak(caplog):
    """The same with 2,000 requests, and memory is flat."""
    caplog.set_level("CRITICAL", "forerun")
    _soak(FULL)
