"""EAGLE as a drafter: what of the target it reads, and where its weights start."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from forerun.drafters.chain.decode import ChainDrafter
from forerun.drafters.chain.start import last_layer, pass_last, randomise, take_over
from forerun.drafters.eagle import loss
from forerun.drafters.eagle.config import EagleConfig, EagleSettings
from forerun.drafters.eagle.network import EagleNetwork
from forerun.drafters.eagle.start import fit_eagle
from forerun.drafters.layers import like_target
from forerun.drafters.learned import DesignPlan, Exercise, Losses, Material, TrainingBatch, config_fields
from forerun.drafters.learned.fitting import fit_soundly
from forerun.target.base import Target


class Eagle(ChainDrafter):
    """Predicts the target's next top feature and reads it with the target's own head (methods, 3.2)."""

    name = "eagle"
    settings_class = EagleSettings
    config_class = EagleConfig
    settings: EagleSettings
    network: EagleNetwork

    @classmethod
    def design(cls, target: Target, settings: EagleSettings, plan: DesignPlan) -> Self:
        settings.check(target.num_layers)
        vocabulary = plan.vocabulary(settings)
        config = EagleConfig(
            **config_fields(target, settings, plan, (target.num_layers,)),
            method="eagle",
            transformer_layer_config=like_target(target, "llama", 1, settings.intermediate_size),
            bias=settings.bias,
            feature_norm="final_norm",
        )
        network = cls.network_of(config)
        randomise(network, plan.seed)
        if settings.init == "target" and (given := last_layer(target, plan)):
            take_over(network.layers[0], given)
            pass_last(network.fc)
        drafter = cls(config, network, vocabulary, target)
        drafter.settings = settings
        return drafter

    @classmethod
    def network_of(cls, config: EagleConfig) -> EagleNetwork:
        return EagleNetwork(config.transformer_layer_config, config.bias)

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        """[n, H] h = n -> [n, H] as it enters the target's head; nothing here is learned."""
        return self.target.final_norm(features.to(self.target.dtype)).to(self.network.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target_head(hidden)

    @property
    def known_size(self) -> int:
        return (len(self.taps) + 1) * self.target.hidden_size  # the embedding stands beside the taps

    def fit(self, material: Material) -> bool:
        return fit_soundly(self.network, material, lambda: fit_eagle(self, material))

    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:
        return loss.prepare(batch, generator)

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:  # noqa: ARG002
        return loss.losses(self, batch, exercise)
