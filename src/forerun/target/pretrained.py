"""transformers' `from_pretrained`, held to our manners: quiet, complete or refused, its errors in one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from forerun.errors import ForerunError, ModelError
from forerun.target.checkpoint import stored_shapes

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files a tokenizer may have its vocabulary in."""


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
        ModelError: whatever went wrong, in one line; also a tensor that is missing, left over or of another shape, and
            a folder without a tokenizer.
    """
    from transformers import AutoModelForCausalLM

    load_model = cast(Any, AutoModelForCausalLM).from_pretrained
    with explained(source), quiet():
        tokenizer = load_tokenizer(source, folder, options)
        # Mismatched sizes are not ignored: transformers lists them instead of raising, and `_check_complete` refuses.
        listing = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, report = load_model(folder, dtype=dtype, **listing, **options, **model_options)
        except Exception:
            # Of tied weights that are stored twice transformers compares the values before it lists their shapes.
            if model_options.get("use_safetensors"):
                _check_complete(source, {"mismatched_keys": _misshapen(folder, options)})
            raise
        _check_complete(source, report)
        return model, tokenizer


def load_tokenizer(source: str, folder: Path, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. `source` and `options` as for `pretrained`; whatever transformers raises is raised.

    Raises:
        ModelError: there are no tokenizer files, or none that hold a vocabulary.
    """
    from transformers import AutoTokenizer

    nothing = (
        f"--target: {source} has no tokenizer files that hold a vocabulary; "
        "put tokenizer.json and tokenizer_config.json of the model it was made from beside its weights"
    )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **options)
    except ValueError as error:
        if "backend tokenizer" in str(error) and not any(any(folder.glob(name)) for name in VOCABULARIES):
            raise ModelError(nothing) from error
        raise
    # For many families transformers makes up a tokenizer that knows its special tokens and not one piece of text.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ModelError(nothing)
    return tokenizer


def _check_complete(source: str, report: Mapping[str, Any]) -> None:
    """A tensor that is missing or misshapen is an error: transformers would draw it at random and go on."""
    for kind in ("missing", "mismatched", "unexpected"):
        found = sorted(_described(key) for key in report.get(f"{kind}_keys", ()))
        if found:
            raise ModelError(
                f"--target: the weights of {source} do not fit its config: {len(found)} {kind} "
                f"tensors ({'; '.join(found[:3])})"
            )


def _misshapen(folder: Path, options: Mapping[str, Any]) -> list[tuple[str, Sequence[int], Sequence[int]]]:
    """Tensors of another shape than the config says: name, stored shape, expected one; none where a model of that
    config cannot be built."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, **options)
        with torch.device("meta"):
            model = cast(Any, AutoModelForCausalLM).from_config(config, trust_remote_code=options["trust_remote_code"])
    except Exception:  # whatever it is, the error of loading says it
        return []
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = stored_shapes(folder)
    return [(n, stored[n], expected[n]) for n in stored.keys() & expected.keys() if stored[n] != expected[n]]


def _described(key: str | tuple[str, Sequence[int], Sequence[int]]) -> str:
    """A tensor of the report: its name, and of a mismatched one both shapes."""
    if isinstance(key, str):
        return key
    name, *shapes = key
    stored, expected = (" x ".join(str(n) for n in shape) or "a single number" for shape in shapes)
    return f"{name}: {stored} stored, {expected} by the config"


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
