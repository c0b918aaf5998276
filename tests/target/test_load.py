"""Loading: what a user may type after --target, and the one line that says why it cannot be."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from forerun.errors import DoesNotFit, ModelError, OptionError
from forerun.target import checkpoint
from forerun.target.base import Batch, Segment
from forerun.target.dtypes import dtype_named
from forerun.target.hf import _choose_plan
from forerun.target.load import announce, load_target
from forerun.target.outline import outline


@pytest.fixture
def folder(tiny_qwen3_dir, tmp_path):
    """A model folder of one's own to damage."""
    return shutil.copytree(tiny_qwen3_dir, tmp_path / "model")


def _refused(source, match, **options):
    with pytest.raises(ModelError, match=match) as caught:
        load_target(source, device="cpu", **options)
    assert str(caught.value).startswith("--target")
    assert "\n" not in str(caught.value)


def _edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "auto"])
def test_a_folder_gives_the_logits_of_stock_transformers(folder, dtype):
    """In every dtype; `auto` is the checkpoint's own."""
    target = load_target(str(folder), dtype=dtype, device="cpu")
    expected = torch.float32 if dtype == "auto" else dtype_named(dtype)
    assert target.dtype == expected
    stock = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=expected, attn_implementation="eager")
    ids = target.tokenizer.encode("lossless")
    target.allocate(1)
    ours = target.forward(Batch([Segment(ids, 0, [0], len(ids))])).logits
    with torch.no_grad():
        reference = stock(torch.tensor([ids])).logits[0]
    error = (ours - reference).double().norm() / reference.double().norm()
    assert error < (1e-5 if expected.itemsize >= 4 else 0.05)


def test_what_the_engine_reads_comes_from_the_configs(folder):
    """Window, padded vocabulary, every end id and the sampling defaults of the generation config."""
    _edit(folder / "generation_config.json", eos_token_id=[256, 258], temperature=0.7, top_k=20, do_sample=True)
    target = load_target(folder, device="cpu", max_model_len=100)
    assert (target.window, target.vocab_size, target.tokenizer.size) == (100, 264, 259)
    assert target.eos_token_ids == {256, 258}
    assert target.sampling_defaults == {"temperature": 0.7, "top_k": 20}
    assert target.name == str(folder)


def test_a_loaded_model_goes_with_its_tokenizer(folder):
    """A model that is already there is served in its own dtype; without a tokenizer it is refused."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="tokenizer"):
        load_target(model)
    target = load_target(model, tf.AutoTokenizer.from_pretrained(folder))
    assert target.dtype == torch.bfloat16
    assert target.tokenizer.decode(target.tokenizer.encode("ok")) == "ok"


def test_nothing_is_printed(folder, capfd):
    """transformers' bars and remarks stay out of a user's terminal."""
    load_target(folder, device="cpu")
    assert capfd.readouterr() == ("", "")


def test_loading_shows_how_far_it_is(folder, monkeypatch):
    """transformers' own loop over the weights is counted on a bar of ours, to its end."""
    totals, done = [], []

    class Bar:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def add_task(self, what, total):
            totals.append((what, total))
            return len(totals) - 1

        def advance(self, task):
            done.append(task)

    monkeypatch.setattr("forerun.target.load.progress_bar", Bar)
    load_target(folder, device="cpu")
    tensors = len(checkpoint._tensors(folder / "model.safetensors"))
    assert totals == [("loading model", tensors)]
    assert done == [0] * tensors


@pytest.mark.parametrize("given", [{"dtype": "float16"}, {"device": "cuda"}, {"revision": "main"}], ids=str)
def test_options_of_loading_are_refused_for_a_loaded_model(folder, given):
    """They would have no effect: the model keeps its own dtype and device. What it has anyway may be asked for."""
    model, tokenizer = tf.AutoModelForCausalLM.from_pretrained(folder), tf.AutoTokenizer.from_pretrained(folder)
    with pytest.raises(OptionError, match="no effect on a loaded model") as caught:
        load_target(model, tokenizer, **given)
    assert load_target(model, tokenizer, dtype="float32", device="cpu").dtype == torch.float32
    assert caught.value.option in given
    with pytest.raises(OptionError, match="tokenizer: belongs to a loaded model"):
        load_target(folder, tokenizer, device="cpu")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "int8"}, r"--dtype: must be one of auto, float32, .* got 'int8'"),
        ({"device": "tpu"}, r"--device: must be one of auto, cpu, cuda, mps, got 'tpu'"),
        ({"threads": 0}, r"--threads: must be in 1 \.\. 1024, got 0"),
        ({"threads": 1025}, r"--threads: must be in 1 \.\. 1024, got 1025"),
        ({"threads": "2"}, r"--threads: must be a whole number, got '2'"),
        ({"dtype": ["int8"]}, r"--dtype: must be one of auto, float32, .* got \['int8'\]"),
        ({"device": [1]}, r"--device: must be one of auto, cpu, cuda, mps, got \[1\]"),
        ({"max_model_len": "10"}, r"--max-model-len: must be a whole number, got '10'"),
    ],
)
def test_options_that_cannot_be_used_are_named(folder, options, match):
    """Before anything is loaded."""
    with pytest.raises(OptionError, match=match):
        load_target(folder, **options)


