"""EAGLE's own conventions: which feature it reads, what it is taught, how it starts, what it refuses."""

from __future__ import annotations

import pytest
import torch

from drafters.learning import always, batch_of, decoding, features_of, give, plan_for, texts, tiny_target, view_of
from forerun.drafters.eagle import Eagle
from forerun.drafters.eagle.config import EagleConfig, EagleSettings
from forerun.errors import OptionError
from forerun.target.base import Batch, Segment
from forerun.target.table import history_model

H = 32


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def _made(target, **settings):
    return Eagle.design(target, EagleSettings(**settings), plan_for(target))


def test_ts_1_its_feature_is_what_enters_the_targets_head(target):
    """TS-1: the last hidden state through the target's own norm: its head makes the target's logits of it, and without
    the norm it does not. On a table, whose norm doubles, as well.

    https://github.com/vllm-project/speculators/issues/313
    """
    [text] = texts([12])
    for one in (target, history_model(7)):
        tokens = [t % one.vocab_size for t in text]
        drafter = _made(one).for_decoding(one.dtype)
        assert drafter.taps == (one.num_layers,)
        raw = features_of(one, tokens, drafter.taps)
        one.allocate(4)
        logits = one.forward(Batch([Segment(tokens, 0, [0], 12)])).logits
        torch.testing.assert_close(drafter.logits(drafter.fuse(raw)), logits, rtol=1e-4, atol=1e-4)
        assert (drafter.logits(raw) - logits).abs().max() > 0.1


def test_a_perfect_network_drafts_what_the_target_would_say(target):
    """TS-3: a network that puts out the true next feature makes of row i the target's law of token i + 2: drafts made
    behind any anchor are the target's own greedy continuation.

    https://github.com/vllm-project/vllm/pull/40727
    """
    drafter = decoding(_made(target))
    [text] = texts([9], seed=3)
    whole = list(text)
    for _ in range(5):
        target.allocate(4)
        whole.append(int(target.forward(Batch([Segment(whole, 0, [0], 1)])).logits.argmax()))
    truth = drafter.fuse(features_of(target, whole, drafter.taps))
    calls = []

    def perfect(embedded, feature, mix):
        """The feature of the row behind; the embedding must be that of the token behind the row's feature."""
        row = 7 + len(calls)
        torch.testing.assert_close(feature[0], truth[row], rtol=1e-4, atol=1e-4)
        assert torch.equal(embedded[0], target.embed(torch.tensor(whole[row + 1])))
        calls.append(row)
        return truth[row + 1][None]

    give(drafter, whole, 0, 8)
    drafter.network.forward = perfect
    [draft] = drafter.propose([view_of(whole[:9], 4)], always)
    assert draft.tokens == whole[9:13]
    assert calls == [7, 8, 9, 10]


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_have_the_names_and_shapes_of_the_public_layout(target, bias):
    """fc [H, 2H] (+ bias), one llama layer without input_layernorm; embedding and head are the target's."""
    q, kv, ffn = (32, H), (16, H), 64
    expected = {
        "fc.weight": (H, 2 * H), "layers.0.self_attn.q_proj.weight": q, "layers.0.self_attn.k_proj.weight": kv,
        "layers.0.self_attn.v_proj.weight": kv, "layers.0.self_attn.o_proj.weight": (H, 32),
        "layers.0.post_attention_layernorm.weight": (H,), "layers.0.mlp.gate_proj.weight": (ffn, H),
        "layers.0.mlp.up_proj.weight": (ffn, H), "layers.0.mlp.down_proj.weight": (H, ffn),
    }  # fmt: skip
    if bias:
        expected["fc.bias"] = (H,)
    drafter = _made(target, bias=bias)
    assert {name: tuple(p.shape) for name, p in drafter.network.state_dict().items()} == expected
    assert drafter.config.bias == bias


def test_it_starts_as_the_targets_last_layer_on_the_feature(target):
    """fc passes the feature on, the layer's weights are the target's; queries and keys that need head norms are not."""
    network = _made(target, init="target").network
    donor = target.model.model.layers[-1]
    embedded, feature = torch.randn(3, H), torch.randn(3, H)
    torch.testing.assert_close(network.attention_input(embedded, feature), feature)
    layer = network.layers[0]
    assert torch.equal(layer.self_attn.v_proj.weight, donor.self_attn.v_proj.weight)
    assert torch.equal(layer.mlp.down_proj.weight, donor.mlp.down_proj.weight)
    torch.testing.assert_close(layer.post_attention_layernorm.weight, donor.post_attention_layernorm.weight)
    assert not torch.equal(layer.self_attn.q_proj.weight, donor.self_attn.q_proj.weight)


