"""Drafting with a chain: K tokens cost the row of the anchor and K - 1 more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.base import (
    Accepted,
    Draft,
    DraftView,
    KeepDrafting,
    Proposal,
    top_probability,
)
from forerun.drafters.chain.network import ChainNetwork
from forerun.drafters.chain.rows import ChainRows
from forerun.drafters.learned import Held, LearnedDrafter
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.target.base import Target
from forerun.target.blocks import BlockKey


class ChainDrafter(LearnedDrafter):
    """A learned drafter whose network is a `ChainNetwork`: all of its decoding.

    A request some of whose rows never came (its state was dropped half-way) is not drafted for.
    """

    network: ChainNetwork
    lookahead = 1  # a row is made of a feature and of the token that follows it

    def __init__(self, config: Any, network: ChainNetwork, vocabulary: DraftVocabulary, target: Target):
        super().__init__(config, network, vocabulary, target)
        self.window = config.transformer_layer_config.max_position_embeddings
        self._rows = ChainRows(network, self.fuse, target)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features [n, m * H] of the taps -> what the network is given, [n, H] in its dtype."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The network's hidden states [..., H] -> logits [..., D] over the draft vocabulary."""

    @property
    def chain_steps(self) -> int:
        """Steps of a chain in training."""
        return 1

    def plan_rows_per_token(self, lengths: Sequence[int]) -> float:  # noqa: ARG002 - each row at each step
        return float(self.chain_steps)

    def plan_memory(self, lengths: Sequence[int], half: bool) -> list[Held]:
        from forerun.drafters.chain.memory import chain_memory

        return chain_memory(self, lengths, self.chain_steps, half)

    @property
    def block_bytes(self) -> int:
        return self._rows.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self._rows.allocate(num_blocks)

    @torch.no_grad()
    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        ready = [i for i, view in enumerate(views) if self._rows.complete(view)]
        mine = [views[i] for i in ready]
        hidden: dict[int, Tensor] = {}

        def advance(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            chosen = [mine[i] for i in active]
            if hidden:
                feature = self.network.feedback(torch.stack([hidden[i] for i in active]))
                rows = self._rows.go_on(chosen, [draft.tokens for draft in drafts], feature)
            else:
                rows = self._rows.begin(chosen)
            hidden.update(zip(active, rows, strict=True))
            logits = self.vocabulary.to_target(self.logits(rows))
            return logits, top_probability(logits)

        proposal = [Draft() for _ in views]
        for i, draft in zip(ready, self.draft(mine, keep_drafting, advance), strict=True):
            proposal[i] = draft
        return proposal

    def commit(self, accepted: Sequence[Accepted]) -> None:
        super().commit(accepted)
        self._rows.commit(accepted)

    def release(self, request_id: int) -> None:
        super().release(request_id)
        self._rows.release(request_id)

    def keep(self, request_id: int, tokens: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._rows.keep(request_id, tokens, keys)

    def kept(self, keys: Sequence[BlockKey]) -> int:
        return self._rows.kept(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        self._rows.adopt(request_id, keys)

    def drop(self, key: BlockKey) -> None:
        self._rows.drop(key)

    def audit(self) -> None:
        self._rows.audit()
