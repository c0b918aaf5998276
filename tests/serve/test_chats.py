"""Chats: templates and what may be done with them, reasoning."""

from __future__ import annotations

import pytest

from forerun.drafters.ngram import Ngram
from forerun.target.table import ByteTokenizer
from serve.kit import TIME, WEATHER, Site, ascii_model, engine, guesses, joined, script_model

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{{ c.function.arguments.x }}>{% endfor %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\n"
    "{% endfor %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if enable_thinking %}T{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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
    twice = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert chats.refused(CHAT, {"messages": HELLO, **twice})["param"] == "reasoning_effort"
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


class Marked(ByteTokenizer):
    """The marks of reasoning are one token each, of bytes that texts do not have."""

    def decode(self, ids, skip_special_tokens=True):
        return super().decode(ids, skip_special_tokens).replace("\x01", "<think>").replace("\x02", "</think>")

    def vocabulary(self):
        return {**super().vocabulary(), "<think>": 1, "</think>": 2}


class MarkedBySpecial(Marked):
    """As many added tokens are, these are special: not shown unless that is asked for."""

    special_ids = frozenset({1, 2, 256})

    def decode(self, ids, skip_special_tokens=True):
        return super().decode([i for i in ids if not (skip_special_tokens and i in (1, 2))], skip_special_tokens)


FORM = {"guided_choice": ["left", "right"]}
MUST_CALL = {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False}
MUST_CALL |= {"logit_bias": {str(blank): -50 for blank in b"\t\n\r "}}  # this model has no opinion of white space


@pytest.mark.parametrize(
    ("parser", "tokenizer", "said", "asked", "reasoning"),
    [
        ("deepseek_r1", Marked("a"), b"hm\x02no", FORM, "hm"),  # the prompt, or the model's habit, has begun it
        ("qwen3", Marked("a"), b"\x01hm\x02no", FORM, "hm"),
        ("qwen3", Marked("a"), b"left", FORM, None),
        ("deepseek_r1", Marked("a{# tools <tool_call> #}"), b"hm\x02no", MUST_CALL, "hm"),
        ("deepseek_r1", ByteTokenizer("a"), b"hm</think>no", FORM, None),  # marks of several tokens: no reasoning
        ("deepseek_r1", ByteTokenizer("a{# tools <tool_call> #}"), b"hm", MUST_CALL, None),
    ],
)
def test_a_form_is_that_of_the_content_behind_the_reasoning(parser, tokenizer, said, asked, reasoning):
    """The model may think first, freely; what has the form, or is the call, is never taken for reasoning."""
    target = script_model(said, tokenizer=tokenizer)
    with Site(lambda: engine(guesses(said), target=target), reasoning_parser=parser) as site:
        fields = {"messages": HELLO, "temperature": 0, "max_tokens": 90, **asked}
        [choice] = site.chat(**fields)["choices"]
        message = choice["message"]
        assert message["reasoning_content"] == reasoning
        if asked is FORM:
            assert (message["content"], choice["finish_reason"]) == ("left", "stop")
        else:
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["time"]
        streamed = joined(site.post(CHAT, {**fields, "stream": True}).events)
        assert (streamed["content"] or None, streamed["reasoning"] or None) == (message["content"], reasoning)
        assert site.chat(**fields, speculative=False)["choices"][0]["message"]["content"] == message["content"]


def test_reasoning_is_read_where_its_marks_are_special_tokens():
    """Which are not shown otherwise."""
    target = script_model(b"hm\x02yes", tokenizer=MarkedBySpecial("a"))
    with Site(lambda: engine(target=target), reasoning_parser="deepseek_r1") as site:
        [choice] = site.chat(messages=HELLO, temperature=0, max_tokens=9)["choices"]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "yes")


def test_an_answer_of_a_form_does_not_end_in_its_reasoning():
    """A model that wants to end while it thinks has to go on, until max_tokens."""
    with Site(lambda: engine(target=script_model(b"h", tokenizer=Marked("a"))), reasoning_parser="deepseek_r1") as site:
        [choice] = site.chat(messages=HELLO, temperature=0, max_tokens=5, **FORM)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(
    ("prompt", "fields", "reasoning"),
    [
        ("a<think>\n", {}, True),
        ("a<think>\n\n</think>\n\n", {}, False),  # thinking was switched off
        ("a<think>hm", {"continue_final_message": True}, True),
        ("a<think>hm</think>b", {"continue_final_message": True}, False),
        ("ab", {"continue_final_message": True}, False),
    ],
)
def test_the_prompt_tells_whether_the_answer_begins_in_reasoning(prompt, fields, reasoning):
    """Even where the parser takes it for granted otherwise."""
    from forerun.serve.chat import _begun

    assert _begun("deepseek_r1", prompt, bool(fields)) is reasoning
    assert _begun("qwen3", "ab", False) is None
