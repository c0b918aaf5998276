"""Cancelling, at any moment: blocks come back, batch-mates are not disturbed, nothing half-verified is ever reused."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.conftest import bytes_for, drafter_of, drive, engine_of, idle, ids, plain
from forerun import Sampling
from forerun.errors import RequestCancelled
from forerun.target.table import history_model


@cache
def _reference(prompt: tuple[int, ...], temperature: float, seed: int) -> tuple[int, ...]:
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=24)
    [output] = plain(history_model(7, seed=3), [prompt], sampling, "coupled").values()
    return tuple(output)


@cache
def _alone(kind: str, prompt: tuple[int, ...], temperature: float) -> tuple[int, ...]:
    """What the request emits by itself in rejection mode, with the same drafter and K."""
    engine = engine_of(history_model(7, seed=3), drafter_of(kind, {}, 7), num_speculative_tokens=3)
    [done] = engine.generate([prompt], Sampling(temperature=temperature, seed=1, max_tokens=24))
    return tuple(done.token_ids)


def _crowded(kind: str, blocks: int = 9, **options):
    """An engine with a small pool, coupled unless told otherwise, so that every result has one right answer.

    24 rows a step leave K = 3 for each of four requests, also while a prefill takes its quarter.
    """
    target, drafter = history_model(7, seed=3), drafter_of(kind, {}, 7)
    memory = bytes_for(blocks, target, drafter)
    options = {"num_speculative_tokens": 3, "verify_mode": "coupled", "max_num_batched_tokens": 24, **options}
    return engine_of(target, drafter, kv_cache_memory_bytes=memory, **options)


@pytest.mark.parametrize("kind", ["other small", "ngram"])
def test_ca_1_hundreds_of_cancelled_requests(kind):
    """Requests cancelled at random steps, waiting, in prefill, decoding or preempted, 750 times:
    after each the books balance; batch-mates, and prompts sent again, give plain text; all blocks return.

    https://github.com/sgl-project/sglang/pull/28374, https://github.com/vllm-project/vllm/pull/29987
    """
    rng = random.Random(11)
    engine = _crowded(kind)
    live, cancelled, prompts = {}, 0, set()
    while cancelled < (250 if kind == "other small" else 500):
        while len(live) < 6:
            prompt = tuple(rng.randrange(7) for _ in range(rng.choice([1, 3, 15, 17, 33])))
            temperature = rng.choice([0, 0.8])
            [request] = engine.submit([prompt], Sampling(temperature=temperature, seed=1, max_tokens=24))
            live[request] = (prompt, temperature)
        for _ in range(rng.randrange(3)):
            engine.step()
        for request in [request for request in live if request.finish_reason]:
            prompt, temperature = live.pop(request)
            assert tuple(request.output) == _reference(prompt, temperature, 1)
        if live:
            victim = rng.choice(list(live))
            engine.cancel([victim])
            prompts.add(live.pop(victim)[0])
            cancelled += 1
            engine.audit()
            with pytest.raises(RequestCancelled):
                engine.result(victim)
    engine.cancel(list(live))
    idle(engine)
    again = rng.sample(sorted(prompts), 20)
    for prompt, done in zip(again, engine.generate(again, Sampling(temperature=0, max_tokens=24)), strict=True):
        assert tuple(done.token_ids) == _reference(prompt, 0, 1)
    idle(engine)


@pytest.mark.parametrize("kind", ["oracle", "other small"])
def test_ca_1_cancelled_by_a_listener_in_the_middle_of_delivery(kind):
    """A listener that cancels its own request and another one while a step's results are handed out."""
    prompts = [[1, 2, 3], [4], [5, 5]]
    greedy = Sampling(temperature=0, max_tokens=24)
    known = plain(history_model(7, seed=3), prompts, greedy)
    for moment in range(1, 6):
        engine = engine_of(history_model(7, seed=3), drafter_of(kind, known, 7))
        calls, requests = [], []

        def listen(chunk, calls=calls, requests=requests, engine=engine, moment=moment):
            calls.append(chunk)
            if len(calls) == moment:
                engine.cancel(requests[:2])

        requests += engine.submit(prompts[:2], greedy, listener=listen)
        [mate] = engine.submit(prompts[2:], greedy)
        assert ids(drive(engine, [mate])) == [known[5, 5]]
        assert len(calls) == moment
        idle(engine)


