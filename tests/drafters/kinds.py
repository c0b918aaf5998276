"""Every learned drafter under one name, small and with weights that make it draft all kinds of things."""

from __future__ import annotations

from torch import Tensor

from drafters.learning import plan_for, shaken
from forerun.drafters import drafter_class
from forerun.drafters.learned import LearnedDrafter
from forerun.target.base import Target

SETTINGS: dict[str, dict[str, object]] = {
    "eagle": {},
    "eagle3": {"ttt_steps": 4},
    "eagle3-pruned": {"draft_vocab_size": 3},
    "dflash": {"block_size": 5, "layers": 2},
    "dspark": {"block_size": 4, "layers": 2, "markov_rank": 4},
    "dspark-rnn": {"block_size": 4, "layers": 1, "markov_rank": 4, "markov_head_type": "rnn"},
    "dspark-pruned": {"block_size": 4, "layers": 1, "markov_rank": 4, "draft_vocab_size": 3},
}
"""name -> options of `forerun train`; what stands before the dash is the kind."""


def learned(
    name: str, target: Target, scale: float = 0.3, counts: Tensor | None = None, **options: object
) -> LearnedDrafter:
    """A drafter for training, with shaken weights; `counts` choose the ids of a pruned vocabulary."""
    cls = drafter_class(name.partition("-")[0])
    assert issubclass(cls, LearnedDrafter)
    settings = cls.settings_class(**{**SETTINGS[name], **options})
    return shaken(cls.design(target, settings, plan_for(target, counts=counts)), scale)


def drafting(name: str, target: Target, scale: float = 0.3, **options: object) -> LearnedDrafter:
    """The same, frozen, as it decodes; "... copying": with look-ups of one to three tokens mixed in."""
    name, _, copying = name.partition(" ")
    drafter = learned(name, target, scale, **options).for_decoding(target.dtype)
    if copying:
        drafter.copy_from_text({"prompt_lookup_min": 1, "prompt_lookup_max": 3})
    return drafter
