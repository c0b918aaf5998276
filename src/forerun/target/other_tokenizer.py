"""A tokenizer of another folder for a loaded target, if it gives the same names to the same ids."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ModelError
from forerun.target.base import Target
from forerun.target.pretrained import first_line, quiet
from forerun.target.tokenizer import HFTokenizer


def other_tokenizer(folder: str | Path, target: Target, trust_remote_code: bool = False) -> HFTokenizer:
    """The tokenizer of a folder in place of the target's own: with another chat template, say, or other special tokens.

    Args:
        folder: with the files of a Hugging Face tokenizer.
        target: loaded; its own tokenizer is what the other one is compared with.
        trust_remote_code: run code that comes with it.

    Raises:
        ModelError: it cannot be loaded, or an ordinary token of the target's stands for another text there.
    """
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ModelError(f"--tokenizer: {folder} is no folder")
    try:
        with quiet():
            inner = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, ..
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"--tokenizer: {folder} cannot be loaded ({reason})") from error
    made = HFTokenizer(inner)
    _check_fits(made, target, str(folder))
    return made


def _check_fits(made: HFTokenizer, target: Target, folder: str) -> None:
    """Special tokens may differ, as between the base and the chat model of one family; ids must have logits."""
    ours = {i: text for text, i in target.tokenizer.vocabulary().items()}
    theirs = {i: text for text, i in made.vocabulary().items()}
    beyond = sorted(i for i in theirs if i >= target.vocab_size)
    if beyond:
        raise ModelError(
            f"--tokenizer: {folder} does not fit {target.name}: id {beyond[0]} ({theirs[beyond[0]]!r}) is outside its "
            f"vocabulary of {target.vocab_size}"
        )
    special = target.tokenizer.special_ids | made.special_ids
    wrong = sorted(i for i, text in ours.items() if i not in special and theirs.get(i) != text)
    if wrong:
        first = ", ".join(f"{i} is {ours[i]!r} and there {theirs.get(i)!r}" for i in wrong[:3])
        raise ModelError(
            f"--tokenizer: {folder} does not fit {target.name}: {len(wrong)} of {len(ours)} ids differ (id {first})"
        )


__all__ = ["other_tokenizer"]
