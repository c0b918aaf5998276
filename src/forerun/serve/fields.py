"""Fields of a request that both endpoints share. A field that is declared here is honoured; any other is refused.

`null` equals absent for every field. Numbers are not made of strings nor of booleans.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from forerun.sampling.options import ADDED, BIAS, REPETITION

Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Id = Annotated[Int, Field(ge=0)]
Penalty = Annotated[Float, Field(ge=-ADDED, le=ADDED)]

_Item = TypeVar("_Item")

AT_ONCE = 64
"""Entries of an object that are validated before it is looked at whether one was wrong."""


def _in_portions(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """An object without errors, or those of the first portion that has some."""
    if not isinstance(value, dict):
        return validate(value)
    found: dict[str, Any] = {}
    entries = iter(value.items())
    while portion := dict(islice(entries, AT_ONCE)):
        found |= validate(portion)
    return found


# Errors are collected before one is told, each of them hundreds of bytes: a client that sends one byte for each would
# have the memory. So a list ends at its first error and an object soon behind it, and a body has no others than these.
ListOf = Annotated[list[_Item], Field(fail_fast=True)]
ObjectOf = Annotated[dict[str, _Item], WrapValidator(_in_portions)]


class Fields(BaseModel):
    """An object of a request's body."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any, info: ValidationInfo) -> Any:
        """And so is an unknown field, where there is a context: a function that is told of each. Where there is none,
        the first is kept, to be complained about."""
        if not isinstance(data, Mapping):
            return data
        kept = {name: value for name, value in data.items() if value is not None}
        known = cls.names()
        for index, name in enumerate([name for name in kept if name not in known]):
            if info.context is not None:
                info.context(name)
            if info.context is not None or index:
                del kept[name]
        return kept

    @classmethod
    def names(cls) -> list[str]:
        """The fields as a client spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class StreamOptions(Fields):
    """What a stream carries beside the text."""

    include_usage: Bool | None = None
    """One more event with usage, metrics and timings, and an empty list of choices."""
    continuous_usage_stats: Bool | None = None
    """Usage so far in every event."""
    include_provenance: Bool | None = None
    """Where each token came from: a draft or the target; see `Provenance`."""


class Speculative(Fields):
    """How this request is drafted for. It never changes the law of the output."""

    method: str | ListOf[str] | None = None
    """Which of the loaded drafters may propose."""
    max_draft: Annotated[Int, Field(ge=0)] | None = None
    """Lowers K; it never raises it."""
    verify_mode: Literal["rejection", "coupled"] | None = None
    confidence_threshold: Annotated[Float, Field(ge=0, le=1)] | None = None


class JsonSchema(Fields):
    """OpenAI's wrapping of a schema."""

    name: str | None = None
    description: str | None = None
    schema_: ObjectOf[Any] | None = Field(default=None, alias="schema")
    strict: Bool | None = None


class ResponseFormat(Fields):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's spelling; exactly one of them."""

    json_: ObjectOf[Any] | str | None = Field(default=None, alias="json")
    """A schema, as an object or as text."""
    regex: str | None = None
    choice: ListOf[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""
    json_object: Bool | None = None


class TextPart(Fields):
    """One part of a message's content. Only text can be read here."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Prediction(Fields):
    """Text expected in the answer: a corpus for the n-gram drafter."""

    type: Literal["content"]
    content: str | ListOf[TextPart]


class GenerationFields(Fields):
    """What chat and completions have in common."""

    model: str | None = None
    # --- sampling; what is absent comes from the model's generation config
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Float, Field(ge=REPETITION[0], le=REPETITION[1])] | None = None
    logit_bias: ObjectOf[Annotated[Float, Field(ge=-BIAS, le=BIAS)]] | None = None
    allowed_token_ids: ListOf[Id] | None = Field(default=None, min_length=1)
    bad_words: ListOf[str | ListOf[Id]] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    # --- where it ends
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    min_new_tokens: Annotated[Int, Field(ge=0)] | None = None
    """SGLang's name of `min_tokens`."""
    stop: Annotated[str, Field(min_length=1)] | ListOf[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: ListOf[Id] | None = None
    ignore_eos: Bool | None = None
    include_stop_str_in_output: Bool | None = None
    # --- its form
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: ObjectOf[Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = None
    # --- text and ids
    skip_special_tokens: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    add_special_tokens: Bool | None = None
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    return_token_ids: Bool | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0)] | None = None
    # --- drafting
    speculative: Bool | Speculative | None = None
    verify_mode: Literal["rejection", "coupled"] | None = None
    prediction: Prediction | None = None
    # --- how it is served
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    timings_per_token: Bool | None = None
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Lower ones are admitted first."""
    deadline: Annotated[Float, Field(gt=0, le=1e6)] | None = None
    """Seconds from its arrival after which the request is given up."""
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Only requests with the same one find prefixes of each other in the cache."""
    # --- no effect on tokens
    user: str | None = None
    metadata: ObjectOf[Any] | None = None
    store: Bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    """Handed to the chat template."""

    @property
    def wants_provenance(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_provenance)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "modalities": (["text"],),
    "logprob_token_ids": ([],),
}
"""Fields of other servers, and the values of them that ask for nothing: those are accepted, any other is refused."""

REFUSED = {
    "best_of": "is not built; it must equal n",
    "use_beam_search": "beam search is not built: it draws from another law",
    "length_penalty": "belongs to beam search, which is not built",
    "early_stopping": "belongs to beam search, which is not built",
    "modalities": "only text can be generated",
    "audio": "only text can be generated",
    "functions": "was replaced by tools",
    "function_call": "was replaced by tool_choice",
    "web_search_options": "this server searches nothing",
    "verbosity": "the models here do not read it; say it in the prompt",
    "logits_processors": "code in a request is not run",
    "kv_transfer_params": "KV transfer is not built",
    "mm_processor_kwargs": "only text can be read",
}
"""Fields that others honour and this server does not, and why."""

__all__ = [
    "NEUTRAL",
    "REFUSED",
    "Fields",
    "GenerationFields",
    "JsonSchema",
    "Prediction",
    "ResponseFormat",
    "Speculative",
    "StreamOptions",
    "StructuredOutputs",
    "TextPart",
]
