"""Cutting a request back is starting its next segment earlier: what lies behind is as if it had never been there."""

from __future__ import annotations

import random

import pytest
import torch
from target_families import CONFIGS, VOCAB, WINDOW, pair, scattered_tables, stock_logits, texts

from forerun.errors import UnsupportedModel
from forerun.target.base import BLOCK_SIZE, Batch, Segment
from forerun.target.hf import HFTarget
from forerun.target.table import LetterTokenizer, history_model


def _close(ours, stock, ids):
    torch.testing.assert_close(ours, stock_logits(stock, ids)[-len(ours) :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["loop", "padded"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "qwen2"])
def test_cr_1_rejection_while_the_window_wraps(name, attention):
    """CR-1: window 8, prompt 20, K = 4, three of four drafts refused in each of ten rounds: the next logits are those
    of a fresh prefill.

    https://github.com/huggingface/transformers/pull/48280 https://github.com/huggingface/transformers/issues/37574
    https://github.com/huggingface/transformers/issues/30312
    """
    assert WINDOW == 8
    stock, target = pair(name, attention=attention)
    target.allocate(5)
    (table,) = scattered_tables((70,), 5)
    (tokens,) = texts((20,))
    out = target.forward(Batch([Segment(tokens, 0, table, 1)]))
    draw = random.Random(3)
    for _ in range(10):
        tokens.append(int(out.logits[-1].argmax()))
        drafts = [draw.randrange(3, VOCAB) for _ in range(4)]
        out = target.forward(Batch([Segment([tokens[-1], *drafts], len(tokens) - 1, table, 5)]))
        _close(out.logits, stock, tokens + drafts)
        tokens.append(drafts[0])  # one kept, three refused
        out = target.forward(Batch([Segment([tokens[-1]], len(tokens) - 1, table, 1)]))
        _close(out.logits, stock, tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_that_accepts_differently_each_round_equals_fresh_prefills(name):
    """Four requests verify 0 .. 5 drafts a round and keep 0 .. all of them, beside a prefill in chunks: every row's
    logits are those of its own text alone."""
    stock, target = pair(name)
    lengths = (20, 3, 11, 30)
    tables = scattered_tables([96] * 4, 24)
    target.allocate(24)
    draw = random.Random(4)
    committed = texts(lengths)
    rows = [0] * 4
    for _ in range(8):
        segments, checks = [], []
        for r, tokens in enumerate(committed):
            missing = tokens[rows[r] :]
            if len(missing) > 7:  # still prefilling
                segments.append(Segment(missing[:7], rows[r], tables[r], 7))
                checks.append(tokens[: rows[r] + 7])
                rows[r] += 7
                continue
            drafts = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(6))]
            block = missing + drafts
            segments.append(Segment(block, rows[r], tables[r], len(block)))
            checks.append(tokens + drafts)
            kept = draw.randrange(len(drafts) + 1)
            rows[r] = len(tokens) + kept
            tokens += [*drafts[:kept], draw.randrange(3, VOCAB)]
        logits = target.forward(Batch(segments)).logits
        row = 0
        for segment, text in zip(segments, checks, strict=True):
            _close(logits[row : row + len(segment.tokens)], stock, text)
            row += len(segment.tokens)


def test_cr_3_refused_rows_are_overwritten_in_the_history_model():
    """CR-3: with the always-wrong drafter, 30 rounds of the history model stay on plain decoding's path.

    https://github.com/lucidrains/speculative-decoding/issues/3
    """
    target = history_model(7)
    (table,) = scattered_tables((BLOCK_SIZE * 6,), 6)
    target.allocate(6)
    tokens = [1, 2, 3]
    target.forward(Batch([Segment(tokens[:-1], 0, table, 0)]))
    for _ in range(30):
        best = int(torch.tensor(target._logits(tokens)).argmax())
        wrong = [(best + 1) % 7] * 4
        out = target.forward(Batch([Segment([tokens[-1], *wrong], len(tokens) - 1, table, 5)]))
        assert int(out.logits[0].argmax()) == best
        tokens.append(best)


def test_a_row_nobody_wrote_is_found_by_the_table_targets():
    """The history model refuses to read a hole instead of making logits of it."""
    target = history_model(7)
    target.allocate(2)
    with pytest.raises(AssertionError, match="never written"):
        target.forward(Batch([Segment([1], 5, [0], 1)]))


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_cr_2_recurrent_state_is_refused_when_the_model_is_loaded(name):
    """CR-2: a state that keeps refused tokens is a refusal that says so, not wrong text.

    https://github.com/ml-explore/mlx-lm/pull/1109 https://github.com/vllm-project/vllm/issues/39273
    https://github.com/vllm-project/vllm/pull/40738 https://github.com/vllm-project/vllm/pull/52942
    https://github.com/vllm-project/vllm/issues/53505
    """
    import transformers as tf

    configs = {
        "mamba": lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
        "qwen3_next": lambda: tf.Qwen3NextConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, shared_expert_intermediate_size=16, pad_token_id=0,
        ),
    }  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(configs[name]())
    with pytest.raises(UnsupportedModel, match="cannot be cut back"):
        HFTarget(model, LetterTokenizer(VOCAB), max_model_len=64)
