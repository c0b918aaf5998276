"""The DFlash drafter: all draft tokens of a round from one pass over a block (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from forerun.drafters.base import Draft, DraftView, KeepDrafting, top_probability
from forerun.drafters.dflash.config import DFlashConfig, DFlashSettings
from forerun.drafters.dflash.drafter import BlockDrafter, backbone_of, block_fields
from forerun.drafters.dflash.loss import Rows, hidden_states, metrics_of, row_losses
from forerun.drafters.dflash.network import Backbone, initialise
from forerun.drafters.dflash.start import fit_backbone
from forerun.drafters.learned import DesignPlan, Exercise, Losses, Material, TrainingBatch
from forerun.drafters.learned.fitting import fit_soundly
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.target.base import Target


class DFlash(BlockDrafter):
    """Fills a block of masked slots in one pass over the target's fused features.

    Every slot's law is drawn from by itself: what slot k sees of x_<k is nothing but positions, so blocks of tokens
    that are each likely alone may not fit together. `dspark` chains them. c_k, the top probability of slot k, is then a
    function of the history.
    """

    name = "dflash"
    blind = True
    settings_class = DFlashSettings
    config_class = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, network: Backbone, vocabulary: DraftVocabulary, target: Target):
        super().__init__(config, network, vocabulary, target)
        self.backbone = network
        self.over(network)

    @classmethod
    def network_of(cls, config: DFlashConfig) -> Backbone:
        return backbone_of(config)

    @classmethod
    def design(cls, target: Target, settings: DFlashSettings, plan: DesignPlan) -> Self:
        config = DFlashConfig(method="dflash", **block_fields(target, settings, plan))
        vocabulary = plan.vocabulary(settings)
        drafter = cls(config, cls.network_of(config), vocabulary, target)
        initialise(drafter.backbone, target, settings.init, plan, len(config.aux_hidden_state_layer_ids))
        drafter.settings = settings
        return drafter

    # -------------------------------------------------------------------------------------------------------- training

    def fit(self, material: Material) -> bool:
        return fit_soundly(self.backbone, material, lambda: fit_backbone(self, self.backbone, material))

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:
        blocks, weights = exercise.drawn["blocks"], exercise.drawn["weights"]
        hidden = hidden_states(self.backbone, batch, blocks, self.config, self.target.embed)
        rows = Rows.of(hidden, batch, blocks, weights)
        total, losses = row_losses(self, batch, rows, self.settings, progress)
        return Losses(total, metrics_of(rows, losses, self.config.max_draft))

    # -------------------------------------------------------------------------------------------------------- decoding

    def _drafts(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> list[Draft]:
        hidden = self.context.blocks(views)
        logits = self.vocabulary.to_target(self.target_head(torch.cat(hidden)))
        laws = torch.split(logits, [len(own) for own in hidden])

        def advance(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            logits = torch.stack([laws[i][len(draft.tokens)] for i, draft in zip(active, drafts, strict=True)])
            return logits, top_probability(logits)

        return self.draft(views, keep_drafting, advance)
