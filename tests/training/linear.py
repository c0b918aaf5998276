"""A small drafter that is really trained and really drafts, for tests of the trainer: two linear layers.

Position 1 is predicted from the features of the row before the anchor and the anchor's embedding, position 2 from those
and the first draft's embedding. What a step is taught is drawn row by row, so that its randomness matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from forerun.drafters.base import Accepted, Draft, DraftView, KeepDrafting, Proposal, draft_serially, top_probability
from forerun.drafters.learned import (
    DesignPlan,
    DraftConfig,
    DraftSettings,
    Exercise,
    LearnedDrafter,
    Losses,
    TrainingBatch,
    config_fields,
    wide,
)
from forerun.drafters.losses import compare
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.target.base import Target


class LinearSettings(DraftSettings):
    """Of the test's drafter."""

    block_size: int = Field(default=2, ge=1, le=2, description="Tokens it drafts.")
    skip: float = Field(default=0.25, ge=0, lt=1, description="Share of the rows that a step leaves out.")


class LinearConfig(DraftConfig):
    """Nothing more than the block."""

    block_size: int


class Network(nn.Module):
    """`first` and `second` predict a hidden state; the target's head makes logits of it."""

    def __init__(self, config: LinearConfig):
        super().__init__()
        hidden, columns = config.target_hidden_size, len(config.aux_hidden_state_layer_ids)
        self.first = nn.Linear((columns + 1) * hidden, hidden)
        self.second = nn.Linear((columns + 2) * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Features [n, m * H] and one or two embeddings [n, k * H] -> [n, H]."""
        x = torch.cat([features, embedded], -1)
        layer = self.first if x.shape[-1] == self.first.in_features else self.second
        out: Tensor = self.norm(layer(x.to(layer.weight.dtype)))
        return out


class Linear(LearnedDrafter):
    """See the module."""

    name = "training.linear:Linear"
    settings_class = LinearSettings
    config_class = LinearConfig

    def __init__(self, config: Any, network: nn.Module, vocabulary: DraftVocabulary, target: Target):
        super().__init__(config, network, vocabulary, target)
        self.max_draft = self.default_draft = config.block_size
        self._last: dict[int, tuple[int, Tensor]] = {}

    @classmethod
    def design(cls, target: Target, settings: LinearSettings, plan: DesignPlan) -> Self:
        fields = config_fields(target, settings, plan, settings.taps or (1, target.num_layers))
        config = LinearConfig(method=cls.name, block_size=settings.block_size, **fields)
        vocabulary = DraftVocabulary.most_frequent(plan.token_counts, config.draft_vocab_size)
        drafter = cls(config, cls.network_of(config), vocabulary, target)
        generator = torch.Generator().manual_seed(plan.seed)
        with torch.no_grad():
            for parameter in drafter.network.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
                else:
                    parameter.zero_()
            drafter.network.norm.weight.fill_(1.0)
        if target.dtype == torch.float64:
            drafter.network.double()
        drafter.settings = settings
        return drafter

    @classmethod
    def network_of(cls, config: Any) -> nn.Module:
        return Network(config)

    # -------------------------------------------------------------------------------------------------------- training

    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:
        drawn = torch.rand(len(batch.tokens), generator=generator) >= self.settings.skip
        taught = torch.zeros(len(batch.tokens), self.config.block_size, dtype=torch.bool)
        mask = batch.loss_mask.cpu()
        for start, length in zip(batch.starts, batch.lengths, strict=True):
            for k in range(1, self.config.block_size + 1):
                rows = torch.arange(start + 1, max(start + 1, start + length - k))
                taught[rows, k - 1] = mask[rows + k] & drawn[rows]
        taught = taught.to(batch.tokens.device)
        return Exercise(float(taught.sum()), {"taught": taught})

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:
        total, metrics = torch.zeros((), dtype=self.network.first.weight.dtype), {}
        for k in range(1, self.config.block_size + 1):
            rows = exercise.drawn["taught"][:, k - 1].nonzero()[:, 0]
            known = torch.cat([self.target.embed(batch.tokens[rows + j]) for j in range(k)], -1)
            logits = wide(self.target_head(self.network(batch.features[rows - 1], known)))
            normalizer = None if batch.log_normalizer is None else batch.log_normalizer[rows + k - 1]
            teacher = self.target_probs(batch.last[rows + k - 1], normalizer)
            labels = self.vocabulary.to_draft(batch.tokens[rows + k])
            out = compare(logits, teacher, labels)
            soft = -(teacher.to(logits.dtype) * logits.log_softmax(-1)).sum(-1)  # in the target's own precision
            total = total + soft.sum()
            metrics[f"teacher_forced_acceptance@{k}"] = float(out.acceptance.sum()), float(len(rows))
            metrics[f"soft_ce@{k}"] = float(soft.detach().sum()), float(len(rows))
        return Losses(total, metrics)

    # -------------------------------------------------------------------------------------------------------- decoding

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        def advance(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            features = torch.cat([self._features(views[i]) for i in active])
            known = torch.tensor(
                [[views[i].tokens[-1], *draft.tokens] for i, draft in zip(active, drafts, strict=True)]
            )
            with torch.no_grad():
                hidden = self.network(features, self.target.embed(known.to(features.device)).flatten(1))
                logits = self.vocabulary.to_target(wide(self.target_head(hidden)))
            return logits, top_probability(logits)

        return draft_serially(views, keep_drafting, advance)

    def _features(self, view: DraftView) -> Tensor:
        end, features = self._last[view.request_id]
        assert end == view.anchor, f"features end at row {end}, the anchor is {view.anchor}"
        return features

    def commit(self, accepted: Sequence[Accepted]) -> None:
        for rows in accepted:
            if rows.features is not None and len(rows.features):
                self._last[rows.request_id] = rows.end, rows.features[-1:].clone()

    def release(self, request_id: int) -> None:
        self._last.pop(request_id, None)

    def audit(self) -> None:
        assert not self._last
