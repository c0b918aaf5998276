"""The folder of a trained drafter: `config.json` and `model.safetensors`, both explicit, read strictly."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.drafters.base import LoadContext
from forerun.drafters.foreign import drafter_folder
from forerun.drafters.learned import DraftConfig, LearnedDrafter
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.errors import DoesNotFit, ModelError, OptionError
from forerun.parsing import json_of
from forerun.target.base import Target
from forerun.target.checkpoint import GIB, available_memory
from forerun.target.dtypes import dtype_named
from forerun.target.fingerprint import Fingerprint, differences, fingerprint
from forerun.target.hf import HFTarget
from forerun.target.load import EMBEDDED
from forerun.target.packed import PackedLinear, pack_linears

logger = logging.getLogger("forerun")

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAPS = ("d2t", "t2d")
Kind = TypeVar("Kind", bound=LearnedDrafter)


# -------------------------------------------------------------------------------------------------------------- writing


def save_drafter(drafter: LearnedDrafter, folder: Path) -> None:
    """Writes the folder's two files, each whole or not at all. The weights carry the hash of their config.

    ModelError, and nothing is written: a tensor that the network was built with is no longer in it.
    """
    config = json.dumps(drafter.config.model_dump(mode="json"), indent=2) + "\n"
    tensors = {**_weights(drafter), **drafter.vocabulary.tensors()}
    folder.mkdir(parents=True, exist_ok=True)
    new, new_config = folder / f"{WEIGHTS}.new", folder / f"{CONFIG}.new"
    new_config.write_text(config, encoding="utf-8")
    save_file(tensors, new, {"format": "pt", "config_sha256": _digest(config)})
    shutil.copymode(new_config, new)  # safetensors lets nobody but the owner read it, whatever the umask
    put_in_place(new, folder / WEIGHTS)
    put_in_place(new_config, folder / CONFIG)


def _weights(drafter: LearnedDrafter) -> dict[str, Tensor]:
    """What is stored of the network, in the dtype of the config, on the CPU."""
    plain = unpacked(drafter.network)
    odd = drafter.tensor_names ^ plain.state_dict().keys()
    if odd:
        raise ModelError(f"the network is not the one it was built as, so it cannot be saved: {', '.join(sorted(odd))}")
    state, dtype = stored_names(type(drafter), plain), dtype_named(drafter.config.dtype)
    return {name: state[name].detach().to("cpu", dtype).contiguous() for name in sorted(state)}


def unpacked(network: nn.Module) -> nn.Module:
    """The network itself; if some of its linear layers are packed (they are in no state, and cannot be copied), a copy
    in which they are plain."""
    packed = [module for module in network.modules() if isinstance(module, PackedLinear)]
    return copy.deepcopy(network, {id(module): _plain(module) for module in packed}) if packed else network


def _plain(packed: PackedLinear) -> nn.Linear:
    linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, device="meta")
    linear.weight = nn.Parameter(packed.weight, requires_grad=False)
    if packed.bias is not None:
        linear.bias = nn.Parameter(packed.bias.detach().clone(), requires_grad=False)
    return linear


def stored_names(kind: type[LearnedDrafter], network: nn.Module) -> dict[str, Tensor]:
    """The network's state under the names of the checkpoint; of a network without packed layers."""
    out = {}
    for name, tensor in network.state_dict().items():
        for prefix, stored in kind.renamed.items():
            name = stored + name.removeprefix(prefix) if name.startswith(prefix) else name
        out[name] = tensor
    return out


def put_in_place(new: Path, old: Path) -> None:
    """`new` takes the place of `old` once it is on the disk."""
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(old)


def _digest(config: str) -> str:
    return hashlib.sha256(config.encode()).hexdigest()


def fingerprint_of(target: Target, chat_template: str | None = None) -> dict[str, str]:
    """What a drafter remembers of its target; nothing for a target without weights of its own (tables).

    `chat_template` is the hash of the one that rendered what the drafter learned; None: the target's own.
    """
    if not isinstance(target, HFTarget):
        return {}
    own = fingerprint(target).to_dict()
    return own if chat_template is None else {**own, "chat_template": chat_template}


# -------------------------------------------------------------------------------------------------------------- reading


