"""Profiles and calibrations on the disk: where they lie, read strictly, written whole or not at all.

A profile belongs to one target on one machine (`ProfileKey`). Another dtype, device or number of threads has a file of
its own, so that costs are never used for what they were not measured with. What decodes only reads; `forerun profile`
and `forerun calibrate` write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forerun.budget.calibration import Calibration, Table
from forerun.budget.profile import Profile, ProfileKey
from forerun.errors import OptionError
from forerun.folders import cache_folder, check_file, check_folder
from forerun.parsing import json_of

OPTION = "--calibration-cache"
"""The option that says where, or whether at all."""
OFF = "off"
"""Its value for not at all."""
ELSEWHERE = f"name another folder, or {OFF}"
"""What to do where it cannot be written."""
CALIBRATION = "calibration.json"
"""Name of the calibration in a drafter's own folder,"""
CALIBRATION_OF_COPIES = "calibration-lookup.json"
"""and of that of the same drafter with prompt lookup mixed into its laws."""
LOAD_STUDY_VERSION = 1
NAME_LENGTH = 40
"""Characters of a model's name that a file's name keeps: enough to know it again, whatever it was."""


def profiles_folder(choice: str | None = None) -> Path | None:
    """Where profiles lie, by `--calibration-cache`: its folder, None for `off`; not given: under FORERUN_CACHE."""
    if choice is None:
        return cache_folder() / "profiles"
    return None if choice == OFF else Path(choice)


def check_cache(folder: Path | None) -> None:
    """OptionError if nothing could be kept in the folder of `profiles_folder`. Nothing is made."""
    if folder is not None:
        check_folder(OPTION, folder, ELSEWHERE)


def check_kept(path: Path, option: str = OPTION, otherwise: str = ELSEWHERE) -> None:
    """Before what takes long: could its result be written to this file of a profile, load study or calibration?

    Raises:
        OptionError: it could not; `option` says where it goes, `otherwise` what else can be done. Nothing is made.
    """
    check_folder(option, path.parent, otherwise)
    for file, grows in ((path, False), (_lock(path), True)):
        if path.parent.is_dir():
            check_file(option, file, grows=grows, otherwise=otherwise)


# ------------------------------------------------------------------------------------------------------------ profiles


def profile_path(key: ProfileKey, folder: Path | None = None) -> Path:
    """The file of a profile, there or not; `folder`: instead of the one under FORERUN_CACHE."""
    return _in(folder) / f"{_short(key.model)}-{_digest(asdict(key))}.json"


def read_profile(key: ProfileKey, folder: Path | None = None) -> Profile | None:
    """The profile measured with exactly this key; None: there is none.

    Raises:
        OptionError: there is a file, and it is damaged or of another version; the command that measures anew is named.
    """
    path = profile_path(key, folder)
    text = _text(path)
    if text is None:
        return None
    try:
        return Profile.loads(text, key)
    except OptionError as error:
        raise _unusable(path, error, "forerun profile") from None


def write_profile(profile: Profile, folder: Path | None = None, *, merge: bool = True) -> Path:
    """Writes a profile and returns its file.

    Drafters that were measured before under the same key stay, as long as the file can be read, unless `merge` is
    false. The costs of the target are those of `profile`.

    Raises:
        OptionError: the folder cannot be written.
    """
    path = profile_path(profile.key, folder)
    with _locked(path):
        before = _readable(profile.key, folder) if merge else None
        if before is not None:
            models = {**before.models, **{name: profile.models.get(name, "") for name in profile.drafts}}
            known = {name: model for name, model in models.items() if model}
            profile = replace(profile, drafts={**before.drafts, **profile.drafts}, models=known)
        _write(path, profile.dumps())
    return path


def _readable(key: ProfileKey, folder: Path | None) -> Profile | None:
    try:
        return read_profile(key, folder)
    except OptionError:
        return None  # it is about to be replaced, which is what its message would have asked for


# ------------------------------------------------------------------------------------------------- decoding under load


def load_study_path(key: ProfileKey, folder: Path | None = None) -> Path:
    """Beside the profile that its scheduled way went by."""
    return profile_path(key, folder).with_suffix(".load.json")


