"""Many callers on one engine: streams, cancellation, errors and closing, from one event loop or several."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import aclosing

import pytest

from engine.conftest import all_at_once, drafter_of, engine_of, plain, same
from forerun import AsyncEngine, Sampling
from forerun.drafters.ngram import Ngram
from forerun.engine import aio
from forerun.engine.scoring import PIECE
from forerun.errors import EngineClosed, OptionError, PromptError, RequestCancelled
from forerun.target.table import LetterTokenizer, history_model

GREEDY = Sampling(temperature=0, max_tokens=15)
ENDLESS = Sampling(temperature=0, max_tokens=8_000)


def _engine(**options) -> AsyncEngine:
    return AsyncEngine(engine_of(history_model(7, seed=3), Ngram(prompt_lookup_min=1), **options))


def _run(coroutine):
    """Runs a coroutine, but never hangs."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def _quiet(engine: AsyncEngine) -> None:
    """Waits until nothing runs, and audits the engine on its own thread."""
    while await engine._call(lambda: engine.engine.core.busy):
        await asyncio.sleep(0.001)
    await engine._call(engine.engine.audit)
    assert await engine._call(lambda: engine.engine.core.pool.used) == 0


async def _pass_of(engine: AsyncEngine) -> int:
    return await engine._call(lambda: len(engine.engine.target.passes))