def load_drafter(kind: type[Kind], options: Mapping[str, Any], context: LoadContext) -> Kind:
    """See `LearnedDrafter.load`."""
    folder = _folder(kind, options, context)
    config, text = _read_config(kind, folder)
    _check_target(config, context.target, bool(options.get("allow_target_mismatch")))
    with _weights_file(folder, text) as file:
        _check_sizes(kind, config, file, folder)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    drafter = kind(config, kind.network_of(config), _vocabulary(config, tensors, folder), context.target)
    drafter.folder = folder
    fill(drafter, {k: v for k, v in tensors.items() if k not in MAPS}, str(folder))
    limit = options.get("max_model_len")
    if limit is not None:
        drafter.window = min(limit, drafter.window or limit)
    return _frozen(drafter, context.target.dtype, context.target.device)


def _folder(kind: type[LearnedDrafter], options: Mapping[str, Any], context: LoadContext) -> Path:
    source, embedded = options.get("model"), f"embedded-{kind.name}"
    if source is None and context.target.name == "embedded" and embedded in EMBEDDED:
        source = embedded
    if source is None:
        raise OptionError("model", f"the drafter `{kind.name}` needs its folder: best/ in the --out of `forerun train`")
    return drafter_folder(str(source), options.get("revision"))


def _read_config(kind: type[LearnedDrafter], folder: Path) -> tuple[DraftConfig, str]:
    if not (folder / CONFIG).exists():
        raise ModelError(f"--drafter: {folder} has no {CONFIG}; expected best/ in the --out of `forerun train`")
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        content = json_of(text)
    except (OSError, ValueError) as error:
        raise ModelError(f"--drafter: {folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(content, dict) or "forerun_format" not in content:
        raise ModelError(f"--drafter: {folder} is no drafter trained by forerun (no `forerun_format` in {CONFIG})")
    if content.get("method") != kind.name:
        raise ModelError(f"--drafter: {folder} holds a {content.get('method')!r} drafter, not {kind.name!r}")
    try:
        return kind.config_class(**content), text
    except ValidationError as error:
        first = error.errors()[0]
        where = [".".join(map(str, first["loc"]))] if first["loc"] else []
        said = first["msg"].removeprefix("Value error, ")
        raise ModelError(": ".join(["--drafter", str(folder / CONFIG), *where, said[:1].lower() + said[1:]])) from None


def _check_target(config: DraftConfig, target: Target, allowed: bool) -> None:
    """The drafter's own record of its target against the one it is loaded for."""
    measures = {
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }
    wrong = [
        f"{name} {getattr(config, name)} != {mine}" for name, mine in measures.items() if getattr(config, name) != mine
    ]
    if wrong:
        raise ModelError(f"--drafter: it was trained for {config.target_name}, another model: {', '.join(wrong)}")
    message = _difference(config, target) if isinstance(target, HFTarget) else None
    if message is not None and not allowed:
        raise ModelError(f"--drafter: {message}; --speculative-config.allow_target_mismatch true loads it anyway")
    if message is not None:
        logger.warning("%s", message)


def _difference(config: DraftConfig, target: HFTarget) -> str | None:
    """In words, what speaks against this target; another dtype only warns."""
    if not config.target_fingerprint:
        return f"its target_fingerprint is empty: it does not say which {config.target_name} it was trained for"
    made_for, found = Fingerprint.from_dict(config.target_fingerprint), fingerprint(target)
    if made_for.dtype != found.dtype:
        logger.warning("the drafter was trained on features in %s; this target runs in %s", made_for.dtype, found.dtype)
    parts = differences(made_for, found)
    if parts == ["chat_template"]:
        return (
            f"it was trained for {config.target_name}; this target differs in chat_template: it learned answers in "
            "another chat format and accepts less in this one"
        )
    return f"it was trained for {config.target_name}; this target differs in {', '.join(parts)}" if parts else None


@contextmanager
def _weights_file(folder: Path, config_text: str) -> Iterator[Any]:
    """The open weights of the folder, written for its config. ModelError: they cannot be read, or were not."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            written_for = (file.metadata() or {}).get("config_sha256")
            if written_for is not None and written_for != _digest(config_text):
                raise ModelError(f"--drafter: {path} was written with another {CONFIG} than the one beside it")
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"--drafter: {path} cannot be read: {error}") from error


def _check_sizes(kind: type[LearnedDrafter], config: DraftConfig, file: Any, folder: Path) -> None:
    """What the config describes against what the file holds, by name and shape, before any of it takes memory.

    Raises:
        ModelError: they do not fit. DoesNotFit: they do, but the memory does not hold them.
    """
    try:
        with torch.device("meta"):
            plain = stored_names(kind, kind.network_of(config))
    except (RuntimeError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise ModelError(f"--drafter: {folder / CONFIG} describes no network that could be built: {reason}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _refuse_misfits(_misfits(expected, {n: shape for n, shape in found.items() if n not in MAPS}), str(folder))
    need, free = sum(4 * math.prod(shape) for shape in expected.values()), available_memory(torch.device("cpu"))
    if need > free:
        raise DoesNotFit(
            f"--drafter: {folder} takes {need / GIB:.2f} GiB to load, but {free / GIB:.2f} GiB are free; choose a "
            "smaller drafter"
        )


def _vocabulary(config: DraftConfig, tensors: Mapping[str, Tensor], folder: Path) -> DraftVocabulary:
    present = [name for name in MAPS if name in tensors]
    pruned = config.draft_vocab_size != config.vocab_size
    if len(present) != (2 if pruned else 0):
        want = "needs d2t and t2d" if pruned else "must have neither d2t nor t2d"
        raise ModelError(
            f"--drafter: {folder} keeps {config.draft_vocab_size} of {config.vocab_size} ids, so it {want}; "
            f"it has {', '.join(present) or 'none'}"
        )
    if not pruned:
        return DraftVocabulary(config.vocab_size)
    d2t = tensors["d2t"]
    if d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"--drafter: d2t of {folder} is {d2t.dtype} {tuple(d2t.shape)}, not a row of integers")
    vocabulary = DraftVocabulary.of_offsets(config.vocab_size, d2t)
    if vocabulary.draft_size != config.draft_vocab_size or not torch.equal(vocabulary.tensors()["t2d"], tensors["t2d"]):
        raise ModelError(f"--drafter: d2t and t2d of {folder} do not describe the same {config.draft_vocab_size} ids")
    return vocabulary


def fill(drafter: LearnedDrafter, tensors: Mapping[str, Tensor], where: str) -> None:
    """Gives the network its weights. ModelError: a tensor is missing, left over, of another shape, or not finite."""
    own = stored_names(type(drafter), drafter.network)  # views of the parameters
    expected = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [
        *_misfits(expected, found),
        *(f"{name} is {t.dtype}, not floating point" for name, t in tensors.items() if not t.is_floating_point()),
        *(f"{name} is not finite" for name, tensor in tensors.items() if not tensor.float().isfinite().all()),
    ]
    _refuse_misfits(problems, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


Shapes = Mapping[str, tuple[int, ...]]


def _misfits(expected: Shapes, found: Shapes) -> list[str]:
    """What is missing, left over or of another shape."""
    return [
        *(f"{name} is missing" for name in expected.keys() - found.keys()),
        *(f"{name} is left over" for name in found.keys() - expected.keys()),
        *(f"{n} is {found[n]}, not {expected[n]}" for n in expected.keys() & found.keys() if found[n] != expected[n]),
    ]


def _refuse_misfits(problems: Sequence[str], where: str) -> None:
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ModelError(f"--drafter: the weights of {where} do not fit: {', '.join(sorted(problems)[:3])}{more}")


# ------------------------------------------------------------------------------------------------------------- decoding


def decoding_copy(drafter: Kind, dtype: torch.dtype) -> Kind:
    """See `LearnedDrafter.for_decoding`."""
    plain = unpacked(drafter.network)
    network = copy.deepcopy(plain) if plain is drafter.network else plain
    saved = dtype_named(drafter.config.dtype)  # rounded as saving rounds it
    twin = type(drafter)(drafter.config, network.to(saved), drafter.vocabulary, drafter.target)
    twin.window = drafter.window
    return _frozen(twin, dtype, drafter.target.device)


def _frozen(drafter: Kind, dtype: torch.dtype, device: torch.device) -> Kind:
    drafter.network.to(device, dtype).eval().requires_grad_(False)
    pack_linears(drafter.network)
    return drafter
