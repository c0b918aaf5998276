"""transformers' `from_pretrained`, held to our manners: quiet, complete or refused, its errors in one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from forerun.errors import ForerunError, ModelError

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def pretrained(
    source: str, folder: Path, dtype: torch.dtype, options: Mapping[str, Any], **model_options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a folder, on the CPU.

    Args:
        source: what the user typed, for messages.
        folder: where the files are.
        dtype: of the weights.
        options: for both `from_pretrained` calls.
        model_options: for the model's only.

    Raises:
        ModelError: whatever went wrong, in one line; also a tensor that is missing, left over or of another shape.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load_model = cast(Any, AutoModelForCausalLM).from_pretrained
    with explained(source), quiet():
        model, report = load_model(folder, dtype=dtype, output_loading_info=True, **options, **model_options)
        _check_complete(source, report)
        return model, AutoTokenizer.from_pretrained(folder, **options)


def _check_complete(source: str, report: Mapping[str, Any]) -> None:
    """A tensor that is missing is an error: transformers would draw it at random and go on."""
    for kind in ("missing", "mismatched", "unexpected"):
        names = sorted(str(key) for key in report.get(f"{kind}_keys") or ())
        if names:
            raise ModelError(
                f"--target: the weights of {source} do not fit its config: {len(names)} {kind} "
                f"tensors ({', '.join(names[:3])})"
            )


@contextmanager
def explained(source: str) -> Iterator[None]:
    """Whatever transformers raises while it reads the files of `source`, as a ModelError of one line."""
    try:
        yield
    except ForerunError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, RuntimeError, ..
        if "trust_remote_code" in str(error):
            raise ModelError(f"--target: {source} needs code of its own; allow it with --trust-remote-code") from error
        line = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"--target: {source} cannot be loaded ({line})") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and remarks of transformers; its errors stay."""
    from tqdm.std import tqdm
    from transformers.utils import logging as noise

    logging: Any = noise
    verbosity, init = logging.get_verbosity(), tqdm.__init__
    logging.set_verbosity_error()
    # Not all bars of transformers obey its own switch (the one of the GGUF reader does not).
    tqdm.__init__ = partialmethod(init, disable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        tqdm.__init__ = init


def progress_bar() -> Progress:
    """Bars with the time left on stderr, where that is a terminal; gone when done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counted(progress: Progress, what: str) -> Iterator[None]:
    """Loops for which transformers has a bar of its own, which `quiet` takes away, are counted on ours."""
    from tqdm.std import tqdm

    own = tqdm.__iter__

    def count(bar: Any) -> Iterator[Any]:
        task = progress.add_task(what, total=bar.total)
        for item in bar.iterable:
            yield item
            progress.advance(task)

    tqdm.__iter__ = count
    try:
        yield
    finally:
        tqdm.__iter__ = own
