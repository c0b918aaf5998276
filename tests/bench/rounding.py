"""A target whose logits depend on the length of the pass, as low precision makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from forerun.target.base import Forward
from forerun.target.table import TableTarget, history_model

NOISE = 0.125


def near_ties(vocab_size: int) -> Callable[[Sequence[int]], list[float]]:
    """A history model whose two best logits lie .0625 apart after every fourth token."""

    def logits(prefix: Sequence[int]) -> list[float]:
        row = list(history_model(vocab_size, seed=4)._logits(prefix))
        if len(prefix) % 4 == 0:
            row[row.index(-1.0)] = -0.0625
        return row

    return logits


class Rounding(TableTarget):
    """In bfloat16, with passes over several rows of a request moving every logit but the best by `NOISE`."""

    dtype = torch.bfloat16

    def forward(self, batch, taps=()):
        logits, features = super().forward(batch, taps)
        several = [len(s.tokens) > 1 and s.start > 0 for s in batch.segments for _ in range(s.logit_rows)]
        moved = logits + NOISE * (logits < 0)
        return Forward(moved.where(torch.tensor(several, dtype=torch.bool)[:, None], logits), features)
