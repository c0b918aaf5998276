"""Learned drafters in the engine: plain decoding's output, the committed rows' features, and nothing leaks."""

from __future__ import annotations

import pytest
import torch

from drafters.kinds import SETTINGS, drafting
from drafters.learning import features_of, tiny_target
from engine.conftest import PROMPTS, bytes_for, configured, drive, engine_of, plain, preempt_all
from forerun import Sampling
from forerun.drafters.base import Accepted, Draft, Drafter
from forerun.drafters.fake import Script
from forerun.drafters.layers import Rotary
from forerun.drafters.ngram import Ngram
from forerun.target.base import BLOCK_SIZE
from forerun.target.table import history_model

KINDS = list(SETTINGS)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_greedy_output_is_that_of_plain_decoding(name, k):
    """Mixed lengths side by side, any K: the reference's ids, and the books balance."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0, max_tokens=19)
    known = plain(target, PROMPTS, sampling)
    engine = engine_of(target, drafting(name, target), num_speculative_tokens=k)
    done = engine.generate(PROMPTS, sampling)
    assert [c.token_ids for c in done] == list(known.values())
    assert all(c.stats.drafted > 0 and c.stats.drafter_faults == 0 for c in done)
    engine.audit()
    assert engine.core.pool.used == 0


@pytest.mark.parametrize("name", KINDS)
def test_coupled_output_is_that_of_plain_decoding_at_any_temperature(name):
    """One seed gives one text, with the drafter, without it, and beside an n-gram drafter."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0.9, max_tokens=19, seed=11)
    known = list(plain(target, PROMPTS, sampling, "coupled").values())
    engine = engine_of(target, Ngram(), drafting(name, target), num_speculative_tokens=3, verify_mode="coupled")
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == known
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling, speculative=False)] == known


