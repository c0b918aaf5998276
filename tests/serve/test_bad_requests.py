"""Whatever is wrong with a request is said, with the status and the field clients branch on; nothing is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from forerun.serve.body import Reader
from forerun.serve.errors import ApiError
from forerun.serve.fields import NEUTRAL, REFUSED
from forerun.serve.routes import BODIES
from forerun.serve.schemas import ChatRequest, CompletionRequest
from serve.kit import Site, counted, noisy_engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
INVALID = "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'"a"', b"1", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"n": 1e999}',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"": 1}', b'{"\\ud800": 1}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_a_400(site, path, content):
    """Whatever the bytes are, the answer is a 400 in OpenAI's shape."""
    reply = site.post(path, content)
    assert reply.status == 400, reply.body
    assert reply.error["type"] == INVALID


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "the body is no JSON: a number has too many digits"),
        (b'{"prompt": [-1]}', "prompt[0]: input should be greater than or equal to 0, got -1"),
        (b'{"prompt": [1, "a"]}', 'prompt[1]: input should be a valid integer, got "a"'),
        (b'{"prompt": ["a", 1]}', "prompt[1]: input should be a valid string, got 1"),
        (b'{"prompt": [[1, "a"]]}', 'prompt[0][1]: input should be a valid integer, got "a"'),
        (b'{"prompt": "a", "prediction": "b"}', 'prediction: input should be an object, got "b"'),
    ],
)
def test_a_message_is_about_what_was_meant(site, content, said):
    """Of a field's alternatives the one that the value resembles; nothing of what is inside this program."""
    assert site.post(COMPLETIONS, content).error["message"] == said


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_field_is_named_with_the_nearest_one(site, path):
    """`temprature` is a 400 that says `temperature`."""
    base = HELLO if path == CHAT else {"prompt": "a"}
    error = site.refused(path, {**base, "temprature": 0})
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_parameter"
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_name_without_end_is_not_repeated(ignored):
    """Nor looked for among the known ones as a whole, which takes forty times its memory, nor remembered."""
    reader, name = Reader(0, ignored), "x" * 5000
    if ignored:
        assert reader._known({name: 1}, ChatRequest) == {}
        assert all(len(seen) < 100 for seen in reader._warned)
        return
    with pytest.raises(ApiError) as refused:
        reader._known({name: 1}, ChatRequest)
    assert all(len(said or "") < 2000 for said in refused.value.body["error"].values())
    assert refused.value.body["error"]["param"].startswith("xxx")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_of_others_that_is_not_built_is_refused_by_name(site, name):
    """What other servers honour and this one does not is never ignored."""
    error = site.refused(COMPLETIONS, {"prompt": "a", name: {"some": "thing"}})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values])
def test_a_value_that_asks_for_nothing_is_accepted(site, name, value):
    """`use_beam_search: false` costs nothing and is what drivers send."""
    assert site.complete(prompt="a", max_tokens=1, **{name: value})["choices"]


def test_best_of_must_equal_n(site):
    """best_of = n is what is done in any case."""
    assert len(site.complete(prompt="a", max_tokens=1, n=2, best_of=2)["choices"]) == 2
    assert site.refused(COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3})["param"] == "best_of"


def test_unknown_fields_can_be_ignored_with_one_warning_each(caplog):
    """--ignore-unknown-fields: the request is served, each name is warned about once."""
    with Site(noisy_engine, ignore_unknown_fields=True) as site:
        for _ in range(2):
            assert site.complete(prompt="a", max_tokens=1, whatever=1, use_beam_search=True)["choices"]
    assert sum("'whatever'" in record.getMessage() for record in caplog.records) == 1


