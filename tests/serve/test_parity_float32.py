"""Coupled answers of a real transformer in float32 are the plain ones, token by token, whatever drafts.

`test_parity.py` shows it bit by bit over exact float64 models. Here rows of one pass are computed together, so that
numbers may differ by rounding: tokens must not, and log-probabilities by no more than 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.kinds import drafting
from engine.conftest import engine_of
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine
from forerun.serve.prompt import with_template
from forerun.target.load import load_target
from serve.kit import Call, Site, difference, running, seen
from serve.options import CASES, CHAT, COMPLETIONS, DRAFTERS, TEMPLATE, VALUES, endpoint, request_with

LETTERS = [97, 98, 99, 100, 32, 49]
"""Few and nearly as likely as each other under the bias: drafts are now right and now wrong."""
BASE: dict[str, Any] = {"max_tokens": 14, "seed": 22, "temperature": 0.9, "verify_mode": "coupled"}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"logprobs": 3, "temperature": 1.4}),
    (COMPLETIONS, {"temperature": 0, "logprobs": 2}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "top_p": 0.7}),
    (COMPLETIONS, {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.5, "logprobs": 1}),
    (CHAT, {"logit_bias": {"97": 4.0, "98": 3.5, "99": -6.0}, "logprobs": True}),
    (COMPLETIONS, {"allowed_token_ids": LETTERS, "n": 2, "logprobs": 1}),
    (COMPLETIONS, {"allowed_token_ids": LETTERS[:3], "seed": -3, "min_p": 0.05, "logprobs": 1}),
    (COMPLETIONS, {"prompt_logprobs": 2, "top_k": 5}),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "allowed_token_ids": LETTERS[:2], "max_tokens": 40}),
]
"""Options that touch numbers."""
TOLERANCE = 1e-4


def _make(kind: str, target_dir: Path, small_dir: Path) -> Engine:
    target = load_target(target_dir, dtype="float32", device="cpu")
    target.tokenizer = with_template(target.tokenizer, TEMPLATE)
    counts = torch.bincount(torch.tensor(LETTERS), minlength=target.vocab_size)
    letters = {"counts": counts, "draft_vocab_size": len(LETTERS)}
    drafters = {
        "vanilla": lambda: [],
        "ngram": lambda: [Ngram(prompt_lookup_min=1, prompt_lookup_max=3)],
        "small": lambda: [Small(load_target(small_dir, dtype="float32", device="cpu"), target.vocab_size)],
        "dspark": lambda: [drafting("dspark-pruned", target, **letters)],
        "dspark+lookup": lambda: [drafting("dspark-pruned copying", target, **letters)],
    }
    return engine_of(target, *drafters[kind](), max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def sites(tiny_qwen3_dir, tiny_small_dir) -> Iterator[dict[str, Site]]:
    """One server for each drafter over the same weights."""
    with running({kind: partial(_make, kind, tiny_qwen3_dir, tiny_small_dir) for kind in DRAFTERS}) as sites:
        yield sites


Asked = tuple[str, Mapping[str, Any]]


def _call(site: Site, asked: Asked, stream: bool) -> Call:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return site.call("POST", asked[0], {**asked[1], **more})


_PLAIN: dict[str, dict[str, Any]] = {}


def _plain(sites: dict[str, Site], asked: Asked) -> dict[str, Any]:
    """The answer of plain decoding, alone and whole; each is made once."""
    path, fields = asked
    if repr(asked) not in _PLAIN:
        reply = sites["vanilla"].post(path, {**fields, "speculative": False})
        _PLAIN[repr(asked)] = {**seen(reply, fields, stream=False), "prompt": _prompt_scores(reply)}
    return _PLAIN[repr(asked)]


def _prompt_scores(reply: Any) -> list[Any]:
    return [choice.get("prompt_logprobs") for choice in reply.json["choices"]]


def _hold(sites: dict[str, Site], drafter: str, asked: Sequence[Asked], streams: Sequence[bool]) -> tuple[float, float]:
    """These requests in one batch are as plain decoding alone; tokens that were drafted, and accepted."""
    site = sites[drafter]
    streams = [stream and "prompt_logprobs" not in fields for stream, (_, fields) in zip(streams, asked, strict=True)]
    before = _drafted(site)
    replies = site.in_one_batch([_call(site, *pair) for pair in zip(asked, streams, strict=True)])
    for reply, one, stream in zip(replies, asked, streams, strict=True):
        want = _plain(sites, one)
        scores = want["prompt"] if stream else _prompt_scores(reply)
        found = {**seen(reply, one[1], stream), "prompt": scores}
        assert difference(found, want, TOLERANCE) == "", one
    verified, accepted = (now - then for now, then in zip(_drafted(site), before, strict=True))
    return verified, accepted


def _drafted(site: Site) -> tuple[float, float]:
    """Tokens verified and accepted so far."""
    verified, accepted = (site.metric(f"forerun:spec_decode_{word}_tokens_total") for word in ("verified", "accepted"))
    return verified or 0, accepted or 0


def _request(path: str, fields: Mapping[str, Any]) -> Asked:
    prompt = {"messages": [{"role": "user", "content": "abab cd"}]} if path == CHAT else {"prompt": "abab cd abab c"}
    return path, {**prompt, **BASE, "return_token_ids": True, **fields}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_float32_answers_are_the_plain_ones(sites, drafter):
    """Options that touch numbers, in one batch, some of them streamed: ids, texts, reasons and usage are equal,
    log-probabilities to 1e-4; drafts were taken and refused on the way."""
    asked = [_request(*one) for one in ASKED]
    drafted, accepted = _hold(sites, drafter, asked, [index % 2 == 0 for index in range(len(asked))])
    if drafter != "vanilla":
        assert 0 < accepted < drafted


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_option_in_float32(sites, drafter, stream):
    """All values of all options, alone and among eight, at both endpoints."""
    for path in (COMPLETIONS, CHAT):
        asked = [_of_case(option, index, path) for option, index in CASES]
        for start in range(0, len(asked), 8):
            group = asked[start : start + 8]
            _hold(sites, drafter, group, [stream] * len(group))
        for one in asked:
            _hold(sites, drafter, [one], [stream])


def _of_case(option: str, index: int, path: str) -> Asked:
    path = endpoint(option, path)
    fields = request_with(option, VALUES[option][index], path, **BASE)
    return path, {"logprobs": True, "top_logprobs": 1, **fields} if path == CHAT else {"logprobs": 1, **fields}
