"""Batch-mates, chunks, pools and preemption change nothing about a request."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.conftest import (
    KINDS,
    PROMPTS,
    bytes_for,
    drafter_of,
    drive,
    engine_of,
    idle,
    ids,
    plain,
    preempt_all,
    same,
    seeded,
)
from forerun import Sampling
from forerun.drafters.fake import Script
from forerun.drafters.ngram import Ngram
from forerun.errors import PromptError
from forerun.sampling import VerifyMode
from forerun.target.base import BLOCK_SIZE
from forerun.target.table import history_model, position_model

GREEDY = Sampling(temperature=0, max_tokens=23, seed=11)  # for drafters that draw what they guess
WARM = Sampling(temperature=0.9, top_p=0.95, max_tokens=23, seed=11)
MODES = [("greedy", GREEDY, "rejection"), ("coupled", WARM, "coupled"), ("rejection", WARM, "rejection")]


def _fresh(kind: str, sampling: Sampling, mode: VerifyMode, k: int = 3, **options: object):
    """An engine over a history model with one drafter, and what the reference decodes."""
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, sampling, mode)
    drafter = drafter_of(kind, known, 7)
    if "blocks" in options:
        options["kv_cache_memory_bytes"] = bytes_for(options.pop("blocks"), target, drafter)
    return engine_of(target, drafter, num_speculative_tokens=k, verify_mode=mode, **options), known


def _alone(kind: str, sampling: Sampling, mode: VerifyMode, k: int = 3):
    """Each prompt of PROMPTS in an engine of its own."""
    return [_fresh(kind, sampling, mode, k)[0].generate(prompt, sampling)[0] for prompt in PROMPTS]


# ------------------------------------------------------------------------------------------------- rows of a step


def _scripted(known, accept):
    """Drafts of view.k tokens of which exactly `accept[prompt]` are right, each round anew."""

    def guess(view):
        prompt = tuple(view.tokens[: view.prompt_length])
        done = len(view.tokens) - view.prompt_length
        future = known[prompt][done : done + view.k]
        right = accept[prompt]
        return [token if i < right else (token + 1) % 7 for i, token in enumerate(future)]

    return Script(guess)


@pytest.mark.parametrize("model", [history_model, position_model])
def test_ba_1_rows_that_accept_different_lengths(model):
    """Rows that accept 0, 1, 3 and K in every step beside a plain row, joining and leaving at different steps, emit
    what they emit alone.

    https://github.com/huggingface/transformers/pull/32189, https://github.com/huggingface/transformers/pull/26875,
    https://github.com/huggingface/transformers/pull/42655, https://github.com/HabanaAI/vllm-fork/pull/1780
    """
    target = model(7, seed=5)
    prompts = [*PROMPTS, [3, 3, 3, 1]]
    lengths = [40, 25, 33, 18, 29]
    samplings = [Sampling(temperature=0, max_tokens=length) for length in lengths]
    known = plain(target, prompts, Sampling(temperature=0, max_tokens=40))
    accept = dict(zip(map(tuple, prompts), [0, 1, 3, 5, 0], strict=True))
    engine = engine_of(target, _scripted(known, accept), num_speculative_tokens=5)
    requests = []

    def join(step):
        if step % 3 == 0 and step // 3 < 5:
            row = step // 3
            plain_row = {"speculative": False} if row == 4 else {}
            requests.extend(engine.submit(prompts[row], samplings[row], **plain_row))

    join(0)
    for step in itertools.count(1):
        if len(requests) == 5 and all(request.finish_reason for request in requests):
            break
        engine.step()
        engine.audit()
        join(step)
    for request, prompt, length in zip(requests, prompts, lengths, strict=True):
        completion = engine.result(request)
        assert completion.token_ids == known[tuple(prompt)][:length]
        stats, right = completion.stats, accept[tuple(prompt)]
        assert stats.accepted_by_position[:right] == stats.reached_by_position[:right]
        assert sum(stats.accepted_by_position[right:]) == 0
    assert requests[4].stats.drafted == 0
    idle(engine)


# ----------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize(
    ("kind", "mode"), list(itertools.product(KINDS, MODES)), ids=lambda v: v if v in KINDS else v[0]
)
def test_ba_2_preemption_at_each_step_changes_no_ids(kind, mode):
    """All rows preempted before each step index in turn: ids of every drafter as without preemption, greedy, coupled
    and in rejection mode with a fixed K; nothing is sampled from the second prefill.

    https://github.com/vllm-project/vllm/pull/31955, https://github.com/vllm-project/vllm/pull/49620
    """
    _, sampling, verify_mode = mode
    want = ids(_fresh(kind, sampling, verify_mode)[0].generate(PROMPTS, sampling))
    for index in (1, 4):
        engine, _ = _fresh(kind, sampling, verify_mode)

        def preempt(step, engine=engine, index=index):
            if step == index:
                preempt_all(engine)

        done = drive(engine, engine.submit(PROMPTS, sampling), preempt)
        assert ids(done) == want, index
        assert any(completion.stats.preemptions for completion in done)
        idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"), list(itertools.product(KINDS, MODES)), ids=lambda v: v if v in KINDS else v[0]
)
def test_ba_2_in_full(kind, mode):
    """The same for every step index, every second one twice in a row, at K 1, 4 and 8."""
    _, sampling, verify_mode = mode
    for k in (1, 4, 8):
        want = ids(_fresh(kind, sampling, verify_mode, k)[0].generate(PROMPTS, sampling))
        for index in range(24):
            engine, _ = _fresh(kind, sampling, verify_mode, k)

            def preempt(step, engine=engine, index=index):
                if step == index or (index % 2 and step == index + 1):
                    preempt_all(engine)

            assert ids(drive(engine, engine.submit(PROMPTS, sampling), preempt)) == want, (k, index)


@pytest.mark.parametrize("mode", MODES, ids=lambda v: v[0])
@pytest.mark.parametrize("kind", ["coin", "other small", "ngram"])
def test_ba_2_a_pool_for_one_and_a_half_requests(kind, mode):
    """Three requests in a pool that holds one and a half of them: preempted by need, ids as with all the memory.

    https://github.com/vllm-project/vllm/pull/31955, https://github.com/vllm-project/vllm/pull/49620
    """
    _, sampling, verify_mode = mode
    longer = Sampling(**{**_options(sampling), "max_tokens": 40})
    want = ids(_fresh(kind, longer, verify_mode)[0].generate(PROMPTS, longer))
    # 19 prompt tokens and 40 new ones: 4 blocks.
    engine, _ = _fresh(kind, longer, verify_mode, blocks=6)
    done = drive(engine, engine.submit(PROMPTS, longer))
    assert ids(done) == want
    assert sum(completion.stats.preemptions for completion in done) > 0
    idle(engine)


def _options(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "seed")}


@pytest.mark.parametrize("kind", ["oracle", "other small", "ngram"])
@pytest.mark.parametrize("k", [4, 20])
def test_a_pool_for_exactly_one_request(kind, k):
    """With memory for exactly the longest request, all are served, one after the other where need be, at any K."""
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, GREEDY)
    drafter = drafter_of(kind, known, 7)
    blocks = -(-(len(PROMPTS[2]) + 23 - 1) // BLOCK_SIZE)
    memory = bytes_for(blocks, target, drafter)
    engine = engine_of(target, drafter, num_speculative_tokens=k, kv_cache_memory_bytes=memory)
    assert ids(drive(engine, engine.submit(PROMPTS, GREEDY))) == list(known.values())
    idle(engine)
    with pytest.raises(PromptError, match="kv_cache_memory_bytes"):
        engine.submit(PROMPTS[2], Sampling(max_tokens=blocks * BLOCK_SIZE - len(PROMPTS[2]) + 2))


# ---------------------------------------------------------------------------------------------- chunks and queues


@pytest.mark.parametrize("mode", MODES, ids=lambda v: v[0])
@pytest.mark.parametrize("rows", [2, 7, 19])
def test_chunked_prefill_between_decoding_rows_changes_nothing(rows, mode):
    """Prefill in chunks of every size, decoding going on beside it: same ids; the first token is never drafted for.

    A chunk that ends one row before the prompt does leaves one pending token, which is still prefill.
    """
    _, sampling, verify_mode = mode
    want = _alone("other small", sampling, verify_mode, 1)
    engine, _ = _fresh("other small", sampling, verify_mode, k=1, max_num_batched_tokens=rows, max_num_seqs=2)
    engine.target.passes.clear()
    if verify_mode == "rejection" and not sampling.greedy and rows < 4:
        pytest.skip("two rows share fewer than two K=1 blocks: a shared token budget promises the law only")
    done = drive(engine, engine.submit(PROMPTS, sampling))
    assert ids(done) == ids(want)
    for completion in done:
        assert completion.from_draft[0] is False
        assert 1 + completion.stats.emitted - completion.stats.discarded == len(completion.token_ids)
    assert max(engine.target.passes) <= rows
    idle(engine)


@pytest.mark.parametrize("cut", [1, 9, 16, 17, 18])
def test_the_first_token_does_not_depend_on_the_chunks_of_its_prefill(cut):
    """Rejection mode, fixed K, a prompt of 19 fed as `cut` rows and the rest: always the same text."""
    prompt = PROMPTS[2]
    want = _fresh("other small", WARM, "rejection")[0].generate(prompt, WARM)[0]
    engine, _ = _fresh("other small", WARM, "rejection", max_num_batched_tokens=64)
    [request] = engine.submit(prompt, WARM)
    limits = engine.core.admission.limits
    object.__setattr__(limits, "max_num_batched_tokens", cut)
    engine.step()
    object.__setattr__(limits, "max_num_batched_tokens", 64)
    assert same(drive(engine, [request])[0], want)


def test_one_sequence_at_a_time():
    """max_num_seqs = 1 serves a queue in order, each as alone."""
    engine, known = _fresh("coin", GREEDY, "rejection", max_num_seqs=1)
    requests = engine.submit(PROMPTS, GREEDY)
    finished = []

    def note(step):
        assert len(engine.core.admission.running) <= 1
        finished.extend(i for i, r in enumerate(requests) if r.finish_reason and i not in finished)

    assert ids(drive(engine, requests, note)) == list(known.values())
    note(-1)
    assert finished == [0, 1, 2, 3]
    idle(engine)


def test_fifty_requests_that_join_and_leave():
    """Fifty requests of mixed lengths and temperatures over a small pool, some joining late: each as alone."""
    rng = random.Random(7)
    prompts = [[rng.randrange(7) for _ in range(rng.randrange(1, 40))] for _ in range(50)]
    samplings = [Sampling(temperature=rng.choice([0, 0.8]), max_tokens=rng.randrange(1, 30), seed=i) for i in range(50)]
    target = history_model(7, seed=3)
    drafter = Ngram(prompt_lookup_min=1)
    engine = engine_of(target, drafter, verify_mode="coupled", kv_cache_memory_bytes=bytes_for(12, target))
    requests = engine.submit(prompts[:10], samplings[:10])

    def join(step):
        if step % 2 and len(requests) < 50:
            at = len(requests)
            requests.extend(engine.submit(prompts[at : at + 3], samplings[at : at + 3]))

    while len(requests) < 50:
        join(1)
        engine.step()
    done = drive(engine, requests, join)
    for prompt, sampling, completion in zip(prompts, samplings, done, strict=True):
        assert completion.token_ids == plain_one(prompt, sampling), prompt
    idle(engine)


def plain_one(prompt, sampling):
    [output] = plain(history_model(7, seed=3), [prompt], sampling, "coupled").values()
    return output


@pytest.mark.slow
def test_ba_3_the_same_batch_shuffled():
    """The same 8 requests five times in shuffled order: five equal results for each.

    https://github.com/snowflakedb/ArcticInference/issues/143
    """
    rng = random.Random(1)
    prompts = [[rng.randrange(7) for _ in range(rng.randrange(1, 30))] for _ in range(8)]
    for mode, sampling in itertools.product(("rejection", "coupled"), (GREEDY, WARM)):
        results: dict[tuple[int, ...], list] = {}
        samplings = seeded(sampling, 8)
        for _ in range(5):
            order = list(range(8))
            rng.shuffle(order)
            engine = engine_of(
                history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode=mode, max_num_seqs=5
            )
            done = engine.generate([prompts[i] for i in order], [samplings[i] for i in order])
            for i, completion in zip(order, done, strict=True):
                results.setdefault((i,), []).append(completion)
        for group in results.values():
            assert all(same(one, group[0]) for one in group)


def test_a_batch_of_eight_in_two_orders():
    """BA-3 in short: reversing a batch changes no result, in either mode."""
    prompts = [[i, 1, 2] for i in range(7)] + [[5] * 20]
    for mode in ("rejection", "coupled"):
        samplings = seeded(WARM, 8)
        make = lambda mode=mode: engine_of(history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode=mode)  # noqa: E731
        forward = make().generate(prompts, samplings)
        backward = make().generate(prompts[::-1], samplings[::-1])[::-1]
        assert all(same(a, b) for a, b in zip(forward, backward, strict=True))
