"""What a DSpark drafter is (`config.json`) and how it is taught (`forerun train dspark`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forerun.drafters.dflash.config import BlockConfig, BlockSettings

MarkovType = Literal["vanilla", "gated", "rnn"]


class DSparkConfig(BlockConfig):
    """The `config.json` of a DSpark drafter: a block drafter with a sequential and a confidence head."""

    method: Literal["dspark"]
    markov_rank: int = Field(ge=0)
    """r; 0: no Markov head, every slot's law stands alone."""
    markov_head_type: MarkovType
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    """Whether the confidence sees W1 of the previous token beside the hidden state."""


class DSparkSettings(BlockSettings):
    """Options of `forerun train dspark`."""

    block_size: int = Field(default=7, ge=1, description="Slots of a block, the anchor's included; K is the same.")
    sample_from_anchor: bool = Field(default=True, description="Whether the anchor's slot predicts too.")
    ce_weight: float = Field(default=0.1, ge=0, description="Weight of the cross entropy.")
    l1_weight: float = Field(default=0.9, ge=0, description="Weight of sum |q - p|, twice the total variation.")
    confidence_weight: float = Field(default=1.0, ge=0, description="Weight of the confidence head's loss.")
    markov_rank: int = Field(default=256, ge=0, description="Rank of the Markov head; 0: none.")
    markov_head_type: MarkovType = Field(default="vanilla", description="How the previous token corrects the next.")
    enable_confidence_head: bool = Field(default=True, description="Predict which drafts will be accepted.")
    confidence_head_with_markov: bool = Field(
        default=True, description="Show the confidence head the previous token as well."
    )
