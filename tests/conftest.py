"""Models for any test: a tiny random Qwen3 and a smaller one that agrees with it now and then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tiny import qwen3, save_tokenizer

# No test may fail for being slow on a busy machine, nor by chance: the same examples in every run.
settings.register_profile("forerun", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forerun")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees what its user has measured on this machine: with known costs an engine schedules."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FORERUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power, and what a killed process has written is there: only the descriptor is checked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, float32, 256 positions, a byte tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    qwen3(3).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the other one with the same head: a draft model that is right now and then."""
    folder = tmp_path_factory.mktemp("tiny-small")
    qwen3(2).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
