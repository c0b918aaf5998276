"""Drafters of other projects: named, refused, and never taken for a small model or for a damaged folder."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import save_file

from drafters.learning import tiny_target
from forerun.drafters.base import LoadContext
from forerun.drafters.config import NOT_BUILT, WITHOUT, parse_config
from forerun.drafters.fake import Never
from forerun.drafters.foreign import refuse_foreign
from forerun.errors import ModelError, OptionError

LAYER = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 264}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LAYER}
QWEN3 = {"model_type": "qwen3", **LAYER}
TAPS = {"mask_token_id": 5, "target_layer_ids": [1, 2]}
DSPARK = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, **QWEN3}
EAGLE_3 = ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight")
EAGLE_1 = ("fc.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.weight")

KNOWN = {
    "speculators eagle3": ({"speculators_model_type": "eagle3"}, "an EAGLE-3 drafter in the speculators", "eagle3"),
    "speculators dflash": ({"speculators_model_type": "dflash"}, "a DFlash drafter in the speculators", "dflash"),
    "speculators dspark": ({"speculators_model_type": "dspark"}, "a DSpark drafter in the speculators", "dspark"),
    "speculators, new": ({"speculators_model_type": ["x"]}, "a drafter in the speculators", None),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, "a P-EAGLE drafter in the speculators", None),
    "SpecForge": ({"architectures": ["LlamaForCausalLMEagle3"], **LAYER}, "EAGLE-3 .* of SpecForge", "eagle3"),
    "EAGLE's own": ({**LLAMA, "draft_vocab_size": 60}, "EAGLE-3 .* of EAGLE's own code", "eagle3"),
    "vLLM's EAGLE": ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, "EAGLE-1 .* another engine", "eagle"),
    "z-lab": ({"architectures": ["DFlashDraftModel"], "dflash_config": TAPS, **QWEN3}, "DFlash .* z-lab", "dflash"),
    "DFlash by key": ({"dflash_config": TAPS, **QWEN3}, "DFlash .* z-lab", "dflash"),
    "DeepSpec DSpark": (DSPARK, "a DSpark drafter in DeepSpec's format", "dspark"),
    "DeepSpec DFlash": ({**DSPARK, "markov_rank": 0}, "a DFlash drafter in DeepSpec's format", "dflash"),
    "DeepSpec EAGLE-3": ({"architectures": ["Qwen3Eagle3Model"], **QWEN3}, "EAGLE-3 .* DeepSpec's format", "eagle3"),
    "SGLang DSpark": ({**DSPARK, "dflash_config": TAPS}, "a DSpark drafter in the format of SGLang", "dspark"),
    "Medusa": ({"medusa_num_heads": 3, "base_model_name_or_path": "x"}, "Medusa heads", None),
    "Medusa of vLLM": ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "Medusa heads", None),
    "Hydra": ({"hydra_num_heads": 3}, "Hydra heads", None),
    "MLP speculator": ({"model_type": "mlp_speculator"}, "an MLP speculator", None),
    "MTP": ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, r"\(MTP\)", None),
    "MTP of Qwen": ({"architectures": ["Qwen3_5MTP"]}, r"\(MTP\)", None),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def _folder(folder: Path, config: object, names: tuple[str, ...] = (), pickled: bool = False) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.zeros(1) for name in names}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    elif names:
        save_file(tensors, folder / "model.safetensors")
    return folder


def _refusal(folder: Path | str, target, **keys) -> str:
    with pytest.raises(ModelError) as caught:
        parse_config({"model": str(folder), **keys}).build(LoadContext(target))
    return str(caught.value)


@pytest.mark.parametrize(("config", "what", "kind"), KNOWN.values(), ids=KNOWN)
def test_a_drafter_of_another_project_is_named_and_refused(config, what, kind, target, tmp_path):
    """Its kind, whose format it is, and what to do instead: one line, whatever method was asked for."""
    folder = _folder(tmp_path, config)
    said = _refusal(folder, target)
    assert re.search(rf"\A--drafter: {re.escape(str(folder))} holds .*{what}.*\Z", said)
    assert f"`forerun train {kind or 'dspark'}`" in said
    assert ("there is no importer" in said) == (kind is not None)
    assert said == _refusal(folder, target, method="eagle3") == _refusal(folder, target, method="draft_model")


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(("names", "what"), [(EAGLE_1, "an EAGLE-1 drafter"), (EAGLE_3, "an EAGLE-3 drafter")])
def test_eagle_under_the_config_of_a_llama_is_told_by_its_tensors(names, what, prefix, pickled, target, tmp_path):
    """Its config says nothing of it; the names are read in a pickle too, which is not asked to be converted."""
    folder = _folder(tmp_path, LLAMA, tuple(prefix + name for name in names), pickled)
    assert f"{folder} holds {what} in the format of EAGLE's own code" in _refusal(folder, target)


class _Trap:
    def __reduce__(self):
        return print, ("the pickle ran",)


def test_names_are_read_in_a_pickle_without_running_it(target, tmp_path, capsys):
    """What it would do when it is loaded does not happen."""
    folder = _folder(tmp_path, LLAMA)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
        file.writestr("x/data.pkl", pickle.dumps({name: _Trap() for name in EAGLE_1}))
    assert "an EAGLE-1 drafter" in _refusal(folder, target)
    assert "ran" not in capsys.readouterr().out


MODELS = {
    "a model": LLAMA,
    "layers for MTP beside a whole model": {**LLAMA, "num_nextn_predict_layers": 1},
    "a model that sees": {"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl"},
    "a drafter trained here": {"forerun_format": 1, "method": "eagle3", "draft_vocab_size": 60},
    "nothing given": {**LLAMA, "draft_vocab_size": None},
    "no names": {**LLAMA, "architectures": [None, 3], "model_type": ["dflash"]},
    "no mapping": ["dflash_config"],
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_what_is_no_drafter_of_others_is_left_to_its_own_loader(config, tmp_path):
    """Also where its weights are no model's: whoever loads it says so."""
    folder = _folder(tmp_path, config, ("model.layers.0.mlp.up_proj.weight",))
    refuse_foreign(str(folder))
    (folder / "model.safetensors").unlink()
    for content in (b"no pickle", b""):
        (folder / "pytorch_model.bin").write_bytes(content)
        refuse_foreign(str(folder))
    for content in ("{", "[" * 10**6):
        (folder / "config.json").write_text(content)
        refuse_foreign(str(folder))


