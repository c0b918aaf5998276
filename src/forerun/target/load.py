"""From what a user typed after `--target` to a target: an id, a folder, a GGUF file, a model of the package."""

from __future__ import annotations

import importlib.resources
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from forerun.errors import ModelError, OptionError
from forerun.target.base import Target
from forerun.target.checkpoint import Checkpoint, check_fits, inspect_folder
from forerun.target.dtypes import dtype_name, dtype_named
from forerun.target.hf import HFTarget
from forerun.target.packed import pack_linears, packs
from forerun.target.pretrained import counted, first_line, pretrained, progress_bar
from forerun.target.threads import use_threads
from forerun.target.tokenizer import HFTokenizer, shared_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Device = Literal["auto", "cpu", "cuda", "mps"]

EMBEDDED = {"embedded": "target", "embedded-small": "small"} | {
    f"embedded-{kind}": kind for kind in ("eagle", "eagle3", "dflash", "dspark")
}
"""Names of the models in the package, and their folders under forerun/embedded."""

logger = logging.getLogger("forerun")

HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def load_target(
    source: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
) -> HFTarget:
    """Loads a model and takes it apart.

    Args:
        source: a Hugging Face id, a folder with safetensors, a `.gguf` file, `embedded`, `embedded-small`, or a loaded
            model (its dtype and device are kept, asking for others is an error; `tokenizer` then goes with it).
        tokenizer: with a loaded model, and only there.
        dtype: `auto` is the checkpoint's own; float32 for a float16 one on a CPU; bfloat16 for GGUF.
        device: `auto` is cuda where there is one, else the CPU.
        threads: CPU threads of torch, for the whole process.
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: run code that comes with the checkpoint.
        max_model_len: serve a shorter window than the model has.

    Raises:
        ModelError: it cannot be loaded; `UnsupportedModel`, `DoesNotFit` are kinds of it.
        OptionError: an option has a value that cannot be used.
    """
    use_threads(threads)
    if not isinstance(source, (str, Path)):
        _check_is_model(source)
        if tokenizer is None:
            raise OptionError("tokenizer", "a loaded model needs its tokenizer")
        check_agrees(source, dtype, device, revision)
        return HFTarget(source, HFTokenizer(tokenizer), max_model_len=max_model_len)
    if tokenizer is not None:
        raise OptionError("tokenizer", f"belongs to a loaded model; {source} brings its own")
    place = choose_device(device)
    checkpoint, chosen = resolve(str(source), dtype, place, revision, trust_remote_code)
    head_copy = checkpoint.shared_head * chosen.itemsize if packs(chosen, place) else 0
    check_fits(checkpoint, chosen, place, head_copy=head_copy)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    with progress_bar() as progress, counted(progress, f"loading {Path(source).name}"):
        model, inner = pretrained(str(source), checkpoint.folder, chosen, options, use_safetensors=True)
    name = Path(source).stem if str(source).endswith(".gguf") else str(source)
    cast(Any, model).to(place)
    target = HFTarget(model, HFTokenizer(inner), name=name, max_model_len=max_model_len)
    target.linear_reason = pack_linears(target.model)
    announce(target)
    return target


def announce(target: HFTarget) -> None:
    """Says which way was chosen on an accelerator and why; where it was never run on one, the reason says so."""
    if target.device.type != "cpu":
        logger.warning("%s on %s: attention %s", target.name, target.device, target.attention_reason)


def _check_is_model(source: Any) -> None:
    if not isinstance(source, torch.nn.Module):
        kinds = "a hub id, a folder, a .gguf file, `embedded` or a loaded model"
        raise OptionError("target", f"must be {kinds}, got {source!r:.80}")