@pytest.mark.parametrize("source", [None, 5, ["embedded"]], ids=str)
def test_what_is_no_model_is_not_taken_for_a_loaded_one(source):
    """The argument at fault is named, not the tokenizer that a loaded model would need."""
    with pytest.raises(OptionError, match=r"target: must be .* or a loaded model, got"):
        load_target(source)


def test_what_was_not_run_on_a_gpu_says_so_when_it_is_chosen(folder, monkeypatch, caplog):
    """One line with the way and the reason, and nothing on a CPU."""
    target = load_target(folder, device="cpu")
    assert caplog.text == ""
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    monkeypatch.setattr(target, "attention_reason", _choose_plan("auto", target.device)[1])
    announce(target)
    assert "on cuda: attention padded: " in caplog.text
    assert "not yet run on a GPU" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_said_to_be(folder):
    """Instead of a stack trace from the driver."""
    with pytest.raises(OptionError, match=r"--device: torch .* finds no cuda device"):
        load_target(folder, device="cuda")


def test_a_path_that_does_not_exist_names_what_was_tried(tmp_path, monkeypatch):
    """A path, a GGUF file, and an id that neither the disk nor the hub has."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    _refused(str(tmp_path / "no" / "such"), "does not exist .looked for /")
    _refused(str(tmp_path / "no.gguf"), "does not exist")
    _refused("nobody/nothing", "neither the folder /.*nobody/nothing nor a copy of 'nobody/nothing' in the hub's cache")


def test_no_network_is_one_line(monkeypatch):
    """Whatever the hub's client raises."""

    def unreachable(*_, **__):
        raise ConnectionError("Connection refused\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    _refused("nobody/nothing", r"could not be fetched .ConnectionError: Connection refused.")


def test_a_hub_id_is_loaded_from_what_the_hub_gives(folder, monkeypatch):
    """The snapshot's folder is loaded, under the id's name, at the revision asked for."""
    asked = {}

    def snapshot(repo, **options):
        asked.update(repo=repo, **options)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    target = load_target("someone/tiny", device="cpu", revision="v2")
    assert target.name == "someone/tiny"
    assert (asked["repo"], asked["revision"]) == ("someone/tiny", "v2")
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["allow_patterns"])


