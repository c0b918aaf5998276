"""Loading the draft model: what goes wrong is said of the drafter, not of the target."""

from __future__ import annotations

import shutil

import pytest

from forerun import Engine
from forerun.errors import ModelError


def test_a_missing_draft_model_is_not_blamed_on_the_target(tmp_path, tiny_qwen3_dir):
    """From Python as from the command line the message names --drafter."""
    with pytest.raises(ModelError, match=r"^--drafter: .*nowhere"):
        Engine.load(str(tiny_qwen3_dir), drafter={"method": "small", "model": str(tmp_path / "nowhere")})


def test_a_draft_model_without_a_tokenizer_is_refused(tmp_path, tiny_qwen3_dir, tiny_small_dir):
    """With the empty one that transformers makes up, no id would be shared and nothing would ever be accepted."""
    folder = shutil.copytree(tiny_small_dir, tmp_path / "small")
    for path in [*folder.glob("tokenizer*"), *folder.glob("*.jinja")]:
        path.unlink()
    with pytest.raises(ModelError, match=r"^--drafter: .* has no tokenizer files"):
        Engine.load(str(tiny_qwen3_dir), drafter={"method": "small", "model": str(folder)})
