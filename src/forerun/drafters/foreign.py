"""Drafters that other projects wrote: told by their names and keys, refused by name, with what to do instead.

None of them is read here. Without this a folder of theirs would be taken for a small model, which it is not: the
message would ask for a tokenizer, or list tensors of a model that nobody meant.
"""

from __future__ import annotations

import os
import pickletools
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forerun.drafters.config import LARGEST_CONFIG
from forerun.errors import ModelError
from forerun.parsing import json_of
from forerun.target.checkpoint import stored_shapes
from forerun.target.load import find_folder

PICKLE = "pytorch_model.bin"


class Foreign(NamedTuple):
    """A drafter of another project."""

    what: str
    """It in words, with its article."""
    kind: str | None = None
    """The same kind here; None: there is none."""


OURS = Foreign("a drafter of `forerun train`")
"""The one that is not foreign."""

SPECULATORS = {
    "eagle": Foreign("an EAGLE-1 drafter", "eagle"),
    "eagle3": Foreign("an EAGLE-3 drafter", "eagle3"),
    "peagle": Foreign("a P-EAGLE drafter"),
    "dflash": Foreign("a DFlash drafter", "dflash"),
    "dflash2": Foreign("a DFlash2 drafter"),
    "dspark": Foreign("a DSpark drafter", "dspark"),
    "mlp": Foreign("an MLP speculator"),
}
"""By `speculators_model_type`."""

NAMES = (
    (r"eagle3model$", Foreign("an EAGLE-3 drafter in DeepSpec's format", "eagle3")),
    (r"^llamaforcausallmeagle3$", Foreign("an EAGLE-3 drafter in the format of SpecForge and SGLang", "eagle3")),
    (r"eagle3", Foreign("an EAGLE-3 drafter in the format of another engine", "eagle3")),
    (r"eagle(?![\d_])", Foreign("an EAGLE-1 drafter in the format of another engine", "eagle")),  # Eagle2_5_VL is none
    (r"dflash", Foreign("a DFlash drafter in the format of z-lab and SGLang", "dflash")),
    (r"medusa", Foreign("a set of Medusa heads")),
    (r"mlp_?speculator", Foreign("an MLP speculator")),
    (r"mtp(model)?$|nextn$|^gemma4_?assistant", Foreign("the multi-token prediction layers (MTP) of a model")),
)
"""By an architecture or model type in lower case; the first that is found counts."""

KEYS = {
    "medusa_num_heads": Foreign("a set of Medusa heads"),
    "hydra_num_heads": Foreign("a set of Hydra heads"),
    "dflash_config": Foreign("a DFlash drafter in the format of z-lab and SGLang", "dflash"),
    "eagle_config": Foreign("an EAGLE-3 drafter in the format of another engine", "eagle3"),
    "draft_vocab_size": Foreign("an EAGLE-3 drafter in the format of EAGLE's own code", "eagle3"),
}
"""By a key of the config that only such a drafter has; the first that is there counts."""


def refuse_foreign(source: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """ModelError: a drafter of another project, or a model that is not there. Whatever else is wrong is not said here.

    Args:
        source: a folder, hub id or embedded name; a file is not looked at.
        revision: of a hub id.
        trust_remote_code: as for loading, which takes what is fetched here.
    """
    if source.endswith(".gguf") or os.path.isfile(source):
        return
    folder = drafter_folder(source, revision, trust_remote_code)
    found = _found(folder)
    if found is None or found is OURS:
        return
    why, advice = "for which there is no importer; only drafters of `forerun train` are loaded", "train one"
    if found.kind is None:
        why, advice = "a kind that forerun does not have", "train another"
    raise ModelError(
        f"--drafter: {source} holds {found.what}, {why}: {advice} for this target "
        f"(`forerun train {found.kind or 'dspark'}`), or use --drafter ngram, which needs no model"
    )


def drafter_in(source: str) -> str | None:
    """What drafter a folder on this machine holds, in words, for who took it for a model; None: none that is known."""
    folder = Path(source)
    if not folder.is_dir():
        return None
    found = _found(folder)
    if found is OURS:
        return f"what --drafter {source} takes, {found.what}"
    return None if found is None else found.what


def drafter_folder(source: str, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """See `find_folder`; what is wrong is said of the drafter."""
    try:
        return find_folder(source, revision, trust_remote_code)
    except ModelError as error:
        raise type(error)(str(error).replace("--target: ", "--drafter: ", 1)) from error


def _found(folder: Path) -> Foreign | None:
    """What a folder holds, `OURS` included; None: no drafter that is known."""
    config = _config(folder)
    return OURS if "forerun_format" in config else _by_config(config) or _by_tensors(config, folder)


def _config(folder: Path) -> Mapping[str, Any]:
    """Empty: there is none that could be read."""
    try:
        with (folder / "config.json").open("rb") as file:
            content = file.read(LARGEST_CONFIG + 1)
        config = json_of(content) if len(content) <= LARGEST_CONFIG else None
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _by_config(config: Mapping[str, Any]) -> Foreign | None:
    if {"speculators_model_type", "speculators_config"} & config.keys():
        found = SPECULATORS.get(str(config.get("speculators_model_type")), Foreign("a drafter"))
        return found._replace(what=f"{found.what} in the speculators format of vLLM")
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    names = [name.lower() for name in (*listed, config.get("model_type")) if isinstance(name, str)]
    if "dspark_config" in config or any("dspark" in name for name in names):
        return _dspark(config)
    by_name = (found for pattern, found in NAMES if any(re.search(pattern, name) for name in names))
    by_key = (found for key, found in KEYS.items() if config.get(key) is not None)
    return next(by_name, None) or next(by_key, None)


def _dspark(config: Mapping[str, Any]) -> Foreign:
    if {"dspark_config", "dflash_config"} & config.keys():
        return Foreign("a DSpark drafter in the format of SGLang and SpecForge", "dspark")
    if config.get("markov_rank") == 0:  # what DeepSpec calls DFlash is laid out like its DSpark
        return Foreign("a DFlash drafter in DeepSpec's format", "dflash")
    return Foreign("a DSpark drafter in DeepSpec's format", "dspark")


def _by_tensors(config: Mapping[str, Any], folder: Path) -> Foreign | None:
    """Of EAGLE the config may be that of any Llama: only the names of its tensors are its own."""
    if not config:
        return None
    try:
        stored: Collection[str] = stored_shapes(folder)
    except (ModelError, OSError):
        stored = _pickled(folder / PICKLE)
    names = {name.removeprefix("model.") for name in stored}
    if "fc.weight" not in names:
        return None
    if any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names:
        return Foreign("an EAGLE-3 drafter in the format of EAGLE's own code", "eagle3")
    if any(name.startswith("layers.0.") for name in names):
        return Foreign("an EAGLE-1 drafter in the format of EAGLE's own code", "eagle")
    return None


def _pickled(file: Path) -> set[str]:
    """Words in a file of `torch.save`, the names of its tensors among them, without running what it says."""
    try:
        with zipfile.ZipFile(file) as archive:
            [program] = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
            if program.file_size > LARGEST_CONFIG:
                return set()
            return {word for _, word, _ in pickletools.genops(archive.read(program)) if isinstance(word, str)}
    except Exception:  # whatever it is, nothing of it is loaded
        return set()


__all__ = ["drafter_folder", "drafter_in", "refuse_foreign"]
