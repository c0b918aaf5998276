"""EAGLE-3's own conventions: taps, norms, head, the training-time test, what it refuses."""

from __future__ import annotations

import pytest
import torch

from drafters.kinds import learned
from drafters.learning import (
    always,
    batch_of,
    decoding,
    features_of,
    give,
    plan_for,
    shaken,
    texts,
    tiny_target,
    view_of,
)
from forerun.drafters.base import LoadContext
from forerun.drafters.config import parse_config
from forerun.drafters.eagle3 import Eagle3
from forerun.drafters.eagle3.config import Eagle3Config, Eagle3Settings, default_taps
from forerun.errors import OptionError
from forerun.target.base import Batch, Segment

H, V = 32, 264
VARIANTS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def _made(target, **settings):
    return Eagle3.design(target, Eagle3Settings(**settings), plan_for(target))


def _variant(target, variant):
    """The same weights in every variant, as far as they have the same names; norms that are not all ones."""
    drafter = _made(target, **VARIANTS[variant])
    drafter.network.load_state_dict(shaken(_made(target, init="random")).network.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in drafter.network.named_parameters():
            if name.startswith(("input_norm", "fc_norm")):
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    return drafter


def _draft(drafter, text, k=3):
    drafter.allocate(8)
    give(drafter, text, 0, len(text) - 1)
    [draft] = drafter.propose([view_of(text, k)], always)
    return draft


def test_ts_4_every_flag_is_written_and_changes_what_comes_out(target, tmp_path):
    """TS-4: the four norm flags: each is in config.json, changes the drafts' law, and survives saving and loading.

    https://github.com/vllm-project/vllm/issues/56792
    """
    [text] = texts([20], seed=5)
    confidences = {}
    for variant, flags in VARIANTS.items():
        drafter = _variant(target, variant)
        drafter.save(tmp_path / variant)
        loaded = parse_config({"model": str(tmp_path / variant)}).build(LoadContext(target))
        for flag in list(VARIANTS)[1:]:
            assert getattr(loaded.config, flag) == flags.get(flag, False)
        own, read = _draft(drafter.for_decoding(target.dtype), text), _draft(loaded, text)
        assert own.confidence == read.confidence
        assert own.tokens == read.tokens
        confidences[variant] = read.confidence
    firsts = [c[0] for v, c in confidences.items() if v != "norm_output"]
    assert len({round(c, 4) for c in firsts}) == 4
    # norm_output is about what a row hands to the next: the first token is the same, the second is not.
    assert confidences["norm_output"][0] == pytest.approx(confidences["plain"][0], rel=1e-4)
    assert confidences["norm_output"][1] != pytest.approx(confidences["plain"][1], rel=1e-2)


def _alone(attention, rows):
    """Attention of one row that sees itself only: its own value, whatever query and key are."""
    still = torch.ones(1, 16), torch.zeros(1, 16)
    return attention.output(attention.keys_values(rows, still)[1].repeat(1, 2, 1))


def test_the_row_is_that_of_the_formulas(target):
    """Fusion, attention input, residual and head written out for one row without anything before it."""
    for variant in VARIANTS:
        drafter = _variant(target, variant)
        network, layer = drafter.network, drafter.network.layers[0]
        raw = torch.randn(1, 3 * H, generator=torch.Generator().manual_seed(2))
        embedded = target.embed(torch.tensor([7]))

        def rms(x, weight):
            return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        columns = raw
        if variant == "norm_before_fc":
            columns = rms(raw, network.input_norm.weight)
        if variant == "fc_norm":
            columns = torch.cat([rms(raw[:, i * H : i * H + H], network.fc_norm[i].weight) for i in range(3)], -1)
        feature = columns @ network.fc.weight.T
        normed = rms(feature, layer.hidden_norm.weight)
        attention = layer.self_attn
        value = torch.cat([rms(embedded, layer.input_layernorm.weight), normed], -1) @ attention.v_proj.weight.T
        x = (normed if variant == "norm_before_residual" else feature) + value.repeat(1, 2) @ attention.o_proj.weight.T
        y = rms(x, layer.post_attention_layernorm.weight)
        mlp = layer.mlp
        gate = y @ mlp.gate_proj.weight.T
        x = x + (gate * gate.sigmoid() * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        logits = rms(x, network.norm.weight) @ network.lm_head.weight.T

        hidden = network(embedded, drafter.fuse(raw), _alone)
        torch.testing.assert_close(hidden, x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drafter.logits(hidden), logits, rtol=1e-4, atol=1e-4)
        fed = rms(x, network.norm.weight) if variant == "norm_output" else x
        torch.testing.assert_close(network.feedback(hidden), fed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pruned", [None, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_have_the_names_and_shapes_of_the_public_layout(target, variant, pruned):
    """formats, 3.2: projections read 2H columns; the head has D rows; norms of the variants only where they are on."""
    expected = {
        "fc.weight": (H, 3 * H), "layers.0.input_layernorm.weight": (H,), "layers.0.hidden_norm.weight": (H,),
        "layers.0.self_attn.q_proj.weight": (32, 2 * H), "layers.0.self_attn.k_proj.weight": (16, 2 * H),
        "layers.0.self_attn.v_proj.weight": (16, 2 * H), "layers.0.self_attn.o_proj.weight": (H, 32),
        "layers.0.post_attention_layernorm.weight": (H,), "layers.0.mlp.gate_proj.weight": (64, H),
        "layers.0.mlp.up_proj.weight": (64, H), "layers.0.mlp.down_proj.weight": (H, 64),
        "norm.weight": (H,), "lm_head.weight": (pruned or V, H),
        **({"input_norm.weight": (3 * H,)} if variant == "norm_before_fc" else {}),
        **({f"fc_norm.{i}.weight": (H,) for i in range(3)} if variant == "fc_norm" else {}),
    }  # fmt: skip
    drafter = _made(target, draft_vocab_size=pruned, **VARIANTS[variant])
    assert {name: tuple(p.shape) for name, p in drafter.network.state_dict().items()} == expected


def test_it_starts_as_the_targets_last_layer_on_its_last_tap(target):
    """fc passes the last tap on, the layer works on the feature's half, norm and head are the target's: with the tap
    behind the last layer's input it says nearly what the target says.
    """
    drafter = _made(target, layer_type="qwen3", taps=(1, 2, 3), init="target")
    [text] = texts([12], seed=4)
    raw = features_of(target, text, drafter.taps)
    torch.testing.assert_close(drafter.fuse(raw), raw[:, -H:])
    copy = decoding(drafter)
    give(copy, text, 0, 11)
    seen, original = [], copy.vocabulary.to_target
    copy.vocabulary.to_target = lambda logits: seen.append(original(logits)) or seen[-1]
    copy.propose([view_of(text, 1)], always)
    target.allocate(4)
    logits = target.forward(Batch([Segment(text[:11], 0, [0], 1)])).logits
    # Tap 3 of 4 layers is the last layer's input: at the start the drafter repeats the law of the row before.
    torch.testing.assert_close(seen[0], logits, rtol=1e-3, atol=1e-3)


def test_a_pruned_head_starts_from_the_rows_that_are_kept(target):
    """Rows of the head are the target's at the kept ids, the most frequent ones of the data."""
    drafter = _made(target, draft_vocab_size=50, init="target")
    assert drafter.vocabulary.kept.tolist() == list(range(V - 50, V))  # counts ascend with the id
    torch.testing.assert_close(drafter.network.lm_head.weight, target.model.lm_head.weight[V - 50 :])


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (2, 18, 33)), (24, (2, 12, 21)), (12, (2, 6, 9)), (7, (2, 3, 4)), (6, (1, 3, 5)), (5, (1, 2, 4)),
        (4, (1, 2, 3)), (3, (1, 2, 3)), (2, (1, 2)), (1, (1,)),
    ],
)  # fmt: skip
def test_taps_spread_over_targets_of_any_depth(layers, taps):
    """2, n // 2, n - 3 where these ascend; a low, a middle and a high one below."""
    assert default_taps(layers) == taps


