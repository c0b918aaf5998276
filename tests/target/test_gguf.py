"""GGUF files: read as they are, converted once, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf

from forerun.errors import DoesNotFit, ModelError
from forerun.target import checkpoint
from forerun.target import gguf as conversion
from forerun.target.base import Batch, Segment
from forerun.target.load import load_target

gguf = pytest.importorskip("gguf")

NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MERGES = ["Ġ t", "e x"]


def _tiny_qwen2():
    torch.manual_seed(0)
    config = tf.Qwen2Config(
        vocab_size=261, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    return tf.Qwen2ForCausalLM(config).eval()


def _write(path, model):
    """A float32 GGUF of a tiny Qwen2 with a byte-level tokenizer of two merges."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    _write_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer):
    from tokenizers import pre_tokenizers

    tokens = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "Ġt",
        "ex",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3] * 3)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(260)
    writer.add_bos_token_id(258)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _gguf_name(name):
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """(model, GGUF file)"""
    model, path = _tiny_qwen2(), tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write(path, model)
    return model, path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_a_gguf_file_gives_the_logits_it_was_written_from(original):
    """Loaded in float32: the numbers of the model in the file, its tokenizer, end id and template."""
    model, path = original
    target = load_target(path, dtype="float32", device="cpu")
    ids = target.tokenizer.encode("a tiny text")
    assert target.tokenizer.decode(ids) == "a tiny text"
    assert len(ids) == len("a tiny text") - 3  # ` t` twice and `ex` once
    target.allocate(1)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    ours = target.forward(Batch([Segment(ids, 0, [0], len(ids))])).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert target.eos_token_ids == {260}
    assert target.name == "tiny"
    assert target.window == 128
    assert target.tokenizer.chat_template is not None


def test_the_copy_is_kept_per_content_and_dtype(original, cache, monkeypatch):
    """Loaded again nothing is converted; another dtype is another copy; bfloat16 is what `auto` takes."""
    _, path = original
    load_target(path, device="cpu")
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted twice"))
    assert load_target(path, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert [p.name.partition("-")[2] for p in cache.iterdir() if p.is_dir()] == ["bfloat16"]
    with pytest.raises(pytest.fail.Exception, match="converted twice"):
        load_target(path, device="cpu", dtype="float32")


def test_a_conversion_that_died_is_begun_again(original, cache):
    """What a killed process left is never taken for a model."""
    _, path = original
    name = f"{conversion.sha256_of(path)[:32]}-float32"
    (cache / f"{name}.part").mkdir(parents=True)
    (cache / f"{name}.part" / "config.json").write_text("{half")
    assert load_target(path, device="cpu", dtype="float32").num_layers == 2
    assert not (cache / f"{name}.part").exists()


def test_a_failed_conversion_leaves_no_model_behind(original, cache, monkeypatch):
    """The next one starts from nothing."""
    _, path = original

    def fail(source, folder, dtype):
        folder.mkdir()
        raise ModelError("--target: no luck")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_convert", fail)
        with pytest.raises(ModelError, match="no luck"):
            load_target(path, device="cpu")
    assert load_target(path, device="cpu").num_layers == 2


CHILDREN = """
import os
import sys
from pathlib import Path

import torch

from forerun.target import gguf

torch.set_num_threads(1)
path = Path(sys.argv[1])
gguf.converted(path, torch.bfloat16)  # with another copy comes what both would import, before the fork
convert = gguf._convert
def logged(path, folder, dtype):
    with open(sys.argv[2], "a") as log:
        print("converts", file=log)
    convert(path, folder, dtype)
gguf._convert = logged
children = []
for _ in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        sys.stdout.write(f"{gguf.converted(path, torch.float32)}\\n")
        sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_two_processes_that_ask_at_once_convert_once(original, tmp_path):
    """The second waits for the first and takes its copy."""
    _, path = original
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(path), str(log)],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, other = done.stdout.splitlines()
    assert one == other
    assert log.read_text().splitlines() == ["converts"]
    assert checkpoint.inspect_folder(Path(one)).parameters > 0


@pytest.mark.parametrize("keep", [3, 4, 40, 3000, -1])
def test_truncated_files(original, tmp_path, keep):
    """At any length: in the magic, the header, the tokenizer, one byte short of the last tensor."""
    _, path = original
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"--target: .*short.gguf is (not a GGUF file|truncated)"):
        load_target(short, device="cpu")


def test_an_architecture_transformers_cannot_read(tmp_path):
    """Named as what it is, in one line."""
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "quantum")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"--target: .*strange.gguf cannot be loaded .*quantum") as caught:
        load_target(path, device="cpu")
    assert "\n" not in str(caught.value)


def test_no_room_is_said_before_anything_is_converted(original, monkeypatch):
    """Memory and disk, each with its numbers and what to change."""
    _, path = original
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "available_memory", lambda device: 1000)
        with pytest.raises(DoesNotFit, match="GiB are free on cpu"):
            load_target(path, device="cpu")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelError, match="set FORERUN_CACHE to a folder with more room"):
        load_target(path, device="cpu")


def test_a_cache_that_cannot_be_written_says_which_variable_to_set(original, tmp_path, monkeypatch):
    """FORERUN_CACHE that is a file, and a disk that fills up in the middle of the conversion."""
    _, path = original
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set FORERUN_CACHE to a folder that can be written"):
        load_target(path, device="cpu")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "full"))

    def full(source, folder, dtype):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_convert", full)
    with pytest.raises(ModelError, match=r"cannot be kept in .*full/gguf .No space left on device.; set FORERUN_CACHE"):
        load_target(path, device="cpu")


class _Bars:
    """What a progress display was told."""

    def __init__(self):
        self.totals, self.done = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def add_task(self, what, total):
        self.totals.append((what, total))
        self.done.append(0)
        return len(self.done) - 1

    def advance(self, task, steps=1):
        self.done[task] += steps


def test_a_conversion_shows_how_far_it_is(original, monkeypatch):
    """A bar over the tensors, counted to its end; when the copy is there only the file is hashed."""
    model, path = original
    bars = _Bars()
    monkeypatch.setattr(conversion, "progress_bar", lambda: bars)
    load_target(path, device="cpu")
    assert bars.totals[0] == (f"hashing {path.name}", path.stat().st_size)
    counts = [total for what, total in bars.totals if what.startswith(f"converting {path.name}")]
    assert max(counts) >= len(model.state_dict())
    assert bars.done == [total for _, total in bars.totals]
    before = len(bars.totals)
    load_target(path, device="cpu")
    assert bars.totals[before:] == bars.totals[:1]


def test_nothing_but_our_own_lines_is_printed(original, capfd):
    """The bars of the reader stay out of a terminal that is none."""
    _, path = original
    load_target(path, device="cpu", dtype="float32")
    out, err = capfd.readouterr()
    assert out == ""
    assert "it/s" not in err
    assert "Converting and de-quantizing" not in err
