"""From messages or texts to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ModelError, PromptError
from forerun.parsing import json_of
from forerun.serve.errors import invalid, unsupported
from forerun.serve.parameters import text_of
from forerun.serve.schemas import ChatRequest, Message, TokenizeRequest, Tool
from forerun.serve.tools import wants_tools
from forerun.target.base import Tokenizer
from forerun.target.tokenizer import HFTokenizer

FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
)
"""Tokens before the text ahead of a gap, before the text behind it, and before what fills it."""


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """The same tokenizer with another chat template. ModelError: it takes none."""
    if template is None:
        return tokenizer
    if not isinstance(tokenizer, HFTokenizer):
        raise ModelError("--chat-template: this tokenizer takes no other template")
    return HFTokenizer(tokenizer.inner, template)


class Prompts:
    """Makes prompts with one tokenizer.

    Args:
        tokenizer: of the target.
        trust_templates: whether a request may bring its own template.
    """

    def __init__(self, tokenizer: Tokenizer, trust_templates: bool = False):
        self.tokenizer = tokenizer
        self._trust_templates = trust_templates

    def of_chat(self, request: ChatRequest) -> str:
        """The rendered conversation. ApiError: the template refuses it, or there is none."""
        tokenizer = self.tokenizer
        if request.chat_template is not None:
            if not self._trust_templates:
                raise unsupported("chat_template", "start the server with --trust-request-chat-template to allow it")
            tokenizer = with_template(tokenizer, request.chat_template)
        options = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            options.setdefault("reasoning_effort", request.reasoning_effort)
        if request.documents is not None:
            options["documents"] = request.documents
        tools = request.tools if wants_tools(request) else None
        end = (request.add_generation_prompt, request.continue_final_message)
        return self._render(tokenizer, request.messages, tools, end, options)

    def of_tokenize(self, request: TokenizeRequest) -> str:
        """The conversation of /tokenize, rendered as a chat would be."""
        assert request.messages is not None
        end = (request.add_generation_prompt, request.continue_final_message)
        options = dict(request.chat_template_kwargs or {})
        return self._render(self.tokenizer, request.messages, request.tools, end, options)

    def _render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        end: tuple[bool | None, bool | None],
        options: dict[str, Any],
    ) -> str:
        """`end`: add_generation_prompt (by default unless a message is continued) and continue_final_message."""
        generation, continued = end
        if generation and continued:
            raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")
        if tokenizer.chat_template is None:
            raise unsupported("messages", "the model has no chat template; give --chat-template or use /v1/completions")
        if tools and "tools" not in tokenizer.chat_template:
            raise unsupported("tools", "the chat template of this model does not mention tools")
        options["add_generation_prompt"] = not continued if generation is None else generation
        if continued:
            options["continue_final_message"] = True
        if tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        said = [_as_dict(message, index) for index, message in enumerate(messages)]
        try:
            return tokenizer.render_chat(said, **options)
        except PromptError as error:
            raise invalid("messages", str(error).removeprefix("messages: ")) from None
        except Exception as error:  # a template is a program, these messages are its input
            message = f"the chat template fails on them: {type(error).__name__}: {error}"
            raise invalid("messages", message[:300]) from None

    def of_gap(self, before: str, behind: str) -> list[int]:
        """Ids that ask for what stands between two texts. ApiError: the model has no tokens for it."""
        vocabulary = self.tokenizer.vocabulary()
        marks = next((m for m in FILL_IN if all(mark in vocabulary for mark in m)), None)
        if marks is None:
            raise unsupported("suffix", "the model has no fill-in-the-middle tokens")
        first, second, last = (vocabulary[mark] for mark in marks)
        encode = self.tokenizer.encode
        return [*encode(""), first, *encode(before, False), second, *encode(behind, False), last]


def _as_dict(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments of calls as objects."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = text_of(message.content, f"messages[{index}].content")
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _arguments(call.function.name, call.function.arguments, i)}
            for i, call in enumerate(message.tool_calls)
        ]
    return found


def _arguments(name: str, arguments: str, index: int) -> Mapping[str, Any]:
    try:
        return {"name": name, "arguments": json_of(arguments or "{}")}
    except ValueError:
        raise invalid(f"tool_calls[{index}].function.arguments", "is not JSON") from None


__all__ = ["FILL_IN", "Prompts", "with_template"]
