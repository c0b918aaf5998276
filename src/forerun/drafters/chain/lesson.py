"""How the loss of every chain begins: which rows are taught, and the chains unrolled from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.drafters.chain.unroll import Unroll, rows_per_chunk, taught
from forerun.drafters.learned import Losses, TrainingBatch
from forerun.drafters.losses import Taught, in_chunks

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

    def in_chunks(self, chains: Callable[..., Taught], unroll: Unroll, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`losses.in_chunks` of what is taught by the chains from some rows.

        Args:
            chains: a function of the chunk's rows, of its part of every tensor, and of what is to be `unroll.shared`.
            unroll: the chains.
            tensors: each [n, ...], of the taught rows.
        """
        size = rows_per_chunk(self.drafter, self.batch, self.rows, self.mask.shape[1])
        return in_chunks(chains, size, (self.rows, *tensors), unroll.shared, self.drafter.network.parameters())
