"""Tiny random models and a byte tokenizer, saved as users have them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 264  # 256 bytes, three special tokens, padding
END = 256


def save_tokenizer(folder: Path, chat_template: str | None = TEMPLATE) -> None:
    """One id per byte, and `<|end|>`, `<|start|>`, `<|pad|>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<|end|>", "<|start|>", "<|pad|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def qwen3_config(layers: int, window: int = 256) -> Qwen3Config:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=window,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=None,
        dtype="float32",
        initializer_range=0.2,  # wide: the best token leads by far more than float32's rounding
    )


def qwen3(layers: int, seed: int = 0, window: int = 256) -> Qwen3ForCausalLM:
    """A random model. Fewer layers of the same seed are the first layers of the bigger one."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(qwen3_config(3, window))
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.config.layer_types = model.config.layer_types[:layers]
    return model
