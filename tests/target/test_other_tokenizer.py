"""Another tokenizer takes the place of the target's own only if every ordinary id means the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.engine import Engine
from forerun.errors import ModelError
from forerun.target.other_tokenizer import other_tokenizer
from forerun.target.table import ByteTokenizer, TableTarget
from tiny import END, save_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model's tokenizer with another template."""
    save_tokenizer(tmp_path, "{{ messages[0].content }}, and then:")
    return tmp_path


def test_a_tokenizer_of_another_folder_renders_as_its_template_says(tiny_qwen3_dir, folder):
    """Its ids are the model's."""
    target = Engine.load(str(tiny_qwen3_dir)).target
    made = other_tokenizer(folder, target)
    assert made.render_chat([{"role": "user", "content": "a"}]) == "a, and then:"
    assert made.encode("ab") == target.tokenizer.encode("ab")


def test_special_tokens_may_differ(folder, tiny_qwen3_dir):
    """As between the base and the chat model of one family."""
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder)
    inner.add_tokens(["<|call|>"], special_tokens=True)
    inner.save_pretrained(folder)
    made = other_tokenizer(folder, Engine.load(str(tiny_qwen3_dir)).target)
    assert made.vocabulary()["<|call|>"] == END + 3


def test_ids_without_logits_are_refused(folder):
    """A tokenizer that is larger than the head would make prompts the model cannot read."""
    small = TableTarget(lambda prefix: [0.0] * 257, 257, tokenizer=ByteTokenizer(), name="small")
    with pytest.raises(
        ModelError, match=r"--tokenizer: .* does not fit small: id 257 .* outside its vocabulary of 257"
    ):
        other_tokenizer(folder, small)


def test_ids_that_mean_another_text_are_refused(folder):
    """The first ones are named."""
    bytes_by_value = TableTarget(lambda prefix: [0.0] * 264, 264, tokenizer=ByteTokenizer(), name="bytes")
    with pytest.raises(
        ModelError, match=r"--tokenizer: .* does not fit bytes: \d+ of 257 ids differ \(id 0 is '<0x00>'"
    ):
        other_tokenizer(folder, bytes_by_value)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    """A folder that is not there, or holds none: one line that names the flag."""
    target = TableTarget(lambda prefix: [0.0] * 257, 257, tokenizer=ByteTokenizer())
    with pytest.raises(ModelError, match=r"--tokenizer: .* is no folder"):
        other_tokenizer(tmp_path / "nothing", target)
    with pytest.raises(ModelError, match=r"--tokenizer: .* cannot be loaded"):
        other_tokenizer(tmp_path, target)
