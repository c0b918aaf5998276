"""What is known of a target without its weights is what the loaded target says."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ModelError
from forerun.target.fingerprint import template_hash, tokenizer_hash
from forerun.target.load import load_target
from forerun.target.outline import Outline, outline

CHAT = [{"role": "user", "content": "hi"}]


def assert_same(found: Outline, target: Any) -> None:
    assert found.name == target.name
    assert found.window == target.window
    assert found.vocab_size == target.vocab_size
    assert found.eos_token_ids == target.eos_token_ids
    assert tokenizer_hash(found.tokenizer) == tokenizer_hash(target.tokenizer)
    assert template_hash(found.tokenizer) == template_hash(target.tokenizer)
    if target.tokenizer.chat_template is not None:
        assert found.tokenizer.render_chat(CHAT) == target.tokenizer.render_chat(CHAT)


def test_a_folder_without_its_weights(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """The weights are not even there."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen3_dir, folder)
    target = load_target(folder)
    (folder / "model.safetensors").unlink()
    assert_same(outline(str(folder)), target)


def test_every_end_of_sequence_is_known(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """Those of the generation config too; without that file, those of the config."""
    folder = Path(shutil.copytree(tiny_qwen3_dir, tmp_path / "model"))
    config = folder / "generation_config.json"
    config.write_text('{"eos_token_id": [256, 258]}')
    assert outline(str(folder)).eos_token_ids == load_target(folder).eos_token_ids == {256, 258}
    config.unlink()
    assert outline(str(folder)).eos_token_ids == {256}


def test_embedded_models() -> None:
    """By name."""
    found = outline("embedded")
    assert_same(found, load_target("embedded"))


def test_a_template_of_ones_own(tiny_qwen3_dir: Path) -> None:
    """In place of the model's."""
    assert outline(str(tiny_qwen3_dir), chat_template="{{ messages[0].content }}!").tokenizer.render_chat(CHAT) == "hi!"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing path, a folder without a model, a file that is no GGUF file: one line that names --target."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    for name in ("no/such/model", "empty", "file.txt", "missing.gguf"):
        with pytest.raises(ModelError, match=r"^--target: [^\n]*$"):
            outline(str(tmp_path / name))


def test_gguf_files_before_and_after_their_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file's header, and from the converted folder where there is one: both are the loaded target's."""
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "target")
    module = importlib.import_module("test_gguf")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    module._write(path, module._tiny_qwen2())
    before = outline(str(path))
    assert not (tmp_path / "cache").exists()
    target = load_target(path, dtype="float32", device="cpu")
    assert_same(before, target)
    assert_same(outline(str(path)), target)
