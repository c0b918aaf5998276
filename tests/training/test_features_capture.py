"""Captured features are the ones decoding sees, in bounded passes, in the order of the samples."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun import Sampling
from forerun.drafters.base import Draft, Drafter
from forerun.engine import Engine
from forerun.errors import ModelError, OptionError
from forerun.target.load import load_target
from forerun.target.table import TableTarget, history_model
from forerun.training.features import capture, log_normalizer, open_source
from forerun.training.features.passes import plan_passes
from samples import Text, text, texts

V = 7
LENGTHS = (3, 18, 1, 41, 16, 5)


@pytest.fixture(scope="module")
def qwen(tiny_qwen3_dir):
    return load_target(tiny_qwen3_dir)


@pytest.fixture
def families(monkeypatch):
    """The tiny models of many families that the target's tests use."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "target")
    return importlib.import_module("target_families")


def rows_of(batch, i):
    return slice(batch.starts[i], batch.starts[i] + batch.lengths[i])


# ------------------------------------------------------------------------------------------------------------- passes


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 20))
def test_passes_cover_every_row_once_in_order_and_cut_only_what_is_too_long(lengths, most):
    """Whatever the lengths: rows in the order of the samples, at most `most` a pass; a short sample is never cut."""
    passes = plan_passes(lengths, most)
    rows = [(c.sample, p) for one in passes for c in one for p in range(c.start, c.end)]
    assert rows == [(i, p) for i, n in enumerate(lengths) for p in range(n)]
    assert all(0 < sum(c.end - c.start for c in one) <= most for one in passes)
    assert all(c.start % most == 0 for one in passes for c in one)


@pytest.mark.parametrize("most", [1, 5, 16, 2048])
def test_features_follow_sample_and_row_whatever_the_chunks(most):
    """On an exact target: row p of a sample is the feature of its first p + 1 tokens, bit for bit."""
    target = history_model(V)
    samples = texts(LENGTHS, V)
    batch = capture(target, samples, (0, 2), max_num_batched_tokens=most)
    assert max(target.passes) <= most
    for i, sample in enumerate(samples):
        tokens = sample.token_ids.tolist()
        rows = rows_of(batch, i)
        expected = [target.feature(0, tokens[: p + 1]) + target.feature(2, tokens[: p + 1]) for p in range(len(tokens))]
        assert batch.features[rows].tolist() == expected
        assert batch.last[rows].tolist() == [target.feature(3, tokens[: p + 1]) for p in range(len(tokens))]
        assert batch.tokens[rows].tolist() == tokens
        assert batch.loss_mask[rows].tolist() == sample.loss_mask.tolist()