def test_unknown_fields_of_inner_objects_can_be_ignored_too(caplog):
    """What other servers read in messages, parts and options: the answer is that without them; a part that is no text
    stays refused."""
    parts = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    asked = {"temperature": 0, "max_tokens": 4}
    with Site(noisy_engine, ignore_unknown_fields=True) as site:
        for _ in range(2):
            body = site.chat(messages=[{"role": "user", "content": parts, "id": "m1"}], **asked)
        assert body["choices"][0]["message"] == site.chat(**HELLO, **asked)["choices"][0]["message"]
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        assert site.refused(CHAT, {"messages": image})["param"] == "messages[0].content[0].type"
    for name in ("cache_control", "id"):
        assert sum(repr(name) in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_null_equals_absent(site, kind):
    """Every field of the schema may be null (`prompt` and `messages` may not be absent either)."""
    path, base = (CHAT, HELLO) if kind is ChatRequest else (COMPLETIONS, {"prompt": "a"})
    nothing = {name: None for name in kind.names() if name not in base}
    reply = site.post(path, {**base, **nothing, "max_tokens": 2, "seed": 5, "unknown": None})
    assert reply.status == 200, reply.body
    plain = site.post(path, {**base, "max_tokens": 2, "seed": 5}).json
    assert counted(reply.json["usage"]) == counted(plain["usage"])


BAD = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("top_p", 0),
    ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("n", 0), ("n", 129), ("n", True), ("seed", 2**63),
    ("seed", 1.5), ("presence_penalty", 2.5), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("repetition_penalty", 5e-324),
    ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"99999": 1}), ("logit_bias", [1]),
    ("stop", ""), ("stop", ["a", ""]), ("stop", 5), ("stop_token_ids", [99999]), ("stop_token_ids", [-1]),
    ("bad_words", "ab"), ("bad_words", [""]), ("allowed_token_ids", []), ("allowed_token_ids", [9999]),
    ("min_tokens", -1), ("max_tokens", -1), ("max_tokens", 2.5), ("ignore_eos", 1), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}), ("structured_outputs", {}), ("guided_regex", "("),
    ("guided_json", "{"), ("guided_grammar", "nonsense"), ("guided_choice", []), ("guided_choice", [""]),
    ("truncate_prompt_tokens", 0), ("spaces_between_special_tokens", False), ("speculative", {"method": "nothing"}),
    ("speculative", {"max_draft": -1}), ("speculative", {"maxdraft": 1}), ("speculative", 3), ("verify_mode", "exact"),
    ("prediction", {"type": "content"}), ("prediction", {"type": "text", "content": "a"}), ("priority", 2**40),
    ("deadline", 0), ("request_id", "a b"), ("prompt_logprobs", 21), ("metadata", []), ("user", 5),
    ("cache_salt", ""), ("cache_salt", 5),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:30])
def test_a_value_that_cannot_be_used_is_named(site, path, name, value):
    """A wrong type, a value out of range or one the model has no use for: 400, `param` begins with the field."""
    base = HELLO if path == CHAT else {"prompt": "a"}
    error = site.refused(path, {**base, "max_tokens": 3, name: value})
    assert error["type"] == INVALID
    assert error["param"].startswith(name), error
    assert error["param"] in error["message"]


