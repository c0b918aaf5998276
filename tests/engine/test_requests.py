"""What a server asks beyond sampling: scoring a text, an order, a rule that ends an answer, what each chunk says."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engine.conftest import bytes_for, drafter_of, drive, engine_of, idle, ids, plain
from forerun import AsyncEngine, Sampling
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine.request import Chunk
from forerun.engine.scoring import PIECE, Scoring
from forerun.errors import OptionError, PromptError
from forerun.target.table import history_model

GREEDY = Sampling(temperature=0, max_tokens=15)
TEXT = [i * 5 % 7 for i in range(PIECE + 40)]


def _scored(engine, tokens, top=0):
    scoring = Scoring(engine.core, engine.intake, tokens, top)
    while not scoring.done:
        assert scoring.step()
        engine.audit()
    scoring.close()
    return scoring.values


def test_a_text_is_scored_as_the_target_scores_it():
    """Every token behind the first, over the border of a piece too; nothing is held afterwards."""
    target = history_model(7, seed=3)
    engine = engine_of(target)
    values = _scored(engine, TEXT, top=2)
    assert [value.token_id for value in values] == TEXT[1:]
    for place in (1, 2, PIECE - 1, PIECE, PIECE + 1, len(TEXT) - 1):
        want = torch.tensor(target._logits(TEXT[:place]), dtype=torch.float64).log_softmax(-1)
        assert values[place - 1].logprob == pytest.approx(want[TEXT[place]].item())
        assert values[place - 1].top[0][0] == want.argmax()
    assert _scored(engine, [3]) == []
    idle(engine)


def test_requests_take_the_memory_of_a_scoring_back():
    """A request that needs the rows gets them; the scoring starts over and ends with the same values."""
    target = history_model(7, seed=3)
    want = _scored(engine_of(target), TEXT)
    engine = engine_of(target, kv_cache_memory_bytes=bytes_for(12, target))
    scoring = Scoring(engine.core, engine.intake, TEXT)
    assert scoring.step()
    [request] = engine.submit([1, 2], Sampling(temperature=0, max_tokens=120))
    drive(engine, [request])
    assert not engine.core.kept[scoring._id]
    while not scoring.done:
        assert scoring.step()
    assert scoring.values == want
    scoring.close()
    idle(engine)


def test_scorings_do_not_wait_for_each_other():
    """Two that would each need more than half of the memory: the one that began first gets it, then the other."""
    target = history_model(7, seed=3)
    want = _scored(engine_of(target), TEXT)
    engine = engine_of(target, kv_cache_memory_bytes=bytes_for(17, target))
    first, second = (Scoring(engine.core, engine.intake, TEXT) for _ in range(2))
    assert second.step()
    for scoring in (first, second):
        for _ in range(4):
            for one in (second, first):
                if not one.done:
                    one.step()
                    engine.audit()
        assert scoring.values == want
        scoring.close()
        assert not scoring.step()  # nothing is computed for one that nobody waits for
    idle(engine)


def test_a_text_that_cannot_be_scored_is_refused():
    """A token outside the vocabulary; more tokens than the memory holds."""
    target = history_model(7, seed=3)
    engine = engine_of(target, kv_cache_memory_bytes=bytes_for(2, target))
    for tokens in ([1, 7], [1] * 33):
        with pytest.raises(PromptError):
            Scoring(engine.core, engine.intake, tokens)
    idle(engine)


def test_texts_are_scored_beside_requests():
    """From an event loop, while requests run: both as alone; a scoring that is cancelled leaves nothing."""

    async def main():
        async with AsyncEngine(engine_of(history_model(7, seed=3))) as engine:
            want = _scored(engine_of(history_model(7, seed=3)), TEXT)
            job = asyncio.create_task(engine.generate([4, 4], Sampling(temperature=0, max_tokens=200)))
            scores = await asyncio.gather(*(engine.score(TEXT) for _ in range(3)))
            assert scores == [want] * 3
            left = asyncio.create_task(engine.score(TEXT))
            await asyncio.sleep(0)
            left.cancel()
            await job
            with pytest.raises(PromptError):
                await engine.score([99])
            await engine.call(engine.engine.audit)
            assert await engine.call(lambda: engine.engine.core.pool.used) == 0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("kind", ["oracle", "never", "coin"])
def test_a_rule_of_the_caller_ends_the_answer(k, kind):
    """`stop_when` is asked after every token, also inside of a block: what is behind it is gone, and drafts change
    nothing. Stop ids come before it, the length after it."""
    prompt = [1, 2, 3]
    known = plain(history_model(7, seed=3), [prompt], GREEDY)
    output = known[tuple(prompt)]
    rule = lambda tokens: len(tokens) - len(prompt) == 6  # noqa: E731
    engine = engine_of(history_model(7, seed=3), drafter_of(kind, known, 7), num_speculative_tokens=k)
    for most in (6, 15):
        [done] = engine.generate([prompt], Sampling(temperature=0, max_tokens=most, stop_when=[rule]))
        assert (done.token_ids, done.finish_reason, done.stop_reason) == (output[:6], "stop", None)
    with pytest.raises(OptionError, match="stop_when"):
        Sampling(stop_when=["rule"])
    idle(engine)


def test_lower_priorities_are_admitted_first():
    """Among equals the first that came; a running request is not touched."""
    engine = engine_of(history_model(7, seed=3), max_num_seqs=1)
    order: list[int] = []
    requests = []
    for number, priority in enumerate((0, 5, -1, 0, -1)):
        listener = lambda chunk, number=number: order.append(number) if chunk.finished else None  # noqa: E731
        requests += engine.submit([1, number], GREEDY, priority=priority, listener=listener)
        if number == 0:
            engine.step()
    drive(engine, requests)
    assert order == [0, 2, 4, 3, 1]


def test_a_long_prompt_leaves_rows_to_those_behind_it():
    """A quarter of what is left of a step: first to what fits, the rest to the next one. Alone it has all of it. What
    comes out is the same."""
    make = lambda: engine_of(history_model(7, seed=3), max_num_batched_tokens=40)  # noqa: E731
    prompts = [[i % 7 for i in range(n)] for n in (300, 200, 2)]
    engine = make()
    requests = engine.submit(prompts, GREEDY)
    engine.step()
    assert [request.rows for request in requests] == [30, 8, 2]
    done = drive(engine, requests)
    assert ids(done) == [ids(make().generate([prompt], GREEDY))[0] for prompt in prompts]
    engine = make()
    [alone] = engine.submit([prompts[0]], GREEDY)
    engine.step()
    assert alone.rows == 40


LONG = [[i % 7 for i in range(300 + n)] for n in range(6)]


@pytest.mark.parametrize("running", [False, True])
def test_no_number_of_long_prompts_keeps_a_short_one_waiting(running):
    """Behind six of them, waiting or running, one that fits into the quarter of a step is read in its first; so is a
    long one whose rows are known; and one of more than a quarter long before the first of the six.
    """
    engine = engine_of(history_model(7, seed=3), max_num_batched_tokens=40, max_num_seqs=20)
    engine.generate([[3] * 64], Sampling(max_tokens=1))
    requests = engine.submit(LONG, GREEDY)
    if running:
        engine.step()
    short, known, middle = engine.submit([[2] * 6, [*[3] * 64, 1], [1] * 14], GREEDY)
    engine.step()
    assert (short.rows, known.rows) == (6, 65)
    for _ in range(7):
        engine.step()
    assert middle.output
    assert requests[0].prefill > 0
    drive(engine, [*requests, middle])
    idle(engine)


@pytest.mark.parametrize("size", [9, 14])
def test_no_number_of_prompts_keeps_a_long_one_waiting(size):
    """Others that came later, three in each step: each of a quarter of one, or more than that."""
    engine = engine_of(history_model(7, seed=3), max_num_batched_tokens=40, max_num_seqs=20)
    longs = engine.submit([[1, 2] * 30, [1, 3] * 30], GREEDY)
    for step in range(12):
        engine.submit([[step % 7] * size] * 3, Sampling(temperature=0, max_tokens=2))
        engine.step()
    assert all(long.output for long in longs)


def test_chunks_say_what_their_step_did():
    """Verified and accepted of every step add up to the counters; log-probabilities come with their tokens."""
    engine = engine_of(history_model(7, seed=3), Ngram(prompt_lookup_min=1), num_speculative_tokens=3)
    sampling = Sampling(temperature=0, max_tokens=40, logprobs=1, stop_token_ids=[4], min_tokens=20)
    chunks: list[Chunk] = list(engine.stream([[1, 2, 1, 2]], sampling))
    done = chunks[-1].completion
    assert sum(chunk.verified for chunk in chunks) == done.stats.verified > 0
    assert sum(chunk.accepted for chunk in chunks) == done.stats.accepted
    assert [entry for chunk in chunks for entry in chunk.logprobs] == done.logprobs
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert all(chunk.stats is done.stats for chunk in chunks)
    assert [chunk.at for chunk in chunks] == sorted(chunk.at for chunk in chunks)
    assert chunks[0].started <= chunks[0].at


@pytest.mark.parametrize("kind", ["ngram", "copying"])
def test_what_came_of_a_prediction_is_counted(kind):
    """Accepted and refused tokens that were taken from it; drafts from prompt and output count for nothing here."""
    prompt = [1, 2, 3]
    [output] = plain(history_model(7, seed=3), [prompt], GREEDY).values()
    letters = "".join("abcdefg"[i] for i in output)
    drafter, sizes = Ngram(3, 2), {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    if kind == "copying":  # a stranger to the target: what comes true was looked up
        drafter = Small(history_model(7, seed=8), 7)
        drafter.copy_from_text(sizes)
    engine = engine_of(history_model(7, seed=3), drafter)
    [done] = engine.generate([prompt], GREEDY, prediction=letters)
    assert done.token_ids == output
    assert done.stats.predicted_accepted > 5
    wrong = "".join(letter if i < 6 else "abcdefg"[(output[i] + 1) % 7] for i, letter in enumerate(letters))
    [done] = engine.generate([prompt], GREEDY, prediction=wrong)
    assert done.token_ids == output
    assert done.stats.predicted_rejected > 0
    [done] = engine.generate([prompt * 4], GREEDY)
    assert (done.stats.predicted_accepted, done.stats.predicted_rejected) == (0, 0)
