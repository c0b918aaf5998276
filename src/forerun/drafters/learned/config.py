"""What a user may choose of a drafter, and what its `config.json` says: one set of rules for both, for all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LARGEST = 1 << 24
"""No size, count or id of a drafter is above it: what is, is a slip or a trap, and would be asked of the memory."""
MOST_LAYERS = 1024
"""Each is built before anything else can be checked."""


class Strict(BaseModel):
    """Settings and configs of every kind: no unknown names, no number that is infinite, not a number or beyond reach.

    Files and flags come here as they are, whoever wrote them, so what no drafter can have is refused here and by the
    name of its field. A kind adds what its own fields cannot be.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _within_reach(cls, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
                raise ValueError(f"must be within what a drafter can have (at most {LARGEST:,})")
        return value


class LearnerSettings(Strict):
    """How a drafter is built and taught: the options of `forerun train KIND` that belong to the kind.

    Every kind adds its own. Descriptions are shown by `forerun train KIND --help`.
    """


class DraftSettings(LearnerSettings):
    """What all drafters that read the target's features let their user choose."""

    layers: int | None = Field(
        default=None, ge=1, le=MOST_LAYERS, description="Decoder layers of the drafter; default: by kind."
    )
    taps: tuple[int, ...] | None = Field(
        default=None, description="Target hidden states it reads (h: 0 is the embedding); default: spread by kind."
    )
    intermediate_size: int | None = Field(default=None, ge=1, description="FFN width; default: the target's.")
    draft_vocab_size: int | None = Field(
        default=None, ge=1, description="Keep only so many ids, the most frequent in the training data."
    )
    init: Literal["fitted", "target", "random"] = Field(
        default="fitted",
        description="Start from what least squares say of the data, the target's last layers, or random weights.",
    )


class DraftConfig(Strict):
    """The `config.json` of a trained drafter: every convention is written, nothing has a default.

    Names are those of the speculators format where it has them (formats, 3 to 5).
    """

    forerun_format: Literal[1]
    method: str
    target_name: str
    target_fingerprint: dict[str, str]
    """`Fingerprint.to_dict()`: config, weights, tokenizer, chat template, dtype, each by itself."""
    target_hidden_size: int = Field(ge=1)
    target_num_layers: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    """V, the columns of the target's logits."""
    draft_vocab_size: int = Field(ge=1)
    """D; equal to vocab_size if every id is kept."""
    layer_id_convention: Literal["h"]
    aux_hidden_state_layer_ids: tuple[int, ...]
    """Taps, ascending."""
    training_length: int = Field(ge=1)
    """Tokens of the longest sequence trained on."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]

    @field_validator("target_fingerprint")
    @classmethod
    def _whole_fingerprint(cls, value: dict[str, str]) -> dict[str, str]:
        from forerun.target.fingerprint import Fingerprint

        odd = Fingerprint.__dataclass_fields__.keys() ^ value.keys()
        if value and odd:  # a target without weights of its own (tables) has none
            raise ValueError(f"has parts missing or left over: {', '.join(sorted(odd))}")
        return value

    # What a validator compares with stands above it in the file; it is absent if it was refused itself.

    @field_validator("draft_vocab_size")
    @classmethod
    def _kept_of_all(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("vocab_size", value):
            raise ValueError(f"{value} is more than vocab_size ({info.data['vocab_size']})")
        return value

    @field_validator("aux_hidden_state_layer_ids")
    @classmethod
    def _ascending_taps(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        num_layers = info.data.get("target_num_layers")
        if num_layers is not None and not taps_fit(value, num_layers):
            raise ValueError(f"must ascend strictly within 1 .. {num_layers}, got {list(value)}")
        return value

    @field_validator("mask_token_id", check_fields=False)  # of the kinds that have one
    @classmethod
    def _known_mask(cls, value: int, info: ValidationInfo) -> int:
        if value >= info.data.get("vocab_size", value + 1):
            raise ValueError(f"{value} is not below vocab_size ({info.data['vocab_size']})")
        return value


def taps_fit(taps: Sequence[int], num_layers: int) -> bool:
    """Whether they ascend strictly within 1 .. n, and there are any."""
    return len(taps) > 0 and list(taps) == sorted(set(taps)) and taps[0] >= 1 and taps[-1] <= num_layers
