"""Every option of a request means the same with a drafter and without, streamed or whole, alone or in a batch.

The matrix is made of the schemas: a field that is added to them and not put into `VALUES` fails the first test here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from drafters.kinds import drafting
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.target.table import PLAIN_TEMPLATE, ByteTokenizer
from laws.pairwise import Case, pairwise, product
from serve.kit import VOCAB, Call, Reply, Site, ascii_model, counted, engine, joined, running
from serve.options import ALPHABET, CASES, CHAT, COMPLETIONS, ELSEWHERE, VALUES, endpoint, fields_of, request_with

WITHOUT_EFFECT = {
    "max_completion_tokens", "top_logprobs", "reasoning_effort", "chat_template_kwargs", "documents",  # of a chat
    "seed", "skip_special_tokens", "add_special_tokens", "include_stop_str_in_output", "timings_per_token",
    "speculative",
}  # fmt: skip
"""Options that change nothing in this model's completions, or not the tokens."""

DRAFTERS = ["vanilla", "ngram", "small", "dspark"]
TEMPLATE = "{{ documents[0].text if documents }}{{ '~' if enable_thinking is false }}" + PLAIN_TEMPLATE


def test_no_field_is_forgotten():
    """Each field of both schemas is in the matrix or says where else it is tested, not both, and no other is."""
    assert {*fields_of(CHAT), *fields_of(COMPLETIONS)} == {*VALUES, *ELSEWHERE}
    assert not VALUES.keys() & ELSEWHERE.keys()


def _make(kind: str):
    # Few letters and nearly as likely: every filter, penalty and stop has something to change.
    flat = {"eos_level": 1, "gap": 0.25, "alphabet": ALPHABET, "tokenizer": ByteTokenizer(TEMPLATE)}
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
    with running({kind: partial(_make, kind) for kind in DRAFTERS}) as sites:
        yield sites


# A seed, and the rule under which it gives one text whatever is drafted.
BASE = {"max_tokens": 18, "seed": 21, "temperature": 0.9, "verify_mode": "coupled"}

MATES = [
    {"prompt": "other", "temperature": 1.2, "top_k": 3, "seed": 5, "max_tokens": 25},
    {"prompt": "third" * 9, "repetition_penalty": 1.5, "seed": 6, "max_tokens": 14, "stream": True},
]
"""In rejection mode, in every batch."""

Answer = dict[str, object]


def _request(case: Case) -> tuple[str, dict[str, object]]:
    """Where it goes, and what."""
    option, index = case["option"]
    path = endpoint(option, case["path"])
    return path, request_with(option, VALUES[option][index], path, **BASE)


def _call(site: Site, path: str, fields: dict[str, object], stream: bool) -> Call:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return site.call("POST", path, {**fields, **more})


def _seen(reply: Reply, path: str, fields: dict[str, object], stream: bool) -> Answer:
    """What a client sees of all choices, streamed or not."""
    assert reply.status == 200, reply.body
    if stream:
        *events, last = reply.events
        choices = [joined(events, i) for i in range(fields.get("n", 1))]
        usage, texts = last["usage"], [c["text" if path == COMPLETIONS else "content"] for c in choices]
    else:
        choices, usage = reply.json["choices"], reply.json["usage"]
        texts = [c["text"] if path == COMPLETIONS else c["message"]["content"] for c in choices]
    return {
        "usage": counted(usage),
        "texts": texts,
        "ids": [c.get("token_ids") or None for c in choices],
        **{name: [c[name] for c in choices] for name in ("finish_reason", "stop_reason", "logprobs", "seed")},
    }


_PLAIN: dict[str, Answer] = {}


def _plain(sites: dict[str, Site], path: str, fields: dict[str, object]) -> Answer:
    """The answer of plain decoding, alone and whole; each is made once."""
    key = json.dumps([path, fields])
    if key not in _PLAIN:
        asked = {**fields, "speculative": False}
        _PLAIN[key] = _seen(sites["vanilla"].post(path, asked), path, asked, stream=False)
    return _PLAIN[key]


