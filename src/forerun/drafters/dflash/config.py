"""What a DFlash drafter is (`config.json`) and how it is taught (`forerun train dflash`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forerun.drafters.layers import LayerConfig
from forerun.drafters.learned import DraftConfig, DraftSettings
from forerun.errors import OptionError


class BlockConfig(DraftConfig):
    """A block drafter: the fields that DFlash and DSpark share."""

    transformer_layer_config: LayerConfig
    layer_types: tuple[Literal["full_attention"], ...]
    """Per layer; full attention within a block is bidirectional (every slot sees the whole block)."""
    block_size: int = Field(ge=1)
    """b, slots of a trained block: the anchor and b - 1 masks."""
    mask_token_id: int = Field(ge=0)
    sample_from_anchor: bool
    """Slot j predicts token s + j + 1, so that the anchor's slot is used (true), or s + j (false, original DFlash)."""

    @model_validator(mode="after")
    def _one_type_per_layer(self) -> BlockConfig:
        if len(self.layer_types) != self.transformer_layer_config.num_hidden_layers:
            raise ValueError(f"layer_types must name {self.transformer_layer_config.num_hidden_layers} layers")
        if self.max_draft < 1:
            raise ValueError("block_size must be at least 2 without sample_from_anchor: the anchor's slot is not used")
        return self

    @property
    def max_draft(self) -> int:
        """K of a whole block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft token."""
        return 0 if self.sample_from_anchor else 1


class DFlashConfig(BlockConfig):
    """The `config.json` of a DFlash drafter."""

    method: Literal["dflash"]


class BlockSettings(DraftSettings):
    """Options of `forerun train` that DFlash and DSpark share."""

    block_size: int = Field(ge=1, description="Slots of a block.")
    sample_from_anchor: bool = Field(description="Whether the anchor's slot predicts too.")
    mask_token_id: int | None = Field(
        default=None,
        ge=0,
        description="Token of the slots after the anchor; default: an unused id, a special one, or the end of text.",
    )
    anchors: int = Field(default=512, ge=1, description="Blocks per sequence and step, drawn anew each time.")
    short_blocks: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="Share of the blocks cut to any length, as decoding cuts them to a smaller K.",
    )
    decay: float | None = Field(
        default=None, gt=0, description="g of the weights exp(-(k - 1) / g) of position k; default: from the block."
    )
    ce: Literal["hard", "soft"] = Field(
        default="soft", description="Cross entropy against the target's whole law (soft) or the text (hard)."
    )
    ce_weight: float = Field(ge=0, description="Weight of the cross entropy.")
    l1_weight: float = Field(ge=0, description="Weight of sum |q - p|, twice the total variation.")
    ce_first: float = Field(
        default=0.0, ge=0, le=1, description="Share of the training in which the l1 term is cross entropy instead."
    )
    teacher_top: int | None = Field(
        default=None, ge=1, description="Compare only so many of the target's best ids one by one, the rest as a lump."
    )

    @model_validator(mode="after")
    def _learns_something(self) -> BlockSettings:
        if self.block_size < 2 and not self.sample_from_anchor:
            raise OptionError("block_size", "must be at least 2 without sample_from_anchor, or nothing is drafted")
        if self.ce_weight + self.l1_weight <= 0:
            raise OptionError("ce_weight", "ce_weight and l1_weight cannot both be 0")
        return self

    @property
    def decay_gamma(self) -> float:
        """DFlash's g: 7 for blocks of 16, 5 for 10, 4 for 8 and 7."""
        return self.decay or (7.0 if self.block_size >= 16 else float(max(1, (self.block_size + 1) // 2)))


class DFlashSettings(BlockSettings):
    """Options of `forerun train dflash`."""

    block_size: int = Field(default=16, ge=2, description="Slots of a block: the anchor and the drafts.")
    sample_from_anchor: bool = Field(default=False, description="Whether the anchor's slot predicts too.")
    ce_weight: float = Field(default=1.0, ge=0, description="Weight of the cross entropy.")
    l1_weight: float = Field(default=0.0, ge=0, description="Weight of sum |q - p|, twice the total variation.")
