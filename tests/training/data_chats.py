"""Chat templates in the style of well-known families, written for these tests, and a byte tokenizer that has all their
special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.target.tokenizer import HFTokenizer

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]",
    "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip

CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.' }}
{%- else %}{{ '<|im_start|>system\n' + messages[0].content }}{% endif %}
{%- if tools %}{{ '\n<tools>' }}
  {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
      {{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<result>' + m.content + '</result><|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Qwen 2.5: a system prompt of its own, tools, a line break behind every turn, none of which is emitted."""

THINKING = """
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
    {{- m.content + '<|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
"""Qwen 3: thoughts of earlier turns are forgotten; with enable_thinking false an empty one is part of the prompt."""

LLAMA = """
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
  {%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}
  {{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
"""Llama 3: two ends, one of them of tool calls; texts are trimmed; nothing between turns."""

GEMMA = """
{{- '<bos>' }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
  {%- set role = 'model' if m.role == 'assistant' else m.role %}
  {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""Gemma: no system role, strict alternation, its own name for the assistant."""

MISTRAL = """
{{- '<s>' }}
{%- set ns = namespace(system='') %}
{%- for m in messages %}
  {%- if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}
  {%- elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}
  {%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
"""Mistral: no generation prompt at all, the system text within the first user turn."""

MISTRAL_TOOLS = """
{{- '<s>' }}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if loop.index0 >= messages | length - 2 and tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}
    {{- '[INST] ' + m.content + ' [/INST]' }}
  {%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
"""Later Mistral: tools stand before the last user turn, and move on with it."""

PHI = """
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""
"""Phi: a second end behind a conversation that nobody goes on with."""

FORCED = """
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '<|user|>' + m.content }}
  {%- else %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|endoftext|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"""
"""DeepSeek R1: the prompt begins the thought, and no answered conversation has one."""

MARKED = """
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\n' }}
  {%- if m.role == 'assistant' %}
    {%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {%- generation %}{{ m.content }}{% endgeneration %}
  {%- else %}{{ m.content }}{% endif %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""ChatML that marks its answers itself: without their thoughts, and without their ends."""


def tokenizer(template: str | None, merges: Sequence[tuple[str, str]] = ()) -> HFTokenizer:
    """One id per byte, merges on top, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(a + b for a, b in merges)]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    return HFTokenizer(fast, template)


def ids_of(tokenizer: HFTokenizer, *texts: str) -> frozenset[int]:
    """The ids of special tokens."""
    return frozenset(tokenizer.vocabulary()[text] for text in texts)
