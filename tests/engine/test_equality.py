"""Whatever drafts, however many and beside whom: the engine emits what plain decoding emits."""

from __future__ import annotations

import itertools

import pytest
from conftest import engine_of, plain

from forerun import Sampling
from forerun.drafters.fake import Coin, Never, Oracle, Shift
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.target.table import history_model, position_model

PROMPTS = [[1, 2, 3], [4], [0, 5, 5, 2, 1, 6, 3, 3, 2, 1, 0, 4, 4, 5, 6, 1, 2, 3, 0], [6, 6]]


def _drafter(kind, known, vocab_size):
    return {
        "oracle": lambda: Oracle(known),
        "never": lambda: Never(known, vocab_size),
        "coin": lambda: Coin(known, vocab_size, 0.6),
        "shift": lambda: Shift(known),
        "ngram": lambda: Ngram(prompt_lookup_min=1, prompt_lookup_max=3),
        "small": lambda: Small(history_model(vocab_size, seed=3), vocab_size),
        "other small": lambda: Small(position_model(vocab_size, seed=8), vocab_size),
    }[kind]()


KINDS = ["oracle", "never", "coin", "shift", "ngram", "small", "other small"]


@pytest.mark.parametrize(("kind", "k"), list(itertools.product(KINDS, [1, 2, 5])))
def test_greedy_output_is_that_of_plain_decoding(kind, k):
    """Every drafter, K and batch-mate: the greedy ids are the reference's; the books balance."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0, max_tokens=23)
    known = plain(target, PROMPTS, sampling)
    engine = engine_of(target, _drafter(kind, known, 7), num_speculative_tokens=k)
    for completion, prompt in zip(engine.generate(PROMPTS, sampling), PROMPTS, strict=True):
        assert completion.token_ids == known[tuple(prompt)]
        assert completion.finish_reason == "length"
        stats = completion.stats
        assert 1 + stats.emitted - stats.discarded == len(completion.token_ids)
    engine.audit()
    assert engine.core.pool.used == 0


@pytest.mark.parametrize(("kind", "k"), list(itertools.product(["ngram", "small", "other small"], [1, 4])))
def test_coupled_output_is_that_of_plain_decoding_at_any_temperature(kind, k):
    """Coupled mode: one seed gives one text, with any drafter and K and with none."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0.9, max_tokens=23, seed=11)
    known = plain(target, PROMPTS, sampling, "coupled")
    engine = engine_of(target, _drafter(kind, known, 7), num_speculative_tokens=k, verify_mode="coupled")
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == list(known.values())
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling, speculative=False)] == list(known.values())


def test_the_oracle_is_always_accepted_and_never_is_not():
    """Accepted length K + 1 with a perfect drafter, 1 with one that is always wrong."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0, max_tokens=25)
    known = plain(target, PROMPTS, sampling)
    best = engine_of(target, Oracle(known), num_speculative_tokens=3).generate(PROMPTS, sampling)
    assert all(c.stats.mean_accepted_length == 4 for c in best)
    worst = engine_of(target, Never(known, 7), num_speculative_tokens=3).generate(PROMPTS, sampling)
    assert all(c.stats.mean_accepted_length == 1 and not any(c.from_draft) for c in worst)
