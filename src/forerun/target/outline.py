"""What the files of a target say without its weights: enough to write its prompts and read its answers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError
from forerun.target.gguf import kept
from forerun.target.hf import eos_ids
from forerun.target.load import find_folder, gguf_file
from forerun.target.pretrained import explained, load_tokenizer, quiet
from forerun.target.probe import served_window
from forerun.target.tokenizer import HFTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Outline:
    """The part of a target that no weight is needed for. Each field is that of the loaded target."""

    name: str
    tokenizer: HFTokenizer
    window: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def outline(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False, chat_template: str | None = None
) -> Outline:
    """Reads config and tokenizer of what `load_target` would load; seconds for a model of any size.

    Args:
        source: id, folder, `.gguf` file or embedded name. Of a GGUF file that was converted before, the converted
            folder is read, otherwise the header of the file itself.
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: run code that comes with the checkpoint.
        chat_template: in place of the tokenizer's own.

    Raises:
        ModelError: there is no such model, or its files cannot be read.
    """
    folder, options = _files(source, revision, trust_remote_code)
    with explained(source), quiet():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, **options)
        tokenizer = HFTokenizer(_tokenizer(source, folder, options), chat_template)
    text = config.get_text_config()
    return Outline(
        name=Path(source).stem if source.endswith(".gguf") else source,
        tokenizer=tokenizer,
        window=served_window(text, None)[0],
        vocab_size=text.vocab_size,
        eos_token_ids=eos_ids(config, _generation_config(folder)),
    )


def _files(source: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, dict[str, Any]]:
    """The folder to read, and the options of `from_pretrained`."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    if not source.endswith(".gguf") and not os.path.isfile(source):
        return find_folder(source, revision, trust_remote_code), options
    path = gguf_file(Path(source))
    folder = kept(path)
    return (path.parent, options | {"gguf_file": path.name}) if folder is None else (folder, options)


def _tokenizer(source: str, folder: Path, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Of a GGUF file as it is after conversion: saved and read again, which changes what it takes for special."""
    tokenizer = load_tokenizer(source, folder, options)
    if "gguf_file" not in options:
        return tokenizer
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return AutoTokenizer.from_pretrained(place, local_files_only=True)


def _generation_config(folder: Path) -> Any:
    """None where the folder has none, as for a GGUF file: the config then names every end."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"--target: {folder / 'generation_config.json'} cannot be read: {error}") from error
