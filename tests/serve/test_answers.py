"""Answers have the shapes of OpenAI's API; a stream adds up to the whole answer; usage counts what was committed."""

from __future__ import annotations

import asyncio
import inspect
import math

import pytest

from engine.conftest import configured
from forerun import Sampling
from forerun.budget.calibration import Calibration, CalibrationKey, Table
from forerun.cli.serve import serve
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine
from forerun.serve import ServeOptions
from forerun.serve.effective import _without_login
from serve.kit import PRINTABLE, Site, ascii_model, counted, engine, guesses, joined, noisy_engine, script_model
from tiny import save_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def test_a_completion_has_every_field_clients_read(site):
    """id, object, created, model, choices, usage, and vLLM's extras."""
    body = site.complete(prompt="def area(", **GREEDY)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "table"
    assert body["system_fingerprint"].startswith("fp_")
    [choice] = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["logprobs"] is None
    assert len(choice["text"]) == 12
    want = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    assert body["usage"] == {**want, "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_chat_has_every_field_clients_read(site):
    """The template is applied; the message is the assistant's."""
    body = site.chat(messages=HELLO, **GREEDY)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    [plain] = engine().generate("user: hello\nassistant: ", Sampling(**GREEDY))
    assert choice["message"]["content"] == plain.text
    assert body["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")


def test_content_may_be_a_list_of_parts(site):
    """GuideLLM and `vllm bench serve` send lists; they are the text of their parts."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    found, want = (site.chat(messages=messages, **GREEDY, seed=1) for messages in (parts, HELLO))
    assert found["choices"] == want["choices"]


def test_a_model_answers_to_its_names():
    """--served-model-name: any of them, the first where none is given; the answer has the one that was used."""
    with Site(noisy_engine, served_model_name=("one", "two")) as site:
        assert [model["id"] for model in site.get("/v1/models").json["data"]] == ["one", "two"]
        assert site.complete(prompt="a", max_tokens=1)["model"] == "one"
        assert site.complete(prompt="a", max_tokens=1, model="two")["model"] == "two"
        assert site.get("/v1/models/two").json["max_model_len"] == 400


STREAMED = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 4},
    {"logprobs": True},
    {"stop": ["e", "~~"], "max_tokens": 60},
    {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 60},
    {"return_token_ids": True},
    {"speculative": False, "temperature": 1.0, "seed": 9},
    {"verify_mode": "coupled", "temperature": 1.0, "seed": 9, "n": 2},
]


@pytest.mark.parametrize("fields", STREAMED, ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_adds_up_to_the_whole_answer(site, path, fields):
    """Text, reasons, ids, log-probabilities and seeds of every choice, usage, metrics; one reason for each choice."""
    fields = {**GREEDY, "seed": 4, **({"prompt": "def f("} if path == COMPLETIONS else {"messages": HELLO}), **fields}
    if "logprobs" in fields:
        fields |= {"logprobs": 2} if path == COMPLETIONS else {"top_logprobs": 2}
    whole = site.post(path, fields).json
    events = site.post(path, {**fields, "stream": True, "stream_options": {"include_usage": True}}).events
    *parts, last = events
    assert last["choices"] == []
    assert counted(last["usage"]) == counted(whole["usage"])
    assert last.get("metrics") == whole.get("metrics")
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in parts)
    for want in whole["choices"]:
        got = joined(parts, want["index"])
        text = want["text"] if path == COMPLETIONS else want["message"]["content"]
        assert got["text"] + got["content"] == text
        for name in ("finish_reason", "stop_reason", "seed", "logprobs"):
            assert got.get(name) == want.get(name), name
        if "return_token_ids" in fields:
            assert got["token_ids"] == want["token_ids"]
        assert got["finish_reason"] is not None


def test_the_role_comes_with_the_first_text_and_the_reason_with_the_last(site):
    """Drivers time every event with choices: none is empty."""
    events = site.post(CHAT, {"messages": HELLO, "stream": True, **GREEDY}).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [("role" in delta) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert all(delta["content"] for delta in deltas)
    assert [bool(event["choices"][0]["finish_reason"]) for event in events] == [False] * (len(events) - 1) + [True]


def test_one_event_for_each_committed_block():
    """Several tokens of a step travel together."""
    text = "the quick brown fox"
    with Site(lambda: engine(guesses(text), target=script_model(text), num_speculative_tokens=4)) as site:
        events = site.post(COMPLETIONS, {"prompt": [7], "stream": True, **GREEDY, "max_tokens": 50}).events
        pieces = [event["choices"][0]["text"] for event in events]
        assert "".join(pieces) == text
        assert pieces[:2] == [text[:1], text[1:6]]  # the token of the prefill, then blocks of 4 drafts and one more


def test_continuous_usage(site):
    """`continuous_usage_stats`: usage so far in every event, never less than before."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = site.post(COMPLETIONS, {"prompt": "abc", "stream": True, "stream_options": options, **GREEDY}).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert all(event["usage"]["prompt_tokens"] == 3 for event in events)


def test_usage_can_be_forced():
    """--enable-force-include-usage: streams end with usage whether or not it was asked for."""
    with Site(noisy_engine, enable_force_include_usage=True) as site:
        events = site.post(COMPLETIONS, {"prompt": "abc", "stream": True, **GREEDY}).events
        assert events[-1]["usage"]["completion_tokens"] == 12


def test_prompts_come_in_four_forms_and_are_numbered(site):
    """A text, texts, ids, lists of ids; choices are prompt_index * n + sample_index."""
    one = site.complete(prompt="abc", **GREEDY)["choices"][0]["text"]
    other = site.complete(prompt="xyz", **GREEDY)["choices"][0]["text"]
    assert site.complete(prompt=[97, 98, 99], **GREEDY)["choices"][0]["text"] == one
    for prompts in (["abc", "xyz"], [[97, 98, 99], [120, 121, 122]]):
        body = site.complete(prompt=prompts, n=2, **GREEDY)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]] == [one, one, other, other]
        assert body["usage"]["prompt_tokens"] == 6
        assert body["usage"]["completion_tokens"] == 48
        assert body["metrics"] is None  # several answers cannot be told apart


