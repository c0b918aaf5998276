"""Shared pieces of the engine's tests: exact targets, the oracle, and engines over them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun import Sampling
from forerun.drafters.base import Drafter
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.reference import decode
from forerun.sampling import Noise, VerifyMode
from forerun.target.base import Target
from forerun.target.table import history_model


def engine_of(target: Target, *drafters: Drafter, **options: object) -> Engine:
    """An engine over a target and drafters that are already made."""
    chosen = EngineOptions.of({"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})
    return Engine(target, load_drafters(list(drafters), target, chosen), chosen)


def plain(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, mode: VerifyMode = "rejection"
) -> dict[tuple[int, ...], list[int]]:
    """What the reference decodes for each prompt."""
    target.allocate(64)
    noise = Noise.of(sampling.seed or 0)
    return {tuple(prompt): decode(target, prompt, sampling, noise, mode) for prompt in prompts}


@pytest.fixture
def history() -> Target:
    return history_model(7, seed=3)
