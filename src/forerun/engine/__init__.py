"""Floor 3: continuous batching over one target and its drafters."""

from forerun.engine.aio import AsyncEngine
from forerun.engine.conversation import Conversation
from forerun.engine.engine import Engine
from forerun.engine.load import EngineOptions
from forerun.engine.request import Chunk, Completion
from forerun.engine.stats import DecodingStats
from forerun.sampling import TokenLogprob

__all__ = [
    "AsyncEngine",
    "Chunk",
    "Completion",
    "Conversation",
    "DecodingStats",
    "Engine",
    "EngineOptions",
    "TokenLogprob",
]