def _hold(sites: dict[str, Site], drafter: str, cases: Sequence[Case]) -> None:
    """Each of these cases, in one batch with two more if they are several, is as plain decoding alone."""
    site, requests = sites[drafter], [_request(case) for case in cases]
    calls = [_call(site, *request, case["stream"]) for request, case in zip(requests, cases, strict=True)]
    mates = [site.call("POST", COMPLETIONS, mate) for mate in MATES] if len(cases) > 1 else []
    replies = site.together([*calls, *mates])
    assert all(reply.status == 200 for reply in replies)
    for reply, (path, fields), case in zip(replies, requests, cases, strict=False):
        assert _seen(reply, path, fields, case["stream"]) == _plain(sites, path, fields), case


FACTORS = {
    "option": CASES,
    "drafter": DRAFTERS,
    "stream": [False, True],
    "batch": ["alone", "mixed"],
    "path": [COMPLETIONS, CHAT],
}
PAIRS = pairwise(FACTORS)
BATCH = 6


def _batches(cases: Sequence[Case]) -> list[list[Case]]:
    """Parts of six; the last one is filled up from the front."""
    made = [list(cases[start : start + BATCH]) for start in range(0, len(cases), BATCH)]
    made[-1] += cases[: BATCH - len(made[-1])]
    return made


def _name(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", [case for case in PAIRS if case["batch"] == "alone"], ids=_name)
def test_every_option_means_the_same(sites, case):
    """Each pair of (option, drafter, streamed or whole, alone or among eight, endpoint) occurs in some case, here or in
    the test below: text, ids, reasons, log-probabilities, seeds and usage are those of plain decoding, bit by bit
    (float64, coupled)."""
    _hold(sites, case["drafter"], [case])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_option_means_the_same_among_eight(sites, drafter):
    """Six different options at once, some streamed, beside two requests in rejection mode: each as if it were alone
    and plain."""
    for batch in _batches([c for c in PAIRS if (c["batch"], c["drafter"]) == ("mixed", drafter)]):
        _hold(sites, drafter, batch)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch", FACTORS["batch"])
def test_every_option_with_everything(sites, drafter, batch):
    """The full product of the factors."""
    cases = product({name: FACTORS[name] for name in ("option", "stream", "path")})
    for group in _batches(cases) if batch == "mixed" else [[case] for case in cases]:
        _hold(sites, drafter, group)


def test_the_options_have_an_effect(sites):
    """What the matrix compares is not the same text over and over: each option changes it for some seed."""

    def seen(option: str, value: object, seed: int) -> Answer:
        fields = {**request_with(option, value, COMPLETIONS, **BASE), "seed": seed}
        return _plain(sites, COMPLETIONS, fields)

    known, seeds, changed = fields_of(COMPLETIONS), range(21, 26), set()
    base = {seed: seen("seed", seed, seed) for seed in seeds}
    for option, index in CASES:
        if option in known and any(seen(option, VALUES[option][index], seed) != base[seed] for seed in seeds):
            changed.add(option)
    without = {option for option, _ in CASES} - changed
    assert without <= WITHOUT_EFFECT, without - WITHOUT_EFFECT


def test_fields_without_effect(sites):
    """Accepted, and the tokens are the same."""
    fields = request_with("seed", 21, COMPLETIONS, **BASE)
    base = _plain(sites, COMPLETIONS, fields)
    extra = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "reasoning_effort": "high", "cache_salt": "c",
    }  # fmt: skip
    for name, value in extra.items():
        asked = {**fields, name: value}
        assert _seen(sites["small"].post(COMPLETIONS, asked), COMPLETIONS, asked, False) == base, name


def test_drafters_drafted(sites):
    """The matrix would prove nothing if nothing had been drafted or nothing accepted."""
    for kind, mode in itertools.product(DRAFTERS[1:], ("rejection", "coupled")):
        before = sites[kind].metric("forerun:spec_decode_verified_tokens_total")
        sites[kind].complete(
            prompt="abab" * 6, temperature=0.5, seed=1, max_tokens=60, verify_mode=mode, ignore_eos=True
        )
        assert sites[kind].metric("forerun:spec_decode_verified_tokens_total") > before, kind
    assert sites["small"].metric("forerun:spec_decode_accepted_tokens_total") > 50
