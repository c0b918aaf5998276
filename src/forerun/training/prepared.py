"""Where the prepared samples of a run are: the folder that was named, or one made from the file that was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import OptionError
from forerun.training.config import TrainingConfig
from forerun.training.stops import reading

if TYPE_CHECKING:
    from forerun.target.base import Target


def is_prepared(data: Path) -> bool:
    """Whether this is a folder of `forerun data prepare`, not something it would take."""
    from forerun.training.data.dataset import MANIFEST

    return (data / MANIFEST).is_file()


def prepare(config: TrainingConfig, target: Target, place: Path) -> Path:
    """Prepares the records that --data names with the defaults of `forerun data prepare`, unless that was done.
    Samples that are too long are cut, not left out.

    Returns:
        `place`.

    Raises:
        OptionError: records or template that cannot be used.
    """
    from forerun.target.outline import outline
    from forerun.training.data import Dataset
    from forerun.training.data.prepare import Preparation, write
    from forerun.training.data.rendering import Rendering
    from forerun.training.data.samples import MAX_LENGTH, Choice
    from forerun.training.data.sources import Sources

    if is_prepared(place) and list(Dataset(place).manifest["sources"]) == [config.data] and not _newer(config, place):
        return place
    found = outline(config.target, revision=config.revision, trust_remote_code=config.trust_remote_code)
    choice = Choice(max_length=config.max_length or min(MAX_LENGTH, target.window), overlong="truncate")
    rendering = Rendering(found.tokenizer, found.eos_token_ids)
    preparation = Preparation(Sources([config.data], "--data"), found, rendering, choice)
    write(preparation, place, 0.0, True, lambda *_: None)
    return place


def _newer(config: TrainingConfig, place: Path) -> bool:
    """Whether the records were written after the samples."""
    from forerun.training.data.dataset import MANIFEST

    source = Path(config.data)
    return source.exists() and source.stat().st_mtime > (place / MANIFEST).stat().st_mtime


def check_data(config: TrainingConfig) -> None:
    """OptionError if --data names nothing that is there; before a model is loaded."""
    name = config.data
    with reading("--data"):
        there = name.startswith("hf:") or Path(name).exists()
        if there and Path(name).is_file():
            Path(name).open("rb").close()
    if not there:
        raise OptionError("--data", f"{name} does not exist (looked for {Path(name).absolute()})")
