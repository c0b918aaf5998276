"""How the loss of every chain begins: which rows are taught, and the chains unrolled from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.drafters.chain.unroll import Unroll, rows_per_chunk, taught
from forerun.drafters.learned import Losses, TrainingBatch

if TYPE_CHECKING:
    from forerun.drafters.chain.decode import ChainDrafter


@dataclass(frozen=True)
class Lesson:
    """What a batch teaches a drafter in chains of some steps."""

    drafter: ChainDrafter
    batch: TrainingBatch
    rows: Tensor
    """[n] packed rows that are taught at a step at least, ascending; others give keys and values alone."""
    mask: Tensor
    """[n, steps] bool, at which steps each of them is."""

    @classmethod
    def of(cls, drafter: ChainDrafter, batch: TrainingBatch, steps: int) -> Lesson:
        mask = taught(batch, steps)
        rows = mask.any(-1).nonzero()[:, 0]
        return cls(drafter, batch, rows, mask[rows])

    @property
    def nothing(self) -> Losses:
        """Of a batch that teaches no row, with a graph all the same."""
        return Losses(self.drafter.network.fc.weight.sum() * 0, {})

    @cached_property
    def features(self) -> Tensor:
        """[T, H] of all rows, as the network is given them."""
        return self.drafter.fuse(self.batch.features)

    def unroll(self, features: Tensor) -> Unroll:
        """Chains that begin with these features [T, H]."""
        embedded = self.drafter.target.embed(self.batch.tokens).to(features.dtype)
        return Unroll(self.drafter.network, self.batch, embedded, features)

    @cached_property
    def chunk(self) -> int:
        """Rows that are computed at once."""
        return rows_per_chunk(self.drafter, self.batch, self.rows, self.mask.shape[1])