def test_later_steps_weigh_less_and_all_rows_divide(target):
    """Step t counts decay^t; what the loss is divided by is every position, whatever is taught."""
    batch = batch_of(target, texts([20, 10], seed=1), (1, 2, 3), learned_from=6)

    def total(**options):
        drafter = _made(target, **options)
        exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
        losses = drafter.losses(batch, exercise, 0.0)
        return exercise.weight, float(losses.total.detach()), losses.metrics

    weight, one, _ = total(ttt_steps=1)
    _, three, metrics = total(ttt_steps=3, step_decay=0.5)
    assert weight == 30
    parts = [metrics[f"soft_ce@{k}"][0] for k in (1, 2, 3)]
    assert one == pytest.approx(parts[0], rel=1e-5)
    assert three == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2], rel=1e-5)
    # Learned tokens 6 .. 19 and 6 .. 9: step t teaches the rows two and t before them.
    assert [metrics[f"teacher_forced_acceptance@{k}"][1] for k in (1, 2, 3)] == [18, 18, 18]


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"layers": 2}, "layers"),
        ({"taps": (2, 1)}, "taps"),
        ({"taps": (1, 5)}, "taps"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm"),
        ({"draft_vocab_size": 265}, "draft_vocab_size"),
    ],
)
def test_settings_that_no_eagle3_can_have_are_named(settings, option, target):
    """An OptionError with the option's name, before anything is trained."""
    with pytest.raises(OptionError, match=option):
        _made(target, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"norm_before_residual": None}, "norm_before_residual"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(change, message, target):
    """Both norms before fc at once, and a flag without a value."""
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**{**_made(target).config.model_dump(), **change})


def test_every_step_of_the_unroll_counts_in_an_estimate_of_work():
    """A kind that passes its data once computes a row per token; EAGLE-3 one per step of the training-time test."""
    target = tiny_target()
    assert learned("eagle3", target, ttt_steps=3).plan_rows_per_token([5, 9]) == 3
    assert learned("eagle", target).plan_rows_per_token([5, 9]) == 1
