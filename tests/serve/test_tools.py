"""Tools: what must be called is called, what a model calls by itself is read, in the notation of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.ngram import Ngram
from forerun.serve.tools import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, notation_of
from forerun.target.table import ByteTokenizer
from laws.pairwise import pairwise
from serve.kit import TIME, WEATHER, Site, ascii_model, engine, guesses, joined, running, script_model

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
NO_TOOL = {"type": "function", "function": {"name": "no"}}

TEMPLATES = {
    "hermes": "{# <tool_call> #}",
    "llama3_json": "{# <|python_tag|> #}",
    "mistral": "{# [TOOL_CALLS] #}",
    "mistral, named": "{# [TOOL_CALLS] [ARGS] #}",
}
"""What in a chat template tells the notation."""
WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"x": 1}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"x": 1}}',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"x": 1}}]',
    "mistral, named": 'Let me see.[TOOL_CALLS]weather[ARGS]{"x": 1}',
}
"""What a model of the family writes."""


def _template(notation: str) -> str:
    return TEMPLATES[notation] + "{% if tools %}{% endif %}a"


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    """A server for each notation, told apart by the template alone."""

    def make(notation: str):
        target = ascii_model(tokenizer=ByteTokenizer(_template(notation)), window=900)
        return engine(Ngram(prompt_lookup_min=1, prompt_lookup_max=3), target=target)

    with running({notation: partial(make, notation) for notation in TEMPLATES}) as sites:
        yield sites


def _check_call(call, name: str | None = None) -> None:
    assert call["type"] == "function"
    assert call["function"]["name"] in ({name} if name else {"weather", "time"})
    arguments = json.loads(call["function"]["arguments"])
    assert arguments == {} if call["function"]["name"] == "time" else arguments["x"] in (1, 2)


CHOICES = {
    "required": {"tool_choice": "required"},
    "one": {"tool_choice": "required", "parallel_tool_calls": False},
    "weather": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "time": {"tool_choice": {"type": "function", "function": {"name": "time"}}},
}


@pytest.mark.parametrize(
    "case",
    pairwise({"notation": list(TEMPLATES), "choice": list(CHOICES), "seed": [0, 1, 2]}),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_a_tool_that_must_be_called_is_called(sites, case):
    """Whatever the model would say: calls with arguments of the schema, streamed as whole, drafted as plain."""
    site, choice = sites[case["notation"]], case["choice"]
    asked = {
        "messages": HELLO, "tools": [WEATHER, TIME], "temperature": 1.0, "seed": case["seed"], "max_tokens": 600,
        "verify_mode": "coupled", **CHOICES[choice],
    }  # fmt: skip
    [drafted] = site.chat(**asked)["choices"]
    [plain] = site.chat(**asked, speculative=False)["choices"]
    calls = drafted["message"]["tool_calls"]
    assert [c["function"] for c in calls] == [c["function"] for c in plain["message"]["tool_calls"]]
    for call in calls:
        _check_call(call, choice if choice in ("weather", "time") else None)
    if drafted["finish_reason"] == "tool_calls":
        assert drafted["message"]["content"] is None
    if choice != "required":
        assert len(calls) == 1
    streamed = joined(site.post(CHAT, {**asked, "stream": True}).events)
    assert [c["function"] for c in streamed["calls"]] == [c["function"] for c in calls]
    assert [c["index"] for c in streamed["calls"]] == list(range(len(calls)))
    assert streamed["finish_reason"] == drafted["finish_reason"]


@pytest.mark.parametrize("notation", WRITTEN)
def test_a_call_the_model_makes_by_itself_is_told_apart(notation):
    """tool_choice auto: text and calls as models of the family write them, read in the notation of the template;
    --tool-call-parser none leaves them text."""
    said = WRITTEN[notation]
    target = script_model(said, tokenizer=ByteTokenizer(_template(notation)))
    make = lambda: engine(guesses(said), target=target)  # noqa: E731
    fields = {"messages": HELLO, "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    with Site(make) as site:
        [choice] = site.chat(**fields)["choices"]
        content = "Let me see." if said.startswith("Let") else None
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        _check_call(call, "weather")
        # Mistral's templates take ids of nine letters and no others.
        assert len(call["id"]) == 9 if notation.startswith("mistral") else call["id"].startswith("call_")
        events = site.post(CHAT, {**fields, "stream": True}).events
        streamed = joined(events)
        assert (streamed["content"] or None, streamed["finish_reason"]) == (content, "tool_calls")
        parts = [part for event in events for part in event["choices"]]
        # OpenAI's client would not see the end of a call that came with the end of the answer.
        assert not any(part["finish_reason"] and "tool_calls" in part["delta"] for part in parts)
        assert streamed["calls"][0]["function"] == call["function"]
        assert site.chat(**{**fields, "tool_choice": "none"})["choices"][0]["message"]["content"] == said
    with Site(make, tool_call_parser="none") as site:
        assert site.chat(**fields)["choices"][0]["message"]["content"] == said


def _marked(model: Path, folder: Path, template: str, tokens: list[str], **options: Any):
    """A tokenizer with these tokens added, and how an engine is made that has it in place of its model's own."""
    from transformers import AutoTokenizer

    from forerun.engine import Engine
    from forerun.target.other_tokenizer import other_tokenizer

    inner = AutoTokenizer.from_pretrained(model)
    inner.add_tokens(tokens, **options)
    inner.chat_template = _template(template)
    inner.save_pretrained(folder)

    def make() -> Engine:
        loaded = Engine.load(str(model), drafter="ngram")
        loaded.target.tokenizer = other_tokenizer(folder, loaded.target)
        return loaded

    return inner, make


