"""Floor 1: models that score packed rows."""

from forerun.target.base import BLOCK_SIZE, Batch, Forward, Segment, Target, Tokenizer

__all__ = ["BLOCK_SIZE", "Batch", "Forward", "Segment", "Target", "Tokenizer"]
