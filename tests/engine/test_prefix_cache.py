"""Blocks that outlive their requests: found by the same text and salt only, with what the drafters hold of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from drafters.kinds import drafting
from drafters.learning import tiny_target
from drafters.overfit import PROMPT, learned_by_heart
from engine.conftest import bytes_for, drafter_of, drive, engine_of, idle, ids, plain, preempt_all
from engine.test_cache import _sliding
from engine.test_cancel import FEW, Schedule
from forerun import AsyncEngine, Sampling
from forerun.bench import exact
from forerun.bench.enumeration import measure
from forerun.drafters.base import Drafter, LoadContext
from forerun.drafters.config import parse_config
from forerun.drafters.fake import Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions, prefix_cache
from forerun.engine.propose import LoadedDrafter
from forerun.engine.scoring import Scoring
from forerun.errors import OptionError
from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockPool
from forerun.target.table import TableTarget, history_model, position_model

TEXT = [(i * i + 3 * i + i // 5) % 7 for i in range(53)]
OTHER = [6 - token for token in TEXT[:40]]
GREEDY = Sampling(temperature=0, max_tokens=19)
WARM = Sampling(temperature=0.8, seed=5, max_tokens=19)
LEARNED = ["eagle", "eagle3", "dflash", "dspark"]
KINDS = [*LEARNED, "small", "other small", "ngram", "nothing"]


def _engine(kind: str = "nothing", target=None, **options):
    target = target or history_model(7, seed=3)
    if kind == "nothing":
        return engine_of(target, **options)
    drafter = drafting(kind, target) if kind in LEARNED else drafter_of(kind, {}, 7)
    return engine_of(target, drafter, **{"num_speculative_tokens": 3, **options})


def _record(engine) -> dict[tuple[int, ...], list]:
    """What the engine's drafter proposes from now on, by the text it proposes for."""
    made: dict[tuple[int, ...], list] = {}
    if engine.core.loaded:
        drafter = engine.core.loaded[0].drafter
        propose = drafter.propose

        def watch(views, keep_drafting):
            drafts = propose(views, keep_drafting)
            for view, draft in zip(views, drafts, strict=True):
                made[tuple(view.tokens)] = [list(draft.tokens), draft.probs, list(draft.confidence)]
            return drafts

        drafter.propose = watch
    return made


def _assert_same_drafts(one: dict, other: dict) -> None:
    """The same texts, tokens, laws and confidences."""
    assert one.keys() == other.keys()
    for text, (tokens, probs, confidence) in one.items():
        assert other[text][0] == tokens
        assert other[text][2] == pytest.approx(confidence, rel=1e-4)
        if probs is not None:
            torch.testing.assert_close(other[text][1], probs, rtol=1e-4, atol=1e-6)


def _cold(kind: str, prompt, sampling, target=None, **options):
    """A request and its drafts in an engine that has seen nothing else."""
    engine = _engine(kind, target, **options)
    made = _record(engine)
    [done] = engine.generate([prompt], sampling)
    return done, made


# -------------------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48, 53])
def test_a_hit_computes_only_what_is_new(length):
    """The second time, the whole blocks of a prompt are not computed; its last token always is. Counted in rows of the
    first pass, in the request's `cached_tokens` and in the engine's counters.
    """
    engine, prompt = _engine(), TEXT[:length]
    cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    [first] = engine.generate([prompt], GREEDY)
    engine.target.passes.clear()
    [again] = engine.generate([prompt], GREEDY)
    assert engine.target.passes == [length - cached, *[1] * 18]
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, cached)
    assert (engine.core.prefix_cache.queries, engine.core.prefix_cache.hits) == (2 * length, cached)
    assert first.token_ids == again.token_ids == plain(history_model(7, seed=3), [prompt], GREEDY)[tuple(prompt)]
    idle(engine)


def test_outputs_are_found_as_well():
    """A prompt that goes on from an answer computes nothing of it but the last incomplete block."""
    engine = _engine()
    [first] = engine.generate([TEXT], GREEDY)
    whole = [*TEXT, *first.token_ids, 1, 1]
    [second] = engine.generate([whole], GREEDY)
    assert second.stats.cached_tokens == (len(TEXT) + 19 - 1) // BLOCK_SIZE * BLOCK_SIZE == 64
    assert second.token_ids == plain(history_model(7, seed=3), [whole], GREEDY)[tuple(whole)]


def test_texts_under_different_salts_share_nothing():
    """A hit needs the same salt, also where one of them has none."""
    engine = _engine()
    engine.generate([TEXT], GREEDY, cache_salt="a")
    for salt, cached in (("b", 0), (None, 0), ("a", 48), ("b", 48), (None, 48)):
        [done] = engine.generate([TEXT], GREEDY, cache_salt=salt)
        assert done.stats.cached_tokens == cached, salt
    for wrong in ("", 5):
        with pytest.raises(OptionError, match="cache_salt"):
            engine.generate([TEXT], GREEDY, cache_salt=wrong)
    streamed = [chunk for chunk in engine.stream([TEXT], GREEDY, cache_salt="c") if chunk.completion]
    assert streamed[0].completion.stats.cached_tokens == 0