def test_a_wrong_kind_of_file(tmp_path):
    """A pickle, and a file that only has the name of a GGUF."""
    for name, match in (("model.bin", "neither a model folder nor a .gguf file"), ("m.gguf", "is not a GGUF file")):
        (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
        _refused(str(tmp_path / name), match)


def test_pickled_weights_are_refused(folder):
    """A folder whose weights could run code."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    _refused(folder, "as a pickle .pytorch_model.bin., which can run code")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(folder, keep):
    """At any length: before the header, within it, one byte short."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    _refused(folder, "is truncated|is not a safetensors file")


def test_a_missing_shard(folder):
    """Named, before anything is read."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    _refused(folder, "lacks model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "quantum_lm"}, "cannot be loaded .*quantum_lm"),
        ({"model_type": "vit"}, "cannot be loaded"),
        (
            {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
            r"do not fit its config: \d+ missing tensors",
        ),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, r"do not fit its config: \d+ unexpected"),
        (
            {"intermediate_size": 32},
            r"do not fit its config: 9 mismatched tensors \(model\.layers\.0\.mlp\.down_proj\.weight: "
            r"32 x 64 stored, 32 x 32 by the config; ",
        ),
        ({"vocab_size": 300}, r"2 mismatched .*lm_head\.weight: 264 x 32 stored, 300 x 32 by the config"),
        ({"hidden_size": 48}, r"\d+ mismatched .*lm_head\.weight: 264 x 32 stored, 264 x 48 by the config"),
    ],
)
def test_configs_that_do_not_go_with_the_weights(folder, fields, match):
    """An unknown architecture, and tensors missing, left over or misshapen: never a layer drawn at random."""
    _edit(folder / "config.json", **fields)
    _refused(folder, match)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.mark.parametrize("kept", [(), ("tokenizer_config.json",)], ids=["no-file", "only-its-config"])
def test_a_folder_without_a_tokenizer(folder, kept):
    """transformers makes up one without a text; it is refused before any weight is read, and not as a bad prompt."""
    if kept:  # as saved for a family: the class, and tokens that are added to the vocabulary it has not
        added = {str(i): {"content": f"<|{i}|>", "special": i < 2} for i in range(4)}
        _edit(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added)
    for name in set(TOKENIZER_FILES) - set(kept):
        (folder / name).unlink(missing_ok=True)
    _refused(folder, r"has no tokenizer files .*tokenizer\.json")
    with pytest.raises(ModelError, match=r"^--target: .* has no tokenizer files"):
        outline(str(folder))


def test_a_family_whose_tokenizer_transformers_cannot_make_up(folder):
    """Where transformers raises about backends instead, the user is told the same."""
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    _edit(folder / "config.json", model_type="llama")
    _refused(folder, "has no tokenizer files")


def test_a_vocabulary_of_a_few_words_is_a_tokenizer(folder):
    """However many more logits there are."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="b").save_pretrained(folder)
    assert load_target(folder, device="cpu").tokenizer.encode("a") == [0]


@pytest.mark.parametrize("shape", [(1,), (), (33,), (1, 32)], ids=str)
def test_one_misshapen_tensor_is_enough(folder, shape):
    """Also one that would broadcast, or has as many numbers."""
    path, name = folder / "model.safetensors", "model.norm.weight"
    save_file({**load_file(path), name: torch.ones(shape)}, path, metadata={"format": "pt"})
    stored = " x ".join(map(str, shape)) or "a single number"
    _refused(folder, rf"1 mismatched tensors \({name}: {stored} stored, 32 by the config\)")


def test_a_misshapen_embedding_that_is_the_head_too(folder):
    """It is listed under the one name it is stored by."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    _edit(folder / "config.json", vocab_size=300)
    _refused(folder, r"1 mismatched tensors .*embed_tokens\.weight: 264 x 32 stored, 300 x 32 by the config")


@pytest.mark.parametrize("misshapen", [["lm_head"], ["model.embed_tokens"], ["lm_head", "model.embed_tokens"]], ids=str)
def test_a_misshapen_embedding_that_is_stored_twice(folder, misshapen):
    """Tied weights of which the file has both copies: whichever is at fault is named, with both shapes."""
    _edit(folder / "config.json", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for name in misshapen:
        weights[f"{name}.weight"] = weights[f"{name}.weight"][:-1].clone()
    save_file(weights, path, metadata={"format": "pt"})
    listed = "; ".join(rf"{name}\.weight: 263 x 32 stored, 264 x 32 by the config" for name in misshapen)
    _refused(folder, rf"{len(misshapen)} mismatched tensors \({listed}\)")


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "torch.float64"}, torch.float64),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": None}, torch.float32),
        ({"dtype": None, "text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
    ],
    ids=str,
)
def test_the_checkpoints_own_dtype(folder, fields, dtype):
    """The one its config names, wherever it does; else the one its weights are stored in."""
    _edit(folder / "config.json", **fields)
    assert checkpoint.inspect_folder(folder).dtype == dtype


def test_weights_say_their_dtype_where_the_config_does_not(folder):
    """bfloat16 weights are not blown up to float32 for a missing field."""
    tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    _edit(folder / "config.json", dtype=None)
    assert load_target(folder, device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["banana", "nn", 5])
def test_a_dtype_that_torch_has_not_is_named(folder, name):
    """One line instead of an AttributeError."""
    _edit(folder / "config.json", dtype=name)
    _refused(folder, "names the dtype .*, which torch has not")


HEADERS = [
    b"[]",
    b"55",
    b'{"w": 5}',
    b'{"w": {"dtype": "F32"}}',
    b'{"w": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_is_json_but_no_header(folder, header):
    """Damaged in a way that still parses."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    _refused(folder, "is not a safetensors file")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"w": 5}}], ids=str)
def test_an_index_without_files(folder, index):
    """Named as what it is."""
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(folder, "lists no files of weights")


@pytest.mark.parametrize("text", ["{", "[]", b"\xff"], ids=str)
def test_a_generation_config_that_cannot_be_read_is_not_passed_over(folder, text):
    """transformers goes on without it; its end-of-sequence ids would be missing, and the text would not end."""
    path = folder / "generation_config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    _refused(folder, "generation_config.json (is not valid JSON|holds no JSON object)")


def test_sampling_defaults_that_cannot_be_used_are_the_models_fault(folder):
    """Not blamed on an option that nobody gave."""
    _edit(folder / "generation_config.json", top_p=1.5, do_sample=True)
    _refused(folder, "generation.config.*top_p|top_p.*")


def test_a_folder_that_cannot_be_read(folder, monkeypatch):
    """The system's own words, in one line."""
    own = type(folder).read_text

    def read_text(self, *rest, **options):
        if self.name == "config.json":
            raise PermissionError(13, "Permission denied", str(self))
        return own(self, *rest, **options)

    monkeypatch.setattr(type(folder), "read_text", read_text)
    _refused(folder, r"cannot read .*config\.json: Permission denied")


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "y" * 300, "z" * 300 + ".gguf"], ids=["id", "path", "gguf"])
def test_a_name_longer_than_any_file_has(name, monkeypatch):
    """No traceback from the file system."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _refused(name, "does not exist|could not be fetched")


def test_folders_without_a_config_or_with_a_broken_one(folder):
    """Said as such."""
    (folder / "config.json").write_text("{")
    _refused(folder, "config.json is not valid JSON")
    (folder / "config.json").unlink()
    _refused(folder, "has no config.json")


def test_code_of_the_checkpoints_own_is_not_run(folder):
    """Unless asked for: the message names the option."""
    _edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text("raise SystemExit('this code was run')\n")
    _refused(folder, "allow it with --trust-remote-code")


def test_a_model_that_does_not_fit_shows_the_arithmetic(folder, monkeypatch):
    """Parameters, bytes each, what is free, and what to change."""
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: 1000)
    with pytest.raises(DoesNotFit, match=r"parameters x 4 bytes .float32. .* GiB are free on cpu; choose a smaller"):
        load_target(folder, device="cpu")


def test_a_head_that_is_also_the_embedding_is_counted_twice_where_it_is_packed(folder, monkeypatch):
    """On a CPU in bfloat16 the head gets a packed copy: its bytes are in the arithmetic, and only there."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    found = checkpoint.inspect_folder(folder)
    head = model.get_input_embeddings().weight.numel()
    assert (found.shared_head, found.parameters) == (head, sum(p.numel() for p in model.parameters()))
    monkeypatch.setattr("forerun.target.packed._can_pack", lambda: True)
    weights = int(found.bytes_as(torch.bfloat16) * checkpoint.LOADING)
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: weights + 2 * head - 1)
    with pytest.raises(DoesNotFit, match="for a packed copy of the head"):
        load_target(folder, dtype="bfloat16", device="cpu")
    monkeypatch.setattr("forerun.target.packed._can_pack", lambda: False)
    load_target(folder, dtype="bfloat16", device="cpu")


