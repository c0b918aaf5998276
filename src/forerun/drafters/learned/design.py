"""From a target and a user's settings to a drafter that can be built: what every kind does alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from forerun.drafters.learned.config import DraftSettings, taps_fit
from forerun.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.vocabulary import DraftVocabulary
    from forerun.target.base import Target


@dataclass(frozen=True)
class DesignPlan:
    """What the trainer knows and a design needs."""

    training_length: int
    """Tokens of the longest sequence."""
    token_counts: Tensor
    """[V] how often each id occurs under the loss mask: the ids to keep when the vocabulary is pruned."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Of the saved weights."""
    seed: int
    trust_remote_code: bool = False
    """Whether code that comes with a model may be run."""
    chat_template: str | None = None
    """`template_hash` of the template that rendered the data; None: the target's own, or none (plain text)."""

    def vocabulary(self, settings: DraftSettings) -> DraftVocabulary:
        """All ids, or the most frequent ones of the data. OptionError if more are asked for than the target has."""
        from forerun.drafters.vocabulary import DraftVocabulary

        size = len(self.token_counts)
        if settings.draft_vocab_size is None:
            return DraftVocabulary(size)
        return DraftVocabulary.most_frequent(self.token_counts, settings.draft_vocab_size)


def config_fields(target: Target, settings: DraftSettings, plan: DesignPlan, taps: Sequence[int]) -> dict[str, Any]:
    """The fields of `DraftConfig` that every kind fills alike (not `method`).

    OptionError: the taps do not fit, or more ids are to be kept than there are.
    """
    from forerun.drafters.checkpoint import fingerprint_of

    draft_size = settings.draft_vocab_size or target.vocab_size
    if draft_size > target.vocab_size:
        raise OptionError("draft_vocab_size", f"must be in 1 .. {target.vocab_size}, got {draft_size}")
    return {
        "forerun_format": 1,
        "target_name": target.name,
        "target_fingerprint": fingerprint_of(target, plan.chat_template),
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_size,
        "layer_id_convention": "h",
        "aux_hidden_state_layer_ids": check_taps(taps, target),
        "training_length": plan.training_length,
        "dtype": plan.dtype,
    }


def check_taps(taps: Sequence[int], target: Target) -> tuple[int, ...]:
    """Taps as a tuple. OptionError if they do not ascend strictly within 1 .. n."""
    if not taps_fit(taps, target.num_layers):
        raise OptionError(
            "taps", f"must ascend strictly within 1 .. {target.num_layers} for this target, got {list(taps)}"
        )
    return tuple(taps)
