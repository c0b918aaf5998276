"""The prefix cache as clients and operators see it: what was spared is told, and who shares with whom can be said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.kit import Site, engine, noisy_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "a prompt that fills more than three blocks of sixteen tokens."
"""61 tokens: three blocks, and a rest that is computed."""
FIELDS = {"prompt": LONG, "max_tokens": 6, "temperature": 0}


def _cached(body) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def fresh() -> Iterator[Site]:
    with Site(noisy_engine, timings=True) as site:
        yield site
        site.settle()


def test_what_a_request_was_spared_is_told(fresh):
    """usage, timings, counters in tokens: three blocks of sixteen, and the answer is the same."""
    cold, hit = fresh.complete(**FIELDS), fresh.complete(**FIELDS)
    assert (_cached(cold), _cached(hit)) == (0, 48)
    assert hit["choices"][0]["text"] == cold["choices"][0]["text"]
    assert hit["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"] == 61
    assert (hit["timings"]["cache_n"], hit["timings"]["prompt_n"]) == (48, 13)
    assert (cold["timings"]["cache_n"], cold["timings"]["prompt_n"]) == (0, 61)
    assert fresh.metric("forerun:prefix_cache_queries_total") == 122
    assert fresh.metric("forerun:prefix_cache_hits_total") == 48
    assert fresh.metric("forerun:prompt_tokens_total") == 61 + 13
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert _cached(fresh.post(COMPLETIONS, {**FIELDS, **options}).events[-1]) == 48


def test_drafts_are_accepted_behind_a_hit_as_in_a_cold_run(fresh):
    """Both drafters go on from what was kept: verified and accepted tokens are the same."""
    cold, hit = (fresh.complete(**{**FIELDS, "max_tokens": 40}) for _ in range(2))
    assert _cached(hit) == 48
    assert hit["metrics"] == cold["metrics"]
    assert cold["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_several_answers_of_one_prompt(fresh):
    """A prompt counts once in usage, so what was spared counts once too; several prompts add up."""
    fresh.complete(**FIELDS)
    assert _cached(fresh.complete(**{**FIELDS, "n": 3})) == 48
    assert _cached(fresh.complete(**{**FIELDS, "prompt": [LONG, LONG, "short"]})) == 96


def test_salts_keep_requests_apart(fresh):
    """cache_salt: only the same one finds what is there, none being one of its own."""
    assert _cached(fresh.complete(**FIELDS)) == 0
    assert _cached(fresh.complete(**FIELDS, cache_salt="mine")) == 0
    assert _cached(fresh.complete(**FIELDS, cache_salt="mine")) == 48
    assert _cached(fresh.complete(**FIELDS, cache_salt="yours")) == 0
    assert _cached(fresh.complete(**FIELDS)) == 48
    chat = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "cache_salt": "mine"}
    assert [_cached(fresh.chat(**chat)) for _ in range(2)] == [0, 64]


@pytest.mark.parametrize("apart", [False, True])
def test_keys_can_keep_requests_apart(apart):
    """--salt-cache-per-key: what came with one key is not found with another, whatever their salts; else it is."""
    with Site(noisy_engine, api_key=("first", "second"), salt_cache_per_key=apart) as site:

        def asked(key: str, **more: str) -> int:
            return _cached(site.post(COMPLETIONS, {**FIELDS, **more}, authorization=f"Bearer {key}").json)

        assert asked("first") == 0
        assert asked("first") == 48
        assert asked("second") == (0 if apart else 48)
        assert asked("second") == 48
        assert asked("first", cache_salt="s") == 0
        assert asked("second", cache_salt="s") == (0 if apart else 48)


def test_scores_of_a_prompt_are_computed_whole(fresh):
    """echo with log-probabilities needs every row: the same values cold and behind a hit."""
    asked = {**FIELDS, "echo": True, "logprobs": 1}
    cold, hit = (fresh.complete(**asked)["choices"][0]["logprobs"] for _ in range(2))
    assert hit == cold
    assert len(cold["token_logprobs"]) == 61 + 6


def test_it_can_be_switched_off():
    """--no-enable-prefix-caching: nothing is looked up."""
    with Site(lambda: engine(enable_prefix_caching=False)) as site:
        assert [_cached(site.complete(**FIELDS)) for _ in range(2)] == [0, 0]
        assert site.metric("forerun:prefix_cache_queries_total") == 0
        assert site.get("/server_info").json["engine"]["enable_prefix_caching"] is False