# ------------------------------------------------------------------------------------------------------------- training


def test_the_noise_is_uniform_as_wide_as_the_length_says_and_drawn_anew(target):
    """(rand - 1/2) * width * 512 / length on the features that are read, never on those to predict; a function of the
    generator alone.
    """
    drafter = _made(target, feature_noise=0.1, ce_weight=0.0)
    batch = batch_of(target, texts([128, 64], seed=1), drafter.taps)
    read = []
    network = drafter.network
    original = network.attention_input
    network.attention_input = lambda embedded, feature: read.append(feature) or original(embedded, feature)
    generator = torch.Generator().manual_seed(0)
    exercises = [drafter.prepare(batch, generator) for _ in range(2)]
    again = drafter.prepare(batch, torch.Generator().manual_seed(0))
    assert exercises[0] == again
    assert exercises[0] != exercises[1]
    totals = [float(drafter.losses(batch, exercise, 0.0).total.detach()) for exercise in (*exercises, again)]
    assert totals[0] == totals[2] != totals[1]
    noise = read[0] - drafter.fuse(batch.features)  # the first call is for keys and values of all rows
    for part, width in ((noise[:128], 0.1 * 512 / 128), (noise[128:], 0.1 * 512 / 64)):
        assert part.abs().max() <= width / 2
        # 64 * 32 values at least: the standard deviation of a uniform law within 5 %, the mean within 5 deviations.
        assert float(part.std()) == pytest.approx(width / 12**0.5, rel=0.05)
        assert abs(float(part.mean())) < 5 * width / 12**0.5 / part.numel() ** 0.5


def test_without_noise_nothing_is_drawn(target):
    """Width 0: the loss is the same whatever the generator."""
    drafter = _made(target, feature_noise=0.0)
    batch = batch_of(target, texts([20], seed=1), drafter.taps)
    totals = {
        float(drafter.losses(batch, drafter.prepare(batch, torch.Generator().manual_seed(seed)), 0.0).total.detach())
        for seed in range(3)
    }
    assert len(totals) == 1


def test_its_losses_are_weighted_as_asked(target):
    """Feature and token loss: each alone, and the defaults 1.0 and 0.1 of the paper's code."""
    batch = batch_of(target, texts([20], seed=1), (target.num_layers,))

    def total(**weights):
        drafter = _made(target, feature_noise=0.0, **weights)
        losses = drafter.losses(batch, drafter.prepare(batch, torch.Generator().manual_seed(0)), 0.0)
        return float(losses.total.detach()), losses.metrics

    whole, metrics = total()
    feature, _ = total(ce_weight=0.0)
    tokens, _ = total(feature_weight=0.0, ce_weight=1.0)
    assert whole == pytest.approx(feature + 0.1 * tokens, rel=1e-5)
    assert metrics["feature"] == (pytest.approx(feature, rel=1e-5), 18)
    assert metrics["soft_ce@1"] == (pytest.approx(tokens, rel=1e-5), 18)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"layers": 2}, "layers"),
        ({"taps": (1,)}, "taps"),
        ({"taps": (2, 4)}, "taps"),
        ({"draft_vocab_size": 265}, "draft_vocab_size"),
        ({"feature_weight": 0.0, "ce_weight": 0.0}, "ce_weight"),
    ],
)
def test_settings_that_no_eagle_can_have_are_named(settings, option, target):
    """An OptionError with the option's name, before anything is trained; its own tap and one layer may be spelt out."""
    with pytest.raises(OptionError, match=option):
        _made(target, **settings)
    assert _made(target, layers=1, taps=(4,)).taps == (4,)


def test_ts_4_a_config_of_two_layers_is_refused(target):
    """TS-4: what this version cannot run as it was trained is not run at all.

    https://github.com/vllm-project/vllm/issues/56792
    """
    content = _made(target).config.model_dump()
    content["transformer_layer_config"]["num_hidden_layers"] = 2
    with pytest.raises(ValueError, match="num_hidden_layers must be 1"):
        EagleConfig(**content)
