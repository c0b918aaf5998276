"""What an EAGLE drafter is (`config.json`) and how it is taught (`forerun train eagle`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from forerun.drafters.chain.network import check_one_layer, need_one_layer
from forerun.drafters.layers import LayerConfig
from forerun.drafters.learned import DraftConfig, DraftSettings
from forerun.errors import OptionError


class EagleConfig(DraftConfig):
    """The `config.json` of an EAGLE drafter."""

    method: Literal["eagle"]
    transformer_layer_config: LayerConfig
    """Of its one llama layer, which has no input_layernorm."""
    bias: bool
    """Whether `fc` has one (EAGLE's own key)."""
    feature_norm: Literal["final_norm"]
    """The feature is tap h = n after the target's own final norm: what enters the target's head."""

    @field_validator("transformer_layer_config")
    @classmethod
    def _one_layer(cls, value: LayerConfig) -> LayerConfig:
        return need_one_layer(value)

    @field_validator("aux_hidden_state_layer_ids")
    @classmethod
    def _last_tap(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        num_layers = info.data.get("target_num_layers")
        if num_layers is not None and value != (num_layers,):
            raise ValueError(f"must be the last hidden state alone, [{num_layers}], got {list(value)}")
        return value


class EagleSettings(DraftSettings):
    """Options of `forerun train eagle`. Defaults of the losses and the noise are those of the paper's code."""

    bias: bool = Field(default=False, description="Give fc a bias, as EAGLE does; vLLM loads it without one.")
    feature_weight: float = Field(default=1.0, ge=0, description="Weight of the smooth L1 loss of the feature.")
    ce: Literal["hard", "soft"] = Field(
        default="soft", description="Cross entropy against the target's whole law (soft) or the text (hard)."
    )
    ce_weight: float = Field(default=0.1, ge=0, description="Weight of the cross entropy.")
    feature_noise: float = Field(
        default=0.2,
        ge=0,
        description="Width of the uniform noise on the features of a sequence of 512 tokens; inverse to its length.",
    )

    def check(self, num_layers: int) -> None:
        """OptionError for a setting that no EAGLE drafter can have."""
        check_one_layer(self.layers)
        if self.taps not in (None, (num_layers,)):
            raise OptionError(
                "taps", f"eagle reads the last hidden state alone, h = {num_layers} here; leave it out or use eagle3"
            )
        if self.feature_weight + self.ce_weight <= 0:
            raise OptionError("ce_weight", "ce_weight and feature_weight cannot both be 0")