def test_the_salt_goes_through_the_asynchronous_front():
    """Streams and completions of `AsyncEngine` look under the salt they are given."""

    async def main():
        async with AsyncEngine(_engine()) as engine:
            counts = []
            for salt in ("a", "a", "b"):
                [done] = await engine.generate([TEXT], GREEDY, cache_salt=salt)
                counts.append(done.stats.cached_tokens)
            chunks = [chunk async for chunk in engine.stream([TEXT], GREEDY, cache_salt="b")]
            return [*counts, chunks[-1].stats.cached_tokens]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [0, 48, 0, 48]


def test_it_can_be_switched_off():
    """`enable_prefix_caching=False`: everything is computed, nothing kept or counted; another value is refused."""
    engine = _engine(enable_prefix_caching=False)
    for _ in range(2):
        engine.target.passes.clear()
        [done] = engine.generate([TEXT], GREEDY)
        assert engine.target.passes == [53, *[1] * 18]
        assert done.stats.cached_tokens == 0
    assert (engine.core.prefix_cache.queries, engine.core.prefix_cache.hits) == (0, 0)
    assert not list(engine.core.prefix_cache.blocks)
    idle(engine)
    with pytest.raises(OptionError, match="enable_prefix_caching"):
        _engine(enable_prefix_caching="yes")


def test_a_key_is_a_function_of_the_whole_text_before_it():
    """Keys differ where any token before the block's end, its parent or the salt differs; 256 bits of a hash that is
    made for this: no two texts will ever be found that share a key.
    """
    seen = Counter()
    for salt in (None, "a", "salt a", "\x00"):
        root = prefix_cache._root(salt)
        seen[root] += 1
        for place in range(17):
            tokens = [0] * 17
            tokens[place] = 1
            first = prefix_cache._chained(root, tokens)
            seen[first] += 1
            seen[prefix_cache._chained(first, [0] * 17)] += 1
    assert set(seen.values()) == {1}
    assert {len(key) for key in seen} == {32}


# -------------------------------------------------------------------------------------------------------- with drafters


@pytest.mark.parametrize("kind", KINDS)
def test_px_1_the_same_prompt_twice(kind):
    """The same prompt twice, with another request in between: ids, every draft and its law, and all counters equal
    those of the first time, in rejection mode; the drafter lost nothing.

    https://github.com/vllm-project/vllm/issues/47930, https://github.com/vllm-project/vllm/pull/47926,
    https://github.com/Avarok-Cybersecurity/atlas/pull/693, https://github.com/Avarok-Cybersecurity/atlas/pull/718
    """
    want, drafts = _cold(kind, TEXT, WARM)
    engine = _engine(kind)
    engine.generate([TEXT], WARM)
    engine.generate([OTHER], WARM)
    made = _record(engine)
    [again] = engine.generate([TEXT], WARM)
    assert again.stats.cached_tokens == 48
    assert again.token_ids == want.token_ids
    _assert_same_drafts(drafts, made)
    assert again.stats == want.stats
    idle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_px_1_partial_hits_at_every_border_of_a_block(kind):
    """Prompts that share 15, 16, 17, ... 49 tokens with what is there: as much is found as is equal, and the drafts,
    ids and counters are those of a cold run.

    https://github.com/vllm-project/vllm/issues/47930, https://github.com/vllm-project/vllm/pull/47926,
    https://github.com/Avarok-Cybersecurity/atlas/pull/693, https://github.com/Avarok-Cybersecurity/atlas/pull/718
    """
    engine = _engine(kind)
    engine.generate([TEXT], WARM)
    ahead = 1 if kind.startswith("eagle") else 0  # the last row of a block is made with the token behind it
    for shared in (15, 16, 17, 32, 33, 48, 49):
        prompt = [*TEXT[:shared], *[(token + 1) % 7 for token in TEXT[shared : shared + 1]], 2, 2, 5]
        want, drafts = _cold(kind, prompt, WARM)
        made = _record(engine)
        [done] = engine.generate([prompt], WARM)
        assert done.stats.cached_tokens == (shared - ahead) // BLOCK_SIZE * BLOCK_SIZE, shared
        assert (done.token_ids, done.stats) == (want.token_ids, want.stats), shared
        _assert_same_drafts(drafts, made)
    idle(engine)


