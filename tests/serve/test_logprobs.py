"""Log-probabilities in both modes: of the target's untouched logits, or of the very law that tokens were drawn from."""

from __future__ import annotations

import math

import pytest

from engine.conftest import KINDS, PROMPTS, drafter_of, engine_of, plain
from forerun import Sampling
from forerun.errors import OptionError
from forerun.sampling import Row
from forerun.serve.tokens import TokenText
from forerun.target.table import TableTarget, history_model
from laws import naive
from laws.pairwise import pairwise
from serve.kit import Site, joined, noisy_engine

V, END = 7, 6
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

OPTIONS: dict[str, dict[str, object]] = {
    "as it is": {},
    "warm": {"temperature": 0.7},
    "greedy": {"temperature": 0},
    "filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {2: 3.0, 5: -4.0}},
    "few": {"allowed_token_ids": [0, 1, 4, END]},
    "words": {"bad_words": [[1], [3, 2]]},
    "long": {"min_tokens": 8, "stop_token_ids": [3]},
}


def _target() -> TableTarget:
    return history_model(V, seed=3, eos_token_ids=[END])


def _expected(done, sampling: Sampling) -> list[list[float]]:
    """By position, the log-probability of every id: from one forward pass over the whole prefix each, in Python."""
    found, prompt = [], done.prompt_token_ids
    ends = frozenset({END, *sampling.stop_token_ids})
    for place in range(len(done.token_ids)):
        before = [*prompt, *done.token_ids[:place]]
        logits = list(_target()._logits(before))
        if sampling.logprobs_mode == RAW:
            law = naive.law(logits, Row(Sampling(), before, len(prompt)))
        else:
            law = naive.law(logits, Row(sampling, before, len(prompt), (), ends))
        found.append([math.log(p) if p > 0 else -math.inf for p in law])
    return found


