"""Tapped hidden states: raw, before the final norm, in one numbering; norm and head are the model's own."""

from __future__ import annotations

import pytest
import torch
from target_families import CONFIGS, LAYERS, chunked_logits, pair, scattered_tables, stock_logits, texts

from forerun.target.base import Batch, Segment
from forerun.target.table import TableTarget, history_model

HIDDEN = 32


def _hooked(stock, ids):
    """h = 0 .. n of a stock model by hooks: the embedding's output, then each decoder layer's."""
    seen = {}

    def keep(h):
        def hook(module, args, output):
            seen[h] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    inner = stock.model
    handles = [inner.embed_tokens.register_forward_hook(keep(0))]
    handles += [layer.register_forward_hook(keep(h + 1)) for h, layer in enumerate(inner.layers)]
    with torch.no_grad():
        stock(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [seen[h] for h in range(LAYERS + 1)]


@pytest.mark.parametrize("name", CONFIGS)
def test_ts_3_each_tap_is_the_hooked_residual_stream(name):
    """TS-3: every h = 0 .. n equals a hook on the stock model, whatever chunks the rows came in; ascending h.

    https://github.com/vllm-project/vllm/pull/40727 https://github.com/sgl-project/sglang/pull/31047
    """
    stock, target = pair(name)
    lengths = (23, 6, 40)
    ids, tables = texts(lengths), scattered_tables(lengths, 8)
    target.allocate(8)
    _, features = chunked_logits(target, ids, tables, (5, 1, 9), range(LAYERS + 1))
    for text, ours in zip(ids, features, strict=True):
        expected = _hooked(stock, text)
        for h in range(LAYERS + 1):
            torch.testing.assert_close(ours[:, h * HIDDEN : (h + 1) * HIDDEN], expected[h], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_ts_1_teacher_logits_come_through_the_targets_own_norm_and_head(name):
    """TS-1: logits(final_norm(h_n)) equals the model's logits, soft-cap included, and without the norm it does not.

    https://github.com/vllm-project/speculators/issues/313
    """
    stock, target = pair(name)
    (text,) = texts((30,))
    target.allocate(2)
    out = target.forward(Batch([Segment(text, 0, [0, 1], 30)]), (LAYERS,))
    teacher = target.logits(target.final_norm(out.features))
    torch.testing.assert_close(teacher, out.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(teacher, stock_logits(stock, text), rtol=0, atol=1e-5)
    assert (target.logits(out.features) - teacher).abs().max() > 0.1


def test_logits_keep_leading_dimensions():
    """[..., H] -> [..., V], also with no rows at all (a pass inside a prefill needs none)."""
    _, target = pair("gemma2")
    assert target.logits(torch.zeros(2, 3, HIDDEN)).shape == (2, 3, target.vocab_size)
    target.allocate(1)
    out = target.forward(Batch([Segment([3, 4], 0, [0], 0)]), (1,))
    assert out.logits.shape == (0, target.vocab_size)
    assert out.features.shape == (2, HIDDEN)


def test_one_pass_with_and_without_taps_gives_the_same_logits():
    """Watching changes nothing."""
    _, target = pair("qwen3")
    (text,) = texts((20,))
    results = []
    for taps in ((), (0, 2, LAYERS)):
        target.allocate(2)
        results.append(target.forward(Batch([Segment(text, 0, [1, 0], 20)]), taps).logits)
    assert torch.equal(*results)


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (0, LAYERS + 1)])
def test_ts_3_taps_that_do_not_ascend_or_exist_are_a_bug_of_the_caller(taps):
    """TS-3: unsorted ids would silently change the column order."""
    _, target = pair("llama")
    target.allocate(1)
    with pytest.raises((AssertionError, IndexError)):
        target.forward(Batch([Segment([3], 0, [0], 1)]), taps)


def test_table_features_follow_their_own_row_and_layer():
    """The table targets' features tell rows and layers apart, and the last one gives the logits through the norm."""
    target: TableTarget = history_model(6)
    target.allocate(3)
    out = target.forward(Batch([Segment([1, 2, 3], 0, [2], 3), Segment([4, 5], 0, [0], 1)]), (0, 3))
    assert out.features.shape == (5, 12)
    assert out.features[1, :6].tolist() == target.feature(0, [1, 2])
    assert out.features[4, 6:].tolist() == target.feature(3, [4, 5])
    assert torch.equal(target.logits(target.final_norm(out.features[:3, 6:])), out.logits[:3])
    assert not torch.equal(target.logits(out.features[:3, 6:]), out.logits[:3])
