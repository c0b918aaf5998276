"""The DSpark drafter: one pass over a block, then a few tiny serial steps that chain its tokens (arXiv 2607.05147)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from forerun.drafters.base import Draft, DraftView, KeepDrafting, top_probability
from forerun.drafters.dflash.blocks import Blocks
from forerun.drafters.dflash.drafter import BlockDrafter, block_fields
from forerun.drafters.dflash.loss import Rows, hidden_states, metrics_of, row_losses
from forerun.drafters.dflash.network import initialise
from forerun.drafters.dflash.start import fit_backbone
from forerun.drafters.dspark.bigrams import as_states, fit_bigrams
from forerun.drafters.dspark.config import DSparkConfig, DSparkSettings
from forerun.drafters.dspark.network import DSparkNetwork, initialise_heads
from forerun.drafters.learned import DesignPlan, Exercise, Losses, Material, TrainingBatch, wide
from forerun.drafters.learned.fitting import fit_soundly
from forerun.drafters.learned.head import head_rows
from forerun.drafters.losses import confidence_loss
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.target.base import Target


class DSpark(BlockDrafter):
    """A DFlash backbone whose slots are chained by a Markov head, with a confidence for every draft token."""

    name = "dspark"
    settings_class = DSparkSettings
    config_class = DSparkConfig
    renamed = {"backbone.": ""}  # noqa: RUF012 - a constant of the class
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, network: DSparkNetwork, vocabulary: DraftVocabulary, target: Target):
        super().__init__(config, network, vocabulary, target)
        self.net = network
        # Without a Markov head nothing sees a drawn token; a confidence head may be kept from seeing it.
        unseen = config.enable_confidence_head and not config.confidence_head_with_markov
        self.blind = network.markov_head is None or unseen
        self.over(network.backbone)

    @classmethod
    def network_of(cls, config: DSparkConfig) -> DSparkNetwork:
        return DSparkNetwork(config)

    @classmethod
    def design(cls, target: Target, settings: DSparkSettings, plan: DesignPlan) -> Self:
        heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        own = {name: getattr(settings, name) for name in heads}
        config = DSparkConfig(method="dspark", **block_fields(target, settings, plan), **own)
        drafter = cls(config, cls.network_of(config), plan.vocabulary(settings), target)
        initialise(drafter.net.backbone, target, settings.init, plan, len(config.aux_hidden_state_layer_ids))
        initialise_heads(drafter.net, plan.seed)
        drafter.settings = settings
        return drafter

    # -------------------------------------------------------------------------------------------------------- training

    def fit(self, material: Material) -> bool:
        markov, said = self.net.markov_head, None
        if markov is not None and fit_bigrams(markov, material, self.vocabulary):
            said = as_states(markov, head_rows(self.target, self.vocabulary).to(self.target.device))
        backbone = self.net.backbone
        fitted = fit_soundly(backbone, material, lambda: fit_backbone(self, backbone, material, said))
        return fitted or said is not None

    @property
    def head_bytes(self) -> int:
        """The Markov head's latents, before and after the taught ones are taken, and what the confidence head reads."""
        size, rank = self.config.transformer_layer_config.hidden_size, self.config.markov_rank
        mixed = size + (4 if self.config.markov_head_type == "rnn" else 2) * rank
        gates = 0 if self.config.markov_head_type == "vanilla" else 4 * mixed
        return 8 * rank + gates + 4 * (size + 2 * rank) * self.config.enable_confidence_head

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:
        blocks, weights = exercise.drawn["blocks"], exercise.drawn["weights"]
        hidden = hidden_states(self.net.backbone, batch, blocks, self.config, self.target.embed)
        previous = previous_tokens(batch, blocks, hidden.shape[1])
        rows = Rows.of(hidden, batch, blocks, weights)
        markov, taught = self.net.markov_head, weights > 0
        correction = None if markov is None else (markov.along(previous, hidden)[taught], markov.markov_w2)
        total, losses = row_losses(self, batch, rows, self.settings, progress, correction)
        metrics = metrics_of(rows, losses, self.config.max_draft)
        if self.net.confidence_head is not None:
            logits = self.net.confidence(rows.hidden, previous[taught])
            wrong = confidence_loss(logits, losses.acceptance)
            total = total + self.settings.confidence_weight * (rows.weights * wrong).sum()
            metrics["confidence_bce"] = float((rows.weights * wrong.detach()).sum()), float(rows.weights.sum())
        return Losses(total, metrics)

    # -------------------------------------------------------------------------------------------------------- decoding

    def _drafts(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> list[Draft]:
        hidden = self.context.blocks(views)
        base = torch.split(wide(self.target_head(torch.cat(hidden))), [len(own) for own in hidden])
        states: dict[int, Tensor] = {}

        def advance(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            slots = [len(draft.tokens) for draft in drafts]
            last = [d.tokens[-1] if d.tokens else views[i].tokens[-1] for i, d in zip(active, drafts, strict=True)]
            previous = torch.tensor(last, device=hidden[0].device)
            seen = torch.stack([hidden[i][slot] for i, slot in zip(active, slots, strict=True)])
            logits = torch.stack([base[i][slot] for i, slot in zip(active, slots, strict=True)])
            logits = logits + self._bias(active, previous, seen, states)
            return self.vocabulary.to_target(logits), self._confidence(seen, previous, logits)

        return self.draft(views, keep_drafting, advance)

    def _bias(
        self, active: Sequence[int], previous: Tensor, hidden: Tensor, states: dict[int, Tensor]
    ) -> Tensor | float:
        """[R, D] of the Markov head; moves the states of these requests on."""
        markov = self.net.markov_head
        if markov is None:
            return 0.0
        fresh = markov.start(1, hidden)
        state = torch.cat([states.get(i, fresh) for i in active])
        latent, state = markov.step(previous, hidden, state)
        states.update(zip(active, torch.split(state, 1), strict=True))
        return wide(markov.bias(latent))

    def _confidence(self, hidden: Tensor, previous: Tensor, logits: Tensor) -> list[float]:
        """c_k by the head, or the top probability without one; NaN where the law is not finite."""
        top = top_probability(logits)
        if self.net.confidence_head is None:
            return top
        own = torch.sigmoid(self.net.confidence(hidden, previous).float()).tolist()
        return [c if math.isfinite(p) else math.nan for c, p in zip(own, top, strict=True)]


def previous_tokens(batch: TrainingBatch, blocks: Blocks, length: int) -> Tensor:
    """[B, K] the token before each predicted one, from the text: the anchor for k = 1, then token s + k - 1."""
    rows = blocks.rows[:, None] + torch.arange(length, device=blocks.rows.device)
    return batch.tokens[rows.clamp(max=len(batch.tokens) - 1)]