def test_streams_that_are_closed_early():
    """Closing an iterator before its first chunk, in the middle and at its end leaves nothing behind."""
    greedy = Sampling(temperature=0, max_tokens=8)
    for count in range(10):
        engine = _crowded("other small")
        chunks = engine.stream([[1, 2], [3]], greedy)
        for _ in range(count):
            next(chunks, None)
        chunks.close()
        idle(engine)


def test_a_stream_nobody_reads_computes_nothing():
    """Before the first chunk is asked for, nothing is queued; what cannot be used is refused at once all the same."""
    engine = _crowded("ngram")
    chunks = engine.stream([[1, 2]], Sampling(max_tokens=4))
    assert not engine.core.busy
    del chunks
    idle(engine)


class Schedule(RuleBasedStateMachine):
    """Any order of submitting, stepping, cancelling, preempting and conversing: the books balance after every move, and
    what finishes is what plain decoding emits; in rejection mode, what the same request emits by itself.
    """

    kind = "other small"
    mode = "coupled"

    def __init__(self):
        super().__init__()
        self.engine = _crowded(self.kind, blocks=7, max_num_seqs=4, verify_mode=self.mode)
        self.turns = self.engine.conversation()
        self.said: list[int] = []
        self.requests: dict = {}
        self.open = None

    @rule(prompt=st.lists(st.integers(0, 6), min_size=1, max_size=40), temperature=st.sampled_from([0, 0.8]))
    def submit(self, prompt, temperature):
        [request] = self.engine.submit([prompt], Sampling(temperature=temperature, seed=1, max_tokens=24))
        self.requests[request] = (tuple(prompt), temperature)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.engine.cancel([list(self.requests)[index]])

    @rule()
    def preempt(self):
        if self.engine.core.admission.running:
            self.engine.core.admission.preempt(self.engine.core.admission.running[-1])

    @rule(cut=st.integers(0, 5), more=st.lists(st.integers(0, 6), min_size=1, max_size=5))
    def turn(self, cut, more):
        if self.open is None:
            prompt = [*self.said[: max(0, len(self.said) - cut)], *more][-40:]
            self.open = (prompt, self.turns.stream(prompt, Sampling(temperature=0, max_tokens=24)))

    @rule(chunks=st.integers(1, 30))
    def read(self, chunks):
        for _ in range(chunks):
            if self.open is None:
                return
            chunk = next(self.open[1])
            if chunk.finished:
                prompt = self.open[0]
                assert next(self.open[1], None) is None
                assert tuple(chunk.completion.token_ids) == _reference(tuple(prompt), 0, 1)
                self.said, self.open = [*prompt, *chunk.completion.token_ids], None

    @rule()
    def hang_up(self):
        if self.open is not None:
            self.open[1].close()
            self.open = None

    @invariant()
    def books_balance(self):
        self.engine.audit()
        for request in [request for request in self.requests if request.finish_reason]:
            prompt, temperature = self.requests.pop(request)
            if request.finish_reason != "abort":
                want = (
                    _reference(prompt, temperature, 1)
                    if self.mode == "coupled"
                    else _alone(self.kind, prompt, temperature)
                )
                assert tuple(request.output) == want

    def teardown(self):
        self.hang_up()
        while self.engine.step():
            pass
        self.books_balance()
        self.turns.close()
        idle(self.engine)


class NgramSchedule(Schedule):
    kind = "ngram"


class RejectionSchedule(Schedule):
    mode = "rejection"


FEW = settings(max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
TestSchedule = Schedule.TestCase
TestSchedule.settings = FEW
TestNgramSchedule = NgramSchedule.TestCase
TestNgramSchedule.settings = FEW
TestRejectionSchedule = RejectionSchedule.TestCase
TestRejectionSchedule.settings = FEW


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Schedule, NgramSchedule, RejectionSchedule])
def test_many_schedules(kind):
    """The same with many more and longer schedules."""
    kind.TestCase.settings = settings(FEW, max_examples=400, stateful_step_count=60)
    try:
        kind.TestCase("runTest").runTest()
    finally:
        kind.TestCase.settings = FEW