@pytest.mark.parametrize("kind", LEARNED)
def test_hits_of_a_transformer_draft_as_a_cold_run_does(kind):
    """Float32, a tiny Qwen3: accepted lengths and ids equal, the laws of every draft equal to 1e-4, after a hit within
    the prompt and after one that reaches into an earlier answer.
    """
    target = tiny_target()
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=14, allowed_token_ids=range(250))
    prompt = [(7 * i + 3) % 250 for i in range(37)]
    engine = _engine(kind, target)
    [first] = engine.generate([prompt], sampling)
    longer = [*prompt, *first.token_ids, 9, 8]
    for text, cached in ((prompt, 32), (longer, 48)):
        made = _record(engine)
        [done] = engine.generate([text], sampling)
        assert done.stats.cached_tokens == cached
        want, drafts = _cold(kind, text, sampling, tiny_target())
        assert done.token_ids == want.token_ids
        _assert_same_drafts(drafts, made)
        assert done.stats == want.stats
        assert done.stats.drafted > 0


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("shared", [32, 33])
def test_prompts_that_part_at_a_border_do_not_disturb_each_other(kind, shared):
    """Two prompts that part right behind a block, or one token later, decoded side by side over what they share: each
    drafts as alone. (EAGLE makes the last row of a block with the token behind it.)
    """
    prompts = [[*TEXT[:shared], 1, 4, 2], [*TEXT[:shared], 5, 0, 3]]
    alone = [_cold(kind, prompt, WARM) for prompt in prompts]
    engine = _engine(kind)
    engine.generate([[*TEXT[:shared], 3]], WARM)
    made = _record(engine)
    done = engine.generate(prompts, WARM)
    assert all(one.stats.cached_tokens >= 16 for one in done)
    assert ids(done) == [want.token_ids for want, _ in alone]
    assert [one.stats for one in done] == [want.stats for want, _ in alone]
    _assert_same_drafts(alone[0][1] | alone[1][1], made)
    idle(engine)


