"""Floor 2: everything that guesses. A drafter is one module or folder here plus one line in `DRAFTERS`."""

from __future__ import annotations

import importlib

from forerun.drafters.base import Accepted, Draft, Drafter, DraftView, KeepDrafting, Proposal
from forerun.errors import OptionError, nearest

DRAFTERS = {
    "vanilla": "forerun.drafters.vanilla:Vanilla",
    "ngram": "forerun.drafters.ngram:Ngram",
    "small": "forerun.drafters.small:Small",
    "eagle": "forerun.drafters.eagle:Eagle",
    "eagle3": "forerun.drafters.eagle3:Eagle3",
    "dflash": "forerun.drafters.dflash:DFlash",
    "dspark": "forerun.drafters.dspark:DSpark",
}
"""name -> "module:Class", imported on use."""

ALIASES = {"draft_model": "small", "ngram_gpu": "ngram", "standalone": "small", "none": "vanilla"}
"""Spellings of vLLM and SGLang for the same thing."""


def canonical(name: str) -> str:
    """Our name for a method in any spelling; one that is not known stays as it is, in lower case."""
    return ALIASES.get(name.strip().lower(), name.strip().lower())


def drafter_class(name: str) -> type[Drafter]:
    """The class of a drafter by name, alias or `module:Class`. OptionError lists near names."""
    path = DRAFTERS.get(canonical(name), name if ":" in name else None)
    if path is None:
        raise OptionError("method", f"no drafter is called {name!r}; {nearest(name, DRAFTERS)}")
    module, _, attribute = path.partition(":")
    if not module or module.startswith("."):
        raise OptionError("method", f"{path!r} must be module:Class, with the full name of the module")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the code of a user's own module runs here
        raise OptionError("method", f"{path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise OptionError("method", f"{path!r} is not a subclass of forerun.Drafter")
    return found


__all__ = [
    "DRAFTERS",
    "Accepted",
    "Draft",
    "DraftView",
    "Drafter",
    "KeepDrafting",
    "Proposal",
    "canonical",
    "drafter_class",
]
