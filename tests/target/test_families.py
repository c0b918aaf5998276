"""Packed passes over our own KV storage give what stock transformers gives, family by family."""

from __future__ import annotations

import copy

import pytest
import torch
from target_families import (
    CONFIGS,
    FURTHER,
    LAYERS,
    chunked_logits,
    decode_greedily,
    pair,
    scattered_tables,
    stock_logits,
    stock_model,
    texts,
)

from forerun.target.attention import FOLD_ROWS
from forerun.target.base import Batch, Segment
from forerun.target.hf import HFTarget

LENGTHS = (23, 1, 45, 9)


@pytest.mark.parametrize("name", [*CONFIGS, *FURTHER])
def test_logits_of_mixed_chunks_equal_stock(name):
    """Four texts of mixed lengths, in chunks of 1 to 11 rows over scattered blocks: every logit within 1e-5."""
    stock, target = pair(name)
    ids = texts(LENGTHS)
    tables = scattered_tables(LENGTHS, 12)
    target.allocate(12)
    ours, _ = chunked_logits(target, ids, tables, (5, 1, 11, 2))
    for text, logits in zip(ids, ours, strict=True):
        torch.testing.assert_close(logits, stock_logits(stock, text), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_ids_equal_stock_while_requests_join(name):
    """64 tokens for each of three requests that join at steps 0, 3 and 17: each token is stock's argmax there."""
    stock, target = pair(name)
    prompts = texts((13, 5, 20))
    for tokens, prompt in zip(decode_greedily(target, prompts, (0, 3, 17), 64), prompts, strict=True):
        best = stock_logits(stock, tokens).argmax(-1).tolist()
        assert tokens[len(prompt) :] == best[len(prompt) - 1 : -1]


@pytest.mark.parametrize("name", CONFIGS)
def test_eq_7_every_row_count_gives_the_same_logits(name):
    """EQ-7 (ds4#913): row counts on both sides of each switch-over - one row, folded heads, long chunks.

    https://github.com/antirez/ds4/issues/913
    """
    stock, target = pair(name)
    ids = texts((FOLD_ROWS + 40,))
    expected = stock_logits(stock, ids[0])
    for rows in (1, 2, 3, 8, FOLD_ROWS - 1, FOLD_ROWS, FOLD_ROWS + 1, len(ids[0])):
        target.allocate(6)
        (ours,), _ = chunked_logits(target, ids, scattered_tables((72,), 6), (rows,))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_attention_plans_agree(name):
    """One call per request and one gathered call give the same logits and features for a batch of all kinds of rows."""
    loop, padded = pair(name, attention="loop")[1], pair(name, attention="padded")[1]
    assert loop.attention_reason != padded.attention_reason
    lengths = (FOLD_ROWS + 21, 1, 45, 9)
    ids, tables = texts(lengths), scattered_tables(lengths, 12)
    results = []
    for target in (loop, padded):
        target.allocate(12)
        results.append(chunked_logits(target, ids, tables, (FOLD_ROWS + 3, 1, 6, 2), (0, LAYERS)))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_other_dtypes_run_near_stock(name, dtype):
    """float64 within 1e-5 (norms run in float32 inside the models), half precision within its rounding."""
    stock = stock_model(name, dtype=dtype)
    if dtype == torch.float64:
        stock.set_experts_implementation("eager")  # the default one cannot, in stock transformers as well
    ids = texts((19, 7))
    expected = [stock_logits(stock, text) for text in ids]
    target = HFTarget(stock, None)
    assert target.dtype == dtype
    target.allocate(4)
    ours, features = chunked_logits(target, ids, scattered_tables((19, 7), 4), (5, 2), (0, LAYERS))
    for logits, reference, tapped in zip(ours, expected, features, strict=True):
        assert logits.dtype == tapped.dtype == dtype
        error = (logits - reference).double().norm() / reference.double().norm()
        assert error < (1e-5 if dtype == torch.float64 else 0.05)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_shorter_than_the_probe(name, window):
    """A window of one or three rows is found and honoured like any other."""
    stock = stock_model(name, sliding_window=window)
    target = HFTarget(copy.deepcopy(stock), None)
    assert window in {a.window for a in target.anatomy.attentions}
    target.allocate(2)
    (ours,), _ = chunked_logits(target, texts((20,)), [[1, 0]], (3, 1, 5))
    torch.testing.assert_close(ours, stock_logits(stock, texts((20,))[0]), rtol=0, atol=1e-5)


def test_a_head_replaced_later_is_the_one_that_is_used():
    """Modules swapped in the model after loading (packed layers) are seen by `logits`."""
    _, target = pair("llama")
    hidden = torch.randn(2, target.hidden_size)
    before = target.logits(hidden)
    with torch.no_grad():
        target.model.lm_head = torch.nn.Linear(32, target.vocab_size, bias=False)
    assert not torch.allclose(target.logits(hidden), before)


def test_results_may_be_used_in_training():
    """Logits and features are ordinary tensors without a graph, and a gradient passes through the head."""
    _, target = pair("qwen3")
    target.allocate(1)
    out = target.forward(Batch([Segment([3, 4, 5], 0, [0], 3)]), (2, 4))
    assert not out.logits.requires_grad
    assert not out.logits.is_inference()
    assert not out.features.is_inference()
    weight = torch.ones(32, requires_grad=True)
    target.logits(target.final_norm(out.features[:, 32:] * weight)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_block_bytes_is_what_allocate_takes():
    """Bytes per block over all layers, by the storage that is really made, for keys and values of different width."""
    for name in ("llama", "deepseek_v3"):
        _, target = pair(name)
        target.allocate(3)
        taken = sum(t.numel() * t.element_size() for s in target._stores.values() for t in (s.keys, s.values))
        assert taken == 3 * target.block_bytes
