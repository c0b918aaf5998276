"""The bodies of the endpoints, one class each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.serve.fields import Bool, Fields, GenerationFields, Id, Int, TextPart


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[Id] | list[list[Id]]
    logprobs: Annotated[Int, Field(ge=0)] | None = None
    """Log-probabilities of each token and of this many best ones."""
    echo: Bool | None = None
    suffix: str | None = None
    """Text behind the gap, for models with fill-in-the-middle tokens."""


class CalledFunction(Fields):
    """What an assistant called, arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None


class Message(Fields):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer name of `reasoning_content`."""
    refusal: str | None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)


class Function(Fields):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: Bool | None = None


class Tool(Fields):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    """Wins over `max_tokens`."""
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    documents: list[dict[str, Any]] | None = None


class TokenizeRequest(Fields):
    """POST /tokenize: of a prompt or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    return_token_strs: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Id]


__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Function",
    "Message",
    "NamedTool",
    "TokenizeRequest",
    "Tool",
    "ToolCall",
]
