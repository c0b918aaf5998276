"""What drafters borrow from a target: embedding, some columns of the head, rotation, measures, layers to start from."""

from __future__ import annotations

import pytest
import torch
from target_families import BASE, CONFIGS, FURTHER, LAYERS, LONGROPE, VOCAB, pair, stock_model, texts

from forerun.errors import OptionError
from forerun.target.base import Batch, Segment
from forerun.target.donor import final_norm_weight, layer_weights, narrowed
from forerun.target.hf import HFTarget
from forerun.target.packed import pack_linears
from forerun.target.rope import inverse_frequencies
from forerun.target.table import LetterTokenizer, history_model

ROTATED = [name for name in (*CONFIGS, "granite", "olmo2", "qwen2_moe") if name != "phi3"]


@pytest.mark.parametrize("name", [*CONFIGS, "granite"])
def test_the_embedding_is_hidden_state_0(name):
    """Scaled as the model scales it (Gemma, Granite), on ids of any shape."""
    _, target = pair(name)
    [text] = texts((12,))
    target.allocate(1)
    expected = target.forward(Batch([Segment(text, 0, [0], 0)]), (0,)).features
    torch.testing.assert_close(target.embed(torch.tensor(text)), expected, rtol=1e-6, atol=1e-6)
    assert target.embed(torch.tensor([text[:6], text[6:]])).shape == (2, 6, 32)


@pytest.mark.parametrize("name", [*CONFIGS, *FURTHER])
def test_some_columns_of_the_head_are_those_columns(name):
    """Soft-cap and scale included; the model itself stays whole."""
    _, target = pair(name)
    hidden = torch.randn(2, 3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 7, 8, VOCAB - 1])
    before = target.logits(hidden)
    torch.testing.assert_close(target.partial_logits(ids)(hidden), before[..., ids], rtol=1e-6, atol=1e-6)
    assert torch.equal(target.logits(hidden), before)


def test_columns_of_a_packed_head_have_gradients_and_the_same_numbers():
    """bfloat16 heads lie packed; a drafter in training differentiates through its columns."""
    target = HFTarget(stock_model("qwen3", dtype=torch.bfloat16), LetterTokenizer(VOCAB))
    if "packed" not in pack_linears(target.model):
        pytest.skip("this CPU packs nothing")
    ids = torch.tensor([3, 9, 20])
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    logits = target.partial_logits(ids)(hidden)
    torch.testing.assert_close(logits, target.logits(hidden)[:, ids], rtol=1e-2, atol=1e-2)
    logits.float().sum().backward()
    weight = target.model.lm_head.weight[ids].float().sum(0)
    torch.testing.assert_close(hidden.grad.float(), weight.expand(5, -1), rtol=1e-2, atol=1e-2)


def test_the_table_targets_have_the_same_parts():
    target = history_model(6)
    target.allocate(1)
    out = target.forward(Batch([Segment([1, 2, 3], 0, [0], 3)]), (0,))
    assert torch.equal(target.embed(torch.tensor([1, 2, 3])), out.features)
    assert torch.equal(target.partial_logits(torch.tensor([4, 5]))(out.logits), out.logits[:, 4:])


@pytest.mark.parametrize("name", ROTATED)
def test_rotation_is_the_models_own(name):
    """The frequencies a drafter would use are those of the model's full-attention layers."""
    stock, target = pair(name)
    rotary = stock.model.rotary_emb
    own = getattr(rotary, "full_attention_inv_freq", None)
    own = rotary.inv_freq if own is None else own
    frequencies, factor = inverse_frequencies(target.shape.rope_parameters, target.shape.head_dim, target.window)
    torch.testing.assert_close(frequencies, own)
    assert factor == 1.0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_scaled_rotation_is_the_models_own(rope):
    """linear, llama3 and yarn: frequencies and factor as transformers' own layers have them."""
    import transformers as tf

    parameters = {"rope_theta": 10000.0, **rope}
    stock = tf.LlamaForCausalLM(tf.LlamaConfig(**BASE, rope_parameters=dict(parameters)))
    target = HFTarget(stock, LetterTokenizer(VOCAB))
    frequencies, factor = inverse_frequencies(target.shape.rope_parameters, 8, target.window)
    torch.testing.assert_close(frequencies, stock.model.rotary_emb.inv_freq)
    assert factor == pytest.approx(stock.model.rotary_emb.attention_scaling)


def test_longrope_is_fixed_to_its_short_factors():
    """A target is served within its original length, where the factors are the short ones; so is its drafter."""
    stock, target = pair("phi3")
    frequencies, _ = inverse_frequencies(target.shape.rope_parameters, 8, target.window)
    expected = 1 / (torch.tensor(LONGROPE["short_factor"]) * 10000.0 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(frequencies, expected)
    torch.testing.assert_close(frequencies, stock.model.rotary_emb.inv_freq)


def test_an_unknown_rotation_is_named():
    with pytest.raises(OptionError, match="spiral"):
        inverse_frequencies({"rope_type": "spiral", "rope_theta": 1.0}, 8, 64)


def test_a_layer_is_given_by_portable_names():
    """Qwen3 has all of it; Qwen2 no head norms; Phi-3's fused and Gemma's sandwiched parts are left out."""
    full = {f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    full |= {f"mlp.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    head_norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    expected = {
        "qwen3": full | norms,
        "llama": full - head_norms | norms,
        "qwen2": full - head_norms | norms,
        "gemma3": full,
        "phi3": {"self_attn.o_proj.weight", "mlp.down_proj.weight"} | norms,
    }
    for name, parts in expected.items():
        stock, target = pair(name)
        given = layer_weights(target, LAYERS - 1)
        assert given.keys() == parts, name
        for part, weight in given.items():
            own = stock.model.layers[-1].get_parameter(part)
            shift = 1.0 if name == "gemma3" and "norm" in part else 0.0
            torch.testing.assert_close(weight, own + shift, rtol=1e-3, atol=1e-3)


def test_a_narrower_feed_forward_keeps_the_neurons_that_write_most():
    """Neurons without output are dropped first: cut to the others the layer computes what it did."""
    _, target = pair("llama")
    mlp = target.model.model.layers[-1].mlp
    silent = torch.tensor([3, 10, 11, 40])
    with torch.no_grad():
        mlp.down_proj.weight[:, silent] = 0
    given = layer_weights(target, LAYERS - 1)
    cut = narrowed(given, 44)
    gate, up, down = (cut[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert (len(gate), len(up), down.shape[1]) == (44, 44, 44)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    ours = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(ours, mlp(x), rtol=1e-4, atol=1e-5)
    assert narrowed(given, 48) is given
    assert narrowed({"norm.weight": x}, 3) == {"norm.weight": x}


def test_the_final_norm_is_what_it_multiplies_with():
    """1 + w for Gemma; nothing where it is no RMS norm."""
    stock, target = pair("gemma2")
    torch.testing.assert_close(final_norm_weight(target), stock.model.norm.weight + 1, rtol=1e-3, atol=1e-3)
    _, opt = pair("gpt2")
    assert final_norm_weight(opt) is None
