"""Rows behind the kept prefix are as if they had never been there, and nothing is drafted from a hole."""

from __future__ import annotations

import pytest

from engine.conftest import PROMPTS, configured, drafter_of, engine_of, idle, ids, plain
from forerun import Sampling
from forerun.drafters.fake import Never, Script
from forerun.drafters.small import Small
from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import blocks_for
from forerun.target.table import LetterTokenizer, history_model

GREEDY = Sampling(temperature=0, max_tokens=30)


def _sliding(seed: int = 0):
    """A tiny Mistral with a window of 8."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from forerun.target.hf import HFTarget

    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=8, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return HFTarget(MistralForCausalLM(config), LetterTokenizer(61))


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_cr_1_rejection_while_a_sliding_window_wraps(kept):
    """Window 8, prompt 20, K = 4, of which `kept` are right in each round: ids of a reference that computes the whole
    prefix anew for each token.

    https://github.com/huggingface/transformers/pull/48280, https://github.com/huggingface/transformers/issues/37574,
    https://github.com/huggingface/transformers/issues/30312
    """
    prompt = [(7 * i + 3) % 61 for i in range(20)]
    target = _sliding()
    known = plain(target, [prompt], GREEDY)[tuple(prompt)]

    def guess(view):
        done = len(view.tokens) - 20
        return [token if i < kept else (token + 1) % 61 for i, token in enumerate(known[done : done + view.k])]

    engine = engine_of(target, Script(guess), num_speculative_tokens=4)
    [done] = engine.generate([prompt], GREEDY)
    assert done.token_ids == known
    assert done.stats.acceptance_by_position[:4] == [1.0] * kept + [0.0] + [None] * (3 - kept)
    idle(engine)


@pytest.mark.parametrize("k", [1, 4, 8, 17, 40])
def test_cr_3_rejected_tokens_leave_the_sequence(k):
    """A drafter that is always wrong, on a model whose logits depend on every row: ids equal plain; after every step
    the cache holds committed - 1 rows, in no more blocks than those need.

    https://github.com/lucidrains/speculative-decoding/issues/3
    """
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, GREEDY)
    engine = engine_of(target, Never(known, 7), num_speculative_tokens=k, max_num_batched_tokens=200)
    requests = engine.submit(PROMPTS, GREEDY)
    while engine.step():
        for request in engine.core.admission.running:
            assert request.rows == len(request.tokens) - 1
            assert len(request.blocks) == blocks_for(request.rows)
        engine.audit()
    assert ids([engine.result(request) for request in requests]) == list(known.values())
    idle(engine)


@pytest.mark.parametrize("preempted", [False, True])
def test_cr_4_a_drafter_that_returns_drafts_from_no_hole(preempted):
    """K = 4, then 0 for ten steps while a batch-mate is there, then 4 again: the first round after the return is
    accepted whole, as without the interruption, also if the request was preempted meanwhile.

    https://github.com/vllm-project/vllm-metal/pull/716
    """
    target = history_model(7, seed=3)
    drafter = Small(history_model(7, seed=3), 7)
    engine = configured(target, drafter, {"num_speculative_tokens_per_batch_size": {"1": 4, "2-8": 0}})
    [request] = engine.submit([PROMPTS[0]], Sampling(temperature=0, max_tokens=60))
    for _ in range(4):
        engine.step()
    before = request.stats.verified
    [mate] = engine.submit([PROMPTS[1]], Sampling(temperature=0, max_tokens=10))
    while mate.finish_reason is None:
        if preempted and len(mate.output) == 5:
            engine.core.admission.preempt(request)
        engine.step()
    assert request.stats.verified == before == 12
    assert mate.stats.drafted == 0
    passes = len(drafter.model.passes)
    engine.step()
    while request.stats.verified == before:  # a preempted one is prefilled first
        engine.step()
    assert request.stats.verified == before + 4
    assert request.stats.draft_acceptance_rate == 1
    # The missing rows are filled in the first of the four passes, never skipped; a preempted one has kept a block.
    assert drafter.model.passes[passes] == (len(request.tokens) - 5 - BLOCK_SIZE if preempted else 12)
    while engine.step():
        pass
    assert (
        request.output == plain(history_model(7, seed=3), [PROMPTS[0]], Sampling(temperature=0, max_tokens=60))[1, 2, 3]
    )
    idle(engine)


def test_the_draft_models_rows_are_cut_with_the_targets():
    """After every step the draft model holds no row behind the kept prefix, and its own books balance."""
    drafter = drafter_of("other small", {}, 7)
    engine = engine_of(history_model(7, seed=3), drafter, num_speculative_tokens=5)
    requests = engine.submit(PROMPTS, GREEDY)
    while engine.step():
        for request in engine.core.admission.running:
            assert drafter._tables.rows(request.id) <= request.rows
        drafter.audit()
    assert drafter._tables.used == 0
    assert all(request.finish_reason == "length" for request in requests)
