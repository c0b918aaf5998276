"""Learned drafters in the engine: plain decoding's output, the committed rows' features, and nothing leaks."""

from __future__ import annotations

import pytest
import torch

from drafters.kinds import SETTINGS, drafting
from drafters.learning import features_of, tiny_target
from engine.conftest import PROMPTS, bytes_for, drive, engine_of, plain, preempt_all
from forerun import Sampling
from forerun.drafters.base import Accepted
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
