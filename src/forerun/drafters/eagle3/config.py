"""What an EAGLE-3 drafter is (`config.json`) and how it is taught (`forerun train eagle3`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from forerun.drafters.chain.network import check_one_layer, need_one_layer
from forerun.drafters.layers import LayerConfig
from forerun.drafters.learned import DraftConfig, DraftSettings
from forerun.errors import OptionError

ONE_NORM = "norm_before_fc (one norm over all taps) and fc_norm (one per tap) exclude each other"


class Eagle3Config(DraftConfig):
    """The `config.json` of an EAGLE-3 drafter."""

    method: Literal["eagle3"]
    transformer_layer_config: LayerConfig
    """Of its one layer; queries, keys and values read embedding and feature side by side."""
    norm_before_residual: bool
    """The residual stream starts from hidden_norm(feature) (true) or from the feature as it is."""
    norm_before_fc: bool
    """`input_norm` over all taps side by side before `fc`."""
    fc_norm: bool
    """`fc_norm.i` over each tap before `fc`."""
    norm_output: bool
    """What a row hands to the next as its feature is the hidden state after the final norm (true) or before it."""

    @field_validator("transformer_layer_config")
    @classmethod
    def _one_layer(cls, value: LayerConfig) -> LayerConfig:
        return need_one_layer(value)

    @model_validator(mode="after")
    def _one_norm(self) -> Eagle3Config:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(ONE_NORM)
        return self


class Eagle3Settings(DraftSettings):
    """Options of `forerun train eagle3`. What is set by default is served by vLLM and SGLang alike (formats, 11)."""

    layer_type: Literal["llama", "qwen3"] = Field(
        default="llama", description="Kind of its layer; qwen3 norms each head of queries and keys, llama does not."
    )
    ttt_steps: int = Field(default=7, ge=1, description="Steps of the training-time test: draft tokens it learns from.")
    step_decay: float = Field(default=0.8, gt=0, le=1, description="Weight of step t is this to the power of t.")
    ce: Literal["hard", "soft"] = Field(
        default="soft", description="Cross entropy against the target's whole law (soft) or the text (hard)."
    )
    norm_before_residual: bool = Field(
        default=False, description="Start the residual stream from the normed feature (SGLang cannot serve that)."
    )
    norm_before_fc: bool = Field(default=False, description="Norm all taps together before fusing them.")
    fc_norm: bool = Field(default=False, description="Norm each tap before fusing them.")
    norm_output: bool = Field(default=False, description="Feed the normed hidden state back.")

    def check(self) -> None:
        """OptionError for settings that exclude each other or that no server could load."""
        check_one_layer(self.layers)
        if self.norm_before_fc and self.fc_norm:
            raise OptionError("fc_norm", ONE_NORM)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """h = 2, n // 2, n - 3 as published; below seven layers, where these do not ascend, a low, middle and high one."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return 1, num_layers // 2, num_layers - 1
    return tuple(range(1, num_layers + 1))