STEMS = [TEXT[:35], OTHER[:17], TEXT[:16], [*TEXT[:34], 3, 3, 3]]
MIXTURE = [[*stem, i % 7, i // 2] for i, stem in enumerate(STEMS * 3)]


@cache
def _mixture(mode):
    """What plain decoding makes of it."""
    return list(plain(history_model(7, seed=3), MIXTURE, GREEDY if mode == "rejection" else WARM, mode).values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "sampling"), [("rejection", GREEDY), ("coupled", WARM)])
def test_a_mixture_of_shared_prefixes_is_plain_decoding(kind, mode, sampling):
    """Prompts over a few stems, more than fit in one batch, twice, with drafts: the reference's ids."""
    engine = _engine(kind, verify_mode=mode, max_num_seqs=5)
    for _ in range(2):
        done = drive(engine, engine.submit(MIXTURE, sampling))
        assert ids(done) == _mixture(mode)
    assert all(one.stats.cached_tokens >= 16 for one in done)
    idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_trained_drafter_is_accepted_behind_a_hit_as_in_a_cold_run(kind, tmp_path):
    """A drafter that knows one text by heart goes on from the middle of it, the beginning found in the cache: accepted
    whole, as without it.
    """
    known, k = learned_by_heart(kind, tmp_path)
    prompt, rest = [*PROMPT, *known.token_ids[:14]], known.token_ids[14:]
    sampling = Sampling(temperature=0, max_tokens=len(rest), ignore_eos=True)
    lengths = []
    for before in ([], [PROMPT]):
        target, config = tiny_target(), parse_config({"model": str(tmp_path), "num_speculative_tokens": k})
        loaded = LoadedDrafter(config.build(LoadContext(target)), config)
        engine = Engine(target, [loaded], EngineOptions(max_num_seqs=1))
        for earlier in before:
            engine.generate([earlier], Sampling(temperature=0, max_tokens=26, ignore_eos=True))
        [done] = engine.generate([prompt], sampling)
        assert done.token_ids == rest
        assert done.stats.cached_tokens == (16 if before else 0)
        lengths.append(done.stats.mean_accepted_length)
    assert lengths[0] == lengths[1] > 4


def test_a_sliding_window_sees_cached_rows():
    """Rows of a hit lie within the window of 8 of the first rows that are computed: ids of the reference."""
    prompt = [(7 * i + 3) % 61 for i in range(37)]
    target = _sliding()
    known = plain(target, [prompt], GREEDY)[tuple(prompt)]
    engine = engine_of(target, Ngram(prompt_lookup_min=1), num_speculative_tokens=4)
    for cached in (0, 32):
        [done] = engine.generate([prompt], GREEDY)
        assert (done.token_ids, done.stats.cached_tokens) == (known, cached)


# ---------------------------------------------------------------------------------------------- state that is not there


def _without_state(kind: str):
    """An engine that has the blocks of TEXT, the drafter's state of the first of them only."""
    engine = _engine(kind, max_num_batched_tokens=16)
    [request] = engine.submit([TEXT], GREEDY)
    engine.step()
    assert request.rows == 16
    engine.core.drafters.release(request.id, [kind])
    drive(engine, [request])
    return engine


@pytest.mark.parametrize("kind", LEARNED)
def test_px_1_a_block_without_drafter_state_ends_the_hit_once(kind):
    """Blocks made while the drafter had dropped the text: a request that wants the drafter takes the blocks before
    them, drafts as in a cold run, and puts the state there; one that does not want it takes all, and disturbs nothing.

    https://github.com/vllm-project/vllm/issues/47930
    """
    want, drafts = _cold(kind, TEXT, GREEDY, max_num_batched_tokens=16)
    engine = _without_state(kind)
    [plainly] = engine.generate([TEXT], GREEDY, speculative=False)
    assert (plainly.stats.cached_tokens, plainly.token_ids) == (48, want.token_ids)
    for cached in (16, 48):
        made = _record(engine)
        [done] = engine.generate([TEXT], GREEDY)
        assert done.stats.cached_tokens == cached
        assert (done.token_ids, done.stats) == (want.token_ids, want.stats)
        _assert_same_drafts(drafts, made)
    idle(engine)


def test_a_small_model_makes_up_for_the_rows_it_does_not_have():
    """`small` shortens no hit: rows it never had are ingested before its first draft, and those it had are not."""
    model = history_model(7, seed=3)
    engine = engine_of(history_model(7, seed=3), Small(model, 7), num_speculative_tokens=3)
    engine.generate([TEXT], GREEDY, speculative=False)
    [first] = engine.generate([TEXT], GREEDY)
    assert (first.stats.cached_tokens, model.passes[0]) == (48, len(TEXT) + 1)
    model.passes.clear()
    [again] = engine.generate([TEXT], GREEDY)
    assert (again.stats.cached_tokens, model.passes[0]) == (48, len(TEXT) + 1 - 48)
    assert again.stats == first.stats
    assert again.stats.draft_acceptance_rate == 1


@pytest.mark.parametrize("blocks", [6, 7, 8, 16])
def test_a_small_model_has_no_room_for_rows_that_only_the_target_shares(blocks):
    """Four samples share two blocks of the target, while the draft model makes these rows for each of them: those for
    which its memory does not suffice are decoded without it; nothing fails, and ids are those of plenty of memory.
    """
    sampling = Sampling(temperature=0.8, seed=3, max_tokens=6, n=4)
    target, drafter = history_model(7, seed=3), Small(history_model(7, seed=3), 7)
    memory = bytes_for(blocks, target, drafter)
    engine = engine_of(target, drafter, verify_mode="coupled", kv_cache_memory_bytes=memory)
    done = drive(engine, engine.submit([TEXT[:40]], sampling))
    assert ids(done) == ids(_engine(verify_mode="coupled").generate([TEXT[:40]], sampling))
    assert all(one.stats.drafter_faults == 0 for one in done)
    assert sum(one.stats.accepted > 0 for one in done) >= (4 if blocks == 16 else 1)
    idle(engine)


def test_a_drafter_that_reads_features_and_keeps_nothing_gets_whole_prompts():
    """Without `keep` and `kept` of its own, its requests find nothing; others do."""
    seen: dict[int, list[tuple[int, int]]] = {}

    class Reading(Script):
        taps = (1,)

        def commit(self, accepted):
            for rows in accepted:
                seen.setdefault(rows.request_id, []).append((rows.start, rows.end))

    engine = engine_of(history_model(7, seed=3), Reading(lambda view: [1]), num_speculative_tokens=1)
    for speculative, cached in ((None, 0), (None, 0), (False, 48)):
        [request] = engine.submit([TEXT], GREEDY, speculative=speculative)
        drive(engine, [request])
        assert request.stats.cached_tokens == cached
        assert (seen.get(request.id, [(0, 53)])[0]) == (0, 53)
    assert request.id not in seen  # it lacks the beginning of this text, so it is told nothing of it


def _stores(drafter) -> list[torch.Tensor]:
    """Everything a learned drafter keeps of committed rows."""
    rows = getattr(drafter, "_rows", None)
    cache = rows._cache if rows is not None else drafter.context._cache
    stores = [tensor for store in cache._stores.values() for tensor in (store.keys, store.values)]
    return stores if rows is None else [*stores, rows._features]


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("wrong", [-3.0, 1e30, float("nan")])
def test_wrong_features_in_cached_blocks_cost_only_speed(kind, wrong):
    """What the drafter keeps with the blocks is overwritten: greedy and coupled outputs stay plain decoding's, sampled
    ones end as they should, and the target's rows are untouched.
    """
    coupled = plain(history_model(7, seed=3), [TEXT], WARM, "coupled")[tuple(TEXT)]
    greedy = plain(history_model(7, seed=3), [TEXT], GREEDY)[tuple(TEXT)]
    engine = _engine(kind)
    engine.generate([TEXT], GREEDY)
    for store in _stores(engine.core.loaded[0].drafter):
        store.fill_(wrong)
    for sampling, mode, known in ((GREEDY, "rejection", greedy), (WARM, "coupled", coupled), (WARM, "rejection", None)):
        [done] = engine.generate([TEXT], sampling, speculative={"verify_mode": mode})
        assert done.stats.cached_tokens == 48
        assert len(done.token_ids) == 19
        assert known is None or done.token_ids == known
        assert done.stats.drafter_faults == 0
    idle(engine)


class Forgetful(Small):
    """Everything it takes over from another request reads as token 0."""

    def adopt(self, request_id, keys):
        super().adopt(request_id, keys)
        for block in self._tables.reserve(request_id, 0):
            self.model._rows[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [0] * BLOCK_SIZE


@pytest.mark.parametrize("kind", [Small, Forgetful])
def test_the_law_behind_a_hit_is_the_targets(kind):
    """Rejection mode, every random number enumerated, each run but the first over cached blocks: the law of what is
    emitted equals the target's to 1e-12, also where the draft model's cached rows are wrong.
    """
    draft_logits = lambda prefix: exact.DRAFT_TABLE[sum(prefix) % 3]  # noqa: E731
    make = lambda: kind(TableTarget(draft_logits, 3, window=exact.WINDOW), 3)  # noqa: E731
    prompt = (0, 1, 2, 1, 2, 2, 0, 1) * 2 + (1,)
    case = exact.Case("hit", exact.after_last(exact.TARGET), make, k=2, length=3, vocab_size=3, prompt=prompt)
    runner = exact._CaseRunner(case)
    drafter = runner.watched
    for name in ("keep", "kept", "adopt", "drop"):
        setattr(drafter, name, getattr(drafter.inner, name))
    runner([{}])
    emitted = measure(runner)
    expected = exact.plain_law(case, next(iter(emitted))[0])
    assert sum(abs(emitted.get(o, 0.0) - expected.get(o, 0.0)) for o in emitted.keys() | expected.keys()) < 2e-12
    cache = runner.engine.core.prefix_cache
    assert cache.hits == (cache.queries - len(prompt)) // len(prompt) * BLOCK_SIZE


@pytest.mark.parametrize("where", ["keep", "kept", "adopt", "drop"])
def test_a_drafter_that_breaks_over_cached_blocks_costs_no_request(where):
    """An exception in any of the four calls leaves the output as it is; the books of the target balance."""

    class Breaking(Ngram):
        def keep(self, *args):
            self._maybe("keep")

        def kept(self, keys):
            self._maybe("kept")
            return len(keys)

        def adopt(self, *args):
            self._maybe("adopt")

        def drop(self, key):
            self._maybe("drop")

        def _maybe(self, name):
            if name == where:
                raise RuntimeError("on purpose")

    target = history_model(7, seed=3)
    engine = engine_of(target, Breaking(1), kv_cache_memory_bytes=bytes_for(6, target))
    known = plain(history_model(7, seed=3), [TEXT, OTHER], GREEDY)
    for prompt in (TEXT, TEXT, OTHER, TEXT):  # of two texts in six blocks, one pushes out the other
        done = drive(engine, engine.submit([prompt], GREEDY))
        assert ids(done) == [known[tuple(prompt)]]
    idle(engine)


# ------------------------------------------------------------------------------------ requests on their way, and memory


def test_samples_of_one_prompt_compute_it_once():
    """n = 4: the others stand back until the first has computed the prompt, then compute the last incomplete block;
    each sample is what it is without the cache.
    """
    sampling = Sampling(temperature=0.8, seed=3, max_tokens=6, n=4)
    engine = _engine()
    done = engine.generate([TEXT[:40]], sampling)
    assert engine.target.passes == [40, 1 + 3 * 8, 4, 4, 4, 4, 3]
    assert [one.stats.cached_tokens for one in done] == [0, 32, 32, 32]
    assert ids(done) == ids(_engine(enable_prefix_caching=False).generate([TEXT[:40]], sampling))
    engine.target.passes.clear()
    engine.generate([TEXT[:10]], sampling)
    assert engine.target.passes == [40, 4, 4, 4, 4, 4]  # nothing to share: at once
    idle(engine)


def test_samples_do_not_wait_for_one_that_is_gone():
    """The first sample is cancelled, or fails, before its prompt is computed: the others go on, and other requests are
    admitted past those that stand back.
    """
    for how in ("cancel", "fail"):
        engine = _engine(max_num_batched_tokens=16)
        requests = engine.submit([TEXT], Sampling(temperature=0.8, seed=3, max_tokens=6, n=3))
        [mate] = engine.submit([[1, 2]], GREEDY)
        engine.step()
        assert engine.core.admission.running == [requests[0], mate]
        if how == "cancel":
            engine.cancel(requests[:1])
        else:
            engine.core.fail(requests[0], RuntimeError("on purpose"))
        drive(engine, [*requests[1:], mate])
        idle(engine)


def test_a_prompt_is_found_while_it_is_still_being_computed():
    """Chunk by chunk: a request that comes later finds the blocks of those that are done."""
    engine = _engine(max_num_batched_tokens=20)
    [first] = engine.submit([TEXT], GREEDY)
    engine.step()
    assert first.rows == 20
    [second] = engine.submit([TEXT], GREEDY)
    engine.step()
    assert second.stats.cached_tokens == 16
    done = drive(engine, [first, second])
    assert done[0].token_ids == done[1].token_ids
    idle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_finds_its_own_blocks(kind):
    """Sent back to the queue, it computes only what is behind its last whole block, and nothing else changes."""
    want, _ = _cold(kind, TEXT, WARM)
    engine = _engine(kind)
    [request] = engine.submit([TEXT], WARM)
    for _ in range(4):
        engine.step()
    preempt_all(engine)
    engine.target.passes.clear()
    rows = len(request.tokens) - 1
    drive(engine, [request])
    assert engine.target.passes[0] == rows - (rows - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert request.output == want.token_ids
    assert request.stats.preemptions == 1
    assert request.stats.cached_tokens == 0
    assert engine.core.prefix_cache.queries == len(TEXT)  # counted once
    idle(engine)


def test_unused_blocks_are_free_for_whoever_needs_them():
    """A pool of six blocks: each text of five pushes out the one before, counted as free all along; nobody is refused
    or preempted, and what was pushed out is computed again.
    """
    target = history_model(7, seed=3)
    engine = _engine(target=target, kv_cache_memory_bytes=bytes_for(6, target))
    for _ in range(2):
        for prompt in (TEXT, OTHER):
            [done] = drive(engine, engine.submit([prompt], GREEDY))
            assert done.stats.preemptions == 0
            assert (engine.core.pool.used, engine.core.pool.free) == (0, 6)
    [done] = engine.generate([OTHER], GREEDY)
    assert done.stats.cached_tokens == 32
    idle(engine)


def test_the_block_given_back_first_goes_first_and_later_blocks_before_earlier_ones():
    """Kept blocks that nobody holds are taken in the order in which they were given back; of one table the last first,
    since the others are of no use without those before them. Kept ones that somebody holds are never taken.
    """
    evicted: list[int] = []
    pool = BlockPool(6)
    pool.on_evict = evicted.append
    one, two, held = [], [], []
    pool.grow(one, 32)
    pool.grow(two, 32)
    for block in (*one, *two):
        pool.keep(block)
    (a, b), (c, d) = one, two
    pool.hold(held, [a])
    pool.shrink(two, 0)
    pool.shrink(one, 0)
    assert (pool.used, pool.free) == (1, 5)
    pool.audit([held], [a, b, c, d])
    pool.grow(held, 16 * 5)
    assert evicted == [d, c]
    pool.audit([held], [a, b])
    pool.grow(held, 16 * 6)
    assert evicted == [d, c, b]
    assert held[0] == a
    pool.drop(a)
    pool.shrink(held, 0)
    pool.audit([], [])


def test_audits_find_what_does_not_balance():
    """A block that is lost, held by nobody the pool knows, or shared without being kept."""
    pool = BlockPool(4)
    table: list[int] = []
    pool.grow(table, 32)
    for tables, kept in (([], []), ([table, table[:1]], []), ([table], [table[0]]), ([[*table, 3]], [])):
        with pytest.raises(AssertionError):
            pool.audit(tables, kept)
    pool.audit([table], [])
    with pytest.raises(AssertionError, match="not kept"):
        pool.hold([], table)


def test_a_storage_that_was_written_behind_the_engine_is_forgotten():
    """`clear`: nothing is found any more, in the drafters neither, and no block is lost."""
    engine = _engine("dspark")
    engine.generate([TEXT], GREEDY)
    assert list(engine.core.prefix_cache.blocks)
    engine.core.prefix_cache.clear()
    engine.target.allocate(engine.core.pool.num_blocks)
    assert engine.core.loaded[0].drafter.context._cache._kept.blocks == {}
    want, _ = _cold("dspark", TEXT, GREEDY)
    [done] = engine.generate([TEXT], GREEDY)
    assert (done.stats.cached_tokens, done.token_ids) == (0, want.token_ids)
    idle(engine)


def test_scoring_a_text_computes_all_of_it():
    """Its log-probabilities need the logits of every row: cached blocks are not used, and none are made."""
    engine = _engine()
    before = Scoring(engine.core, engine.intake, TEXT)
    while not before.done:
        before.step()
    before.close()
    engine.generate([TEXT], GREEDY)
    kept = set(engine.core.prefix_cache.blocks)
    engine.target.passes.clear()
    scoring = Scoring(engine.core, engine.intake, TEXT)
    while not scoring.done:
        scoring.step()
    scoring.close()
    assert scoring.values == before.values
    assert engine.target.passes == [53]
    assert set(engine.core.prefix_cache.blocks) == kept
    idle(engine)


# -------------------------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_goes_back_leaves_the_blocks_of_others_alone(kind):
    """A turn that parts inside a block which another request reads, at its border and one token behind: both go on as
    alone, whichever drafter.
    """
    reading, _ = _cold(kind, [*TEXT, 6], WARM)
    for shared in (20, 32, 33):
        engine = _engine(kind)
        turns = engine.conversation()
        turns.generate(TEXT, WARM)
        [reader] = engine.submit([[*TEXT, 6]], WARM)
        for _ in range(2):
            engine.step()
        assert reader.stats.cached_tokens == 48
        later = [*TEXT[:shared], (TEXT[shared] + 1) % 7, 2, 2]
        answer = turns.generate(later, WARM)
        want, _ = _cold(kind, later, WARM)
        assert (answer.token_ids, answer.stats) == (want.token_ids, want.stats), shared
        engine.audit()
        [done] = drive(engine, [reader])
        assert (done.token_ids, done.stats) == (reading.token_ids, reading.stats), shared
        turns.close()
        idle(engine)


def test_a_turn_takes_what_another_conversation_has_computed():
    """A conversation without rows of its own finds the prompt in the cache, as does one whose rows are of no use."""
    engine = _engine()
    one, two = engine.conversation(), engine.conversation()
    one.generate(TEXT, GREEDY)
    assert two.generate(TEXT, GREEDY).stats.cached_tokens == 48
    assert two.generate([2, 2, 2], GREEDY).stats.cached_tokens == 0
    assert two.generate(TEXT, GREEDY).stats.cached_tokens == 48
    for turns in (one, two):
        turns.close()
    idle(engine)


def test_rows_taken_back_from_a_conversation_are_found_in_the_cache():
    """Its blocks are free for others, and as long as nobody has taken them the next turn still finds the whole ones."""
    engine = _engine("small")
    turns = engine.conversation()
    answer = turns.generate(TEXT, GREEDY)
    assert engine.core.pool.used == 5
    assert engine.core.reclaim()
    assert engine.core.pool.used == 0
    later = [*TEXT, *answer.token_ids, 4]
    done = turns.generate(later, GREEDY)
    assert done.stats.cached_tokens == 64
    assert done.token_ids == plain(history_model(7, seed=3), [later], GREEDY)[tuple(later)]
    turns.close()
    idle(engine)


# -------------------------------------------------------------------------------------------------------- at any moment


def _contents(engine, known: dict[bytes, tuple[bytes, list[int]]]) -> None:
    """Asserts that every kept block of a table target holds exactly the tokens its key was made of."""
    for key, block in engine.core.prefix_cache._kept.blocks.items():
        _, tokens = known[key]
        assert engine.target._rows[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] == tokens[:BLOCK_SIZE]


class SharedPrefixes(Schedule):
    """The schedules of CA-1 (any order of submitting, stepping, cancelling, preempting, conversing) over prompts of few
    stems and two salts, with several samples: after every move the books balance, and every kept block holds the tokens
    of its key, all of them committed; no drafter fails; what finishes is what plain decoding emits.

    https://github.com/sgl-project/sglang/pull/28374, https://github.com/vllm-project/vllm/pull/29987
    """

    kind = "small"

    def __init__(self):
        super().__init__()
        self.known: dict[bytes, tuple[bytes, list[int]]] = {}
        self.chained = prefix_cache._chained
        prefix_cache._chained = self._remember

    def _remember(self, parent, tokens):
        key = self.chained(parent, tokens)
        self.known[key] = (parent, list(tokens))
        return key

    @rule(
        stem=st.sampled_from([TEXT, OTHER]),
        length=st.integers(0, 35),
        tail=st.lists(st.integers(0, 6), min_size=1, max_size=4),
        salt=st.sampled_from([None, "a"]),
        temperature=st.sampled_from([0, 0.8]),
    )
    def submit(self, stem, length, tail, salt, temperature):
        prompt = [*stem[:length], *tail]
        sampling = Sampling(temperature=temperature, seed=1, max_tokens=24)
        [request] = self.engine.submit([prompt], sampling, cache_salt=salt)
        self.requests[request] = (tuple(prompt), temperature)

    @rule(length=st.integers(14, 35))
    def samples(self, length):
        sampling = Sampling(temperature=0.8, seed=1, max_tokens=24, n=2)
        requests = self.engine.submit([TEXT[:length]], sampling)
        self.requests[requests[0]] = (tuple(TEXT[:length]), 0.8)

    @invariant()
    def blocks_hold_what_their_keys_say(self):
        _contents(self.engine, self.known)
        assert not any(request.stats.drafter_faults for request in self.engine.core.admission.running)

    def teardown(self):
        try:
            super().teardown()
        finally:
            prefix_cache._chained = self.chained


class SharedPrefixesOfNgrams(SharedPrefixes):
    kind = "ngram"


TestSharedPrefixes = SharedPrefixes.TestCase
TestSharedPrefixes.settings = FEW
TestSharedPrefixesOfNgrams = SharedPrefixesOfNgrams.TestCase
TestSharedPrefixesOfNgrams.settings = FEW


@pytest.mark.parametrize("kind", ["small", "ngram", "dspark", "eagle3"])
def test_ca_1_what_a_cancelled_request_leaves_is_committed(kind):
    """A request is cancelled after each of its steps in turn: what it leaves in the cache is whole blocks of committed
    tokens, never of drafts; sent again, the prompt finds them and its answer is plain decoding's.

    https://github.com/sgl-project/sglang/pull/28374, https://github.com/vllm-project/vllm/pull/29987
    """
    prompt = TEXT[:30]
    known = plain(history_model(7, seed=3), [prompt], GREEDY)[tuple(prompt)]
    for steps in range(8):
        engine = _engine(kind, max_num_batched_tokens=24)
        [request] = engine.submit([prompt], GREEDY)
        for _ in range(steps):
            engine.step()
        engine.cancel([request])
        idle(engine)
        for block in engine.core.prefix_cache.blocks:
            rows = engine.target._rows[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            assert rows in [[*prompt, *known][start : start + 16] for start in (0, 16, 32)]
        [done] = engine.generate([prompt], GREEDY)
        assert done.token_ids == known
        idle(engine)


def test_a_step_that_fails_leaves_nothing_in_the_cache():
    """The target raises while a prompt is being computed: what was done before stays, the rest is not there."""
    engine = _engine("dflash", max_num_batched_tokens=16)
    forward = engine.target.forward
    [request] = engine.submit([TEXT], GREEDY)
    engine.step()

    def fail(batch, taps=()):
        forward(batch, taps)
        raise RuntimeError("out of order")

    engine.target.forward = fail
    engine.step()
    assert isinstance(request.error, RuntimeError)
    engine.target.forward = forward
    assert len(list(engine.core.prefix_cache.blocks)) == 1
    [done] = engine.generate([TEXT], GREEDY)
    assert (done.stats.cached_tokens, done.stats.drafter_faults) == (16, 0)
    assert done.token_ids == plain(history_model(7, seed=3), [TEXT], GREEDY)[tuple(TEXT)]
    idle(engine)


def test_plain_decoding_pays_for_new_blocks_only():
    """While a request decodes, keys are made and blocks published for none of its steps: once for the prompt, once at
    the end, whatever the length.
    """
    engine = _engine()
    calls = []
    publish = engine.core.prefix_cache.publish
    engine.core.prefix_cache.publish = lambda request: (calls.append(len(request.tokens)), publish(request))
    engine.generate([TEXT], Sampling(temperature=0, max_tokens=100))
    assert calls == [54, 153]


def test_kept_states_of_drafters_go_with_the_blocks():
    """A stream of different texts through a small pool: neither the target nor the drafter keeps more than there is,
    and the drafter keeps nothing under a key that the target has not.
    """
    target = history_model(7, seed=3)
    drafter = drafting("dspark", target)
    memory = bytes_for(9, target, drafter)
    engine = engine_of(target, drafter, num_speculative_tokens=3, kv_cache_memory_bytes=memory)
    for shift in range(12):
        engine.generate([[(token + shift) % 7 for token in TEXT], [shift % 7] * 20], GREEDY)
        idle(engine)
        assert drafter.context._cache._kept.blocks.keys() <= engine.core.prefix_cache._kept.blocks.keys()
        assert 0 < len(engine.core.prefix_cache._kept.blocks) <= 9


@pytest.mark.parametrize("drafter", [Ngram(1), Small(position_model(7, seed=8), 7)], ids=["ngram", "small"])
def test_a_drafter_without_features_follows_no_keys(drafter):
    """The default of `Drafter`: one that keeps nothing but tokens can take any block."""
    assert isinstance(drafter, Drafter)
    drafter.allocate(4)
    assert drafter.kept([b"1", b"2"]) == (2 if isinstance(drafter, Ngram) else 0)
    assert drafter.lookahead == 0