def test_the_place_of_a_nested_field_is_told(site):
    """`messages[1].content[0].text`: lists are indexed, and alternatives of a field leave no trace in its path."""
    parts = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text"}]}]
    assert site.refused(CHAT, {"messages": parts})["param"] == "messages[1].content[0].text"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    error = site.refused(CHAT, {"messages": image})
    assert (error["param"], error["code"]) == ("messages[0].content[0].type", "unsupported_parameter")
    more = [{"role": "user", "content": [{"type": "text", "text": "a", "texxt": "b"}]}]
    error = site.refused(CHAT, {"messages": more})
    assert (error["param"], error["code"]) == ("messages[0].content[0].texxt", "unknown_parameter")
    refusal = [*HELLO["messages"], {"role": "assistant", "refusal": "no"}, *HELLO["messages"]]
    error = site.refused(CHAT, {"messages": refusal})
    assert (error["param"], error["code"]) == ("messages[1].refusal", "unsupported_parameter")
    error = site.refused(CHAT, {"messages": [{"role": "user", "contnt": "a"}]})
    assert error["param"] == "messages[0].contnt"
    assert "'content'" in error["message"]
    error = site.refused(CHAT, {**HELLO, "speculative": {"max_drft": 1}})
    assert error["param"] == "speculative.max_drft"
    assert "'max_draft'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "a", "min_tokens": 3, "min_new_tokens": 4}, "min_new_tokens"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"prediction": {"type": "content", "content": "a"}, "n": 2}, "prediction"),
        ({"prediction": {"type": "content", "content": "a"}, "speculative": {"max_draft": 0}}, "prediction"),
        ({"prediction": {"type": "content", "content": "a"}, "speculative": False}, "prediction"),
        ({"speculative": {"verify_mode": "coupled"}, "verify_mode": "rejection"}, "verify_mode"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(site, fields, param):
    """Two fields that cannot both be honoured: 400 that names one of them."""
    for path, base in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})):
        assert site.refused(path, {**base, **fields})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"chat_template": "a"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"min_tokens": 500}, "min_tokens"),
    ],
)
def test_what_only_a_chat_can_have_wrong(site, fields, param):
    """Fields of /v1/chat/completions alone. The model's template knows no tools, documents nor thinking, and a template
    in a request is not trusted unless the server was told to."""
    assert site.refused(CHAT, {**HELLO, **fields})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 999]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"suffix": "b", "prompt": ["a"]}, "suffix"),
        ({"suffix": "b", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_only_a_completion_can_have_wrong(site, fields, param):
    """Fields of /v1/completions alone. The model has no fill-in-the-middle tokens, so `suffix` is refused."""
    assert site.refused(COMPLETIONS, {"prompt": "a", **fields})["param"].startswith(param)


def test_required_fields_are_told(site):
    """An empty object says which field is missing."""
    assert site.refused(CHAT, {})["param"] == "messages"
    assert site.refused(COMPLETIONS, {})["param"] == "prompt"
    assert site.refused("/detokenize", {})["param"] == "tokens"
    assert site.refused("/tokenize", {})["param"] == "prompt"


@pytest.mark.parametrize(
    "more",
    [{"add_generation_prompt": True}, {"chat_template_kwargs": {}}, {"tools": []}],
    ids=lambda more: next(iter(more)),
)
def test_what_belongs_to_a_chat_is_refused_for_a_text_to_tokenize(site, more):
    """It would have no effect."""
    assert site.refused("/tokenize", {"prompt": "a", **more})["param"] == next(iter(more))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_beyond_the_context_says_the_limit_and_the_count(site, path):
    """`context_length_exceeded`, for a prompt that is too long and for one that leaves no room for max_tokens."""
    field, text = ("messages", "x" * 500) if path == CHAT else ("prompt", "x" * 500)
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = site.refused(path, body)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert "400" in error["message"]
    short = HELLO if path == CHAT else {"prompt": "abc"}
    error = site.refused(path, {**short, "max_tokens": 400})
    assert error["code"] == "context_length_exceeded"
    assert "400" in error["message"]


def test_an_unknown_model_and_an_unknown_route_are_404(site):
    """With OpenAI's code for the first; a wrong method is a 405; a slash too many is no redirect."""
    reply = site.post(COMPLETIONS, {"prompt": "a", "model": "gpt-5"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert site.post("/v1/nothing", {}).status == 404
    assert site.post(f"{COMPLETIONS}/", {"prompt": "a"}).status == 404
    assert site.get(COMPLETIONS).status == 405
    assert site.get("/v1/models/other").error["code"] == "model_not_found"


def test_a_body_that_is_too_large_is_a_413():
    """Told by its length, and by what came if it lies about that."""
    with Site(noisy_engine, max_body_bytes=2048) as site:
        body = json.dumps({"prompt": "a" * 3000}).encode()
        for headers in ({}, {"content-length": str(len(body))}, {"content-length": "3"}):
            reply = site.post(COMPLETIONS, body, **headers)
            assert reply.status == 413
            assert "--max-body-bytes" in reply.error["message"]
        assert site.complete(prompt="a" * 300, max_tokens=1)


def test_errors_never_hold_what_cannot_be_sent(site):
    """Half a surrogate pair in a name or a text is answered, in ASCII."""
    reply = site.post(COMPLETIONS, b'{"prompt": "a", "\\ud800": 1}')
    assert reply.status == 400
    assert reply.body.isascii()
    assert site.refused(COMPLETIONS, b'{"prompt": "\\ud800"}')["param"] == "prompt"
    assert site.refused(COMPLETIONS, b'{"prompt": "a", "max_tokens": 2, "stop": "\\ud800"}')["param"] == "stop"


WRONG = 700
"""Elements of a value that is wrong in each of them."""

Place = Callable[[Any], Any]
"""`place(value)`: a body with this value somewhere in it."""


def _containers(schema: dict[str, Any], defs: dict[str, Any], place: Place) -> Iterator[tuple[Any, Place]]:
    """Every list and object that a JSON schema allows, at any depth, filled with what it does not allow."""
    schema = defs[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for alternative in schema.get("anyOf", ()):
        yield from _containers(alternative, defs, place)
    if schema.get("type") == "array":
        yield [1.5] * WRONG, place
        yield from _containers(schema.get("items", {}), defs, lambda inner: place([inner]))
    if schema.get("type") == "object":
        yield {f"k{i}": "a" for i in range(WRONG)}, place  # unknown fields; values of another type
        yield {f"\ud800{i}": 1.5 for i in range(WRONG)}, place  # no text
        for name, field in schema.get("properties", {}).items():
            yield from _containers(field, defs, lambda inner, name=name: place({name: inner}))


@pytest.mark.parametrize("kind", BODIES.values())
def test_what_is_wrong_many_times_is_complained_about_once(kind):
    """Errors are collected before the first of them is told: one for each element would be four hundred times what was
    sent, on the event loop. Lists and objects are those of the schema, so a new one cannot be forgotten."""
    schema = kind.model_json_schema()
    most: tuple[int, Any] = (0, None)
    for value, place in _containers(schema, schema.get("$defs", {}), lambda inner: inner):
        body = place(value)
        if body is value:  # unknown fields of the body itself are refused before
            continue
        try:
            kind.model_validate(body)
        except ValidationError as error:
            most = max(most, (error.error_count(), error.errors()[0]["loc"]), key=lambda found: found[0])
    assert 0 < most[0] < WRONG // 2, most
