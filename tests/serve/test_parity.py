"""Every option of a request means the same with a drafter and without, streamed or whole, alone or in a batch.

The matrix is made of the schemas: a field that is added to them and not put into `VALUES` fails the first test here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from drafters.kinds import drafting
from forerun import Sampling
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.target.table import ByteTokenizer
from laws.pairwise import Case, pairs_of, pairwise, product
from serve.kit import VOCAB, Call, Site, ascii_model, engine, running, seen
from serve.options import (
    ALPHABET,
    CASES,
    CHAT,
    COMPLETIONS,
    DRAFTERS,
    ELSEWHERE,
    INNER_ELSEWHERE,
    TEMPLATE,
    VALUES,
    WITHOUT_EFFECT,
    endpoint,
    fields_of,
    inner_fields,
    places_in,
    request_with,
)


class Tokens(ByteTokenizer):
    """With a mark at the beginning of a text, unless it is asked for without."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *super().encode(text)]


def test_no_field_is_forgotten():
    """Each field of both schemas is in the matrix or says where else it is tested, not both, and no other is; so is
    each field of what they consist of, by its path."""
    assert {*fields_of(CHAT), *fields_of(COMPLETIONS)} == {*VALUES, *ELSEWHERE}
    assert not VALUES.keys() & ELSEWHERE.keys()
    tried = {place for option, values in VALUES.items() for value in values for place in places_in(value, option)}
    known = inner_fields(CHAT) | inner_fields(COMPLETIONS)
    assert known == (tried & known) | INNER_ELSEWHERE.keys()
    assert not tried & INNER_ELSEWHERE.keys()


WIDEST: dict[str, int] = {}
"""Drafter -> most requests of one pass of its server's target."""


def _make(kind: str):
    # Few letters and nearly as likely: every filter, penalty and stop has something to change.
    flat = {"eos_level": 3, "gap": 0.25, "alphabet": ALPHABET, "memory": 1, "tokenizer": Tokens(TEMPLATE)}
    target = ascii_model(**flat)
    letters = {"counts": torch.bincount(torch.tensor([*ALPHABET, 256])), "draft_vocab_size": len(ALPHABET) + 1}
    drafters = {
        "vanilla": lambda: [],
        "ngram": lambda: [Ngram(prompt_lookup_min=1, prompt_lookup_max=3)],
        "small": lambda: [Small(ascii_model(**flat), VOCAB)],
        "dspark": lambda: [drafting("dspark-pruned", target, **letters)],
        "dspark+lookup": lambda: [drafting("dspark-pruned copying", target, **letters)],
    }
    made, forward = engine(*drafters[kind](), target=target, max_num_batched_tokens=256), target.forward

    def counted_forward(batch, *taps):
        WIDEST[kind] = max(WIDEST.get(kind, 0), len(batch.segments))
        return forward(batch, *taps)

    target.forward = counted_forward
    return made


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    """One server for each drafter over the same target."""
    with running({kind: partial(_make, kind) for kind in DRAFTERS}) as sites:
        yield sites


# A seed, and the rule under which it gives one text whatever is drafted.
BASE = {"max_tokens": 18, "seed": 22, "temperature": 0.9, "verify_mode": "coupled"}

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


_PLAIN: dict[str, Answer] = {}


def _plain(sites: dict[str, Site], path: str, fields: dict[str, object]) -> Answer:
    """The answer of plain decoding, alone and whole; each is made once."""
    key = json.dumps([path, fields])
    if key not in _PLAIN:
        asked = {**fields, "speculative": False}
        _PLAIN[key] = seen(sites["vanilla"].post(path, asked), asked, stream=False)
    return _PLAIN[key]


def _hold(sites: dict[str, Site], drafter: str, cases: Sequence[Case]) -> None:
    """Each of these cases, in one batch with two more if they are several, is as plain decoding alone."""
    site, requests = sites[drafter], [_request(case) for case in cases]
    calls = [_call(site, *request, case["stream"]) for request, case in zip(requests, cases, strict=True)]
    mates = [site.call("POST", COMPLETIONS, mate) for mate in MATES] if len(cases) > 1 else []
    replies = site.in_one_batch([*calls, *mates])
    assert all(reply.status == 200 for reply in replies)
    for reply, (path, fields), case in zip(replies, requests, cases, strict=False):
        assert seen(reply, fields, case["stream"]) == _plain(sites, path, fields), case


FACTORS = {
    "option": CASES,
    "drafter": DRAFTERS,
    "stream": [False, True],
    "batch": ["alone", "mixed"],
    "path": [COMPLETIONS, CHAT],
}
BATCH = 6


def _pairs() -> list[Case]:
    """Every pair of values of two factors, in turn alone and among eight for each drafter: left to the covering array
    too, nearly all of the batches would be those of one drafter."""
    cases = sorted(pairwise({n: v for n, v in FACTORS.items() if n != "batch"}), key=lambda c: c["option"])
    found = []
    for number, drafter in enumerate(DRAFTERS):
        own = [case for case in cases if case["drafter"] == drafter]
        found += [{**case, "batch": FACTORS["batch"][(i + number) % 2]} for i, case in enumerate(own)]
    return found