def read_load_study(key: ProfileKey, folder: Path | None = None) -> dict[str, Any] | None:
    """What `write_load_study` wrote last; None: there is none. OptionError: it cannot be used."""
    path = load_study_path(key, folder)
    text = _text(path)
    if text is None:
        return None
    try:
        found = json_of(text)
        if found["version"] == LOAD_STUDY_VERSION and isinstance(found["points"], list):
            return dict(found)
    except (KeyError, TypeError, ValueError):
        pass
    raise _unusable(path, OptionError(OPTION, "is damaged or of another version"), "forerun bench load")


def write_load_study(
    key: ProfileKey, points: Sequence[Mapping[str, Any]], made_with: Mapping[str, Any], folder: Path | None = None
) -> Path:
    """Keeps the speeds that `forerun bench load` measured, in place of those before, and returns the file.

    Args:
        key: of the profile.
        points: one for each way of decoding and load: `drafter`, `policy`, `load`, and tokens a second `per_user` and
            in `total`.
        made_with: models, machine, versions and options.
        folder: instead of the one under FORERUN_CACHE.

    Raises:
        OptionError: the folder cannot be written.
    """
    path = load_study_path(key, folder)
    document = {
        "version": LOAD_STUDY_VERSION,
        "points": [dict(point) for point in points],
        "made_with": dict(made_with),
    }
    with _locked(path):
        _write(path, json.dumps(document, indent=1))
    return path


# -------------------------------------------------------------------------------------------------------- calibrations


def calibration_path(key: ProfileKey, drafter: str, folder: Path | None = None) -> Path:
    """The calibration of a drafter that has no folder of ours (`ngram`, a foreign model): beside the profiles.

    Confidences depend on models and dtype, not on the machine.
    """
    conditions = {"model": key.model, "dtype": key.dtype, "drafter": drafter}
    return _in(folder) / f"{_short(key.model)}-{_short(drafter)}-{_digest(conditions)}.calibration.json"


def read_calibration(path: Path, option: str = OPTION) -> Calibration | None:
    """The tables of a file; None: there is none.

    Raises:
        OptionError: it cannot be used; `option` says where it is looked for, and the command to run is named.
    """
    text = _text(path, option)
    if text is None:
        return None
    try:
        return Calibration.loads(text)
    except OptionError as error:
        raise _unusable(path, error, "forerun calibrate", option) from None


def write_calibration(path: Path, tables: list[Table], option: str = OPTION) -> None:
    """Adds tables to a file, each in place of the one with its key. A file that cannot be used is replaced.

    Raises:
        OptionError: the folder cannot be written; `option` says which it is.
    """
    with _locked(path, option):
        try:
            calibration = read_calibration(path) or Calibration()
        except OptionError:
            calibration = Calibration()
        for table in tables:
            calibration = calibration.with_table(table)
        _write(path, calibration.dumps())


# --------------------------------------------------------------------------------------------------------------- files


def _in(folder: Path | None) -> Path:
    return cache_folder() / "profiles" if folder is None else folder


def _short(name: str) -> str:
    """What of a name a file's name can hold; its end, where paths differ."""
    return re.sub(r"[^\w.-]+", "-", name)[-NAME_LENGTH:].strip("-.") or "model"


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _text(path: Path, option: str = OPTION) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(option, f"cannot read {path}: {error}") from None


def _unusable(path: Path, error: OptionError, command: str, option: str = OPTION) -> OptionError:
    found = error.reason
    hint = "" if command in found else f"; run `{command}` again"
    return OptionError(option, f"{path} {found}{hint}" + (f", or give {OFF!r}" if option == OPTION else ""))


@contextmanager
def _locked(path: Path, option: str = OPTION) -> Iterator[None]:
    """Alone at a file, among all processes; its folder is made. OptionError: that is not possible."""
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock(path)):
            yield
    except OSError as error:
        raise OptionError(option, f"cannot write {path}: {error.strerror or error}") from None


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


__all__ = [
    "CALIBRATION",
    "calibration_path",
    "check_cache",
    "check_kept",
    "load_study_path",
    "profile_path",
    "profiles_folder",
    "read_calibration",
    "read_load_study",
    "read_profile",
    "write_calibration",
    "write_load_study",
    "write_profile",
]
