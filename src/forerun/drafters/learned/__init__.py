"""Drafters that are trained: what they are to the trainer, beside what every `Drafter` is to the engine.

The trainer and its evaluation know a `Learner`, the engine a `Drafter`. A `LearnedDrafter` is one object for both: it
is designed for a target (or loaded for it), computes its losses on packed batches, and drafts with the same network.
"""

from forerun.drafters.learned.batch import Exercise, Held, Losses, Material, Text, TrainingBatch, wide
from forerun.drafters.learned.config import DraftConfig, DraftSettings, LearnerSettings, Strict, taps_fit
from forerun.drafters.learned.design import DesignPlan, check_taps, config_fields
from forerun.drafters.learned.drafter import LearnedDrafter
from forerun.drafters.learned.learner import Learner

__all__ = [
    "DesignPlan",
    "DraftConfig",
    "DraftSettings",
    "Exercise",
    "Held",
    "LearnedDrafter",
    "Learner",
    "LearnerSettings",
    "Losses",
    "Material",
    "Strict",
    "Text",
    "TrainingBatch",
    "check_taps",
    "config_fields",
    "taps_fit",
    "wide",
]
