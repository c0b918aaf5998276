"""Chats: templates and what may be done with them, tool calls, reasoning."""

from __future__ import annotations

import json

import pytest

from forerun.drafters.ngram import Ngram
from forerun.serve.answer import CALL, CALL_END
from forerun.target.table import ByteTokenizer
from serve.kit import Site, ascii_model, engine, guesses, joined, script_model

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{{ c.function.arguments.x }}>{% endfor %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n"
    "{% endfor %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if enable_thinking %}T{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
NO_TOOL = {"type": "function", "function": {"name": "no"}}
TIME = {"type": "function", "function": {"name": "time"}}


def _engine():
    target = ascii_model(tokenizer=ByteTokenizer(TEMPLATE), window=900)
    return engine(Ngram(prompt_lookup_min=1, prompt_lookup_max=3), target=target)


@pytest.fixture(scope="module")
def chats():
    with Site(_engine) as site:
        yield site


def _prompt(site: Site, **fields) -> str:
    body = site.chat(**{"messages": HELLO, "max_tokens": 1, "return_token_ids": True, **fields})
    return bytes(body["prompt_token_ids"]).decode()


# ---------------------------------------------------------------------------------------------------------- templates


def test_what_reaches_the_template(chats):
    """Roles, names of tools, arguments as objects, reasoning, effort and the template's own options."""
    assert _prompt(chats) == "user: hello\nassistant: "
    assert _prompt(chats, add_generation_prompt=False) == "user: hello\n"
    assert _prompt(chats, tools=[WEATHER, TIME]) == "[weather time ]user: hello\nassistant: "
    assert _prompt(chats, tools=[WEATHER], tool_choice="none") == "user: hello\nassistant: "
    assert _prompt(chats, reasoning_effort="low") == "user: hello\nlowassistant: "
    assert _prompt(chats, chat_template_kwargs={"enable_thinking": True}) == "user: hello\nTassistant: "
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"x": 2}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    want = "system: be brief\nuser: hello\nassistant: <weather2>(hm)\ntool: sunny\nassistant: "
    assert _prompt(chats, messages=messages) == want


def test_a_message_of_an_answer_can_be_sent_back(chats):
    """What the client got, with the nulls its library adds, is a message."""
    message = chats.chat(messages=HELLO, max_tokens=3)["choices"][0]["message"]
    more = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    back = [*HELLO, {k: v for k, v in {**message, **more}.items() if k not in ("audio", "function_call")}, *HELLO]
    assert chats.chat(messages=back, max_tokens=1)["choices"]


def test_templates_can_be_replaced(tiny_qwen3_dir):
    """--chat-template for the server; one in a request only where the server trusts it; a message can be continued."""
    from forerun.engine import Engine

    make = lambda: Engine.load(str(tiny_qwen3_dir))  # noqa: E731
    with Site(make, chat_template="A{{ messages[0].content }}B") as site:
        found = site.post("/tokenize", {"messages": HELLO}).json
        assert site.post("/detokenize", {"tokens": found["tokens"]}).json["prompt"] == "AhelloB"
    with Site(make, trust_request_chat_template=True) as site:
        fields = {"messages": HELLO, "chat_template": "X{{ messages[0].content }}", "return_token_ids": True}
        body = site.chat(**fields, max_tokens=1)
        assert site.post("/detokenize", {"tokens": body["prompt_token_ids"]}).json["prompt"] == "Xhello"
        assert site.refused(CHAT, {**fields, "chat_template": "{{ 1/0 }}"})["param"] == "messages"
        assert site.refused(CHAT, {**fields, "chat_template": "{% if %}"})["param"] == "messages"
        begun = [*HELLO, {"role": "assistant", "content": "I think"}]
        body = site.chat(messages=begun, continue_final_message=True, return_token_ids=True, max_tokens=1)
        prompt = site.post("/detokenize", {"tokens": body["prompt_token_ids"]}).json["prompt"]
        assert prompt.endswith("<|start|>assistant\nI think")


def test_a_model_without_a_template_has_no_chats():
    """The error says what to do."""
    target = ascii_model(tokenizer=ByteTokenizer(None))
    with Site(lambda: engine(target=target)) as site:
        error = site.refused(CHAT, {"messages": HELLO})
        assert "--chat-template" in error["message"]


# -------------------------------------------------------------------------------------------------------------- tools


