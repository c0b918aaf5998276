"""Loading the draft model: what goes wrong is said of the drafter, not of the target."""

from __future__ import annotations

import pytest

from forerun import Engine
from forerun.errors import ModelError


def test_a_missing_draft_model_is_not_blamed_on_the_target(tmp_path, tiny_qwen3_dir):
    """From Python as from the command line the message names --drafter."""
    with pytest.raises(ModelError, match=r"^--drafter: .*nowhere"):
        Engine.load(str(tiny_qwen3_dir), drafter={"method": "small", "model": str(tmp_path / "nowhere")})
