"""The DFlash drafter: all draft tokens of a round from one pass over a block (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from forerun.drafters.base import (
    Accepted,
    Draft,
    DraftView,
    KeepDrafting,
    Proposal,
    draft_serially,
    top_probability,
)
from forerun.drafters.dflash.config import BlockConfig, BlockSettings, DFlashConfig, DFlashSettings
from forerun.drafters.dflash.context import FusedContext
from forerun.drafters.dflash.loss import Rows, exercise, hidden_states, metrics_of, objective, row_losses
from forerun.drafters.dflash.network import Backbone, default_layers, initialise, mask_token, spread_taps
from forerun.drafters.layers import like_target
from forerun.drafters.learned import DesignPlan, Exercise, LearnedDrafter, Losses, TrainingBatch, config_fields
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.errors import OptionError
from forerun.target.base import Target


class DFlash(LearnedDrafter):
    """Fills a block of masked slots in one pass over the target's fused features.

    Every slot's law is drawn from by itself: what slot k sees of x_<k is nothing but positions, so blocks of tokens
    that are each likely alone may not fit together. `dspark` chains them.
    """

    name = "dflash"
    settings_class = DFlashSettings
    config_class = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, network: Backbone, vocabulary: DraftVocabulary, target: Target):
        super().__init__(config, network, vocabulary, target)
        self.backbone = network
        self.context = FusedContext(network, config, target)
        self.max_draft = self.default_draft = config.max_draft
        self.window = block_window(config)

    @classmethod
    def network_of(cls, config: DFlashConfig) -> Backbone:
        return backbone_of(config)

    @classmethod
    def design(cls, target: Target, settings: DFlashSettings, plan: DesignPlan) -> Self:
        config = DFlashConfig(method="dflash", **block_fields(target, settings, plan))
        vocabulary = kept_ids(config, plan)
        drafter = cls(config, cls.network_of(config), vocabulary, target)
        initialise(drafter.backbone, target, settings.init, plan.seed, len(config.aux_hidden_state_layer_ids))
        drafter.settings = settings
        return drafter

    # -------------------------------------------------------------------------------------------------------- training

    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:
        return exercise(batch, self.config, self.settings, generator)

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:
        blocks, weights = exercise.drawn["blocks"], exercise.drawn["weights"]
        hidden = hidden_states(self.backbone, batch, blocks, self.config, self.target.embed)
        rows = Rows.of(hidden, batch, blocks, weights)
        losses = row_losses(self, batch, rows, self.settings)
        total = (rows.weights * objective(losses, self.settings, progress)).sum()
        return Losses(total, metrics_of(rows, losses, self.config.max_draft))

    # -------------------------------------------------------------------------------------------------------- decoding

    @property
    def block_bytes(self) -> int:
        return self.context.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self.context.allocate(num_blocks)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        return self.context.propose(views, lambda ready: self._drafts(ready, keep_drafting))

    def _drafts(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> list[Draft]:
        hidden = self.context.blocks(views)
        logits = self.vocabulary.to_target(self.target_head(torch.cat(hidden)))
        laws = torch.split(logits, [len(own) for own in hidden])

        def advance(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            logits = torch.stack([laws[i][len(draft.tokens)] for i, draft in zip(active, drafts, strict=True)])
            return logits, top_probability(logits)

        return draft_serially(views, keep_drafting, advance)

    def commit(self, accepted: Sequence[Accepted]) -> None:
        with torch.inference_mode():
            self.context.commit(accepted)

    def release(self, request_id: int) -> None:
        self.context.release(request_id)

    def audit(self) -> None:
        self.context.audit()


# ------------------------------------------------------------------------------------- what every block drafter needs


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


def kept_ids(config: BlockConfig, plan: DesignPlan) -> DraftVocabulary:
    """The vocabulary a design keeps: the most frequent ids of the training data."""
    if config.draft_vocab_size == config.vocab_size:
        return DraftVocabulary(config.vocab_size)
    return DraftVocabulary.most_frequent(plan.token_counts, config.draft_vocab_size)


def block_window(config: BlockConfig) -> int:
    """Positions for anchor and drafts: a block whose anchor slot is not used is one slot longer than its drafts."""
    return config.transformer_layer_config.max_position_embeddings - config.first_slot