@pytest.mark.parametrize("name", KINDS)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(name):
    """The drafter's state is dropped and made again by the new prefill: same ids, same drafts behind it."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0.8, max_tokens=19, seed=5)
    whole = engine_of(target, drafting(name, target), num_speculative_tokens=3).generate(PROMPTS, sampling)
    engine = engine_of(target, drafting(name, target), num_speculative_tokens=3)
    requests = engine.submit(PROMPTS, sampling)
    for step in range(200):
        if step in (3, 6):
            preempt_all(engine)
        if not engine.step():
            break
    assert [engine.result(r).token_ids for r in requests] == [c.token_ids for c in whole]
    assert all(r.stats.preemptions > 0 for r in requests)
    engine.audit()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark"])
def test_li_1_blocks_end_at_the_window(name):
    """LI-1: prompt + 3 positions left, and a drafter with fewer: K shrinks to nothing, the last position is used.

    https://github.com/turboderp-org/exllamav2/issues/274
    """
    target = history_model(7, seed=3, window=12)
    sampling = Sampling(temperature=0)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    known = plain(target, [prompt], Sampling(temperature=0, max_tokens=3))[tuple(prompt)]
    for window in (None, 10):
        drafter = drafting(name, target)
        drafter.window = window or drafter.window
        engine = engine_of(target, drafter, num_speculative_tokens=4)
        [done] = engine.generate([prompt], sampling)
        assert done.token_ids == known
        assert done.finish_reason == "length"
        assert done.stats.drafter_faults == 0


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark"])
def test_ts_8_no_slot_lies_beyond_the_drafters_own_positions(name):
    """TS-8: a drafter of 20 positions, a target of 99: a text that grows past them is drafted for up to the last one,
    a prompt that is longer than all of them not at all; no slot is turned by a position that was never trained.

    https://github.com/vllm-project/vllm/issues/48894
    """
    target, drafter, seen = history_model(7, seed=3, window=99), drafting(name, history_model(7, seed=3, window=20)), []
    [rotary] = [module for module in drafter.network.modules() if isinstance(module, Rotary)]
    propose = drafter.propose

    def watch(views, keep_drafting):
        hook = rotary.register_forward_pre_hook(lambda _, args: seen.extend(args[0].tolist()))
        try:
            return propose(views, keep_drafting)
        finally:
            hook.remove()

    drafter.propose = watch
    prompts, sampling = [[1, 2, 3], [i * i % 7 for i in range(30)]], Sampling(temperature=0, max_tokens=24)
    engine = engine_of(target, drafter, num_speculative_tokens=3)
    short, long = engine.generate(prompts, sampling)
    assert [short.token_ids, long.token_ids] == list(plain(target, prompts, sampling).values())
    assert 18 <= max(seen) < 20
    assert (long.stats.drafted, long.stats.drafter_faults, short.stats.drafter_faults) == (0, 0, 0)
    assert min(one.stats.skipped_steps["context"] for one in (short, long)) >= 4


def _proposals(drafter: Drafter) -> dict[tuple[int, ...], Draft]:
    """What it proposes from now on, by the text it proposes for."""
    made, propose = {}, drafter.propose

    def watch(views, keep_drafting):
        drafts = propose(views, keep_drafting)
        made.update((tuple(view.tokens), draft) for view, draft in zip(views, drafts, strict=True))
        return drafts

    drafter.propose = watch
    return made


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_cr_4_a_drafter_that_returns_drafts_as_if_it_had_read_all(name):
    """CR-4: K = 3, then 0 while a batch-mate is there, then 3 again: the first draft behind the pause, confidences
    included, is that of a drafter whose prompt was the whole text.

    https://github.com/vllm-project/vllm-metal/pull/716
    """
    target, table = history_model(7, seed=3), {"num_speculative_tokens_per_batch_size": {"1": 3, "2-8": 0}}
    paused, cold = drafting(name, target), drafting(name, target)
    engine, made, fresh = configured(target, paused, table), _proposals(paused), _proposals(cold)
    requests = engine.submit([PROMPTS[0]], Sampling(temperature=0, max_tokens=40))
    drafted = [bool(engine.step() and made) for _ in range(3)]
    [mate] = engine.submit([PROMPTS[1]], Sampling(temperature=0, max_tokens=11))
    while mate.finish_reason is None:
        made.clear()
        engine.step()
    assert drafted[-1]
    assert not made
    while not made:
        engine.step()
    [(text, draft)] = made.items()
    engine.cancel(requests)
    greedy = Sampling(temperature=0, max_tokens=5)
    [before] = engine_of(target, cold, num_speculative_tokens=3).generate([text[:-1]], greedy)
    assert len(text) > 3 + 2 + 10
    assert before.token_ids[0] == text[-1]
    assert draft.tokens == fresh[text].tokens
    assert draft.confidence == pytest.approx(fresh[text].confidence, rel=1e-6)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark"])
def test_features_that_reach_the_drafter_are_those_of_training(name):
    """Captured = decoded: the rows a drafter is given over prefill chunks, rounds and rejections are, in order, those
    one pass over the finished text gives, the last layer included.
    """
    target = tiny_target()
    drafter = drafting(name, target)
    seen: dict[int, torch.Tensor] = {}
    commit = drafter.commit

    def watch(accepted: list[Accepted]) -> None:
        for rows in accepted:
            before = seen.get(rows.request_id, torch.zeros(0, rows.features.shape[1]))
            assert rows.start <= len(before)
            seen[rows.request_id] = torch.cat([before[: rows.start], rows.features])
        commit(accepted)

    drafter.commit = watch
    engine = engine_of(target, drafter, num_speculative_tokens=4, max_num_batched_tokens=16)
    prompts = [list(range(40)), [7, 8, 9]]
    requests = engine.submit(prompts, Sampling(temperature=0, max_tokens=12, ignore_eos=True))
    drive(engine, requests)
    for request in requests:
        tokens = [*request.tokens][:-1]
        torch.testing.assert_close(
            seen[request.id][: len(tokens)], features_of(target, tokens, drafter.taps), rtol=1e-4, atol=1e-5
        )


class Reading(Script):
    """Guesses the same tokens always, and keeps the features it is given by (request, row)."""

    def __init__(self, name: str, taps: tuple[int, ...]):
        super().__init__(lambda view: [0, 1, 2])
        self.name, self.taps, self.rows = name, taps, {}

    def commit(self, accepted):
        for rows in accepted:
            for place, features in zip(range(rows.start, rows.end), rows.features.tolist(), strict=True):
                self.rows[rows.request_id, place] = features


def test_ts_3_drafters_of_one_engine_are_each_given_the_layers_they_read():
    """TS-3: three drafters whose layers overlap, over prefill chunks, rounds and rejections: one pass computes the
    layers of all, and each gets the columns of its own in ascending order, row by row.

    https://github.com/vllm-project/vllm/pull/40727, https://github.com/sgl-project/sglang/pull/31047
    """
    target = history_model(7, seed=3)
    drafters = [Reading("one", (1, 3)), Reading("two", (2,)), Reading("three", (0, 2, 3))]
    engine = engine_of(target, *drafters, num_speculative_tokens=3, max_num_batched_tokens=16)
    requests = engine.submit([[i % 7 for i in range(20)], [4, 4]], Sampling(temperature=0, max_tokens=12))
    drive(engine, requests)
    for drafter in drafters:
        want = {
            (request.id, place): [x for h in drafter.taps for x in target.feature(h, request.tokens[: place + 1])]
            for request in requests
            for place in range(len(request.tokens) - 1)
        }
        assert drafter.rows == want, drafter.name


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark"])
def test_nu_3_a_drafter_of_nan_costs_speed_only(name):
    """NU-3: weights that are not finite: nothing is drafted, it is counted, and the output is plain decoding's.

    https://github.com/vllm-project/vllm/pull/27077
    """
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0, max_tokens=9)
    drafter = drafting(name, target)
    with torch.no_grad():
        for parameter in drafter.network.parameters():
            parameter.fill_(torch.nan)
    [done] = engine_of(target, drafter, num_speculative_tokens=3).generate([[1, 2, 3]], sampling)
    assert done.token_ids == plain(target, [[1, 2, 3]], sampling)[1, 2, 3]
    assert done.stats.invalid_drafts > 0
    assert done.stats.accepted == 0


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark"])
def test_a_chat_goes_on_with_what_is_kept(name):
    """Turns of a conversation: the drafter's rows of the earlier turns are used, and the ids are plain decoding's."""
    target = history_model(7, seed=3, window=256)
    drafter = drafting(name, target)
    engine = engine_of(target, drafter, num_speculative_tokens=3)
    sampling = Sampling(temperature=0, max_tokens=7)
    conversation = engine.conversation()
    tokens: list[int] = []
    for turn in ([1, 2, 3], [4, 4], [0, 6, 5, 1]):
        tokens += turn
        expected = plain(history_model(7, seed=3, window=256), [tokens], sampling)[tuple(tokens)]
        done = None
        for chunk in conversation.stream(tokens, sampling):
            done = chunk.completion or done
        assert done is not None
        assert done.token_ids == expected
        assert done.stats.drafted > 0
        tokens += expected
    conversation.close()
    engine.audit()


@pytest.mark.parametrize("name", ["eagle", "eagle3", "dflash", "dspark"])
def test_the_draft_model_has_rows_of_its_own_in_the_budget(name):
    """Its KV counts in kv_cache_memory_bytes, and a pool that is just large enough is enough."""
    target = history_model(7, seed=3)
    drafter = drafting(name, target)
    assert drafter.block_bytes > 0
    blocks = -(-(19 + 3) // BLOCK_SIZE) + 1
    engine = engine_of(
        target, drafter, num_speculative_tokens=3, kv_cache_memory_bytes=bytes_for(blocks, target, drafter)
    )
    sampling = Sampling(temperature=0, max_tokens=19)
    [done] = engine.generate([[1, 2, 3]], sampling)
    assert done.stats.drafter_faults == 0
    assert done.token_ids == plain(target, [[1, 2, 3]], sampling)[1, 2, 3]
