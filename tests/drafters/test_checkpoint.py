"""The folder of a trained drafter: complete, explicit, for one target, or refused with the reason."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.kinds import SETTINGS, drafting, learned
from drafters.learning import always, give, plan_for, texts, tiny_target, view_of
from forerun.drafters.base import LoadContext
from forerun.drafters.config import parse_config
from forerun.drafters.eagle import Eagle
from forerun.errors import DoesNotFit, ModelError, OptionError
from forerun.target.fingerprint import fingerprint
from forerun.training.metrics import peak_memory

KINDS = [name for name in SETTINGS if "rnn" not in name]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def _load(folder, target, **keys):
    return parse_config({"model": str(folder), **keys}).build(LoadContext(target))


def _edit(folder, change):
    """Changes a config as another program would write it: the weights carry no hash of it."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_saved_drafter_drafts_as_the_one_in_training(name, target, tmp_path):
    """Save, load by the folder alone (its kind is in it): same drafts and confidences as the trained one's own copy."""
    drafter = learned(name, target, **({"draft_vocab_size": 60} if "pruned" in name else {}))
    drafter.save(tmp_path)
    loaded, own = _load(tmp_path, target), drafter.for_decoding(target.dtype)
    [text] = texts([25])
    drafts = []
    for one in (loaded, own):
        one.allocate(8)
        give(one, text, 0, 24)
        drafts += one.propose([view_of(text, 3)], always)
    assert type(loaded) is type(drafter)
    assert drafts[0].tokens == drafts[1].tokens
    assert drafts[0].confidence == drafts[1].confidence
    assert loaded.config == drafter.config


@pytest.mark.parametrize("name", ["eagle", "eagle3-pruned", "dflash", "dspark-rnn"])
def test_a_loaded_bfloat16_drafter_is_saved_whole(name, tmp_path):
    """CK-3: its linear layers are packed on a CPU, and in no state; a second round trip still changes no tensor."""
    target = tiny_target(dtype=torch.bfloat16)
    learned(name, target).save(tmp_path / "one")
    loaded = _load(tmp_path / "one", target)
    loaded.save(tmp_path / "two")
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert again.keys() == whole.keys()
    for key, tensor in whole.items():
        rounded = tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(again[key], rounded), key
    [text] = texts([25])
    drafts = []
    for one in (loaded, _load(tmp_path / "two", target), loaded.for_decoding(torch.bfloat16)):
        one.allocate(8)
        give(one, text, 0, 24)
        drafts.append(one.propose([view_of(text, 3)], always)[0].tokens)
    assert drafts[0] == drafts[1] == drafts[2]