def test_forty_streams_at_once():
    """Concurrent streams get their own chunks, in order, and the results of a synchronous engine."""
    prompts = [[i % 7, i // 7, 1] for i in range(40)]
    want = engine_of(history_model(7, seed=3)).generate(prompts, GREEDY)

    async def one(engine, prompt):
        chunks = [chunk async for chunk in engine.stream(prompt, GREEDY)]
        assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        done = chunks[-1].completion
        assert "".join(chunk.text for chunk in chunks) == done.text
        assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
        return done

    async def main():
        async with _engine() as engine:
            done = await asyncio.gather(*(one(engine, prompt) for prompt in prompts))
            assert all(same(a, b) for a, b in zip(done, want, strict=True))
            await _quiet(engine)

    _run(main())


def test_samples_and_prompts_come_back_in_order():
    """generate: (prompt, sample) order, though they finish in another one."""

    async def main():
        async with _engine() as engine:
            samplings = [Sampling(n=2, seed=1, max_tokens=9), Sampling(n=1, seed=1, max_tokens=2)]
            done = await engine.generate([[1, 2], [3]], samplings)
            assert [(c.prompt_index, c.sample_index) for c in done] == [(0, 0), (0, 1), (1, 0)]

    _run(main())


def test_leaving_the_iteration_cancels():
    """Breaking out of a stream frees its request; a batch-mate is not disturbed."""

    async def main():
        async with _engine() as engine:
            mate = asyncio.create_task(engine.generate([4, 4], GREEDY))
            async for _ in engine.stream([1, 2, 3], ENDLESS):
                break
            gc.collect()
            await mate
            await _quiet(engine)
            [output] = plain(history_model(7, seed=3), [[4, 4]], GREEDY).values()
            assert mate.result()[0].token_ids == output

    _run(main())


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_the_task_cancels_the_request(steps):
    """A task cancelled at any await, that of submission included, leaves nothing running."""

    async def main():
        async with _engine() as engine:
            held, gate = threading.Event(), threading.Event()
            if steps == 0:  # hold the engine's thread, so that the task is cancelled while it waits for `submit`
                engine._commands.put(lambda: (held.set(), gate.wait()))
                held.wait()
            task = asyncio.create_task(engine.generate([1, 2, 3], ENDLESS))
            while steps == 0 and engine._commands.empty():
                await asyncio.sleep(0)
            if steps:
                start = await _pass_of(engine)
                while await _pass_of(engine) < start + steps:
                    await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await _quiet(engine)

    _run(main())


def test_errors_of_submission_reach_the_caller_alone():
    """What `submit` refuses is raised where it was asked; nothing of the call runs, the engine goes on."""

    async def main():
        async with _engine() as engine:
            with pytest.raises(PromptError):
                await engine.generate([])
            with pytest.raises(PromptError):
                await engine.generate([[1, 2], [99]], GREEDY)
            with pytest.raises(OptionError):
                await engine.generate([1, 2], GREEDY, speculative={"method": "nothing"})
            assert await _pass_of(engine) == 0
            assert len((await engine.generate([1, 2], GREEDY))[0].token_ids) == 15

    _run(main())


def test_an_error_of_the_target_ends_the_streams_it_hit():
    """The step's requests raise that error; the engine's thread lives, later requests are served."""

    async def main():
        async with _engine() as engine:
            target = engine.engine.target
            whole, calls = target.forward, iter(range(1000))

            def forward(*args):
                if next(calls) == 3:
                    raise MemoryError("no room for this step")
                return whole(*args)

            target.forward = forward
            with pytest.raises(MemoryError, match="no room"):
                await engine.generate([1, 2, 3], GREEDY)
            assert len((await engine.generate([1, 2], GREEDY))[0].token_ids) == 15
            await _quiet(engine)

    _run(main())


def test_a_broken_step_fails_what_runs_and_the_engine_lives():
    """Even an invariant broken in a step is told to every caller; nobody waits forever, later requests are served."""

    async def main():
        async with _engine() as engine:
            core, calls = engine.engine.core, iter(range(1000))
            choose = core.admission.choose

            def broken(plan):
                if next(calls) == 4:
                    raise AssertionError("an invariant is broken")
                return choose(plan)

            core.admission.choose = broken
            async with all_at_once(engine, 3):
                jobs = [asyncio.create_task(engine.generate([i, 1], GREEDY)) for i in range(3)]
            done = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(one, AssertionError) for one in done), done
            assert len((await engine.generate([1, 2], GREEDY))[0].token_ids) == 15
            await _quiet(engine)

    _run(main())


def test_closing_ends_running_streams():
    """close() with streams in flight: each raises EngineClosed, calls afterwards too, and close() may be repeated."""

    async def main():
        engine = _engine()
        jobs = [asyncio.create_task(engine.generate([i, 1], ENDLESS)) for i in range(5)]
        while await _pass_of(engine) < 3:
            await asyncio.sleep(0)
        await asyncio.gather(engine.close(), engine.close())
        assert not engine._thread.is_alive()
        for done in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(done, EngineClosed)
        with pytest.raises(EngineClosed):
            await engine.generate([1], GREEDY)
        await engine.close()
        assert engine.engine.core.pool.used == 0

    _run(main())


def test_calls_that_race_with_close_are_answered():
    """Callers of another event loop while the engine closes get a result or EngineClosed, never silence."""
    for _ in range(20):
        engine = _engine()
        outcomes = []

        async def caller(engine=engine, outcomes=outcomes):
            while True:
                try:
                    await asyncio.wait_for(engine.generate([1, 2], Sampling(max_tokens=1)), 30)
                    outcomes.append("served")
                except EngineClosed:
                    outcomes.append("closed")
                    return

        threads = [threading.Thread(target=lambda: asyncio.run(caller())) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        _run(engine.close())
        for thread in threads:
            thread.join(40)
        assert outcomes.count("closed") == 3


def test_two_event_loops_share_an_engine():
    """Streams of two loops in two threads run together; results as alone."""
    engine = _engine()
    prompts = [[1, 2, 3], [4, 4]]
    want = engine_of(history_model(7, seed=3)).generate(prompts, GREEDY)
    got: dict[int, list] = {}

    def thread(i):
        got[i] = asyncio.run(engine.generate(prompts[i], GREEDY))

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert all(same(got[i][0], want[i]) for i in range(2))
    _run(engine.close())


def test_a_loop_that_ends_with_open_streams_does_not_hurt_the_others():
    """An event loop closed without ceremony takes only its own requests along: the engine's thread lives on."""
    engine = _engine()
    loop = asyncio.new_event_loop()
    stream = engine.stream([1, 2, 3], ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()  # neither cancelled nor shut down

    async def main():
        assert len((await engine.generate([1, 2], GREEDY))[0].token_ids) == 15
        await _quiet(engine)
        await engine.close()

    _run(main())
    stream = None
    gc.collect()


def test_a_slow_reader_costs_only_itself(monkeypatch, caplog):
    """A reader that falls too far behind is cancelled with a log line; the engine never waits for it."""
    # More than the other reader's whole output: the event loop may get no turn while all of that is made.
    monkeypatch.setattr(aio, "MOST_UNREAD", 32)

    async def main():
        async with _engine() as engine, aclosing(engine.stream([1, 2, 3], ENDLESS)) as slow:
            await anext(slow)
            assert len((await engine.generate([4, 4], GREEDY))[0].token_ids) == 15
            await _quiet(engine)  # the slow one no longer runs
            with pytest.raises(RequestCancelled, match="behind"):
                async for _ in slow:
                    pass

    _run(main())
    assert "behind" in caplog.text


def test_a_reader_that_pauses_a_little_misses_nothing():
    """Chunks wait for a reader that is only late."""

    async def main():
        async with _engine() as engine:
            chunks = []
            async for chunk in engine.stream([1, 2, 3], GREEDY):
                chunks.append(chunk)
                await asyncio.sleep(0.002)
            assert [t for chunk in chunks for t in chunk.token_ids] == chunks[-1].completion.token_ids

    _run(main())


def test_zero_tokens():
    """max_tokens = 0 yields one chunk with an empty completion."""

    async def main():
        async with _engine() as engine:
            [chunk] = [chunk async for chunk in engine.stream([1, 2], Sampling(max_tokens=0))]
            assert chunk.finished
            assert (chunk.completion.token_ids, chunk.completion.finish_reason) == ([], "length")

    _run(main())


def test_a_text_that_takes_long_to_read_holds_up_nobody():
    """A prediction, a banned word: tokenised outside of the engine's thread, whose steps go on meanwhile."""
    reading = threading.Event()

    class Slow(LetterTokenizer):
        def encode(self, text, add_special_tokens=True):
            if "abc" in text:
                reading.wait(20)
            return super().encode(text.strip(), add_special_tokens)

    async def main():
        target = history_model(7, seed=3, tokenizer=Slow(7))
        async with AsyncEngine(engine_of(target, Ngram(prompt_lookup_min=1))) as engine:
            banned = Sampling(temperature=0, max_tokens=5, bad_words=["abc"])
            jobs = [engine.generate([1, 2], GREEDY, prediction="abc"), engine.generate([1, 2], banned)]
            slow = [asyncio.create_task(job) for job in jobs]
            await asyncio.sleep(0.01)
            assert len((await engine.generate([4, 4], GREEDY))[0].token_ids) == 15
            held_up = reading.is_set() or any(task.done() for task in slow)
            reading.set()
            assert [len(task[0].token_ids) for task in await asyncio.gather(*slow)] == [15, 5]
            assert not held_up
            await _quiet(engine)

    _run(main())


def test_scoring_many_texts_holds_up_no_step():
    """Between two steps one piece is computed, however many texts wait: what decodes has its turn behind each."""

    async def main():
        async with _engine() as engine:
            whole, order = engine.engine.target.forward, []

            def forward(batch, *more):
                order.append(sum(len(segment.tokens) for segment in batch.segments) < PIECE)
                time.sleep(0.001)  # the scorers' event loop has asked for their next pieces before this one is done
                return whole(batch, *more)

            engine.engine.target.forward = forward
            job = asyncio.create_task(engine.generate([4, 4], Sampling(temperature=0, max_tokens=200)))
            while not order:
                await asyncio.sleep(0)
            start = len(order)
            await asyncio.gather(*(engine.score([1, 2] * PIECE * 3) for _ in range(4)))
            assert not job.done()
            pieces = "".join("p" if is_step else "S" for is_step in order[start:]).strip("p")
            assert "SS" not in pieces
            job.cancel()
            await _quiet(engine)

    _run(main())


def test_the_event_loop_is_free_during_a_step():
    """While the target computes, other coroutines run."""

    async def main():
        async with AsyncEngine(engine_of(history_model(7, seed=3), drafter_of("small", {}, 7))) as engine:
            whole = engine.engine.target.forward

            def slow(*args):
                time.sleep(0.02)
                return whole(*args)

            engine.engine.target.forward = slow
            ticks = 0
            task = asyncio.create_task(engine.generate([1, 2, 3], GREEDY))
            while not task.done():
                await asyncio.sleep(0.001)
                ticks += 1
            assert ticks > 10

    _run(main())
