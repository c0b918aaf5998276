"""Every option of a request with values that have an effect: what is tested of all options is generated from here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

from forerun.serve.schemas import ChatRequest, CompletionRequest
from forerun.target.table import PLAIN_TEMPLATE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DRAFTERS = ["vanilla", "ngram", "small", "dspark", "dspark+lookup"]
TEMPLATE = (
    "{{ documents[0].text if documents }}{{ '~' if enable_thinking is false }}{{ reasoning_effort }}" + PLAIN_TEMPLATE
)
"""Reads every field that may reach a template."""
PROMPT = "abcabcab xyxy"
ALPHABET = b"abcdefxyz ~12"
"""Letters of the model that the values below are made for."""

PRINTED = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}

VALUES: dict[str, list[object]] = {
    "temperature": [0, 0.5, 1.5],
    "top_p": [0.6],
    "top_k": [2],
    "min_p": [0.2],
    "presence_penalty": [1.8],
    "frequency_penalty": [1.3],
    "repetition_penalty": [1.8],
    "logit_bias": [{"101": 4.0, "102": -6.0}],
    "allowed_token_ids": [[97, 98, 99, 32, 256]],
    "bad_words": [["a", "bc", [100, 101]]],
    "seed": [-3],
    "n": [2],
    "max_tokens": [1, 9],
    "max_completion_tokens": [7],
    "min_tokens": [6],
    "min_new_tokens": [6],
    "stop": [["e", "by", "~ ", "ac"]],
    "stop_token_ids": [[101, 120]],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": PRINTED}}],
    "structured_outputs": [
        {"regex": "[ab]{2,9}"},
        {"json": PRINTED},
        {"choice": ["be", "cd"]},
        {"grammar": 'start: "a" ("b" | "c")*'},
        {"json_object": True},
    ],
    "guided_json": [PRINTED],
    "guided_regex": ["(x|yz){3}"],
    "guided_choice": [["left", "right"]],
    "guided_grammar": ['start: "a" ("b" | "c")*'],
    "skip_special_tokens": [False],
    "add_special_tokens": [True, False],
    "truncate_prompt_tokens": [5],
    "return_token_ids": [True],
    "speculative": [
        {"max_draft": 2},
        {"verify_mode": "coupled"},
        {"confidence_threshold": 0.05},
    ],
    "echo": [True],
    "logprobs": [2],
    "top_logprobs": [3],
    "reasoning_effort": ["low"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "documents": [[{"text": "a"}]],
    "timings_per_token": [True],
}
"""Field -> values with an effect, each of which must be the same for every drafter."""

ELSEWHERE = {
    "model": "test_answers.py: names",
    "messages": "every chat",
    "prompt": "every completion",
    "stream": "a factor of the matrix",
    "stream_options": "every stream of the matrix",
    "verify_mode": "the matrix: coupled",
    "prompt_logprobs": "test_answers.py: scoring; nothing is drafted there",
    "prediction": "test_answers.py: it needs the n-gram drafter",
    "spaces_between_special_tokens": "test_bad_requests.py: only true is built",
    "priority": "test_answers.py: order, not tokens",
    "deadline": "test_life.py",
    "request_id": "test_answers.py",
    "suffix": "test_answers.py: fill-in-the-middle",
    "tools": "test_tools.py",
    "tool_choice": "test_tools.py",
    "parallel_tool_calls": "test_tools.py",
    "chat_template": "test_chats.py",
    "add_generation_prompt": "test_chats.py",
    "continue_final_message": "test_chats.py",
    "cache_salt": "test_prefix.py, and no effect on tokens: test_fields_without_effect",
    **dict.fromkeys(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "no effect on tokens: test_null_equals_absent and test_fields_without_effect",
    ),
}
"""Fields that are tested in another way, and where."""

INNER_ELSEWHERE = {
    "speculative.method": "test_answers.py and test_soak.py: each server of the matrix has one drafter",
    "stream_options.include_usage": "every stream of the matrix",
    "stream_options.continuous_usage_stats": "test_answers.py",
    "stream_options.include_provenance": "test_page.py",
    **dict.fromkeys(
        ("prediction.type", "prediction.content", "prediction.content.type", "prediction.content.text"),
        "test_answers.py, and test_chats.py for parts",
    ),
    **dict.fromkeys(
        (f"response_format.json_schema.{name}" for name in ("name", "description", "strict")),
        "no effect: a form is always strict; test_grammar.py gives a name",
    ),
    **dict.fromkeys(
        (f"messages.{name}" for name in ("role", "content", "content.type", "content.text", "name", "refusal")),
        "test_chats.py and test_bad_requests.py",
    ),
    **dict.fromkeys(
        (f"messages.{name}" for name in ("reasoning", "reasoning_content", "annotations", "tool_call_id")),
        "test_chats.py",
    ),
    "messages.tool_calls": "test_chats.py",
    **dict.fromkeys((f"messages.tool_calls.{name}" for name in ("id", "type", "index", "function")), "test_chats.py"),
    **dict.fromkeys((f"messages.tool_calls.function.{name}" for name in ("name", "arguments")), "test_chats.py"),
    **dict.fromkeys((f"tool_choice.{name}" for name in ("type", "function", "function.name")), "test_tools.py"),
    "tools.type": "test_tools.py",
    "tools.function": "test_tools.py",
    **dict.fromkeys(
        (f"tools.function.{name}" for name in ("name", "description", "parameters", "strict")), "test_tools.py"
    ),
}
"""Fields of inner objects that are tested in another way, and where."""

_NO_TOKENS = {("timings_per_token", 0), *(("speculative", index) for index in range(len(VALUES["speculative"])))}

WITHOUT_EFFECT = {
    COMPLETIONS: {*_NO_TOKENS, ("add_special_tokens", 0), ("reasoning_effort", 0)},
    CHAT: {*_NO_TOKENS, ("add_special_tokens", 1)},
}
"""(option, number of its value) that changes nothing of what is compared: a default, or not about tokens."""

CASES = [(option, index) for option, values in VALUES.items() for index in range(len(values))]
"""(option, number of its value)"""


def fields_of(path: str) -> list[str]:
    """Names of the fields of an endpoint."""
    return (ChatRequest if path == CHAT else CompletionRequest).names()


def inner_fields(path: str) -> set[str]:
    """Fields of the objects that a body of an endpoint consists of, by their path: `stream_options.include_usage`."""
    return {*_inner(ChatRequest if path == CHAT else CompletionRequest)}


def _inner(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        place = f"{before}{field.alias or name}"
        if before:
            yield place
        for inner in _models(field.annotation):
            yield from _inner(inner, f"{place}.")


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """The objects that a field may hold, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def places_in(value: object, before: str) -> Iterator[str]:
    """The paths of the fields that a value gives."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{before}.{name}"
        yield from places_in(inner, f"{before}.{name}")


def endpoint(option: str, path: str) -> str:
    """The endpoint, or the other one where this one has no such field."""
    return path if option in fields_of(path) else COMPLETIONS if path == CHAT else CHAT


def request_with(option: str, value: object, path: str, **base: object) -> dict[str, object]:
    """A request of an endpoint with this option, and with what the option needs beside it."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
    fields = {**prompt, **base, option: value}
    if option == "top_logprobs" or (option == "logprobs" and path == CHAT):
        fields["logprobs"] = True
    if option == "max_completion_tokens":
        del fields["max_tokens"]
    if option == "include_stop_str_in_output":
        fields["stop"] = ["e", "b"]
    if option == "skip_special_tokens":
        fields["ignore_eos"] = True
    if option in ("ignore_eos", "skip_special_tokens", "min_tokens", "min_new_tokens"):
        fields["logit_bias"] = {"256": 3.5}  # or an end would seldom come early enough
    return fields