def test_a_drafter_that_lost_a_tensor_is_not_saved_over_a_whole_one(target, tmp_path):
    """A network with a layer whose weights are in no state is refused before anything is written."""
    drafter = learned("eagle", target)
    drafter.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    drafter.network.fc = torch.nn.Identity()
    with pytest.raises(ModelError, match=r"fc\.weight"):
        drafter.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_saved_files_are_as_readable_as_any_other(target, tmp_path):
    """The umask decides who reads the weights, not the library that writes them."""
    (tmp_path / "other").touch()
    learned("eagle", target).save(tmp_path)
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_every_field_of_the_config_is_needed(target, tmp_path):
    """CK-3, TS-4: conventions are written, none has a default; one that is missing, or one more, is an error.

    https://github.com/vllm-project/speculators/issues/753
    """
    learned("dspark", target).save(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    for name in whole:
        if name in ("method", "forerun_format"):
            continue  # then it is no drafter of ours at all
        file.write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        with pytest.raises(ModelError, match=name):
            _load(tmp_path, target, method="dspark")
    file.write_text(json.dumps({**whole, "surprise": 1}))
    with pytest.raises(ModelError, match="surprise"):
        _load(tmp_path, target)


def test_a_wrong_set_of_tensors_is_refused_by_name(target, tmp_path):
    """CK-3: missing, left over, misshapen and non-finite tensors.

    https://github.com/vllm-project/vllm/issues/54526
    """
    learned("dspark", target).save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    broken = {
        "fc.weight is missing": {k: v for k, v in whole.items() if k != "fc.weight"},
        "extra.weight is left over": {**whole, "extra.weight": torch.zeros(1)},
        "norm.weight is": {**whole, "norm.weight": torch.zeros(3)},
        "fc.weight is not finite": {**whole, "fc.weight": torch.full_like(whole["fc.weight"], torch.nan)},
    }
    for message, tensors in broken.items():
        save_file(tensors, path)
        with pytest.raises(ModelError, match=message):
            _load(tmp_path, target)


NONSENSE = {
    "taps below 1": ("eagle3", {"aux_hidden_state_layer_ids": [-1, 2, 3]}, "aux_hidden_state_layer_ids"),
    "the embedding as a tap": ("eagle3", {"aux_hidden_state_layer_ids": [0, 2, 3]}, "aux_hidden_state_layer_ids"),
    "a tap twice": ("eagle3", {"aux_hidden_state_layer_ids": [1, 3, 3]}, "aux_hidden_state_layer_ids"),
    "taps that fall": ("eagle3", {"aux_hidden_state_layer_ids": [3, 2, 1]}, "aux_hidden_state_layer_ids"),
    "no taps": ("eagle3", {"aux_hidden_state_layer_ids": []}, "aux_hidden_state_layer_ids"),
    "taps beyond n": ("eagle3", {"aux_hidden_state_layer_ids": [1, 2, 9]}, "aux_hidden_state_layer_ids"),
    "eagle in the middle": ("eagle", {"aux_hidden_state_layer_ids": [2]}, "aux_hidden_state_layer_ids"),
    "another depth": ("eagle3", {"target_num_layers": 9}, "target_num_layers 9 != 4"),
    "a mask that is no id": ("dflash", {"mask_token_id": 264}, "mask_token_id"),
    "more ids than there are": ("eagle3", {"draft_vocab_size": 265}, "draft_vocab_size"),
    "half a fingerprint": ("eagle3", {"target_fingerprint": {"config": "x"}}, "target_fingerprint: .*weights"),
}


@pytest.mark.parametrize(("name", "change", "message"), NONSENSE.values(), ids=NONSENSE)
def test_ck_3_a_config_that_cannot_be_is_refused_by_field(name, change, message, target, tmp_path):
    """CK-3: files of others, whose weights carry no hash of a config, in one line that names the field.

    https://github.com/vllm-project/speculators/issues/753
    """
    learned(name, target).save(tmp_path)
    _edit(tmp_path, lambda config: config.update(change))
    with pytest.raises(ModelError, match=rf"\A--drafter: .*{message}.*\Z"):
        _load(tmp_path, target)


LAYER = "transformer_layer_config"
BEYOND = [
    ("eagle", f"{LAYER}.rms_norm_eps", math.inf),
    ("eagle3", f"{LAYER}.rope_parameters.rope_theta", math.nan),
    ("dflash", f"{LAYER}.rope_parameters.rope_theta", -math.inf),
    ("dspark", f"{LAYER}.rms_norm_eps", math.nan),
    ("dspark", "markov_rank", math.inf),
    ("dspark", "markov_rank", 10**12),
    ("dflash", "block_size", 10**30),
    ("eagle", f"{LAYER}.head_dim", 2**40),
    ("eagle3", f"{LAYER}.num_hidden_layers", 10**9),
    ("dflash", "aux_hidden_state_layer_ids", [1, 10**12]),
    ("dspark", "training_length", 10**400),
]


@pytest.mark.parametrize(("name", "field", "value"), BEYOND, ids=lambda value: str(value)[:40])
def test_ck_3_numbers_that_no_drafter_has_are_refused_by_field(name, field, value, target, tmp_path):
    """CK-3: infinite, not a number, or larger than any memory, in the config of every kind: one line, and no more.

    https://github.com/vllm-project/speculators/issues/753
    """
    learned(name, target).save(tmp_path)

    def change(config):
        *path, last = field.split(".")
        for key in path:
            config = config[key]
        config[last] = value

    _edit(tmp_path, change)
    with pytest.raises(ModelError, match=rf"\A--drafter: .*{re.escape(field.split('.')[-1])}.*\Z"):
        _load(tmp_path, target)


def test_ck_3_sizes_are_compared_with_the_file_before_they_take_memory(target, tmp_path):
    """CK-3: a config that asks for gigabytes, or for more than could be addressed, beside weights that have none.

    https://github.com/vllm-project/vllm/issues/54526
    """
    learned("dspark", target).save(tmp_path)
    before = peak_memory(torch.device("cpu"))
    _edit(tmp_path, lambda config: config[LAYER].update(intermediate_size=1 << 24))  # 6 GB
    with pytest.raises(ModelError, match=r"\A--drafter: .*mlp\.\w+\.weight is \(.*, not \(.*16777216.*\Z"):
        _load(tmp_path, target)
    huge = dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim"), 1 << 24)
    _edit(tmp_path, lambda config: config[LAYER].update(huge))
    with pytest.raises(ModelError, match=r"\A--drafter: .*describes no network that could be built: .*\Z"):
        _load(tmp_path, target)
    assert peak_memory(torch.device("cpu")) - before < 1e9


def test_a_drafter_larger_than_the_memory_is_refused_with_the_arithmetic(target, tmp_path, monkeypatch):
    """Its sizes fit its file, and the machine holds neither."""
    learned("eagle", target).save(tmp_path)
    monkeypatch.setattr("forerun.drafters.checkpoint.available_memory", lambda device: 1000)
    with pytest.raises(DoesNotFit, match=r"\A--drafter: .*GiB to load, but .*GiB are free"):
        _load(tmp_path, target)


def test_ck_3_a_config_with_endless_numbers_is_refused(target, tmp_path):
    """CK-3: what Python's own reader will not turn into a number, or follow so deep.

    https://github.com/vllm-project/speculators/issues/753
    """
    learned("eagle", target).save(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    for broken in (text.replace(": 64,", f": {'9' * 5000},", 1), "[" * 10**6):
        file.write_text(broken)
        with pytest.raises(ModelError, match=r"\A--drafter: .*config\.json cannot be read"):
            _load(tmp_path, target, method="eagle")


def test_a_rotation_that_needs_tables_is_built_without_memory_for_weights(target, tmp_path):
    """Llama 3's frequencies are numbers of their own: checking sizes first leaves them as they are."""
    drafter = learned("dspark", target)
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    layer = drafter.config.transformer_layer_config.model_copy(update={"rope_parameters": rope})
    config = drafter.config.model_copy(update={"transformer_layer_config": layer})
    made = type(drafter)(config, type(drafter).network_of(config), drafter.vocabulary, target)
    made.network.load_state_dict(drafter.network.state_dict())
    made.save(tmp_path)
    loaded = _load(tmp_path, target)
    assert torch.equal(loaded.net.backbone.rotary.frequencies, made.net.backbone.rotary.frequencies)
    assert loaded.net.backbone.rotary.frequencies.device.type == "cpu"
    assert loaded.folder == tmp_path
    assert made.folder is None


def test_ck_3_a_config_without_its_method_or_rotation_is_refused_by_field(target, tmp_path):
    """CK-3: what is read before, and below, the fields of the config itself.

    https://github.com/vllm-project/speculators/issues/753
    """
    learned("eagle", target).save(tmp_path)
    _edit(tmp_path, lambda config: config[LAYER]["rope_parameters"].update(rope_theta=10**400))
    with pytest.raises(ModelError, match=r"\A--drafter: .*rope_parameters.*\Z"):
        _load(tmp_path, target)
    _edit(tmp_path, lambda config: config["transformer_layer_config"]["rope_parameters"].pop("rope_theta"))
    with pytest.raises(ModelError, match=r"\A--drafter: .*rope_parameters has no rope_theta\Z"):
        _load(tmp_path, target)
    _edit(tmp_path, lambda config: config.pop("method"))
    with pytest.raises(ModelError, match=r"\A--drafter: .*method: field required\Z"):
        _load(tmp_path, target)


def test_ts_2_a_drafter_that_names_no_target_is_refused(target, tmp_path, caplog):
    """TS-2: an empty fingerprint says nothing about a target that has one; it can be overruled.

    https://github.com/vllm-project/speculators/issues/705
    """
    learned("eagle", target).save(tmp_path)
    _edit(tmp_path, lambda config: config.update(target_fingerprint={}))
    with pytest.raises(ModelError, match=r"target_fingerprint is empty.*allow_target_mismatch"):
        _load(tmp_path, target)
    with caplog.at_level(logging.WARNING, "forerun"):
        _load(tmp_path, target, allow_target_mismatch=True)
    assert "target_fingerprint is empty" in caplog.text


def test_ck_3_tensors_of_another_kind_are_refused_by_name(target, tmp_path):
    """CK-3: integers where weights belong, and maps that are no row of integers.

    https://github.com/vllm-project/vllm/issues/54526
    """
    learned("eagle3-pruned", target).save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    broken = {
        r"fc\.weight is torch\.int32": {"fc.weight": whole["fc.weight"].int()},
        r"d2t .* \(1, 3\)": {"d2t": whole["d2t"][None]},
        r"d2t .* is torch\.float32": {"d2t": whole["d2t"].float()},
    }
    for message, tensors in broken.items():
        save_file({**whole, **tensors}, path)
        with pytest.raises(ModelError, match=rf"\A--drafter: .*{message}"):
            _load(tmp_path, target)


def test_ck_1_a_pruned_vocabulary_without_its_map_is_refused(target, tmp_path):
    """CK-1: D != V without d2t, and maps that contradict each other.

    https://github.com/SafeAILab/EAGLE/issues/222
    """
    learned("dspark-pruned", target).save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({k: v for k, v in whole.items() if k != "d2t"}, path)
    with pytest.raises(ModelError, match="d2t"):
        _load(tmp_path, target)
    save_file({**whole, "t2d": ~whole["t2d"]}, path)
    with pytest.raises(ModelError, match="t2d"):
        _load(tmp_path, target)


def test_ck_1_the_map_of_a_saved_drafter_is_that_of_its_drafts(target, tmp_path):
    """CK-1: D = 5, ids {1, 3, 4, 7, 9}, of the padded vocabulary that the config has: saved, loaded and decoded, only
    these are drafted; without its maps the folder is refused, not read as the first five ids.

    https://github.com/SafeAILab/EAGLE/issues/246
    """
    kept, counts = [1, 3, 4, 7, 9], torch.zeros(target.vocab_size)
    counts[kept] = 1
    learned("dspark-pruned", target, counts=counts, draft_vocab_size=5).save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    assert target.tokenizer.size < len(whole["t2d"]) == target.vocab_size
    assert whole["t2d"].nonzero()[:, 0].tolist() == (torch.arange(5) + whole["d2t"]).tolist() == kept
    [text] = texts([25])
    loaded = _load(tmp_path, target)
    loaded.allocate(8)
    give(loaded, text, 0, 24)
    [draft] = loaded.propose([view_of(text, 4)], always)
    assert len(draft.tokens) == 4
    assert set(draft.tokens) <= set(kept)
    save_file({k: v for k, v in whole.items() if k not in ("d2t", "t2d")}, path)
    with pytest.raises(ModelError, match="so it needs d2t and t2d; it has none"):
        _load(tmp_path, target)


def test_weights_of_another_config_are_refused(target, tmp_path):
    """A crash between the two files, or a hand-edited config, shows."""
    learned("dspark", target).save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"training_length": 64', '"training_length": 65'))
    with pytest.raises(ModelError, match=r"another config\.json"):
        _load(tmp_path, target)


def test_ts_2_another_target_is_refused_with_the_difference(target, tmp_path, caplog):
    """TS-2: other weights under the same config; the difference is named, and can be overruled.

    https://github.com/vllm-project/speculators/issues/705
    """
    learned("dspark", target).save(tmp_path)
    other = tiny_target(seed=5)
    with pytest.raises(ModelError, match=r"differs in weights; --speculative-config.allow_target_mismatch true loads"):
        _load(tmp_path, other)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert _load(tmp_path, other, allow_target_mismatch=True).max_draft == 4
    assert "differs in weights" in caplog.text


def test_ts_9_a_drafter_remembers_the_template_of_its_data(target, tmp_path):
    """TS-9: taught on data that another template rendered, it is no drafter for the target's own; one that was taught
    with the target's own, or on plain text, is.

    https://github.com/z-lab/dflash/issues/133, https://github.com/SafeAILab/EAGLE/issues/227
    """
    own = fingerprint(target).chat_template
    for template, refused in ((None, False), (own, False), ("of-another", True)):
        plan = replace(plan_for(target), chat_template=template)
        Eagle.design(target, Eagle.settings_class(), plan).save(tmp_path)
        if refused:
            with pytest.raises(ModelError, match=r"differs in chat_template: .*chat format.*allow_target_mismatch"):
                _load(tmp_path, target)
        else:
            assert _load(tmp_path, target).made_for["chat_template"] == own


def test_another_dtype_only_warns(target, tmp_path, caplog):
    """TS-2: features in another precision are nearly the same."""
    learned("dspark", target).save(tmp_path)
    with caplog.at_level(logging.WARNING, "forerun"):
        _load(tmp_path, tiny_target(dtype=torch.bfloat16))
    assert "float32" in caplog.text
    assert "bfloat16" in caplog.text


def test_ts_8_a_shorter_context_of_its_own_only_lowers_k(target, tmp_path):
    """TS-8: max_model_len of the drafter, below the target's window.

    https://github.com/vllm-project/vllm/issues/48894
    """
    learned("dspark", target).save(tmp_path)
    assert _load(tmp_path, target, max_model_len=20).window == 20


def test_ts_4_more_drafts_than_the_block_has_are_refused(target, tmp_path):
    """TS-4: K follows from block size and convention."""
    learned("dflash", target).save(tmp_path)
    with pytest.raises(OptionError, match="num_speculative_tokens"):
        _load(tmp_path, target, num_speculative_tokens=5)
    assert _load(tmp_path, target, num_speculative_tokens=4).max_draft == 4


SLOW_TO_LEARN = {"eagle3-pruned"}
"""The pruned vocabulary is learned by heart by the other kinds; this one takes as long as all of them."""


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW_TO_LEARN else k for k in KINDS])
def test_one_sample_learned_by_heart_is_accepted_whole(name, tmp_path):
    """TS-7: train on one text, save, load, decode: every round accepts all its drafts.

    https://github.com/sgl-project/SpecForge/issues/455
    """
    from drafters.overfit import PROMPT, learned_by_heart, used

    done, k = learned_by_heart(name, tmp_path)
    stats = done.stats
    assert stats.acceptance_by_position == [1.0] * k
    assert stats.mean_accepted_length == k + 1
    for fewer in (1, 2):  # a smaller plan is no other language
        again = used(tiny_target(), PROMPT, done, tmp_path, fewer)
        assert again.stats.acceptance_by_position == [1.0] * fewer


def test_a_folder_of_another_kind_or_of_none_is_named(target, tmp_path):
    """The messages for a folder that is no drafter, or another kind than was asked for."""
    learned("dspark", target).save(tmp_path / "one")
    with pytest.raises(ModelError, match="'dspark' drafter, not 'dflash'"):
        _load(tmp_path / "one", target, method="dflash")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="no drafter trained by forerun"):
        _load(tmp_path / "two", target, method="dspark")
    with pytest.raises(OptionError, match="forerun train"):
        parse_config("dspark").build(LoadContext(target))
    assert drafting("dspark", target).max_draft == 4