def test_da_5_nothing_is_padded_and_a_pass_is_bounded():
    """DA-5: a short and a long sample together compute exactly their own rows, in passes of bounded size, over storage
    for the long one and a pass of others.

    https://github.com/sgl-project/SpecForge/issues/466
    """
    target, allocated = history_model(V), []
    allocate = target.allocate
    target.allocate = lambda blocks: (allocated.append(blocks), allocate(blocks))  # type: ignore[method-assign]
    capture(target, texts((6, 300, 8), V), (1,), max_num_batched_tokens=64)
    assert sum(target.passes) == 314
    assert target.passes == [6, 64, 64, 64, 64, 44 + 8]
    assert allocated == [-(-300 // 16) + 1, 0]


def test_no_logits_are_computed():
    """Every segment asks for none: the head would cost V columns a row."""
    target, asked = history_model(V), []
    forward = target.forward
    target.forward = lambda batch, taps: (asked.append(batch.logit_index), forward(batch, taps))[1]
    capture(target, texts((4, 9), V), (1,))
    assert asked == [[]]


# --------------------------------------------------------------------------------------------------- equal to decoding


class Recorder(Drafter):
    """Proposes noise and remembers the features of every row that became final."""

    name = "recorder"

    def __init__(self, taps, vocab_size):
        self.taps = tuple(taps)
        self.vocab_size = vocab_size
        self.rows: dict[int, list[torch.Tensor]] = {}
        self._random = random.Random(1)

    def propose(self, views, keep_drafting):
        return [Draft([self._random.randrange(self.vocab_size) for _ in range(view.k)]) for view in views]

    def commit(self, accepted):
        for rows in accepted:
            mine = self.rows.setdefault(rows.request_id, [])
            assert len(mine) == rows.start, "rows become final in order"
            mine += rows.features


def decoded(target, prompts, taps, tokens):
    """What the engine decodes, as samples, with the features it gave a drafter, last row excluded (it has none yet)."""
    recorder = Recorder(taps, target.vocab_size)
    engine = Engine.load(target, recorder, num_speculative_tokens=3, max_num_seqs=4, max_num_batched_tokens=16)
    requests = engine.submit(prompts, Sampling(temperature=1.0, max_tokens=tokens, seed=3, ignore_eos=True))
    while engine.step():
        pass
    samples = [text(f"r{r.id}", r.tokens) for r in requests]
    return samples, [torch.stack(recorder.rows[r.id]) for r in requests]


@pytest.mark.parametrize("taps", [(1, 2), (0, 1, 3), (3,)])
def test_captured_features_are_decoded_features_bit_for_bit(taps):
    """Exact target: prefill chunks, plain rounds, accepted, rejected drafts give what capture gives, also at h = n."""
    target = history_model(V)
    samples, features = decoded(target, [[1, 2, 3], [4], [0, 5, 5, 2] * 6], taps, 12)
    batch = capture(target, samples, taps)
    for i, mine in enumerate(features):
        assert torch.equal(batch.features[rows_of(batch, i)][: len(mine)], mine)
        assert len(mine) == batch.lengths[i] - 1


def test_captured_features_are_decoded_features_of_a_transformer(qwen):
    """float32 model: to rounding, the last hidden state included, long prompts in chunks."""
    taps = (1, 3)
    samples, features = decoded(qwen, [list(range(40, 75)), [7, 8]], taps, 10)
    batch = capture(qwen, samples, taps, max_num_batched_tokens=20)
    for i, mine in enumerate(features):
        torch.testing.assert_close(batch.features[rows_of(batch, i)][: len(mine)], mine, rtol=1e-4, atol=1e-4)


def test_features_do_not_depend_on_neighbours_with_packed_layers(tiny_qwen3_dir):
    """bfloat16 with packed layers, where passes are exact: alone or among others, a sample has the same bits."""
    target = load_target(tiny_qwen3_dir, dtype="bfloat16")
    if "packed:" not in target.linear_reason:
        pytest.skip(target.linear_reason)
    samples = texts((9, 40, 70, 5), target.vocab_size)
    together = capture(target, samples, (1, 2), max_num_batched_tokens=64)
    for i, sample in enumerate(samples):
        alone = capture(target, [sample], (1, 2), max_num_batched_tokens=64)
        assert torch.equal(alone.features, together.features[rows_of(together, i)])
        assert torch.equal(alone.last, together.last[rows_of(together, i)])


# ----------------------------------------------------------------------------------------------------- norms and layers

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3"]


@pytest.mark.parametrize("name", FAMILIES)
def test_ts_1_the_teacher_is_rebuilt_through_the_targets_own_norm_and_head(name, families):
    """TS-1: from `last`, the target's own norm and head give the stock model's logits, soft-cap included, and the
    normaliser is their log-sum-exp; without the norm they are something else.

    https://github.com/vllm-project/speculators/issues/313
    """
    stock, target = families.pair(name)
    tokens = families.texts((30, 7))
    batch = capture(target, [text(str(i), t) for i, t in enumerate(tokens)], (2,), with_normalizer=True)
    expected = torch.cat([families.stock_logits(stock, t) for t in tokens])
    teacher = target.logits(target.final_norm(batch.last))
    torch.testing.assert_close(teacher, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(batch.log_normalizer, expected.logsumexp(-1), rtol=0, atol=1e-5)
    assert (target.logits(batch.last) - teacher).abs().max() > 0.1


class Constants(TableTarget):
    """Hidden state h is h everywhere."""

    def feature(self, h, prefix):
        return [float(h)] * self.hidden_size


def test_ts_3_each_column_is_the_layer_that_was_asked_for():
    """TS-3: with a different constant in every layer, the columns are those of the taps in ascending h, `last` is n.

    https://github.com/vllm-project/vllm/pull/40727 https://github.com/sgl-project/sglang/pull/31047
    """
    target = Constants(lambda prefix: [0.0] * 4, 4, num_layers=6)
    batch = capture(target, texts((5, 2), 4), (0, 2, 5))
    assert batch.features.tolist() == [[0.0] * 4 + [2.0] * 4 + [5.0] * 4] * 7
    assert batch.last.tolist() == [[6.0] * 4] * 7


def test_the_last_state_as_a_tap_is_kept_once():
    """h = n among the taps: `last` is a view of its columns. Without taps there is `last` alone."""
    target = history_model(V)
    samples = texts((5, 2), V)
    batch = capture(target, samples, (1, 3))
    assert batch.last.data_ptr() == batch.features[:, V:].data_ptr()
    bare = capture(target, samples, ())
    assert bare.features.shape == (7, 0)
    assert torch.equal(bare.last, batch.last)


def test_the_normaliser_is_computed_a_few_rows_at_a_time(qwen, monkeypatch):
    """In chunks as in one go, to rounding; the number of rows that exist at a time is bounded by their elements."""
    batch = capture(qwen, texts((50, 13), qwen.vocab_size), (1,))
    dense = qwen.logits(qwen.final_norm(batch.last)).logsumexp(-1)
    seen = []
    logits = qwen.logits
    monkeypatch.setattr(qwen, "logits", lambda hidden: (seen.append(len(hidden)), logits(hidden))[1])
    monkeypatch.setattr("forerun.training.features.passes.LOGITS_AT_ONCE", 10 * qwen.vocab_size)
    torch.testing.assert_close(log_normalizer(qwen, batch.last), dense, rtol=0, atol=1e-5)
    assert seen == [10] * 6 + [3]


def test_features_are_ordinary_tensors(qwen):
    """A drafter's layer may keep them for its backward pass."""
    batch = capture(qwen, texts((9,), qwen.vocab_size), (1, 2))
    layer = torch.nn.Linear(batch.features.shape[1], 3)
    layer(batch.features).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().max() > 0


# ------------------------------------------------------------------------------------------- sharing the target, errors


def test_an_engine_made_after_a_capture_decodes_as_ever():
    """Capture and decoding take turns over one target; an engine that outlives a capture fails, it does not misread."""
    target = history_model(V)
    greedy = Sampling(temperature=0, max_tokens=8)
    before = Engine.load(target)
    expected = before.generate([[1, 2, 3]], greedy)[0].token_ids
    capture(target, texts((20,), V), (1,))
    with pytest.raises(IndexError):
        before.generate([[1, 2, 3]], greedy)
    assert Engine.load(target).generate([[1, 2, 3]], greedy)[0].token_ids == expected


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (text("empty", []), "sample empty has 0 tokens"),
        (
            text("long", [1] * 40),
            "sample long has 40 tokens, table takes 1 .. 32; prepare the data with --max-length 32",
        ),
        (text("foreign", [1, 9]), "sample foreign has ids 1 .. 9, table knows 0 .. 6"),
        (text("negative", [-1, 2]), "sample negative has ids -1 .. 2"),
    ],
)
def test_a_sample_that_does_not_fit_the_target_is_refused_by_name(sample, message):
    """Before anything is computed."""
    target = history_model(V, window=32)
    with pytest.raises(OptionError, match=f"^--data: {message}"):
        capture(target, [text("fine", [1, 2]), sample], (1,))
    assert target.passes == []


def test_a_pass_needs_at_least_one_row():
    """The option is named."""
    with pytest.raises(OptionError, match=r"^max_num_batched_tokens: must be at least 1, got 0"):
        capture(history_model(V), texts((3,), V), (1,), max_num_batched_tokens=0)


def test_a_target_that_overflows_is_named_with_the_token():
    """Features that are not finite would poison a run without a trace."""

    class Overflowing(Constants):
        def feature(self, h, prefix):
            return [float("inf") if list(prefix) == [1, 2, 3] else 1.0] * self.hidden_size

    target = Overflowing(lambda prefix: [0.0] * 5, 5)
    source = open_source(target, (1,))
    with pytest.raises(ModelError, match=r"not finite at token 2 of sample b; try another --target-dtype"):
        source.batch([text("a", [1, 2, 2]), text("b", [1, 2, 3, 4])])


def test_masks_and_ids_may_be_read_only_views():
    """As a memory-mapped data set gives them."""
    tokens, mask = np.array([1, 2, 3], np.int32), np.array([False, True, True])
    tokens.flags.writeable = mask.flags.writeable = False
    batch = capture(history_model(V), [Text("a", tokens, mask)], (1,))
    assert batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [False, True, True]