def test_the_size_is_read_from_the_headers(folder):
    """Parameters counted without loading; packed integers keep their bytes in every dtype."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    found = checkpoint.inspect_folder(folder)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    header = json.dumps({"w": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 12)
    assert checkpoint.inspect_folder(folder).bytes_as(torch.bfloat16) == 12


def test_memory_of_a_container_counts(tmp_path):
    """A cgroup's limit less what is used, cached files not counted; without a limit the machine's."""
    assert checkpoint._container_memory(tmp_path, 7) == 7
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 300\n")
    assert checkpoint._container_memory(tmp_path, 7000) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert checkpoint._container_memory(tmp_path, 7000) == 7000


def test_a_model_of_the_package_that_is_not_there(tmp_path, monkeypatch):
    """An installation without the embedded models says so."""
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    _refused("embedded", "this installation of forerun has no model 'embedded'")


def test_float16_checkpoints_are_widened_on_a_cpu(folder):
    """`auto` keeps every value: float32 holds all of float16."""
    tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)
    assert load_target(folder, device="cpu").dtype == torch.float32


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere", "/nowhere/at/all", ".hidden"])
def test_a_path_is_not_asked_of_the_hub(path):
    """What can only be a path is answered as one."""
    with pytest.raises(ModelError, match=r"^--target: .* does not exist \(looked for "):
        load_target(path)
