"""What every block drafter is: a backbone, the fused context of every request, and a block per round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from forerun.drafters.base import Accepted, Draft, DraftView, KeepDrafting, Proposal
from forerun.drafters.dflash.config import BlockConfig, BlockSettings
from forerun.drafters.dflash.context import FusedContext
from forerun.drafters.dflash.loss import exercise
from forerun.drafters.dflash.memory import BlockPass, block_memory
from forerun.drafters.dflash.network import Backbone, default_layers, mask_token, spread_taps
from forerun.drafters.layers import like_target
from forerun.drafters.learned import DesignPlan, Exercise, Held, LearnedDrafter, TrainingBatch, config_fields
from forerun.errors import OptionError
from forerun.target.base import Target
from forerun.target.blocks import BlockKey


class BlockDrafter(LearnedDrafter):
    """Drafts from a block of slots over the target's fused features; what becomes of the slots is the kind's own."""

    config: BlockConfig
    context: FusedContext

    def over(self, backbone: Backbone) -> None:
        """Sets up what drafting needs, over this backbone."""
        self.context = FusedContext(backbone, self.config, self.target)
        self.max_draft = self.default_draft = self.config.max_draft
        # A block whose anchor slot is not used is one slot longer than its drafts.
        self.window = self.config.transformer_layer_config.max_position_embeddings - self.config.first_slot

    @abstractmethod
    def _drafts(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Sequence[Draft]:
        """A draft for each view; the context of all of them is whole."""

    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:
        return exercise(batch, self.config, self.settings, generator)

    def plan_rows_per_token(self, lengths: Sequence[int]) -> float:
        """Slots per token of the data."""
        return self._pass(lengths).slots / max(1, sum(lengths))

    def plan_memory(self, lengths: Sequence[int], half: bool) -> list[Held]:
        return block_memory(self._pass(lengths), half)

    def _pass(self, lengths: Sequence[int]) -> BlockPass:
        return BlockPass(
            layer=self.config.transformer_layer_config,
            lengths=lengths,
            anchors=self.settings.anchors,
            block_size=self.config.block_size,
            drafts=self.config.max_draft,
            features=self.config.target_hidden_size * len(self.taps),
            feature_itemsize=self.target.dtype.itemsize,
            teacher_columns=self.teacher_columns(self.needs_normalizer),
            draft_vocab_size=self.config.draft_vocab_size,
            head_bytes=self.head_bytes,
        )

    @property
    def head_bytes(self) -> int:
        """What heads of its own keep of a slot in training."""
        return 0

    @property
    def block_bytes(self) -> int:
        return self.context.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self.context.allocate(num_blocks)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        return self.context.propose(views, lambda ready: self._drafts(ready, keep_drafting))

    def commit(self, accepted: Sequence[Accepted]) -> None:
        super().commit(accepted)
        with torch.inference_mode():
            self.context.commit(accepted)

    def release(self, request_id: int) -> None:
        super().release(request_id)
        self.context.release(request_id)

    def keep(self, request_id: int, tokens: Sequence[int], keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        with torch.inference_mode():
            self.context.keep(request_id, keys)

    def kept(self, keys: Sequence[BlockKey]) -> int:
        return self.context.kept(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        self.context.adopt(request_id, keys)

    def drop(self, key: BlockKey) -> None:
        self.context.drop(key)

    def audit(self) -> None:
        self.context.audit()


# ------------------------------------------------------------------------------------------------------------- designs


def block_fields(target: Target, settings: BlockSettings, plan: DesignPlan) -> dict[str, Any]:
    """Fields of a `BlockConfig` but `method`. OptionError if a setting does not fit the target."""
    taps = settings.taps if settings.taps is not None else spread_taps(target.num_layers)
    layers = settings.layers or default_layers(target.num_layers)
    mask = settings.mask_token_id if settings.mask_token_id is not None else mask_token(target)
    if mask >= target.vocab_size:
        raise OptionError("mask_token_id", f"{mask} is not in the target's vocabulary of {target.vocab_size}")
    return {
        **config_fields(target, settings, plan, taps),
        "transformer_layer_config": like_target(target, "qwen3", layers, settings.intermediate_size),
        "layer_types": ("full_attention",) * layers,
        "block_size": settings.block_size,
        "mask_token_id": mask,
        "sample_from_anchor": settings.sample_from_anchor,
    }


def backbone_of(config: BlockConfig) -> Backbone:
    return Backbone(config.transformer_layer_config, config.target_hidden_size * len(config.aux_hidden_state_layer_ids))
