"""From messages or texts to the token ids of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ModelError, PromptError
from forerun.parsing import json_of
from forerun.serve.errors import invalid, unsupported
from forerun.serve.parameters import text_of
from forerun.serve.schemas import CalledFunction, ChatRequest, Message, TokenizeRequest, Tool
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
        template = _template_of(tokenizer)
        options = _template_options(request.chat_template_kwargs, template)
        effort = request.reasoning_effort
        if effort is not None and options.setdefault("reasoning_effort", effort) != effort:
            raise invalid("reasoning_effort", "differs from chat_template_kwargs.reasoning_effort; give one of them")
        if request.documents is not None:
            if not _reads(template, "documents"):
                raise unsupported("documents", "the chat template of this model does not read them")
            options["documents"] = request.documents
        tools = request.tools if wants_tools(request) else None
        end = (request.add_generation_prompt, request.continue_final_message)
        return self._render(tokenizer, request.messages, tools, end, options)

    def of_tokenize(self, request: TokenizeRequest) -> str:
        """The conversation of /tokenize, rendered as a chat would be."""
        assert request.messages is not None
        end = (request.add_generation_prompt, request.continue_final_message)
        options = _template_options(request.chat_template_kwargs, _template_of(self.tokenizer))
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
        if tools and not _reads(_template_of(tokenizer), "tools"):
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

    def of_gap(self, before: str, behind: str, special: bool) -> list[int]:
        """Ids that ask for what stands between two texts, `special` ones as before any prompt ahead of them. ApiError:
        the model has no tokens for it."""
        vocabulary = self.tokenizer.vocabulary()
        marks = next((m for m in FILL_IN if all(mark in vocabulary for mark in m)), None)
        if marks is None:
            raise unsupported("suffix", "the model has no fill-in-the-middle tokens")
        first, second, last = (vocabulary[mark] for mark in marks)
        encode = self.tokenizer.encode
        return [*encode("", special), first, *encode(before, False), second, *encode(behind, False), last]


def _template_of(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    if template is None:
        raise unsupported("messages", "the model has no chat template; give --chat-template or use /v1/completions")
    return template


OF_THE_REQUEST = (
    "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
"""What a template reads and the request says elsewhere."""


def _template_options(given: Mapping[str, Any] | None, template: str) -> dict[str, Any]:
    """`chat_template_kwargs`, all of which the template reads."""
    for name in given or ():
        place = f"chat_template_kwargs.{name[:64]}"
        if name in OF_THE_REQUEST:
            raise invalid(place, f"is a field of the request itself: {name}")
        if not _reads(template, name):
            raise unsupported(place, "the chat template of this model does not read it")
    return dict(given or {})


def _reads(template: str, name: str) -> bool:
    """Whether a template mentions a name; others it would ignore."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None


def _as_dict(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments of calls as objects."""
    place = f"messages[{index}]"
    if message.refusal is not None:
        raise unsupported(f"{place}.refusal", "no chat template reads it; say it in content")
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = text_of(message.content, f"{place}.content")
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _called(call.function, f"{place}.tool_calls[{i}].function")}
            for i, call in enumerate(message.tool_calls)
        ]
    return found


def _called(function: CalledFunction, place: str) -> Mapping[str, Any]:
    try:
        return {"name": function.name, "arguments": json_of(function.arguments or "{}")}
    except ValueError:
        raise invalid(f"{place}.arguments", "is not JSON") from None


__all__ = ["FILL_IN", "Prompts", "with_template"]