PAIRS = _pairs()


def _batches(cases: Sequence[Case]) -> list[list[Case]]:
    """Parts of six; the last one is filled up from the front."""
    made = [list(cases[start : start + BATCH]) for start in range(0, len(cases), BATCH)]
    made[-1] += cases[: BATCH - len(made[-1])]
    return made


def _name(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def test_every_pair_is_there():
    """Of each two factors."""
    wanted = {pair for case in product(FACTORS) for pair in pairs_of(case)}
    assert {pair for case in PAIRS for pair in pairs_of(case)} == wanted
    for drafter in DRAFTERS:
        mixed = [case for case in PAIRS if (case["batch"], case["drafter"]) == ("mixed", drafter)]
        assert len(mixed) > 2 * BATCH


@pytest.mark.parametrize("case", [case for case in PAIRS if case["batch"] == "alone"], ids=_name)
def test_every_option_means_the_same(sites, case):
    """Each pair of (option, drafter, streamed or whole, alone or among eight, endpoint) occurs in some case, here or in
    the test below: text, ids, reasons, log-probabilities, seeds and usage are those of plain decoding, bit by bit
    (float64, coupled)."""
    _hold(sites, case["drafter"], [case])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_option_means_the_same_among_eight(sites, drafter):
    """Six different options at once, some streamed, beside two requests in rejection mode, in one pass of the target:
    each as if it were alone and plain."""
    WIDEST[drafter] = 0
    for batch in _batches([c for c in PAIRS if (c["batch"], c["drafter"]) == ("mixed", drafter)]):
        _hold(sites, drafter, batch)
    assert WIDEST[drafter] == BATCH + len(MATES)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch", FACTORS["batch"])
def test_every_option_with_everything(sites, drafter, batch):
    """The full product of the factors."""
    cases = product({name: FACTORS[name] for name in ("option", "stream", "path")})
    for group in _batches(cases) if batch == "mixed" else [[case] for case in cases]:
        _hold(sites, drafter, group)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_value_has_an_effect(sites, path):
    """What the matrix compares is not the same answer over and over: at each endpoint each value changes the very
    answer that is compared, against the same request without the option."""
    known, without = fields_of(path), set()
    for option, index in CASES:
        if option in known:
            fields = request_with(option, VALUES[option][index], path, **BASE)
            if _plain(sites, path, fields) == _plain(sites, path, {**fields, option: BASE.get(option)}):
                without.add((option, index))
    assert without == WITHOUT_EFFECT[path]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_asked_for_is_what_the_engine_is_asked(sites, monkeypatch, path):
    """Of an option that is wrong for all drafters alike the matrix would see nothing."""
    made, site = [], sites["vanilla"]
    start = site.engine.start
    monkeypatch.setattr(site.engine, "start", lambda requests, *more: (made.extend(requests), start(requests, *more)))
    ours = {field.name for field in dataclasses.fields(Sampling)} & {*fields_of(path)}
    assert len(ours) > 18
    for option in sorted(ours - {"logprobs"}):
        for value in VALUES[option]:
            made.clear()
            assert site.post(path, request_with(option, value, path, **BASE)).status == 200
            found = getattr(made[0].sampling, option)
            if option == "bad_words":  # texts as tokens
                assert {(97,), (98, 99), (100, 101)} <= {*found}
            else:
                assert found == (_ids(value) if option == "logit_bias" else value), option
            assert made[0].verify_mode == "coupled"


def _ids(bias: dict[str, float]) -> dict[int, float]:
    return {int(token): value for token, value in bias.items()}


def test_drafts_follow_every_option(sites):
    """A drafter that is the target itself is right at every place, whatever the option: its laws are formed as the
    target's are. One that did not follow would cost no more than speed, which nothing else here would see."""
    for option, index in CASES:
        if option == "n" or (option, VALUES[option][index]) == ("max_tokens", 1):  # told apart by none, or drafts none
            continue
        path = endpoint(option, COMPLETIONS)
        reply = sites["small"].post(path, request_with(option, VALUES[option][index], path, **BASE))
        found = reply.json["metrics"]["speculative_decoding"]
        assert 0 < found["num_accepted_draft_tokens"] == found["num_draft_tokens"], option


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
        assert seen(sites["small"].post(COMPLETIONS, asked), asked, False) == base, name


@pytest.mark.parametrize("kind", DRAFTERS[1:])
def test_drafters_drafted(sites, kind):
    """The matrix would prove nothing if nothing had been drafted, nothing accepted or, where drafts can be wrong,
    nothing refused."""
    asked = {"prompt": "abab" * 6, "temperature": 0.5, "seed": 1, "max_tokens": 60, "ignore_eos": True}
    for mode in ("rejection", "coupled"):
        found = sites[kind].complete(**asked, verify_mode=mode)["metrics"]["speculative_decoding"]
        verified, accepted = found["num_draft_tokens"], found["num_accepted_draft_tokens"]
        assert 0 < accepted <= verified
        assert (accepted < verified) == (kind != "small")
