"""What several files of trainer tests train on; loaded and written once a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.target.hf import HFTarget
from forerun.target.load import load_target
from training.runs import random_samples, write_data


@pytest.fixture(scope="module")
def target(tiny_qwen3_dir: Path) -> HFTarget:
    return load_target(tiny_qwen3_dir)


@pytest.fixture(scope="module")
def data(target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty samples, some of them held out."""
    return write_data(tmp_path_factory.mktemp("data") / "d", target.tokenizer, random_samples(40), held_out=0.2)