def test_marks_that_are_special_tokens(tiny_qwen3_dir, tmp_path):
    """Where a tokenizer has the marks as special tokens, those are what must come and what is read, though special
    tokens are not shown otherwise."""
    inner, make = _marked(tiny_qwen3_dir, tmp_path, "mistral, named", ["[TOOL_CALLS]", "[ARGS]"], special_tokens=True)
    with Site(make) as site:
        fields = {"messages": HELLO, "tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False}
        asked = {**fields, "temperature": 0, "max_tokens": 60, "return_token_ids": True}
        [choice] = site.chat(**asked)["choices"]
        assert inner.convert_ids_to_tokens(choice["token_ids"])[0] == "[TOOL_CALLS]"
        assert "[ARGS]" in inner.convert_ids_to_tokens(choice["token_ids"])
        [call] = choice["message"]["tool_calls"]
        _check_call(call, "time")
        [text] = site.chat(**asked, skip_special_tokens=True)["choices"]
        assert text["message"]["content"].startswith("time")  # who asks for no marks gets none


@pytest.fixture(scope="module")
def tagged(tiny_qwen3_dir, tmp_path_factory) -> Iterator[Site]:
    """A server whose tokenizer has Hermes' marks as tokens that are shown, as Qwen's has, and the model likes one."""
    folder = tmp_path_factory.mktemp("tagged")
    _, make = _marked(tiny_qwen3_dir, folder, "hermes", ["<tool_call>", "</tool_call>", "<other>"])
    with Site(make) as site:
        yield site


@pytest.mark.parametrize("fields", [{"tool_choice": "required", "parallel_tool_calls": False}, {}], ids=str)
def test_marks_that_are_tokens_and_are_shown(tagged, fields):
    """The form goes on behind a mark that came as its token: Qwen's are no special ones."""
    tokens = tagged.server.service.prompts.tokenizer.vocabulary()
    begin, end, other = (tokens[text] for text in ("<tool_call>", "</tool_call>", "<other>"))
    bias = {begin: 60, end: 60} if fields else {begin: 8, end: 8, other: 8}
    asked = {"messages": HELLO, "tools": [STRICT], "max_tokens": 200, "return_token_ids": True, "seed": 5, **fields}
    asked["logit_bias"] = {str(token): value for token, value in bias.items()}
    [choice] = tagged.chat(**asked)["choices"]
    assert {begin, end} <= {*choice["token_ids"]}
    assert fields or other in choice["token_ids"]
    assert choice["message"]["tool_calls"]
    for call in choice["message"]["tool_calls"]:
        _check_call(call, "weather")


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


@pytest.mark.parametrize("notation", WRITTEN)
def test_a_strict_tool_is_called_as_its_schema_says(notation):
    """tool_choice auto: a model that calls with other arguments is held to the schema of a tool that is strict, drafted
    for or not, and to that of no other; what it says beside is its own."""
    wrong = WRITTEN[notation].replace(": 1}", ": 7}")
    target = script_model(wrong, tokenizer=ByteTokenizer(_template(notation)))
    script = target._logits
    target._logits = lambda prefix: [max(x, -5.0) if i == ord("1") else x for i, x in enumerate(script(prefix))]
    asked = {"messages": HELLO, "temperature": 0, "max_tokens": 90, "tools": [STRICT, TIME]}
    with Site(lambda: engine(guesses(wrong), target=target)) as site:
        [choice] = site.chat(**asked)["choices"]
        [call] = choice["message"]["tool_calls"]
        _check_call(call, "weather")
        assert choice["message"]["content"] == ("Let me see." if wrong.startswith("Let") else None)
        [plain] = site.chat(**asked, speculative=False)["choices"]
        assert plain["message"]["tool_calls"][0]["function"] == call["function"]
        lax = site.chat(**{**asked, "tools": [WEATHER, {**TIME, "function": {"name": "time", "strict": True}}]})
        [call] = lax["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": 7}
        [said] = site.chat(**{**asked, "tool_choice": "none"})["choices"]
        assert said["message"]["content"] == wrong
        form = {"guided_choice": ["yes"]}  # an answer of a form calls nothing
        assert site.chat(**asked, **form)["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("template", "parser", "notation"),
    [
        ("<tool_call>\n{{ tool_call | tojson }}", "auto", HERMES),
        ("{{ tools }} <tool_call>\n<function={{ name }}>", "auto", HERMES),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
         "auto", LLAMA3),
        ("<|python_tag|>", "auto", LLAMA3),
        ("[TOOL_CALLS] [{{ out }}]", "auto", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "auto", MISTRAL_NAMED),
        ("[TOOL_CALLS]", "hermes", HERMES),
        ("<tool_call>", "mistral", MISTRAL),
        ("[ARGS]", "mistral", MISTRAL_NAMED),
        (None, "auto", HERMES),
        (None, "llama3_json", LLAMA3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_the_template_tells_the_notation(template, parser, notation):
    """--tool-call-parser says otherwise where it is given."""
    assert notation_of(template, parser) is notation


def test_a_notation_that_is_not_known_is_said(caplog):
    """Hermes' is assumed, with a line at the start, if the template has to do with tools at all."""
    assert notation_of("{{ tools }}") is HERMES
    assert "hermes is assumed" in caplog.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": NO_TOOL}, "tool_choice.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
    ids=str,
)  # fmt: skip
def test_tools_that_cannot_be_used_are_refused(sites, fields, param):
    """By name."""
    assert sites["hermes"].refused(CHAT, {"messages": HELLO, **fields})["param"] == param
