"""Log-probabilities of a given text under the target: its rows are computed piece by piece, between the steps."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine.core import EngineCore
from forerun.engine.intake import Intake
from forerun.errors import PromptError
from forerun.sampling import TokenLogprob, logprobs
from forerun.target.base import BLOCK_SIZE, Batch, Segment
from forerun.target.blocks import blocks_for

PIECE = 128
"""Rows of one piece: each needs logits over the whole vocabulary, and everybody else waits for it."""


class Scoring:
    """One text. It is used on the engine's thread, `step` between two steps of the engine until it is done.

    Its KV rows are held like those of an idle conversation: requests that need memory take them back, and it starts
    over. So do scorings that began earlier: two that hold half of what they need would wait for each other forever.

    Raises:
        PromptError: a token outside the vocabulary, or more of them than all KV memory holds.
    """

    def __init__(self, core: EngineCore, intake: Intake, tokens: Sequence[int], top: int = 0):
        vocab_size, rows = core.target.vocab_size, core.pool.num_blocks * BLOCK_SIZE
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise PromptError("prompt", f"token {outside[0]} is outside the vocabulary of {vocab_size}")
        if blocks_for(len(tokens)) > core.pool.num_blocks:
            raise PromptError("prompt", f"has {len(tokens)} tokens, all KV memory holds {rows}")
        self.values: list[TokenLogprob] = []
        """Of every token behind the first."""
        self._core = core
        self._tokens = list(tokens)
        self._top = top
        self._rows = 0
        self._id = intake.new_id()
        core.kept[self._id] = []

    @property
    def done(self) -> bool:
        return len(self.values) >= len(self._tokens) - 1

    def step(self) -> bool:
        """Computes the next piece; False if it has to wait for memory, or has been closed."""
        blocks, pool = self._core.kept.get(self._id), self._core.pool
        if blocks is None:
            return False
        if len(blocks) * BLOCK_SIZE < self._rows:  # taken back
            self._rows, self.values = 0, []
        end = min(len(self._tokens), self._rows + PIECE)
        while not pool.can_grow(blocks, end):
            if not self._core.reclaim(since=self._id):
                return False
        pool.grow(blocks, end)
        segment = Segment(self._tokens[self._rows : end], self._rows, blocks, end - self._rows)
        logits = self._core.target.forward(Batch([segment])).logits
        following = self._tokens[self._rows + 1 : end + 1]
        self.values += logprobs(logits[: len(following)], following, self._top)
        self._rows = end
        return True

    def close(self) -> None:
        """Frees its rows."""
        self._core.drop_kept(self._id)