def _check_call(call, name: str | None = None) -> None:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] in ({name} if name else {"weather", "time"})
    arguments = json.loads(call["function"]["arguments"])
    assert arguments == {} if call["function"]["name"] == "time" else arguments["x"] in (1, 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
    ],
    ids=str,
)
def test_a_tool_that_must_be_called_is_called(chats, fields, seed):
    """Whatever the model would say: calls with arguments of the schema, streamed as whole, drafted as plain."""
    asked = {
        "messages": HELLO, "tools": [WEATHER, TIME], "temperature": 1.0, "seed": seed, "max_tokens": 600,
        "verify_mode": "coupled", **fields,
    }  # fmt: skip
    [choice] = chats.chat(**asked)["choices"]
    [plain] = chats.chat(**asked, speculative=False)["choices"]
    calls = choice["message"]["tool_calls"]
    assert [c["function"] for c in calls] == [c["function"] for c in plain["message"]["tool_calls"]]
    named = fields["tool_choice"]["function"]["name"] if isinstance(fields["tool_choice"], dict) else None
    for call in calls:
        _check_call(call, named)
    if choice["finish_reason"] == "tool_calls":
        assert choice["message"]["content"] is None
    if fields.get("parallel_tool_calls") is False or named:
        assert len(calls) == 1
    streamed = joined(chats.post(CHAT, {**asked, "stream": True}).events)
    assert [c["function"] for c in streamed["calls"]] == [c["function"] for c in calls]
    assert [c["index"] for c in streamed["calls"]] == list(range(len(calls)))
    assert streamed["finish_reason"] == choice["finish_reason"]


def test_a_call_the_model_makes_by_itself_is_told_apart():
    """tool_choice auto: text and calls as the model writes them; --tool-call-parser none leaves them text."""
    said = f'Let me see.\n{CALL}\n{{"name": "weather", "arguments": {{"x": 1}}}}\n{CALL_END}'
    target = script_model(said, tokenizer=ByteTokenizer("{% if tools %}{% endif %}a"))
    make = lambda: engine(guesses(said), target=target)  # noqa: E731
    fields = {"messages": HELLO, "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    with Site(make) as site:
        [choice] = site.chat(**fields)["choices"]
        assert choice["message"]["content"] == "Let me see."
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        _check_call(call, "weather")
        streamed = joined(site.post(CHAT, {**fields, "stream": True}).events)
        assert (streamed["content"], streamed["finish_reason"]) == ("Let me see.", "tool_calls")
        assert streamed["calls"][0]["function"] == call["function"]
        assert site.chat(**{**fields, "tool_choice": "none"})["choices"][0]["message"]["content"] == said
    with Site(make, tool_call_parser="none") as site:
        assert site.chat(**fields)["choices"][0]["message"]["content"] == said


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
         "tool_calls[0].function.arguments"),
    ],
    ids=str,
)  # fmt: skip
def test_tools_that_cannot_be_used_are_refused(chats, fields, param):
    """By name."""
    assert chats.refused(CHAT, {"messages": HELLO, **fields})["param"] == param


# ---------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize(
    ("parser", "said", "reasoning", "content"),
    [
        ("qwen3", "<think>first this</think>\n\nthen that", "first this", "\n\nthen that"),
        ("deepseek_r1", "first this</think>then that", "first this", "then that"),
        ("qwen3", "no thought", None, "no thought"),
        (None, "<think>a</think>b", "absent", "<think>a</think>b"),
    ],
)
def test_reasoning_is_told_apart_and_counted(k, parser, said, reasoning, content):
    """`reasoning_content`, and its tokens counted over committed ones: the same however blocks are cut."""
    target = script_model(said, tokenizer=ByteTokenizer("a"))
    make = lambda: engine(guesses(said), target=target, num_speculative_tokens=k)  # noqa: E731
    with Site(make, reasoning_parser=parser) as site:
        fields = {"messages": HELLO, "temperature": 0, "max_tokens": 100}
        body = site.chat(**fields)
        message = body["choices"][0]["message"]
        assert message["content"] == content
        assert message.get("reasoning_content", "absent") == reasoning
        streamed = joined(site.post(CHAT, {**fields, "stream": True}).events)
        assert (streamed["content"], streamed["reasoning"]) == (
            content,
            "" if reasoning in (None, "absent") else reasoning,
        )
        details = body["usage"].get("completion_tokens_details")
        if reasoning == "first this":
            assert details == {"reasoning_tokens": said.index("</think>") + len("</think>")}
        elif parser:
            assert details == {"reasoning_tokens": 0}
        else:
            assert details is None
