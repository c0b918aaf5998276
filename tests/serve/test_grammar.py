"""Answers of a prescribed form: always of that form, the same with drafts, with a law that drafting does not change."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from contextlib import suppress
from functools import cache

import pytest
import torch

from engine.conftest import drive, engine_of
from forerun import Sampling
from forerun.drafters.fake import Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.serve.errors import ApiError
from forerun.serve.grammar import Grammar, Grammars, _TooComplex
from forerun.serve.schemas import ChatRequest, Tool
from forerun.serve.tools import MISTRAL_NAMED, ToolCalls
from forerun.target.table import ByteTokenizer, LetterTokenizer, TableTarget, history_model
from laws.pairwise import pairwise
from serve.kit import VOCAB, Site, ascii_model, engine, joined

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
COMPLETIONS = "/v1/completions"


def _noisy(target, k):
    """Proposes printable bytes that no grammar would want, among them doubled braces."""
    return Script(lambda view: [*b'{{"a'] * 2)


DRAFTERS = {
    "small": lambda: Small(ascii_model(), VOCAB),
    "other small": lambda: Small(ascii_model(7), VOCAB),
    "ngram": lambda: Ngram(prompt_lookup_min=1, prompt_lookup_max=3),
    "noisy": lambda: Script(lambda view: [*b'{{"a'] * 2),  # what no grammar would want, doubled braces among it
}
WAYS = [(0, "rejection"), (1.0, "coupled")]


def _constrained(grammar: Grammar, prompt: list[int], **options) -> Sampling:
    form = Grammars(ByteTokenizer(), VOCAB, [256]).compile(grammar).of(len(prompt))
    return Sampling(logits_processors=(form,), stop_when=(form.complete,), **options)


@cache
def _answer(kind: str | None, k: int, way: tuple[float, str], seed: int):
    """JSON of the schema, by one drafter or by none."""
    prompt, (temperature, mode) = [*b'{"name": "ada", "ok": true'], way
    options = {"num_speculative_tokens": k} if kind else {}
    loaded = engine(*([DRAFTERS[kind]()] if kind else []), verify_mode=mode, **options)
    grammar = Grammar.json("guided_json", SCHEMA)
    sampling = _constrained(grammar, prompt, temperature=temperature, seed=seed, max_tokens=200, logprobs=1)
    [done] = drive(loaded, loaded.submit([prompt], sampling))
    return done


@pytest.mark.parametrize(
    "case",
    pairwise({"kind": list(DRAFTERS), "k": list(range(1, 9)), "way": WAYS}),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_so_1_drafts_do_not_disturb_the_grammar(case):
    """JSON of a schema, whatever is drafted and however blocks are cut: always parseable, no doubled brace, ids and
    text those of plain masked decoding.

    https://github.com/vllm-project/vllm/pull/44297, https://github.com/vllm-project/vllm/pull/48516,
    https://github.com/vllm-project/vllm/issues/48228, https://github.com/openvinotoolkit/openvino.genai/issues/4081
    """
    seed = 1 + case["k"] % 4
    drafted, plain = _answer(case["kind"], case["k"], case["way"], seed), _answer(None, 0, case["way"], seed)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert (drafted.finish_reason, drafted.stop_reason) == ("stop", None)
    found = json.loads(drafted.text)
    assert found["name"] in ("ada", "grace")
    assert found["n"] in (1, 22, 333)


@pytest.mark.parametrize(
    "kind", ["small", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("noisy", "ngram"))]
)
def test_so_1_the_law_is_that_of_plain_masked_decoding(kind):
    """Rejection, T = 1: of 1,500 samples of `[ab][abc]` every outcome is within 4.5 standard deviations of its exact
    probability (false alarm below 1e-4 over six cells), and a law without the mask is not.

    https://github.com/openvinotoolkit/openvino.genai/issues/4081
    """
    target = history_model(7, seed=3, tokenizer=LetterTokenizer(7, eos_id=6), eos_token_ids=[6])
    drafters = {
        "small": lambda: Small(history_model(7, seed=5), 7),
        "noisy": lambda: Script(lambda view: [4, 0]),
        "ngram": lambda: Ngram(prompt_lookup_min=1, prompt_lookup_max=2),
    }
    loaded = engine_of(target, drafters[kind](), num_speculative_tokens=3, max_num_seqs=64, max_num_batched_tokens=512)
    prompt = [0, 1, 0, 2, 1]
    form = Grammars(target.tokenizer, 7, [6]).compile(Grammar.regex("guided_regex", "[ab][abc]")).of(len(prompt))
    sampling = Sampling(seed=12, n=1500, max_tokens=9, logits_processors=(form,), stop_when=(form.complete,))
    outcomes = Counter(done.text for done in loaded.generate([prompt], sampling))
    want = _law(target, prompt)
    assert set(outcomes) <= set(want)
    assert all(_near(outcomes[text], p) for text, p in want.items()), (outcomes, want)
    assert not all(_near(outcomes[text], p) for text, p in _law(target, prompt, masked=False).items())


def _law(target, prompt, masked=True):
    law = {}
    for first in range(2):
        for second in range(3):
            p = 1.0
            for prefix, allowed, token in (([], 2, first), ([first], 3, second)):
                row = torch.tensor(target._logits([*prompt, *prefix]))
                row = row[:allowed] if masked else row
                p *= torch.softmax(row, -1)[token].item()
            law[f"{'ab'[first]}{'abc'[second]}"] = p
    return law


def _near(count: int, p: float, samples: int = 1500) -> bool:
    return abs(count - samples * p) <= 4.5 * math.sqrt(samples * p * (1 - p)) + 1


def test_so_1_the_end_comes_where_min_tokens_forbids_it():
    """When only the end is allowed and min_tokens forbids it, the answer is complete all the same.

    https://github.com/vllm-project/vllm/pull/44297
    """
    with Site(engine) as site:
        for more in ({}, {"ignore_eos": True}):
            fields = {"prompt": "a", "guided_choice": ["ab"], "min_tokens": 10, "max_tokens": 20, **more}
            [choice] = site.complete(**fields)["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)


FORMS = [
    ({"response_format": {"type": "json_object"}}, None),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
    ({"guided_json": SCHEMA}, SCHEMA),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, r"[a-c]{3}-[0-9]{2}"),
    ({"guided_regex": "(ab|cd){2}"}, r"(ab|cd){2}"),
    ({"guided_choice": ["yes", 'n"o', "may\\be"]}, re.escape("yes") + "|" + 'n"o' + "|" + re.escape("may\\be")),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c") "d"'}}, "a[bc]d"),
]


@pytest.mark.parametrize(("fields", "form"), FORMS, ids=str)
def test_every_way_to_prescribe_a_form(site, fields, form):
    """OpenAI's spelling, vLLM's new one and its old ones: the answer is of the form, streamed or not."""
    for seed in range(2):
        asked = {"prompt": "go", "max_tokens": 300, "temperature": 1.0, "seed": seed, "top_k": 6, **fields}
        [choice] = site.complete(**asked)["choices"]
        streamed = joined(site.post(COMPLETIONS, {**asked, "stream": True}).events)
        assert streamed["text"] == choice["text"]
        if choice["finish_reason"] == "length":
            assert form is None  # free JSON need not end
        elif isinstance(form, str):
            assert re.fullmatch(form, choice["text"])
        else:
            assert isinstance(json.loads(choice["text"]), dict)


def _read(schema: object, text: str) -> int:
    """How many characters of a text JSON of a schema, or of a call with such arguments, may begin with."""
    if isinstance(schema, ChatRequest):
        grammar = ToolCalls(ByteTokenizer(), "llama3_json").grammar(schema)
        assert grammar is not None
    else:
        grammar = Grammar.json("guided_json", schema)  # type: ignore[arg-type]
    form = Grammars(ByteTokenizer(), VOCAB, [256]).compile(grammar)
    known = [count for count in range(len(text) + 1) if form.at([*text[:count].encode()]) is not None]
    return max(known)


FREE = {"type": "object", "additionalProperties": True}
CALLED = ChatRequest(
    messages=[{"role": "user"}],
    tools=[Tool(type="function", function={"name": "f", "parameters": FREE})],
    tool_choice="required",
)


@pytest.mark.parametrize("schema", [{"type": "object"}, json.dumps(FREE), "true", CALLED], ids=["a", "b", "c", "call"])
def test_json_may_be_printed_nicely_but_not_be_blank_without_end(schema):
    """Of white space between two tokens of JSON there is what printers write: a blank or two, or a line's end and its
    indentation. A model that likes blanks would fill max_tokens with them, in any form that lets it."""
    deep: object = 1
    for level in range(13):
        deep = {"a": deep} if level % 2 else [deep, True]
    arguments = {"x": deep, "y": [], "z": {"b": "c   d"}}
    whole = {"name": "f", "parameters": arguments} if schema is CALLED else arguments
    for style in ({"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}, {}):
        printed = json.dumps(whole, **style)
        for text in (printed, printed.replace("\n", "\r\n")):
            assert _read(schema, text) == len(text), style
    for blank, most in ((" ", 2), ("\t", 2), ("\n", 1), ("\r\n", 2), (" \n", 3), ("\n ", 65)):
        assert _read(schema, "{" + blank * 60) <= 1 + most, blank


def test_a_schema_may_say_itself_what_white_space_there_is():
    """By the options of llguidance in it."""
    assert _read({"type": "object", "x-guidance": {"whitespace_flexible": False}}, "{ }") == 1
    assert _read({"type": "object", "x-guidance": {"whitespace_pattern": "[ ]{1,9}"}}, "{" + " " * 20) == 10


def test_a_model_that_likes_blanks_still_answers():
    """Drafted for and plain alike: the mask is that of the drafter too."""
    options = {"tokenizer": ByteTokenizer(), "eos_token_ids": [256], "window": 400}
    target = TableTarget(lambda prefix: [5.0 * (byte in (9, 10, 32)) for byte in range(VOCAB)], VOCAB, **options)
    schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 1, "maxItems": 1}
    with Site(lambda: engine(Small(target, VOCAB), target=target)) as blank:
        for temperature in (0, 1.0):
            asked = {"guided_json": schema, "max_tokens": 300, "temperature": temperature, "prompt": "x", "seed": 3}
            drafted = blank.complete(**asked, verify_mode="coupled")
            plain = blank.complete(**asked, verify_mode="coupled", speculative=False)
            assert drafted["choices"] == plain["choices"]
            assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
            assert drafted["choices"][0]["finish_reason"] == "stop"
            assert json.loads(drafted["choices"][0]["text"]) in ([1], [22])


@pytest.mark.parametrize(
    ("grammar", "param"),
    [
        (
            Grammar.json("response_format.json_schema.schema", {"type": "nonsense"}),
            "response_format.json_schema.schema",
        ),
        (Grammar.json("guided_json", "{"), "guided_json"),
        (Grammar.regex("guided_regex", "(a"), "guided_regex"),
        (Grammar.lark("guided_grammar", "start: missing"), "guided_grammar"),
        (Grammar.lark("guided_grammar", ""), "guided_grammar"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_compiled_is_a_400(grammar, param):
    """The field that gave it is named."""
    with pytest.raises(ApiError) as refused:
        Grammars(ByteTokenizer(), VOCAB, [256]).compile(grammar)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == param


def test_a_form_that_is_too_long_is_refused():
    """Before anything is compiled."""
    with pytest.raises(ApiError):
        Grammar.regex("guided_regex", "a" * 300_000)


@pytest.mark.parametrize("more", [{"allowed_token_ids": [98]}, {"bad_words": [[97]]}], ids=str)
def test_a_form_that_leaves_nothing_is_named(site, more):
    """Together with other options no token may be left: the field that gave the form is named, the server lives."""
    error = site.refused(COMPLETIONS, {"prompt": "x", "guided_regex": "a+b", "max_tokens": 9, **more})
    assert error["param"] == "guided_regex"
    site.settle()


def test_a_form_that_becomes_too_complex_is_named(site):
    """Where the parser of forms gives up, the request fails, drafted for or not: its rest is not free of the form."""
    ways = range(2010)  # more than llguidance follows at once
    source = "\n".join(["start: " + " | ".join(f'"a" w{i}' for i in ways), *(f'w{i}: "{i}"' for i in ways)])
    for more in ({}, {"speculative": False}):
        error = site.refused(COMPLETIONS, {"prompt": "x", "guided_grammar": source, "max_tokens": 9, **more})
        assert error["param"] == "guided_grammar"
        assert "too complex" in error["message"]
    site.settle()


def _last_allowed(grammar: Grammar, texts: list[str]) -> str:
    """The last of these texts, each a beginning of the next, behind which the form can still be followed."""
    form, last = Grammars(ByteTokenizer(), VOCAB, [256]).compile(grammar), ""
    with suppress(_TooComplex):
        for text in texts:
            assert form.allowed([*text.encode()]) is not None, text
            last = text
    return last


def test_a_grammar_that_grows_with_its_text_is_given_up_early():
    """Every way to read `aaaa..` is kept, and a token costs the square of what is: the parser's own bound comes behind
    the four hundredth. Counted in tokens, since nothing else is the same everywhere."""
    ambiguous = Grammar.lark("guided_grammar", 'start: s\ns: "a" | s s | s s s')
    last = _last_allowed(ambiguous, ["a" * length for length in range(10, 130, 10)])
    assert 40 <= len(last) <= 100


def test_what_is_large_and_not_ambiguous_is_followed():
    """Thousands of choices, hundreds of optional properties, of tools, of alternatives of a client's own rule: nothing
    here grows with the text."""
    names = [f"name {i}" for i in range(3000)]
    tools = [Tool(type="function", function={"name": f"tool_{i}"}) for i in range(600)]
    called = ToolCalls(ByteTokenizer(), "mistral")
    called.notation = MISTRAL_NAMED
    request = ChatRequest(messages=[{"role": "user"}], tools=tools, tool_choice="required")
    calls = called.grammar(request)
    assert calls is not None
    optional = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(300)}}
    rule = "start: " + " | ".join(f'"name {i}"' for i in range(300))
    for grammar, text in (
        (Grammar.choice("guided_choice", names), "name 29"),
        (Grammar.json("guided_json", optional), '{"field_17": "a", "field_30": "b'),
        (calls, "[TOOL_CALLS]tool_59"),
        (Grammar.lark("guided_grammar", rule), "name 29"),
    ):
        assert _last_allowed(grammar, [text[:length] for length in range(len(text) + 1)]) == text


def test_a_choice_may_begin_with_another():
    """`left` and `leftover`: the answer may end behind the shorter one, or go on."""
    form = Grammars(ByteTokenizer(), VOCAB, [256]).compile(Grammar.choice("guided_choice", ["left", "leftover"]))
    allowed = form.allowed([*b"left"])
    assert [token for token in range(VOCAB) if allowed[token]] == [ord("o"), 256]
    assert form.of(0).complete([*b"leftover"])
    assert not form.of(0).complete([*b"left"])


def test_samples_of_one_request_do_not_disturb_each_other(site):
    """n = 20 at once, each in a place of its own: all of the form, and different ones among them."""
    body = site.complete(prompt="x", n=20, guided_regex="[!-}]{6}", temperature=1.5, seed=1, max_tokens=20)
    texts = [choice["text"] for choice in body["choices"]]
    assert all(re.fullmatch("[!-}]{6}", text) for text in texts)
    assert len(set(texts)) > 10


def test_the_mask_is_a_function_of_the_prefix():
    """Asked in any order, forwards, backwards and for prefixes that are not allowed, a constraint says the same."""
    compiled = Grammars(ByteTokenizer(), VOCAB, [256]).compile(Grammar.regex("guided_regex", "(ab|cd)+x"))
    texts = ["", "a", "ab", "abc", "abcd", "c", "cd", "cdab", "q", "abq", "abx", "cdx", "cdxx"]

    def allowed(form, text):
        row = form([7, *text.encode()], torch.zeros(VOCAB))
        return tuple(i for i in range(VOCAB) if row[i] > -math.inf), form.complete([7, *text.encode()])

    fresh = {text: allowed(compiled.of(1), text) for text in texts}
    assert fresh[""] == ((ord("a"), ord("c")), False)
    assert fresh["ab"][0] == tuple(sorted(map(ord, "acx")))
    assert fresh["abx"] == ((256,), True)
    assert len(fresh["q"][0]) == VOCAB  # behind what is refused nothing is masked
    one = compiled.of(1)
    for text in [*texts, *reversed(texts), *sorted(texts), *texts]:
        assert allowed(one, text) == fresh[text], text


def test_a_hugging_face_tokenizer(tiny_qwen3_dir):
    """Byte-level BPE with special tokens and a padded vocabulary: the answer is JSON."""
    from forerun.engine import Engine

    with Site(lambda: Engine.load(str(tiny_qwen3_dir))) as site:
        for seed in range(3):
            fields = {"prompt": "json:", "guided_json": SCHEMA, "max_tokens": 200, "seed": seed}
            [choice] = site.complete(**fields)["choices"]
            if choice["finish_reason"] == "stop":
                assert json.loads(choice["text"])["name"] in ("ada", "grace")
            assert choice["text"].lstrip().startswith("{")
