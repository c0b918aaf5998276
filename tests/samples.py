"""Training samples for any test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Text:
    """A sample as a prepared data set gives it."""

    id: str
    token_ids: Any  # int32 [S]
    loss_mask: Any  # bool [S]


def text(name: str, tokens: Sequence[int]) -> Text:
    """Every other token is learned."""
    return Text(name, np.array(tokens, np.int32), np.arange(len(tokens)) % 2 == 1)


def texts(lengths: Sequence[int], vocab_size: int, seed: int = 0, prefix: str = "s") -> list[Text]:
    """Random texts of these lengths, `s0`, `s1`, ..."""
    rng = random.Random(seed)
    return [text(f"{prefix}{i}", [rng.randrange(vocab_size) for _ in range(n)]) for i, n in enumerate(lengths)]
