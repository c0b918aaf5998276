"""EAGLE-3 as a drafter: what of the target it reads, and where its weights start."""

from __future__ import annotations

from typing import Self, cast

import torch
from torch import Tensor

from forerun.drafters.chain.decode import ChainDrafter
from forerun.drafters.chain.start import last_layer, pass_last, randomise, take_over
from forerun.drafters.eagle3 import loss
from forerun.drafters.eagle3.config import Eagle3Config, Eagle3Settings, default_taps
from forerun.drafters.eagle3.network import Eagle3Layer, Eagle3Network
from forerun.drafters.eagle3.start import fit_eagle3
from forerun.drafters.layers import like_target
from forerun.drafters.learned import DesignPlan, Exercise, Losses, Material, TrainingBatch, config_fields
from forerun.drafters.learned.fitting import fit_soundly
from forerun.drafters.learned.head import head_rows
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.target.base import Target
from forerun.target.donor import final_norm_weight
from forerun.target.hf import HFTarget


class Eagle3(ChainDrafter):
    """Predicts tokens, not features: a fusion of several taps, continued by its own hidden states (methods, 3.3)."""

    name = "eagle3"
    settings_class = Eagle3Settings
    config_class = Eagle3Config
    settings: Eagle3Settings
    network: Eagle3Network

    @classmethod
    def design(cls, target: Target, settings: Eagle3Settings, plan: DesignPlan) -> Self:
        settings.check()
        vocabulary = plan.vocabulary(settings)
        config = Eagle3Config(
            **config_fields(target, settings, plan, settings.taps or default_taps(target.num_layers)),
            method="eagle3",
            transformer_layer_config=like_target(target, settings.layer_type, 1, settings.intermediate_size),
            norm_before_residual=settings.norm_before_residual,
            norm_before_fc=settings.norm_before_fc,
            fc_norm=settings.fc_norm,
            norm_output=settings.norm_output,
        )
        network = cls.network_of(config)
        randomise(network, plan.seed)
        if settings.init == "target" and isinstance(target, HFTarget):
            _start_from(target, network, vocabulary, plan)
        drafter = cls(config, network, vocabulary, target)
        drafter.settings = settings
        return drafter

    @classmethod
    def network_of(cls, config: Eagle3Config) -> Eagle3Network:
        return Eagle3Network(config)

    def fuse(self, features: Tensor) -> Tensor:
        return self.network.fuse(features)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)

    @property
    def chain_steps(self) -> int:
        return int(self.settings.ttt_steps)

    @property
    def known_size(self) -> int:
        return (len(self.taps) + 1) * self.target.hidden_size  # the embedding stands beside the taps

    def fit(self, material: Material) -> bool:
        return fit_soundly(self.network, material, lambda: fit_eagle3(self, material))

    def prepare(self, batch: TrainingBatch, generator: torch.Generator) -> Exercise:  # noqa: ARG002 - nothing is drawn
        return loss.prepare(batch)

    def losses(self, batch: TrainingBatch, exercise: Exercise, progress: float) -> Losses:  # noqa: ARG002
        return loss.losses(self, batch)


@torch.no_grad()
def _start_from(target: HFTarget, network: Eagle3Network, vocabulary: DraftVocabulary, plan: DesignPlan) -> None:
    """The target's last layer at work on its own last tap, its final norm and its head: what the target's family builds
    in another way stays random."""
    layer, given = cast(Eagle3Layer, network.layers[0]), last_layer(target, plan)
    # What the target norms before its attention is the feature's half here; the embedding's norm stays at ones.
    input_norm = given.pop("input_layernorm.weight", None)
    if input_norm is not None:
        given["hidden_norm.weight"] = input_norm
    take_over(layer, given)
    pass_last(network.fc)
    final_norm = final_norm_weight(target)
    if final_norm is not None:
        network.norm.weight.copy_(final_norm)
    network.lm_head.weight.copy_(head_rows(target, vocabulary))