def check_agrees(loaded: PreTrainedModel | Target, dtype: Dtype, device: Device, revision: str | None = None) -> None:
    """OptionError: an option of loading that asks for something else than what is loaded already."""
    for name, asked in (("dtype", dtype), ("device", device)):
        if asked == "auto":
            continue
        own = dtype_name(loaded.dtype) if name == "dtype" else loaded.device.type
        if asked != own:
            raise OptionError(name, f"{asked!r} has no effect on a loaded model, which has {own}; leave it out")
    if revision is not None:
        raise OptionError("revision", "has no effect on a loaded model; leave it out")


def choose_device(device: Device) -> torch.device:
    """OptionError names a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not isinstance(device, str) or device not in there:
        raise OptionError("--device", f"must be one of auto, {', '.join(there)}, got {device!r}")
    if not there[device]:
        raise OptionError("--device", f"torch {torch.__version__} finds no {device} device here; use cpu or auto")
    return torch.device(device)


def choose_dtype(dtype: Dtype, own: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to load in, `own` being the checkpoint's."""
    if dtype == "auto":
        # A CPU has no float16 arithmetic of its own to speak of; float32 holds every float16 value.
        return torch.float32 if own == torch.float16 and device.type == "cpu" else own
    known = get_args(Dtype)
    if not isinstance(dtype, str) or dtype not in known:
        raise OptionError("--dtype", f"must be one of {', '.join(known)}, got {dtype!r}")
    return dtype_named(dtype)


# ------------------------------------------------------------------------------------------------------- where it is


def resolve(
    source: str, dtype: Dtype, device: torch.device, revision: str | None, trust_remote_code: bool
) -> tuple[Checkpoint, torch.dtype]:
    """The folder a source stands for, and the dtype to load it in."""
    if source.endswith(".gguf") or os.path.isfile(source):  # unlike Path's, never raises
        from forerun.target.gguf import converted

        chosen = choose_dtype(dtype, torch.bfloat16, device)
        return inspect_folder(converted(gguf_file(Path(source)), chosen)), chosen
    checkpoint = inspect_folder(find_folder(source, revision, trust_remote_code))
    return checkpoint, choose_dtype(dtype, checkpoint.dtype, device)


def gguf_file(path: Path) -> Path:
    """The path, if a .gguf file is there. ModelError says what is there instead."""
    if not os.path.exists(path):
        raise ModelError(f"--target: {path} does not exist (looked for {path.absolute()})")
    if path.suffix != ".gguf" or not path.is_file():
        raise ModelError(f"--target: {path} is neither a model folder nor a .gguf file")
    return path


def find_folder(source: str, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The folder of an embedded name, a path or a hub id (fetched if need be). ModelError: there is none."""
    if source in EMBEDDED:
        folder = Path(str(importlib.resources.files("forerun"))) / "embedded" / EMBEDDED[source]
        if not folder.is_dir():
            raise ModelError(f"--target: this installation of forerun has no model {source!r}; name another one")
        return folder
    if os.path.isdir(source):
        return Path(source)
    if not HUB_ID.fullmatch(source):
        raise ModelError(f"--target: {source} does not exist (looked for {Path(source).absolute()})")
    return _download(source, revision, trust_remote_code)


def _download(source: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The hub's copy of a model, from the local cache where it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    tried = f"neither the folder {Path(source).absolute()} nor"
    patterns = HUB_FILES + (["*.py"] if trust_remote_code else [])
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except RevisionNotFoundError as error:
        raise OptionError("--revision", f"{source} has no revision {revision!r}") from error
    except GatedRepoError as error:
        raise ModelError(f"--target: {source} asks for a licence to be accepted and a login on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"--target: {tried} a model {source!r} on the Hugging Face hub exists") from error
    except Exception as error:  # Network errors come in the kinds of several libraries.
        raise ModelError(
            f"--target: {tried} a copy of {source!r} in the hub's cache is there, and it could not be fetched "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


__all__ = [
    "EMBEDDED",
    "check_agrees",
    "choose_device",
    "choose_dtype",
    "find_folder",
    "gguf_file",
    "load_target",
    "shared_vocabulary",
]