CASES = pairwise(
    {"drafter": KINDS, "options": list(OPTIONS), "mode": ["rejection", "coupled"], "logprobs": [RAW, PROCESSED]}
)
CASES += [
    {"drafter": "oracle", "options": options, "mode": "coupled", "logprobs": PROCESSED}
    for options in ("penalties", "words", "long")
]
"""Pairs, and with accepted drafts what makes the law of a place depend on the drafts before it."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_lp_1_log_probabilities_are_those_of_the_mode(case):
    """K = 4, drafts of all kinds: each value is that of a plain forward over the same ids, to 1e-9, before or behind
    all masks, penalties, temperature and filters; lists are sorted, hold what can be drawn and the token itself; and
    where a seed gives one text the ids are the reference decoder's.

    https://github.com/vllm-project/vllm/issues/34497, https://github.com/vllm-project/vllm/issues/17876,
    https://github.com/ggml-org/llama.cpp/issues/27972, https://github.com/ggml-org/llama.cpp/pull/27196,
    https://github.com/Pushkinist/rMLX/issues/542
    """
    fields = {"max_tokens": 14, "seed": 4, "logprobs": 3, "logprobs_mode": case["logprobs"], **OPTIONS[case["options"]]}
    sampling, target = Sampling(**fields), _target()
    known = plain(target, PROMPTS, sampling, case["mode"])
    engine = engine_of(target, drafter_of(case["drafter"], known, V), verify_mode=case["mode"])
    results = engine.generate(PROMPTS, sampling)
    if case["mode"] == "coupled" or sampling.greedy:
        assert [done.token_ids for done in results] == list(known.values())
    if case["drafter"] == "oracle" and case["mode"] == "coupled":
        assert sum(done.stats.accepted for done in results) == sum(done.stats.verified for done in results) > 9
    for done in results:
        expected = _expected(done, sampling)
        assert [entry.token_id for entry in done.logprobs] == done.token_ids
        for entry, row in zip(done.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-9)
            ranked = sorted((i for i in range(V) if row[i] > -math.inf), key=lambda i: (-row[i], i))
            wanted = ranked[:3] + [i for i in [entry.token_id] if i not in ranked[:3]]
            assert [i for i, _ in entry.top] == wanted
            assert [value for _, value in entry.top] == pytest.approx([row[i] for i in wanted], abs=1e-9)


def test_an_unknown_mode_is_refused():
    """By name, with those there are."""
    with pytest.raises(OptionError, match="logprobs_mode: must be one of raw_logprobs, processed_logprobs"):
        Sampling(logprobs_mode="processed_logits")


# --------------------------------------------------------------------------------------------------- through the server


@pytest.fixture(scope="module")
def processed():
    with Site(noisy_engine, logprobs_mode=PROCESSED) as site:
        yield site


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_processed_ones_are_the_same_with_drafts_and_without(processed, path):
    """--logprobs-mode processed_logprobs, streamed and whole: bit by bit those of plain decoding."""
    asked = {"logprobs": 4, "prompt": "abcabc"} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 4}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": "abcabc"}]
    asked |= {"temperature": 0.8, "top_k": 9, "repetition_penalty": 1.2, "max_tokens": 24, "seed": 5}
    asked |= {"verify_mode": "coupled", "ignore_eos": True}
    drafted, plainly = (processed.post(path, {**asked, **more}).json for more in ({}, {"speculative": False}))
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    found = drafted["choices"][0]["logprobs"]
    assert found == plainly["choices"][0]["logprobs"]
    assert joined(processed.post(path, {**asked, "stream": True}).events)["logprobs"] == found


def test_a_greedy_token_is_certain(processed, site):
    """Behind temperature 0 nothing else can come; raw log-probabilities know what might have."""
    asked = {"prompt": "abcabc", "temperature": 0, "max_tokens": 8, "logprobs": 3}
    certain = processed.complete(**asked)["choices"][0]["logprobs"]
    raw = site.complete(**asked)["choices"][0]["logprobs"]
    assert certain["tokens"] == raw["tokens"]
    assert certain["token_logprobs"] == [0.0] * 8
    assert all(len(top) == 1 for top in certain["top_logprobs"])
    assert all(value < 0 for value in raw["token_logprobs"])


def test_a_prompt_is_scored_raw_in_either_mode(processed, site):
    """Nothing was drawn there: echo and prompt_logprobs are of the untouched logits."""
    asked = {"prompt": "abcabc", "echo": True, "logprobs": 2, "temperature": 0.3, "max_tokens": 2, "seed": 1}
    ours, raw = (one.complete(**asked)["choices"][0]["logprobs"] for one in (processed, site))
    assert ours["token_logprobs"][:6] == raw["token_logprobs"][:6]
    assert ours["token_logprobs"][6:] != raw["token_logprobs"][6:]
    scores = {"prompt": "abcabc", "prompt_logprobs": 1, "max_tokens": 1}
    assert len({str(one.complete(**scores)["choices"][0]["prompt_logprobs"]) for one in (processed, site)}) == 1


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (["\u0120the", "caf\u00c3\u00a9", "\u0120"], [" the", "caf\u00e9", " "]),  # GPT-2's letters for bytes
        (
            ["\u2581the", "caf\u00e9", "\u2581", "\u0120"],
            [" the", "caf\u00e9", " ", "\u0120"],
        ),  # sentencepiece, all letters
    ],
    ids=["byte-level", "sentencepiece"],
)
def test_letters_stand_for_bytes_where_a_space_is_one(pieces, texts):
    """A large vocabulary of whole characters has the letter that GPT-2 writes for a space too: as itself."""

    class Vocabulary:
        special_ids = frozenset()

        def vocabulary(self):
            return {piece: i for i, piece in enumerate(pieces)}

    tokens = TokenText(Vocabulary())
    assert [tokens.bytes_of(i) for i in range(len(pieces))] == [text.encode() for text in texts]
