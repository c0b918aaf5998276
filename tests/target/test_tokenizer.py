"""Tokenizers: strict in, faithful out; what two vocabularies share."""

from __future__ import annotations

import pytest

from forerun.errors import ModelError, PromptError, VocabularyMismatch
from forerun.target.table import ByteTokenizer, LetterTokenizer
from forerun.target.tokenizer import HFTokenizer, shared_vocabulary

TEXTS = ["", "plain", "Größe 日本語 🙂👩‍👩‍👧\r\n\t x", "  spaces  ", "<|end|>"]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def inner(tiny_qwen3_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_qwen3_dir)


@pytest.fixture
def tokenizer(inner):
    return HFTokenizer(inner)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    """Byte for byte, special tokens included when they are asked for."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_half_a_surrogate_pair_is_a_prompt_error(tokenizer):
    """Text that no UTF-8 client can send, in both kinds of tokenizer."""
    for one in (tokenizer, ByteTokenizer()):
        with pytest.raises(PromptError, match="not valid UTF-8"):
            one.encode("a\ud83d")


def test_special_ids_and_padded_ids_decode_to_nothing(tokenizer):
    """Ids of special tokens are skipped on request; ids the tokenizer lacks never make text or an error."""
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.decode([*tokenizer.encode("ab"), 256, 263, 10**6]) == "ab"
    assert tokenizer.size == 259


def test_the_chat_template_opens_the_answer(tokenizer):
    """Rendered with the generation prompt; a template given by the user replaces the model's own."""
    assert tokenizer.render_chat(MESSAGES) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False).endswith("<|end|>\n")
    assert HFTokenizer(tokenizer.inner, chat_template="{{ messages[0].content }}!").render_chat(MESSAGES) == "hi!"


def test_a_template_that_refuses_is_a_prompt_error(tokenizer):
    """With the template's own words; and a tokenizer without one says which option to give."""
    strict = HFTokenizer(tokenizer.inner, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="roles must alternate"):
        strict.render_chat(MESSAGES)
    for bare in (ByteTokenizer(chat_template=None), LetterTokenizer(3)):
        with pytest.raises(ModelError, match="--chat-template"):
            bare.render_chat(MESSAGES)


def test_nu_5_padded_sizes_do_not_matter():
    """NU-5: tokenizers of 97, 104 and 96 ids over the same letters share the ids of the shorter one, whatever the
    models' tables are padded to.

    https://github.com/vllm-project/vllm/issues/5203 https://github.com/vllm-project/vllm/issues/7252
    https://github.com/vllm-project/vllm/pull/13849 https://github.com/vllm-project/vllm/issues/42775
    https://github.com/ggml-org/llama.cpp/pull/3812 https://github.com/LostRuins/koboldcpp/issues/2325
    """
    target = LetterTokenizer(97)
    assert shared_vocabulary(target, LetterTokenizer(104)) == 97
    assert shared_vocabulary(target, LetterTokenizer(96)) == 96
    assert shared_vocabulary(target, target) == 97


def test_nu_5_vocabularies_are_compared_string_by_string():
    """NU-5: one ordinary id with another string is found and named; special tokens may differ."""

    class Swapped(LetterTokenizer):
        def vocabulary(self):
            return {**super().vocabulary(), "h": 9, "j": 7}

    with pytest.raises(VocabularyMismatch, match=r"of 20 common ids 2 differ .id 7 is 'h' and 'j', 9 is 'j' and 'h'"):
        shared_vocabulary(LetterTokenizer(20), Swapped(20))
    assert shared_vocabulary(LetterTokenizer(20), LetterTokenizer(20, eos_id=4)) == 20


def test_nu_5_unrelated_tokenizers_do_not_pass(tokenizer):
    """NU-5: a byte-level BPE and a plain byte vocabulary have the same size and nothing else in common."""
    with pytest.raises(VocabularyMismatch, match="of the target's tokenizer family"):
        shared_vocabulary(tokenizer, ByteTokenizer())
