"""What could not be decoded exactly is refused when it is loaded, with the layer and the reason."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from target_families import BASE, LAYERS, LONGROPE, VOCAB, WINDOW, pair, stock_model, texts
from torch import nn

from forerun.drafters.learned.head import head_rows
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.errors import OptionError, UnsupportedModel
from forerun.target.base import Batch, Segment
from forerun.target.hf import HFTarget
from forerun.target.noise import measure_noise


def _refused(model, match, **options):
    with pytest.raises(UnsupportedModel, match=match):
        HFTarget(model, None, **options)


def test_attention_sinks():
    """gpt-oss passes `s_aux` to its attention: named, with the layer."""
    config = tf.GptOssConfig(**BASE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)
    _refused(tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), r"layer 0 .*s_aux")


def test_chunked_attention():
    """Llama 4's chunks are no sliding window."""
    config = tf.Llama4TextConfig(
        **BASE, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=16, moe_layers=[],
        layer_types=["chunked_attention"] * LAYERS, no_rope_layers=[1] * LAYERS,
    )  # fmt: skip
    _refused(tf.AutoModelForCausalLM.from_config(config), r"layer 0 .*chunked_attention")


def test_a_mask_that_is_neither_causal_nor_a_window():
    """Gemma 3 with bidirectional attention: found by trying the mask's own law, not by a name."""
    config = tf.Gemma3TextConfig(**BASE, sliding_window=WINDOW, use_bidirectional_attention=True)
    _refused(tf.AutoModelForCausalLM.from_config(config), r"layer 0 .*neither causal nor a sliding window")


def test_encoder_decoder():
    """T5-like models have no decoder of their own to serve."""
    config = tf.T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    _refused(tf.T5ForConditionalGeneration(config), "encoder-decoder")


def test_models_without_the_attention_interface():
    """Bloom computes its attention itself."""
    config = tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2)
    _refused(tf.BloomForCausalLM(config), "attention interface|packed rows", max_model_len=64)


class _Silent(nn.Module):
    """A layer that mixes tokens without asking the attention interface."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **_):
        return hidden_states + hidden_states.cumsum(1)


def test_one_layer_that_does_not_call_attention_is_named():
    """Attention calls are counted per layer: a single foreign layer is found, whatever the config says."""
    model = stock_model("llama")
    model.model.layers[2] = _Silent(model.model.layers[2])
    _refused(model, r"layer 2 \(_Silent\) called the attention interface 0 times")


def test_what_the_recording_cannot_see_shows_in_the_logits():
    """An eager attention that does something of its own is found by comparing logits with the model's own forward."""
    model = stock_model("llama")

    class Crooked(type(model.model.norm)):
        def forward(self, hidden):
            frame = self.owner.config._attn_implementation
            return super().forward(hidden) if frame != "eager" else super().forward(hidden.flip(-1))

    model.model.norm.__class__ = Crooked
    object.__setattr__(model.model.norm, "owner", model)
    _refused(model, "its logits differ from those of its own forward")


PADDED = 8
"""Ids at the end that are no tokens."""


def _padded_model(value: float = -torch.inf):
    """A model whose head keeps its padded ids out by its bias."""
    model = stock_model("llama")
    plain = model.lm_head
    model.lm_head = nn.Linear(plain.in_features, plain.out_features, bias=True)
    model.lm_head.weight = plain.weight
    with torch.no_grad():
        model.lm_head.bias.zero_()
        model.lm_head.bias[-PADDED:] = value
    return model


def test_padded_ids_may_have_no_mass_at_all():
    """-inf on both sides is a law like any other: the model is served, its noise is a number, its head gives rows."""
    target = HFTarget(_padded_model(), None)
    target.allocate(4)
    logits = target.forward(Batch([Segment([3, 4, 5], 0, [0], 3)])).logits
    assert torch.equal(logits == -torch.inf, (torch.arange(VOCAB) >= VOCAB - PADDED).expand(3, -1))
    noise = measure_noise(target, texts((40,))[0], block=5)
    assert 0 <= noise.max_difference < 1e-4
    rows = head_rows(target, DraftVocabulary(VOCAB))
    torch.testing.assert_close(rows[:-PADDED], target.model.lm_head.weight[:-PADDED])
    assert torch.equal(rows[-PADDED:], torch.zeros(PADDED, 32))


