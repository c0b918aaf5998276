"""Which samples a step trains on, and how a step is cut into passes and shared among devices: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.errors import OptionError

COUNTABLE = 100_000_000
"""Samples of a stream that are dealt out one by one to know its steps: a minute or two."""


@dataclass(frozen=True)
class Order:
    """The endless stream of samples, epoch after epoch, each in an order of its own; a step is a stretch of it.

    A place in the stream is one number, how many samples came before: resuming there costs no replay.

    Args:
        lengths: [N] tokens of every sample.
        tokens_per_step: a step takes samples as long as they fit; a longer one makes a step of its own.
        seed: of the orders.
    """

    lengths: np.ndarray
    tokens_per_step: int
    seed: int
    _known: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def sample(self, place: int) -> int:
        """Index of the sample at a place of the stream."""
        epoch, index = divmod(place, len(self.lengths))
        if epoch not in self._known:
            for old in [known for known in self._known if known < epoch - 1]:
                del self._known[old]
            self._known[epoch] = shuffled(len(self.lengths), self.seed, epoch)
        return int(self._known[epoch][index])

    def step(self, place: int) -> tuple[list[int], int]:
        """Indices of the samples of the step that begins at a place, and where the next one begins.

        No step holds a sample more often than once an epoch would: it ends after N samples at the latest.
        """
        chosen: list[int] = []
        tokens = 0
        while len(chosen) < len(self.lengths):
            index = self.sample(place + len(chosen))
            tokens += int(self.lengths[index])
            if chosen and tokens > self.tokens_per_step:
                break
            chosen.append(index)
        return chosen, place + len(chosen)

    def steps_of(self, epochs: float) -> int:
        """Steps after which the stream has gone through so many epochs; the last one may begin another.

        Raises:
            OptionError: these are more samples than anybody waits to be counted.
        """
        place, steps, end = 0, 0, epochs * len(self.lengths)
        if not end <= COUNTABLE:
            raise OptionError(
                "--epochs", f"{epochs:g} x {len(self.lengths):,} samples are over {COUNTABLE:,}; say how many --steps"
            )
        while place < end:
            place = self.step(place)[1]
            steps += 1
        self._known.clear()
        return steps


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """[count] a permutation. Raw Philox numbers are the same in every version of numpy, its shuffles need not be."""
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(keys, kind="stable")


def micro_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """A step's samples, by their places in it, in groups of neighbours of at most `most` tokens; a longer one alone."""
    groups: list[list[int]] = []
    tokens = 0
    for place, length in enumerate(lengths):
        if not groups or tokens + length > most:
            groups.append([])
            tokens = 0
        groups[-1].append(place)
        tokens += length
    return groups


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which groups each rank computes: every group, in order, to the rank that has the fewest tokens so far."""
    taken: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group, size in enumerate(sizes):
        rank = loads.index(min(loads))
        taken[rank].append(group)
        loads[rank] += size
    return taken
