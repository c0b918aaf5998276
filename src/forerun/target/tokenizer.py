"""Hugging Face tokenizers as ours, and what two vocabularies have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError, PromptError, VocabularyMismatch
from forerun.target.base import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class HFTokenizer:
    """A transformers tokenizer behind the `Tokenizer` protocol. `chat_template` replaces the one it came with."""

    def __init__(self, inner: PreTrainedTokenizerBase, chat_template: str | None = None):
        self.inner = inner
        self._own_template = chat_template

    @property
    def size(self) -> int:
        return len(self.inner)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = {i for i, token in self.inner.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.inner.all_special_ids))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. PromptError: it holds half a surrogate pair, which no UTF-8 text does."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError("prompt", f"not valid UTF-8: {error.reason} at character {error.start}") from error
        # verbose: the tokenizer's own remark on long texts; the window is checked where the request is admitted.
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids beyond the tokenizer's own (a padded vocabulary has some) decode to nothing."""
        known = [i for i in ids if 0 <= i < self.size]
        text = self.inner.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def vocabulary(self) -> Mapping[str, int]:
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())

    @property
    def chat_template(self) -> str | None:
        template = self._own_template or self.inner.chat_template
        # Some tokenizers carry several templates under names; `default` is the one that is meant without a name.
        return template.get("default") if isinstance(template, dict) else template

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The template applied; options (`add_generation_prompt`, `enable_thinking`, `tools`, ..) go to it as they are.

        Raises:
            ModelError: the tokenizer has no template.
            PromptError: the template refuses these messages, with its own words.
        """
        from jinja2 import TemplateError

        if self.chat_template is None:
            raise ModelError("--chat-template: the tokenizer has no chat template; give one")
        options = {"add_generation_prompt": True, **options}
        try:
            rendered = self.inner.apply_chat_template(
                [dict(m) for m in messages], chat_template=self.chat_template, tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError("messages", f"the chat template refuses them: {error}") from error
        return str(rendered)


def shared_vocabulary(target: Tokenizer, drafter: Tokenizer) -> int:
    """How many leading ids two tokenizers share, compared string by string. Padded sizes do not matter.

    A drafter whose ordinary tokens differ would draft nonsense - never a wrong output: verification reads no strings.
    For the same reason special tokens may differ, as they do between the base and the coder model of one family.

    Returns:
        The length of the shorter vocabulary: ids from there on are known to one of the two only.

    Raises:
        VocabularyMismatch: ordinary ids stand for different strings; the first ones are named.
    """
    ours = {i: text for text, i in target.vocabulary().items()}
    theirs = {i: text for text, i in drafter.vocabulary().items()}
    size = min(target.size, drafter.size)
    special = target.special_ids | drafter.special_ids
    known = (i for i in range(size) if i in ours and i in theirs and i not in special)
    different = [i for i in known if ours[i] != theirs[i]]
    if different:
        first = ", ".join(f"{i} is {ours[i]!r} and {theirs[i]!r}" for i in different[:3])
        raise VocabularyMismatch(
            f"target and drafter have different vocabularies: of {size} common ids {len(different)} differ "
            f"(id {first}); the drafter must be of the target's tokenizer family"
        )
    return size


__all__ = ["HFTokenizer", "shared_vocabulary"]
