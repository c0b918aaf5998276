"""Which target a drafter was trained for: what must change a fingerprint, what must not, and which part it is."""

from __future__ import annotations

import copy

import pytest
import torch
from target_families import stock_model

from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import Fingerprint, differences, fingerprint
from forerun.target.hf import HFTarget
from forerun.target.packed import pack_linears
from forerun.target.table import ByteTokenizer


def _print(model=None, tokenizer=None):
    return fingerprint(HFTarget(copy.deepcopy(model or stock_model("llama")), tokenizer or ByteTokenizer()))


@pytest.fixture(scope="module")
def made_for():
    return _print()


def test_the_same_target_has_the_same_fingerprint(made_for):
    """Also after a round trip through a card."""
    assert differences(made_for, _print()) == []
    assert Fingerprint.from_dict(made_for.to_dict()) == made_for
    with pytest.raises(KeyError, match="weights"):
        Fingerprint.from_dict({k: v for k, v in made_for.to_dict().items() if k != "weights"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_recorded_but_is_no_difference(made_for, dtype):
    """float32 weights loaded in bfloat16 or float64: the same model, another dtype."""
    other = _print(stock_model("llama", dtype=dtype))
    assert differences(made_for, other) == []
    assert other.dtype == dtype_name(dtype) != made_for.dtype


def test_packed_layers_change_nothing():
    """Weights in the CPU kernel's layout are read in their plain one. (Where nothing can be packed this is trivial.)"""
    model = stock_model("llama", dtype=torch.bfloat16)
    packed = HFTarget(copy.deepcopy(model), ByteTokenizer())
    pack_linears(packed.model)
    assert fingerprint(packed) == _print(model)


def test_each_part_is_told_apart(made_for):
    """Other weights, another end of the config, another tokenizer, another template: exactly that part differs."""
    tuned = stock_model("llama")
    with torch.no_grad():
        tuned.model.layers[3].mlp.up_proj.weight.mul_(1.05)
    assert differences(made_for, _print(tuned)) == ["weights"]
    rotated = stock_model("llama")
    rotated.config.rope_parameters = {**rotated.config.rope_parameters, "rope_theta": 500000.0}
    assert differences(made_for, _print(rotated)) == ["config"]
    assert differences(made_for, _print(tokenizer=ByteTokenizer(chat_template="{{ 1 }}"))) == ["chat_template"]

    class Upside(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return super().encode(text)[::-1]

    assert differences(made_for, _print(tokenizer=Upside())) == ["tokenizer"]


def test_fields_that_change_no_forward_change_no_fingerprint(made_for):
    """Names, end ids, what a release writes beside the model, and fields that are off."""
    model = stock_model("llama")
    model.config.eos_token_id = 7
    model.config.use_cache = False
    model.config.name_or_path = "elsewhere"
    model.config.a_switch_of_a_later_release = False
    assert differences(made_for, _print(model)) == []