def test_echo_repeats_the_prompt_once(site):
    """With and without a stream, and with nothing generated."""
    text = site.complete(prompt="abc", **GREEDY)["choices"][0]["text"]
    assert site.complete(prompt="abc", echo=True, **GREEDY)["choices"][0]["text"] == "abc" + text
    events = site.post(COMPLETIONS, {"prompt": "abc", "echo": True, "stream": True, **GREEDY}).events
    assert joined(events)["text"] == "abc" + text
    body = site.complete(prompt="abc", echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


def test_echo_with_logprobs_scores_the_prompt(site):
    """max_tokens: 0 is how a text is scored: each value is the target's own, the first token has none."""
    body = site.complete(prompt="abcabc", echo=True, logprobs=2, max_tokens=0)
    scored = body["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == "abcabc"
    assert scored["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert scored["token_logprobs"][0] is None
    model = ascii_model()
    for place in range(1, 6):
        row = model._logits([*b"abcabc"[:place]])
        log_sum = math.log(sum(math.exp(x) for x in row))
        want = row[b"abcabc"[place]] - log_sum
        assert scored["token_logprobs"][place] == pytest.approx(want, abs=1e-5)
        assert "abcabc"[place] in scored["top_logprobs"][place]
    more = site.complete(prompt="abcabc", echo=True, logprobs=2, temperature=0, max_tokens=3)
    joined_ = more["choices"][0]["logprobs"]
    assert joined_["token_logprobs"][:6] == scored["token_logprobs"]
    assert len(joined_["tokens"]) == 9
    fields = {"prompt": "abcabc", "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 3, "stream": True}
    assert joined(site.post(COMPLETIONS, fields).events)["logprobs"] == joined_


def test_a_long_prompt_is_scored_in_pieces():
    """More rows than one step has: as in one piece. Afterwards no block is held."""
    text = "".join(chr(c) for c in PRINTABLE) * 3
    with Site(lambda: engine(max_num_batched_tokens=40)) as site:
        entry = site.complete(prompt=text, prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
        assert len(entry) == len(text)
        assert entry[0] is None
        row = ascii_model()._logits([*text.encode()[:200]])
        want = row[ord(text[200])] - math.log(sum(math.exp(x) for x in row))
        assert entry[200][str(ord(text[200]))]["logprob"] == pytest.approx(want, abs=1e-5)
        site.settle()


def test_suffix_fills_a_gap(tmp_path):
    """A model that has fill-in-the-middle tokens gets them around the texts; `suffix` names no drafter."""
    from forerun.serve.prompt import Prompts

    class Marked:
        chat_template = None

        def vocabulary(self):
            return {"<|fim_prefix|>": 500, "<|fim_suffix|>": 501, "<|fim_middle|>": 502}

        def encode(self, text, add_special_tokens=True):
            return ([1] if add_special_tokens else []) + list(text.encode())

    assert Prompts(Marked()).of_gap("ab", "yz", True) == [1, 500, *b"ab", 501, *b"yz", 502]
    assert Prompts(Marked()).of_gap("ab", "yz", False) == [500, *b"ab", 501, *b"yz", 502]  # add_special_tokens


def test_lp_1_logprobs_are_the_targets_at_every_place_of_a_block():
    """With drafts accepted in blocks, each value is that of a plain forward over the same ids, through HTTP 1e-4.

    https://github.com/vllm-project/vllm/issues/34497, https://github.com/vllm-project/vllm/issues/17876,
    https://github.com/ggml-org/llama.cpp/issues/27972, https://github.com/ggml-org/llama.cpp/pull/27196,
    https://github.com/Pushkinist/rMLX/issues/542
    """
    text = "accepted in blocks"
    model = script_model(text)
    with Site(lambda: engine(guesses(text), target=script_model(text), num_speculative_tokens=4)) as site:
        fields = {"prompt": [7], "temperature": 0, "max_tokens": 50, "logprobs": 5}
        whole = site.complete(**fields)["choices"][0]["logprobs"]
        assert site.metric("forerun:spec_decode_accepted_tokens_total") > 5
        ids = [*text.encode(), 256]
        assert len(whole["tokens"]) == len(ids)  # the end counts, its text is not shown
        for place, token in enumerate(ids):
            row = model._logits([7, *ids[:place]])
            want = row[token] - math.log(sum(math.exp(x) for x in row))
            assert whole["token_logprobs"][place] == pytest.approx(want, abs=1e-4)
            values = list(whole["top_logprobs"][place].values())
            assert values == sorted(values, reverse=True)
            assert whole["token_logprobs"][place] in values


def test_chat_logprobs_carry_bytes(site):
    """`bytes` rebuild what was said; `top_logprobs` are as many as asked for, and the token's own."""
    body = site.chat(messages=HELLO, logprobs=True, top_logprobs=3, temperature=0, max_tokens=6)
    content = body["choices"][0]["logprobs"]["content"]
    said = bytes(byte for entry in content for byte in entry["bytes"])
    assert said.decode() == body["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    none = site.chat(messages=HELLO, logprobs=True, temperature=0, max_tokens=2)["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in none["content"]] == [[], []]


TEXT = "naïve – 日本語 🙂👨‍👩‍👧 done"


@pytest.mark.parametrize("k", range(0, 9))
def test_su_1_characters_stay_whole_across_chunks(k):
    """Byte tokens, characters of 2, 3 and 4 bytes and a joined emoji, cut by blocks of every length: each delta is
    valid UTF-8 and they add up to the text.

    https://github.com/sgl-project/sglang/issues/31598, https://github.com/sgl-project/sglang/pull/34852,
    https://github.com/vllm-project/vllm/pull/19449, https://github.com/tenstorrent/tt-inference-server/pull/2594,
    https://github.com/ai-dynamo/dynamo/issues/12630
    """
    with Site(lambda: engine(guesses(TEXT), target=script_model(TEXT), num_speculative_tokens=k)) as site:
        fields = {"prompt": [7], "temperature": 0, "max_tokens": 100, "stream": True}
        pieces = [event["choices"][0]["text"] for event in site.post(COMPLETIONS, fields).events]
        assert "".join(pieces) == TEXT
        assert all("\ufffd" not in piece for piece in pieces)


def test_su_1_a_character_cut_by_the_end_is_one_replacement():
    """max_tokens inside of a character: U+FFFD once, in the stream as in the whole answer."""
    with Site(lambda: engine(guesses(TEXT), target=script_model(TEXT))) as site:
        fields = {"prompt": [7], "temperature": 0, "max_tokens": TEXT.encode().index("日".encode()) + 2}
        whole = site.complete(**fields)["choices"][0]["text"]
        assert whole == TEXT[: TEXT.index("日")] + "\ufffd"
        assert joined(site.post(COMPLETIONS, {**fields, "stream": True}).events)["text"] == whole


STOPPED = "one two STOP three"


@pytest.fixture(scope="module", params=[0, 3, 8], ids=lambda k: f"k{k}")
def stopping(request):
    """A server that writes this text, by blocks of K and one more."""
    k = request.param
    with Site(lambda: engine(guesses(STOPPED), target=script_model(STOPPED), num_speculative_tokens=k)) as site:
        yield site


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop_reason", "tokens"),
    [
        ({"stop": "STOP"}, "one two ", "stop", "STOP", 12),
        ({"stop": ["three", "STOP"], "include_stop_str_in_output": True}, "one two STOP", "stop", "STOP", 12),
        ({"stop_token_ids": [ord("S")]}, "one two ", "stop", ord("S"), 9),
        ({"stop": "STOP", "max_tokens": 11}, "one two STO", "length", None, 11),
        ({"stop": "STOP", "max_tokens": 12}, "one two ", "stop", "STOP", 12),
        ({"stop": "one", "min_tokens": 4}, STOPPED, "stop", None, 19),
        ({}, STOPPED, "stop", None, 19),
        ({"ignore_eos": True, "max_tokens": 22}, STOPPED, "length", None, 22),
        ({"max_tokens": 5}, "one t", "length", None, 5),
    ],
    ids=str,
)
def test_st_3_the_first_rule_that_fires_ends_the_answer(stopping, fields, text, reason, stop_reason, tokens):
    """A stop in the middle of a block: nothing behind it is visible, counted, or has a log-probability.

    https://github.com/sgl-project/sglang/issues/31599, https://github.com/sgl-project/sglang/pull/33758,
    https://github.com/ikawrakow/ik_llama.cpp/pull/2358 (ST-5)
    """
    asked = {"prompt": [7], "temperature": 0, "max_tokens": 60, "logprobs": 1, "return_token_ids": True, **fields}
    body = stopping.complete(**asked)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop_reason)
    assert body["usage"]["completion_tokens"] == tokens
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == tokens
    assert choice["token_ids"] == [*STOPPED.encode(), *[256] * 4][:tokens]
    streamed = joined(stopping.post(COMPLETIONS, {**asked, "stream": True}).events)
    assert (streamed["text"], streamed["finish_reason"], streamed["stop_reason"]) == (text, reason, stop_reason)


def test_st_5_usage_is_the_number_of_ids():
    """max_tokens 1 .. 10 with blocks of 9: usage, ids and log-probabilities agree.

    https://github.com/ikawrakow/ik_llama.cpp/pull/2358
    """
    text = "abcdefghijklmnopqrstuvwxyz"
    with Site(lambda: engine(guesses(text), target=script_model(text), num_speculative_tokens=8)) as site:
        for most in range(1, 11):
            body = site.complete(prompt=[7], temperature=0, max_tokens=most, logprobs=0, return_token_ids=True)
            [choice] = body["choices"]
            counts = body["usage"]["completion_tokens"], len(choice["token_ids"]), len(choice["logprobs"]["tokens"])
            assert counts == (most, most, most)


def test_se_2_unseeded_requests_differ_and_a_returned_seed_repeats(site):
    """Eight unseeded copies of one request at T = 1: all different (20 tokens of some 1.3 nats each: equal ones have
    probability < 1e-9). `choices[].seed`, alone with n = 1, gives that sample again.

    https://github.com/NVIDIA/TensorRT-LLM/pull/17599, https://github.com/NVIDIA/TensorRT-LLM/issues/19487
    """
    fields = {"prompt": "abc", "temperature": 1.0, "max_tokens": 20, "verify_mode": "coupled"}
    calls = [site.call("POST", COMPLETIONS, fields) for _ in range(8)]
    texts = [reply.json["choices"][0]["text"] for reply in site.together(calls)]
    assert len(set(texts)) == 8
    body = site.complete(**fields, n=3, seed=77)
    assert len({choice["text"] for choice in body["choices"]}) == 3
    for choice in body["choices"]:
        assert site.complete(**fields, seed=choice["seed"])["choices"][0]["text"] == choice["text"]


def test_a_seeded_server_repeats_itself():
    """--seed: the same requests in the same order get the same answers, and different ones from each other."""
    fields = {"prompt": ["abc", "abc"], "temperature": 1.0, "max_tokens": 15}
    runs = []
    for _ in range(2):
        with Site(noisy_engine, seed=3) as site:
            runs.append([c["text"] for _ in range(2) for c in site.complete(**fields)["choices"]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


def test_defaults_come_from_the_generation_config(tmp_path):
    """request > --override-generation-config > generation config > library; /server_info shows what holds."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 3, "pad_token_id": 1}')
    target = ascii_model()
    target.sampling_defaults = {"temperature": 0.0}
    make = lambda: engine(target=target)  # noqa: E731
    with Site(make) as site:
        assert site.get("/server_info").json["sampling_defaults"] == {"temperature": 0.0}
        assert len({site.complete(prompt="a", max_tokens=9)["choices"][0]["text"] for _ in range(3)}) == 1
    with Site(make, generation_config="vllm") as site:
        assert site.get("/server_info").json["sampling_defaults"] == {}
    options = {"generation_config": str(tmp_path), "override_generation_config": {"top_k": 5}}
    with Site(make, **options) as site:
        assert site.get("/server_info").json["sampling_defaults"] == {"temperature": 0.0, "top_k": 5}


def test_prediction_is_accounted_for():
    """Text expected in the answer feeds the n-gram drafter, never the law; what came of it is in usage, and only then.

    https://github.com/vllm-project/vllm/issues/42690
    """
    text = "def area(shape): return 1"
    expected = {"type": "content", "content": text.replace("area", "size")}
    make = lambda: engine(Ngram(prompt_lookup_min=2, prompt_lookup_max=3), target=script_model(text))  # noqa: E731
    with Site(make) as site:
        fields = {"prompt": [7], "temperature": 0, "max_tokens": 60}
        plain = site.complete(**fields)
        assert "completion_tokens_details" not in plain["usage"]
        body = site.complete(**fields, prediction=expected)
        assert body["choices"][0]["text"] == plain["choices"][0]["text"] == text
        details = body["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 10
        assert details["rejected_prediction_tokens"] > 0
        assert body["usage"]["completion_tokens"] == len(text) + 1


def test_prediction_needs_a_drafter_that_reads_it():
    """Where nobody reads it, giving one is an error."""
    with Site(engine) as site:
        error = site.refused(COMPLETIONS, {"prompt": "a", "prediction": {"type": "content", "content": "b"}})
        assert error["param"] == "prediction"


def test_speculative_false_drafts_nothing(site):
    """No drafter proposes for the request; the text is the same."""
    fields = {"prompt": "abab" * 8, "temperature": 0, "max_tokens": 30}
    drafted, plain = site.complete(**fields), site.complete(**fields, speculative=False)
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    one = site.complete(**fields, speculative={"method": "small", "max_draft": 1})["metrics"]["speculative_decoding"]
    assert set(one["acceptance_histogram_by_draft_length"]) == {"1"}
    mode = site.complete(**fields, speculative=False, verify_mode="coupled")["metrics"]["speculative_decoding"]
    assert mode["num_draft_tokens"] == 0


def test_priority_goes_first():
    """Of waiting requests the one with the lower number is admitted first, whenever it came."""
    with Site(lambda: engine(max_num_seqs=1)) as site:
        order: list[str] = []

        async def one(name: str, priority: int) -> None:
            most = 390 if name == "running" else 5
            fields = {"prompt": "a", "max_tokens": most, "temperature": 0, "priority": priority}
            await site.call("POST", COMPLETIONS, fields).run()
            order.append(name)

        async def all_of_them() -> None:
            first = asyncio.ensure_future(one("running", 0))
            while not site.engine.core.admission.running:
                await asyncio.sleep(0.001)
            later = [asyncio.ensure_future(one(name, p)) for name, p in (("low", 5), ("high", -5), ("middle", 0))]
            await asyncio.gather(first, *later)

        site.run(all_of_them())
        assert order == ["running", "high", "middle", "low"]


def test_tokenize_and_detokenize(site):
    """Ids of a text or of a rendered chat, and back."""
    assert site.post("/tokenize", {"prompt": "abc"}).json == {"count": 3, "max_model_len": 400, "tokens": [97, 98, 99]}
    found = site.post("/tokenize", {"messages": HELLO, "return_token_strs": True}).json
    assert "".join(found["token_strs"]) == "user: hello\nassistant: "
    assert site.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "user: hello\nassistant: "}
    assert site.refused("/detokenize", {"tokens": [999]})["param"] == "tokens"


def test_reports(site):
    """/health, /version, /server_info, /v1/models, and an OpenAPI document with the bodies."""
    assert site.get("/health").status == 200
    assert site.get("/version").json["version"]
    info = site.get("/server_info").json
    assert [drafter["name"] for drafter in info["speculative_config"]] == ["ngram", "small"]
    assert [drafter["label"] for drafter in info["speculative_config"]] == ["ngram", "small"]
    assert info["max_model_len"] == 400
    [model] = site.get("/v1/models").json["data"]
    assert {"id", "object", "created", "owned_by", "root", "max_model_len"} <= set(model)
    document = site.get("/openapi.json").json
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    assert document["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


def test_server_info_tells_what_is_in_force():
    """Flags with their defaults, the policy, the calibration of each drafter; never a key."""
    with Site(noisy_engine, api_key=("a-secret",), max_queue=7) as site:
        table = Table(CalibrationKey("rejection", "probabilistic", "0.7"), (1.5,), "held-out", 900, (0.2,), (0.1,))
        site.engine.core.schedule.scheduler.calibrations["small"] = Calibration([table])
        reply = site.get("/server_info", authorization="Bearer a-secret")
        assert reply.json["options"] | {"max_queue": 7, "max_num_seqs": 8, "api_key": "1 set"} == reply.json["options"]
        assert {"logprobs_mode", "verify_mode", "request_timeout"} <= reply.json["options"].keys()
        assert reply.json["policy"] == site.engine.core.schedule.scheduler.options.policy
        [line] = reply.json["calibration"]
        assert (line["drafter"], line["temperature"], line["rounds"]) == ("small", "0.7", 900)
        assert (line["ece_before"], line["ece_after"]) == ([0.2], [0.1])
        assert b"a-secret" not in reply.body


def test_a_drafter_that_copies_is_told_by_its_name():
    """As `--drafter` takes it: with prompt lookup mixed in it is another drafter."""
    target = ascii_model()
    with Site(lambda: configured(target, Small(ascii_model(), 257), {"prompt_lookup_max": 3})) as site:
        [told] = site.get("/server_info").json["speculative_config"]
    assert (told["name"], told["label"]) == ("small", "small+lookup")


TOLD_AS = {
    "target": "model",
    "drafter": "speculative_config",
    "speculative_config_key": "speculative_config",
}
"""Flags that /server_info tells under another name."""


def test_server_info_forgets_no_flag(site):
    """What `forerun serve` can be told, it tells; of keys only how many there are."""
    flags = set(inspect.signature(serve).parameters)
    assert {"host", "tokenizer", "api_key", "max_num_seqs", "block_size"} <= flags
    info = site.get("/server_info").json
    assert {TOLD_AS.get(flag, flag) for flag in flags} - info["options"].keys() - info.keys() == set()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://collector:4318", "http://collector:4318"),
        ("https://me:a-secret@collector:4318//v1/traces", "https://collector:4318//v1/traces"),
        ("https://me:a-secret@collector/v1#a-secret", "https://collector/v1"),
        ("https://[::1]:4318/v1?a-secret", "https://[::1]:4318/v1"),
        ("https://me:a?secret@collector", "set"),
        ("https://me:a/secret@collector", "set"),
        ("https://me:a-secret@[collector", "set"),
    ],
)
def test_no_part_of_an_address_that_may_be_secret_is_told(url, told):
    """Whatever is wrong with it: what cannot be parted is not told at all."""
    assert _without_login(url) == told


def test_server_info_tells_the_tokenizer_and_no_login(tiny_qwen3_dir, tmp_path):
    """Which folder is used in place of the model's own; the collector's address without what opens it."""
    save_tokenizer(tmp_path, "{{ messages[0].content }}, and then:")
    endpoint = "https://me:a-secret@collector:4318/v1?token=a-secret"
    options = ServeOptions(tokenizer=str(tmp_path), otlp_traces_endpoint=endpoint)
    with Site(lambda: Engine.load(str(tiny_qwen3_dir)), tokenizer=str(tmp_path)) as site:
        site.server.service.options = options
        reply = site.get("/server_info")
        assert reply.json["options"]["tokenizer"] == str(tmp_path)
        assert reply.json["options"]["otlp_traces_endpoint"] == "https://collector:4318/v1"
        assert b"a-secret" not in reply.body
        found = site.post("/tokenize", {"messages": HELLO, "return_token_strs": True}).json
        assert "".join(found["token_strs"]) == "hello, and then:"


def test_the_request_id_comes_back(site):
    """x-request-id is echoed, in the header and in the id; one that could not be sent is replaced."""
    reply = site.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.json["id"] == "cmpl-mine-1"
    reply = site.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"x-request-id": "no\u00e4 good"})
    assert reply.headers["x-request-id"].isalnum()
    assert site.complete(prompt="a", max_tokens=1, request_id="own.1")["id"] == "cmpl-own.1"
