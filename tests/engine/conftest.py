"""Shared pieces of the engine's tests: exact targets, the oracle, and engines over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from forerun import Sampling
from forerun.drafters.base import Drafter
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.fake import Coin, Never, Oracle, Shift
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import AsyncEngine, Completion, Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.propose import LoadedDrafter
from forerun.engine.reference import decode
from forerun.engine.request import Request
from forerun.sampling import Noise, VerifyMode
from forerun.target.base import BLOCK_SIZE, Target
from forerun.target.table import TableTarget, history_model, position_model

PROMPTS = [[1, 2, 3], [4], [0, 5, 5, 2, 1, 6, 3, 3, 2, 1, 0, 4, 4, 5, 6, 1, 2, 3, 0], [6, 6]]
"""For models of 7 tokens: short, shortest, longer than a block, and two."""

KINDS = ["oracle", "never", "coin", "shift", "ngram", "small", "other small"]


def engine_of(target: Target, *drafters: Drafter, **options: object) -> Engine:
    """An engine over a target and drafters that are already made, with memory for some 8,000 rows."""
    memory = bytes_for(512, target, *drafters)
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": memory}
    chosen = EngineOptions.of({**small, **options})
    return Engine(target, load_drafters(list(drafters), target, chosen), chosen)


@asynccontextmanager
async def all_at_once(engine: AsyncEngine, count: int) -> AsyncIterator[None]:
    """The engine's thread begins nothing that is asked within before so many calls have come."""
    held, release = threading.Event(), threading.Event()
    holding = asyncio.ensure_future(engine.call(lambda: (held.set(), release.wait(30))))
    try:
        yield
        while not held.is_set() or engine._commands.qsize() < count:
            await asyncio.sleep(0.001)
    finally:
        release.set()
        await holding


def configured(target: Target, drafter: Drafter, config: dict[str, object], **options: object) -> Engine:
    """An engine whose one drafter is used as a speculative config says."""
    chosen = EngineOptions.of({"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})
    entry = LoadedDrafter(drafter, SpeculativeConfig(method=drafter.name, **config))
    return Engine(target, [entry], chosen)


def bytes_for(blocks: int, target: Target, *drafters: Drafter) -> int:
    """kv_cache_memory_bytes for a pool of exactly this many blocks."""
    return blocks * (target.block_bytes + sum(drafter.block_bytes for drafter in drafters))


def plain(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, mode: VerifyMode = "rejection"
) -> dict[tuple[int, ...], list[int]]:
    """What the reference decodes for each prompt, without cache, batching or drafts."""
    most = max(len(prompt) for prompt in prompts) + (sampling.max_tokens or 0)
    target.allocate(most // BLOCK_SIZE + 1)
    noise = Noise.of(sampling.seed or 0)
    return {tuple(prompt): decode(target, prompt, sampling, noise, mode) for prompt in prompts}


def drafter_of(kind: str, known: dict[tuple[int, ...], list[int]], vocab_size: int, seed: int = 3) -> Drafter:
    """A drafter by name: those of known quality, and the two classic ones."""
    makers: dict[str, Callable[[], Drafter]] = {
        "oracle": lambda: Oracle(known),
        "never": lambda: Never(known, vocab_size),
        "coin": lambda: Coin(known, vocab_size, 0.6),
        "shift": lambda: Shift(known),
        "ngram": lambda: Ngram(prompt_lookup_min=1, prompt_lookup_max=3),
        "small": lambda: Small(history_model(vocab_size, seed=seed), vocab_size),
        "other small": lambda: Small(position_model(vocab_size, seed=8), vocab_size),
    }
    return makers[kind]()


def drive(
    engine: Engine,
    requests: Sequence[Request],
    between: Callable[[int], None] = lambda step: None,
) -> list[Completion]:
    """Steps until the requests are done, with an audit after each; `between(i)` is called before step i."""
    step = 0
    while any(request.finish_reason is None for request in requests):
        between(step)
        engine.step()
        engine.audit()
        step += 1
        assert step < 2000, "the engine makes no progress"
    return [engine.result(request) for request in requests]


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def same(left: Completion, right: Completion) -> bool:
    """Equal in everything a caller sees of the result: ids, text, reasons, log-probabilities."""
    fields = ("token_ids", "text", "finish_reason", "stop_reason", "logprobs")
    return all(getattr(left, name) == getattr(right, name) for name in fields)


def preempt_all(engine: Engine) -> None:
    """Sends every running request back to the queue, the latest first, as a full pool would."""
    for request in list(reversed(engine.core.admission.running)):
        engine.core.admission.preempt(request)


def idle(engine: Engine) -> None:
    """Asserts that nothing is left behind."""
    engine.audit()
    assert not engine.core.busy
    assert engine.core.pool.used == 0


def seeded(sampling: Sampling, count: int) -> list[Sampling]:
    """Copies of a sampling with seeds of their own."""
    return [replace(sampling, seed=100 + i) for i in range(count)]


@pytest.fixture
def history() -> TableTarget:
    return history_model(7, seed=3)
