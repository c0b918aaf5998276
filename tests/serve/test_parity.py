"""Every option of a request means the same with a drafter and without, streamed or whole, alone or in a batch.

The matrix is made of the schemas: a field that is added to them and not put into `VALUES` fails the first test here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from drafters.kinds import drafting
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.serve.body import names_of
from forerun.serve.schemas import ChatRequest, CompletionRequest
from laws.pairwise import pairwise, product
from serve.kit import VOCAB, Site, ascii_model, engine, joined

PRINTED = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}

VALUES: dict[str, list[object]] = {
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.6],
    "top_k": [2],
    "min_p": [0.2],
    "presence_penalty": [1.1],
    "frequency_penalty": [0.8],
    "repetition_penalty": [1.4],
    "logit_bias": [{"101": 4.0, "102": -6.0}],
    "allowed_token_ids": [[97, 98, 99, 32, 256]],
    "bad_words": [["a", "bc", [100, 101]]],
    "seed": [-3],
    "n": [2],
    "max_tokens": [1, 9],
    "max_completion_tokens": [7],
    "min_tokens": [6],
    "min_new_tokens": [6],
    "stop": [["e", "xy", "~ "]],
    "stop_token_ids": [[101, 120]],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": PRINTED}}],
    "structured_outputs": [{"regex": "[ab]{2,9}"}],
    "guided_json": [PRINTED],
    "guided_regex": ["(x|yz){3}"],
    "guided_choice": [["left", "right"]],
    "guided_grammar": ['start: "a" ("b" | "c")*'],
    "skip_special_tokens": [False],
    "add_special_tokens": [True],
    "truncate_prompt_tokens": [5],
    "return_token_ids": [True],
    "speculative": [{"max_draft": 2}],
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
    "chat_template": "test_templates.py",
    "add_generation_prompt": "test_templates.py",
    "continue_final_message": "test_templates.py",
    **dict.fromkeys(
        ("cache_salt", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "no effect on tokens: test_null_equals_absent and test_fields_without_effect",
    ),
}
"""Fields that are tested in another way, and where."""

WITHOUT_EFFECT = {
    "max_completion_tokens", "top_logprobs", "reasoning_effort", "chat_template_kwargs", "documents",  # of a chat
    "seed", "skip_special_tokens", "add_special_tokens", "include_stop_str_in_output", "timings_per_token",
    "speculative",
}  # fmt: skip
"""Options that change nothing in this model's completions, or not the tokens."""

DRAFTERS = ["vanilla", "ngram", "small", "dspark"]


def test_no_field_is_forgotten():
    """Each field of both schemas is in the matrix or says where else it is tested, not both, and no other is."""
    fields = {*names_of(ChatRequest), *names_of(CompletionRequest)}
    assert fields == {*VALUES, *ELSEWHERE}
    assert not VALUES.keys() & ELSEWHERE.keys()


