"""How a small model is taught (`forerun train small`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forerun.drafters.learned import LearnerSettings
from forerun.errors import OptionError


class SmallSettings(LearnerSettings):
    """Options of `forerun train small`."""

    model: str | None = Field(
        default=None,
        description="What it begins as: directory, .gguf file, hub id or embedded name. Default: cut from the target.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a model on the hub.")
    layers: int | None = Field(
        default=None, ge=1, description="Layers of the target to keep, without a model; default: a sixth of them."
    )
    ce: Literal["hard", "soft"] = Field(
        default="soft", description="Cross entropy against the target's whole law (soft) or the text (hard)."
    )
    ce_weight: float = Field(default=1.0, ge=0, description="Weight of the cross entropy.")
    l1_weight: float = Field(default=0.0, ge=0, description="Weight of sum |q - p|, twice the total variation.")

    @model_validator(mode="after")
    def _fit_together(self) -> SmallSettings:
        if self.ce_weight + self.l1_weight <= 0:
            raise OptionError("ce_weight", "ce_weight and l1_weight cannot both be 0")
        if self.model is not None and self.layers is not None:
            raise OptionError("layers", "says how many layers of the target are kept; a model comes with its own")
        if self.model is None and self.revision is not None:
            raise OptionError("revision", "is of a model on the hub; name it with model")
        return self