def test_a_drafter_of_the_hub_is_named_by_its_id(target, tmp_path, monkeypatch):
    """The place in the cache, where it was fetched to, says nothing to whoever typed the id."""
    _folder(tmp_path, {"speculators_model_type": "dspark"})
    monkeypatch.setattr("forerun.drafters.foreign.find_folder", lambda *_: tmp_path)
    assert _refusal("some/drafter", target).startswith("--drafter: some/drafter holds a DSpark drafter")


class Own(Never):
    """A class of one's own that takes a folder."""

    config_keys = Never.config_keys | {"model"}

    @classmethod
    def load(cls, options: Mapping[str, Any], context: LoadContext) -> Self:
        return cls({}, 1)


def test_a_class_of_ones_own_may_read_what_it_likes(target, tmp_path):
    """Who writes an importer of his own is not stopped."""
    folder = _folder(tmp_path, {"speculators_model_type": "eagle3"})
    config = parse_config({"method": f"{__name__}:Own", "model": str(folder)})
    assert isinstance(config.build(LoadContext(target)), Own)


def test_a_folder_without_a_config_is_not_called_unreadable(target, tmp_path):
    """What a trained drafter's folder would be is said instead of the number of a system error."""
    said = _refusal(tmp_path, target, method="eagle3")
    assert said == f"--drafter: {tmp_path} has no config.json; expected best/ in the --out of `forerun train`"


@pytest.mark.parametrize("key", WITHOUT)
def test_a_key_of_vllm_that_has_no_counterpart_is_to_be_left_out(key):
    """With the reason; the nearest of our keys is something else."""
    with pytest.raises(OptionError, match=rf"\A{key}: .*; leave it out: {WITHOUT[key]}\Z"):
        parse_config({"method": "eagle3", "model": "x", key: 1})


@pytest.mark.parametrize("name", ["deepseek_mtp", "NEXTN", "hydra", "peagle", "custom_class"])
def test_methods_of_others_get_a_reason_instead_of_a_near_name(name, target):
    """None of them is a slip for one of ours."""
    with pytest.raises(OptionError, match=re.escape(NOT_BUILT[name.lower()])):
        parse_config({"method": name}).build(LoadContext(target))