def _make(kind: str):
    # Few letters and nearly as likely: every filter, penalty and stop has something to change.
    flat = {"eos_level": 1, "gap": 0.25, "alphabet": b"abcdefxyz ~12"}
    target = ascii_model(**flat)
    drafters = {
        "vanilla": lambda: [],
        "ngram": lambda: [Ngram(prompt_lookup_min=1, prompt_lookup_max=3)],
        "small": lambda: [Small(ascii_model(**flat), VOCAB)],
        "dspark": lambda: [drafting("dspark", target)],
    }
    return engine(*drafters[kind](), target=target, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    """One server for each drafter over the same target."""
    running = {kind: Site(lambda kind=kind: _make(kind)) for kind in DRAFTERS}
    for one in running.values():
        one.__enter__()
    yield running
    for one in running.values():
        one.settle()
        one.__exit__()


PROMPT = "abcabcab xyxy"
MATES = [
    {"prompt": "mate", "temperature": 0, "max_tokens": 9},
    {"prompt": "other", "temperature": 1.2, "top_k": 3, "seed": 5, "max_tokens": 25},
    {"prompt": "third", "repetition_penalty": 1.5, "seed": 6, "max_tokens": 14, "speculative": False},
    {"prompt": "fourth" * 9, "temperature": 0.5, "seed": 7, "max_tokens": 20, "stream": True},
    {"prompt": "fifth", "guided_regex": "[a-c]{5,9}", "seed": 8, "max_tokens": 20},
    {"prompt": "sixth", "temperature": 1.0, "n": 2, "seed": 9, "max_tokens": 12},
]
"""With the request in question a batch of eight."""


def _fields(path: str, option: str, value: object) -> dict[str, object] | None:
    """A request with this option; None where the endpoint has no such field."""
    known = names_of(ChatRequest if "chat" in path else CompletionRequest)
    if option not in known:
        return None
    base = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    # A seed, and the rule under which it gives one text whatever is drafted.
    fields = {**base, "max_tokens": 18, "seed": 21, "temperature": 0.9, "verify_mode": "coupled", option: value}
    if option == "logprobs" and "chat" in path:
        fields["logprobs"] = True
    if option == "top_logprobs":
        fields["logprobs"] = True
    if option == "max_completion_tokens":
        del fields["max_tokens"]
    if option == "include_stop_str_in_output":
        fields["stop"] = "e"
    return fields


def _answer(site: Site, path: str, fields: dict[str, object], stream: bool, batch: str) -> list[dict[str, object]]:
    """What a client sees of each choice, streamed or not."""
    asked = {**fields, "stream": True, "stream_options": {"include_usage": True}} if stream else fields
    mates = [site.call("POST", "/v1/completions", mate) for mate in MATES] if batch == "mixed" else []
    reply, *others = site.together([site.call("POST", path, asked), *mates])
    assert all(other.status == 200 for other in others)
    assert reply.status == 200, reply.body
    if stream:
        *events, last = reply.events
        count = fields.get("n", 1)
        choices = [joined(events, i) for i in range(count)]
        usage, text = last["usage"], "text" if "chat" not in path else "content"
        seen = [(c[text], c["finish_reason"], c["stop_reason"]) for c in choices]
    else:
        choices, usage = reply.json["choices"], reply.json["usage"]
        texts = [c["message"]["content"] if "chat" in path else c["text"] for c in choices]
        seen = [(t, c["finish_reason"], c["stop_reason"]) for t, c in zip(texts, choices, strict=True)]
    ids = [c.get("token_ids") or None for c in choices]
    logprobs = [c["logprobs"] for c in choices]
    return [{"usage": usage, "seen": seen, "ids": ids, "logprobs": logprobs, "seeds": [c["seed"] for c in choices]}]


CASES = [(option, index) for option, values in VALUES.items() for index in range(len(values))]
FACTORS = {
    "option": CASES,
    "drafter": DRAFTERS,
    "stream": [False, True],
    "batch": ["alone", "mixed"],
    "path": ["/v1/completions", "/v1/chat/completions"],
}


def _holds(sites: dict[str, Site], case) -> None:
    option, index = case["option"]
    fields = _fields(case["path"], option, VALUES[option][index])
    if fields is None:
        return
    want = _answer(sites["vanilla"], case["path"], {**fields, "speculative": False}, False, "alone")
    got = _answer(sites[case["drafter"]], case["path"], fields, case["stream"], case["batch"])
    assert got == want


def _name(case) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=_name)
def test_every_option_means_the_same(sites, case):
    """Each pair of (option, drafter, streamed or whole, alone or among eight, endpoint) occurs in some case: text, ids,
    reasons, log-probabilities, seeds and usage are those of plain decoding, bit by bit (float64, coupled)."""
    _holds(sites, case)


@pytest.mark.slow
@pytest.mark.parametrize("option", CASES, ids=str)
def test_every_option_with_everything(sites, option):
    """The full product of the other factors for each option."""
    for case in product({name: values for name, values in FACTORS.items() if name != "option"}):
        _holds(sites, {"option": option, **case})


def test_the_options_have_an_effect(sites):
    """What the matrix compares is not the same text over and over: each option changes it for some seed."""

    def seen(option: str, value: object, seed: int) -> object:
        fields = {**_fields("/v1/completions", option, value), "seed": seed}
        return _answer(sites["vanilla"], "/v1/completions", fields, False, "alone")

    known, seeds, changed = names_of(CompletionRequest), range(21, 26), set()
    base = {seed: seen("seed", seed, seed) for seed in seeds}
    for option, index in CASES:
        if option in known and any(seen(option, VALUES[option][index], seed) != base[seed] for seed in seeds):
            changed.add(option)
    without = {option for option, _ in CASES} - changed
    assert without <= WITHOUT_EFFECT, without - WITHOUT_EFFECT


def test_fields_without_effect(sites):
    """Accepted, and the tokens are the same."""
    fields = _fields("/v1/completions", "seed", 21)
    base = _answer(sites["small"], "/v1/completions", fields, False, "alone")
    extra = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "reasoning_effort": "high", "cache_salt": "c",
    }  # fmt: skip
    for name, value in extra.items():
        assert _answer(sites["small"], "/v1/completions", {**fields, name: value}, False, "alone") == base, name


def test_drafters_drafted(sites):
    """The matrix would prove nothing if nothing had been drafted or nothing accepted."""
    for kind, mode in itertools.product(DRAFTERS[1:], ("rejection", "coupled")):
        before = sites[kind].metric("forerun:spec_decode_verified_tokens_total")
        sites[kind].complete(
            prompt="abab" * 6, temperature=0.5, seed=1, max_tokens=60, verify_mode=mode, ignore_eos=True
        )
        assert sites[kind].metric("forerun:spec_decode_verified_tokens_total") > before, kind
    assert sites["small"].metric("forerun:spec_decode_accepted_tokens_total") > 50