def test_ids_without_mass_on_one_side_only_are_named():
    """A model that keeps ids out where we cannot see it does something that decoding here would not."""
    model = _padded_model(0.0)

    class Masking(nn.Linear):
        """Keeps them out from its second call on: the first is ours, then comes the model's own forward."""

        calls = 0

        def forward(self, hidden):
            Masking.calls += 1
            logits = super().forward(hidden)
            logits[..., -PADDED:] = -torch.inf if Masking.calls > 1 else logits[..., -PADDED:]
            return logits

    model.lm_head.__class__ = Masking
    _refused(model, rf"disagree which ids have a logit of -inf \({PADDED} ids, the first is {VOCAB - PADDED}\)")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused_as_such(value):
    """Not as a difference of nan percent: the model's own forward has them already."""
    _refused(_padded_model(value), r"logits are NaN or \+inf in its own forward; .*--dtype float32")


def test_a_head_that_leaves_no_token_is_refused():
    """-inf everywhere is no law."""
    model = _padded_model()
    with torch.no_grad():
        model.lm_head.bias.fill_(-torch.inf)
    _refused(model, "gives no token any probability")


@pytest.mark.parametrize("max_model_len", [None, 100])
def test_ts_8_longrope_is_served_where_its_factors_are_fixed(max_model_len):
    """TS-8: Phi-3's window ends at the original length, where the short factors hold; the target says so.

    https://github.com/vllm-project/vllm/issues/48894
    """
    _, target = pair("phi3", max_model_len=max_model_len)
    assert target.window == (max_model_len or LONGROPE["original_max_position_embeddings"])
    assert "longrope" in target.anatomy.notes[0]


def test_ts_8_longrope_beyond_its_original_length_is_refused():
    """TS-8: a longer window would let one request's length rotate all others."""
    with pytest.raises(OptionError, match=r"--max-model-len.*at most 128.*longrope"):
        pair("phi3", max_model_len=129)


def test_ts_8_dynamic_rope_stays_inside_its_fixed_range():
    """TS-8: `dynamic` factors move only beyond max_position_embeddings; there is no window there."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**BASE, "max_position_embeddings": 32}, rope_parameters=rope))
    target = HFTarget(model, None)
    assert target.window == 32
    assert "dynamic" in target.anatomy.notes[0]
    target.allocate(2)
    before = model.model.rotary_emb.inv_freq.clone()
    target.forward(Batch([Segment([3], 31, [0, 1], 1)]))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("length", [0, -1, 257])
def test_li_1_a_window_longer_than_the_models_is_refused(length):
    """LI-1: the served window never exceeds the positions the model has.

    https://github.com/vllm-project/vllm/issues/5342 https://github.com/turboderp-org/exllamav2/issues/274
    https://github.com/vllm-project/vllm/pull/16087 https://github.com/vllm-project/vllm/pull/24662
    https://github.com/vllm-project/vllm/issues/57941 https://github.com/predibase/lorax/pull/793
    https://github.com/NVIDIA/TensorRT-LLM/issues/16826 https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/499
    """
    with pytest.raises(OptionError, match=r"--max-model-len.*at most 256"):
        pair("llama", max_model_len=length)


def test_li_1_rows_beyond_the_window_are_a_bug_of_the_caller():
    """LI-1: the last position can be fed, the one after it never is."""
    _, target = pair("llama", max_model_len=20)
    target.allocate(2)
    target.forward(Batch([Segment([3], 19, [0, 1], 1)]))
    with pytest.raises(AssertionError, match="beyond the window"):
        target.forward(Batch([Segment([3], 20, [0, 1], 1)]))
