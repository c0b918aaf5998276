"""Every error forerun raises on purpose.

    ForerunError
    +-- OptionError            an option or argument has a value that cannot be used (also a ValueError)
    |   +-- PromptError        the prompt itself: empty, too long for the window, not UTF-8
    +-- ModelError             a model or checkpoint cannot be used
    |   +-- UnsupportedModel   it loads, but decoding it here would not be exact; the layer is named
    |   +-- DoesNotFit         it needs more memory than there is; the arithmetic is in the message
    |   +-- VocabularyMismatch target and drafter do not share a vocabulary
    +-- TrainingFailed         a training run cannot go on; what was saved is kept
    +-- OutOfBlocks            the KV pool is exhausted (the engine preempts; users see it for one over-long request)
    +-- RequestCancelled       the request was cancelled before it finished
    +-- EngineClosed           the engine was shut down

A message says what was found, what was expected and which option to change. Broken invariants of our own are
`assert`ed instead: they are bugs, not conditions a caller could handle.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForerunError(Exception):
    """Base of all errors that forerun raises on purpose."""


class OptionError(ForerunError, ValueError):
    """An option has a value that cannot be used. `option` is its name as the user typed it, `reason` what is wrong."""

    def __init__(self, option: str, reason: str):
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


class PromptError(OptionError):
    """The prompt cannot be used: empty, longer than the window, or not valid UTF-8."""


class ModelError(ForerunError):
    """A model or checkpoint cannot be loaded."""


class UnsupportedModel(ModelError):
    """The model loads but could not be decoded exactly here; the message names the layer and the reason."""


class DoesNotFit(ModelError):
    """The model needs more memory than there is; the message shows the arithmetic."""


class VocabularyMismatch(ModelError):
    """Target and drafter have different tokenizers."""


class TrainingFailed(ForerunError):
    """A training run cannot go on: the message says at which step and why. Its checkpoints are as they were."""


class OutOfBlocks(ForerunError):
    """No free KV block is left."""


class RequestCancelled(ForerunError):
    """The request was cancelled before it finished."""


class EngineClosed(ForerunError):
    """The engine was shut down."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A `did you mean` clause for an unknown name, and the list of known ones where none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def not_imported(error: ImportError, extra: str, *packages: str) -> str:
    """What is wrong with an optional package whose import failed: it is missing, or it is here and broken.

    Args:
        error: what the import raised.
        extra: of forerun's, that installs the packages.
        packages: that were asked for, by the names they are imported under.
    """
    missing = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and missing in packages:
        return f"needs {missing}: pip install 'forerun[{extra}]'"
    return f"needs {' and '.join(packages)}: importing failed ({type(error).__name__}: {error})"
