"""forerun: lossless speculative decoding for Hugging Face language models.

    import forerun
    engine = forerun.Engine.load("embedded", drafter="small")
    [completion] = engine.generate("def fibonacci(n):", forerun.Sampling(temperature=0, max_tokens=64))

Heavy modules (torch, transformers) load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun import verify as verify
    from forerun.drafters.base import Drafter as Drafter
    from forerun.engine import AsyncEngine as AsyncEngine
    from forerun.engine import Completion as Completion
    from forerun.engine import Engine as Engine
    from forerun.errors import ForerunError as ForerunError
    from forerun.sampling import Sampling as Sampling

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "forerun.engine",
    "Completion": "forerun.engine",
    "Drafter": "forerun.drafters.base",
    "Engine": "forerun.engine",
    "ForerunError": "forerun.errors",
    "Sampling": "forerun.sampling",
}

__all__ = ["AsyncEngine", "Completion", "Drafter", "Engine", "ForerunError", "Sampling", "verify"]


def __getattr__(name: str) -> Any:
    if name == "verify":
        return importlib.import_module("forerun.verify")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
