"""What a feature store holds and whose it is: written once, compared before anything is read."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from forerun.drafters.checkpoint import fingerprint_of
from forerun.errors import OptionError
from forerun.target.base import Target
from forerun.target.fingerprint import Fingerprint, differences
from forerun.training.features.layout import Layout, StoreDtype

logger = logging.getLogger("forerun")

MANIFEST = "manifest.json"
NEW = f"{MANIFEST}.new"
LOCK = "writer.lock"
OPTION = "--feature-store"


class Manifest(BaseModel):
    """The `manifest.json` of a store; nothing has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    forerun_feature_store: Literal[1]
    layer_ids: tuple[int, ...]
    """The taps; the last hidden state is stored in any case."""
    numbering_base: Literal["h"]
    """0 is the embedding output, h the output of the h-th decoder layer."""
    post_norm: Literal[False]
    """The last hidden state is the one before the final norm."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: StoreDtype
    log_normalizer: bool
    checksum: Literal["crc32"]
    target_name: str
    target_fingerprint: dict[str, str]
    """`Fingerprint.to_dict()`; empty for a target without weights."""

    @classmethod
    def of(cls, target: Target, taps: Sequence[int], dtype: StoreDtype, normalizer: bool) -> Manifest:
        return cls(
            forerun_feature_store=1,
            layer_ids=tuple(taps),
            numbering_base="h",
            post_norm=False,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=dtype,
            log_normalizer=normalizer,
            checksum="crc32",
            target_name=target.name,
            target_fingerprint=fingerprint_of(target),
        )

    @property
    def layout(self) -> Layout:
        lower = len([h for h in self.layer_ids if h != self.num_layers])
        return Layout(self.hidden_size, lower, self.dtype, self.log_normalizer)

    @property
    def digest(self) -> str:
        """A part of every key, so that a shard moved here from another store is never read as this one's."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def settle_manifest(folder: Path, wanted: Manifest) -> Manifest:
    """The folder's manifest; `wanted`, written now, where the folder is new. Of processes that ask at once one writes.

    Raises:
        OptionError: the folder holds something else, cannot be made, or has a manifest that cannot be read.
    """
    path = folder / MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = set(os.listdir(folder))
        if MANIFEST not in names:
            foreign = sorted(names - {LOCK, NEW})
            if foreign:
                raise OptionError(OPTION, f"{folder} is not empty and no feature store ({foreign[0]}); name another")
            with FileLock(folder / LOCK):
                if not path.exists():
                    _write(path, wanted)
        return _read(path)
    except OSError as error:
        raise OptionError(OPTION, f"{folder}: {error.strerror or error}") from error


def _write(path: Path, manifest: Manifest) -> None:
    """Whole or not at all."""
    new = path.with_name(NEW)
    with new.open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _read(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise OptionError(OPTION, f"{path}: {where}: {first['msg'].lower()}; name another folder") from None


def check_manifest(found: Manifest, wanted: Manifest, folder: Path, allow_target_mismatch: bool) -> bool:
    """Whether a store holds features of the very target at hand; other features are refused.

    Another storage dtype, and another dtype the target ran in, are warned of. False (a store of another target)
    is returned only where that is allowed: it may then be read, never added to.

    Raises:
        OptionError: other taps or shapes, or another target.
    """
    fields = ("layer_ids", "num_layers", "hidden_size", "vocab_size")
    wrong = [f"{f} {getattr(found, f)} there, {getattr(wanted, f)} here" for f in fields if _differ(found, wanted, f)]
    if wrong:
        raise OptionError(OPTION, f"{folder} holds other features ({'; '.join(wrong)}); name another folder")
    if found.dtype != wanted.dtype:
        logger.warning("%s %s stores in %s, not in %s; it stays so", OPTION, folder, found.dtype, wanted.dtype)
    if found.target_fingerprint == wanted.target_fingerprint:
        return True
    parts = _compare(found, wanted)
    if not parts:
        was, now = found.target_fingerprint["dtype"], wanted.target_fingerprint["dtype"]
        logger.warning("the features in %s were computed in %s; this target runs in %s", folder, was, now)
        return True
    message = f"{folder} was computed by {found.target_name}; this target differs in {', '.join(parts)}"
    if not allow_target_mismatch:
        raise OptionError(OPTION, f"{message}; name another folder, or read it anyway with --allow-target-mismatch")
    logger.warning("%s; it is read as it is and nothing is added to it", message)
    return False


def _differ(found: Manifest, wanted: Manifest, field: str) -> bool:
    return bool(getattr(found, field) != getattr(wanted, field))


def _compare(found: Manifest, wanted: Manifest) -> list[str]:
    """Names of the parts in which the two targets differ, the dtype they run in not among them."""
    try:
        return differences(*(Fingerprint.from_dict(m.target_fingerprint) for m in (found, wanted)))
    except KeyError as missing:
        return [f"the fingerprint's {missing.args[0]}"]
