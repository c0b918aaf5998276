"""The bodies of the endpoints, one class each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.serve.fields import Bool, Fields, GenerationFields, Id, Int, ListOf, ObjectOf, TextPart


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | ListOf[str] | ListOf[Id] | ListOf[ListOf[Id]]
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
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer name of `reasoning_content`."""
    refusal: str | None = None
    annotations: ListOf[Any] | None = Field(default=None, max_length=0)


class Function(Fields):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: ObjectOf[Any] | None = None
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

    messages: ListOf[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    """Wins over `max_tokens`."""
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: ObjectOf[Any] | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    documents: ListOf[ObjectOf[Any]] | None = None


class TokenizeRequest(Fields):
    """POST /tokenize: of a prompt or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    return_token_strs: Bool | None = None
    chat_template_kwargs: ObjectOf[Any] | None = None
    tools: ListOf[Tool] | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: ListOf[Id]


__all__ = [
    "CalledFunction",
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
