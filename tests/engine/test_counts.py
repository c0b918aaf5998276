"""Passes, rows and counters: what a step costs, and what is reported of it."""

from __future__ import annotations

import itertools
import math

import pytest

from engine.conftest import PROMPTS, configured, drafter_of, engine_of, ids, plain
from forerun import Sampling
from forerun.drafters.base import Drafter
from forerun.drafters.fake import Never, Oracle, Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import core
from forerun.engine.stats import DecodingStats, mean_accepted_length_macro, total
from forerun.target.table import history_model

GREEDY = Sampling(temperature=0, max_tokens=21)


class Forbidden(Drafter):
    """Must never be asked."""

    name = "forbidden"

    def propose(self, views, keep_drafting):
        raise AssertionError("asked for a draft though K = 0")


@pytest.mark.parametrize("how", ["K", "table", "request", "max_draft", "min_draft", "method"])
def test_sp_2_k_0_is_plain_decoding(how):
    """K = 0 in any way: the target's passes and rows are those of plain decoding, and no drafter is asked.

    https://github.com/vllm-project/vllm/issues/49548
    """
    configs = {
        "K": {"num_speculative_tokens": 0},
        "table": {"num_speculative_tokens_per_batch_size": [[1, 64, 0]]},
        "min_draft": {"min_draft": 22, "num_speculative_tokens": 30},
    }
    asked = {"request": False, "max_draft": {"max_draft": 0}, "method": {"method": "vanilla"}}
    plainly = engine_of(history_model(7, seed=3), max_num_batched_tokens=16)
    want = plainly.generate(PROMPTS, GREEDY)
    engine = configured(history_model(7, seed=3), Forbidden(), configs.get(how, {}), max_num_batched_tokens=16)
    done = engine.generate(PROMPTS, GREEDY, speculative=asked.get(how))
    assert ids(done) == ids(want)
    assert engine.target.passes == plainly.target.passes
    assert [one.stats for one in done] == [one.stats for one in want]
    assert all(one.stats.drafter_faults == 0 and one.drafter == "vanilla" for one in done)


def test_min_draft_is_compared_with_the_k_that_is_left():
    """A planned K below `min_draft` becomes 0 before anything is drafted, also where the end of the request cut it."""
    known = plain(history_model(7, seed=3), [PROMPTS[0]], GREEDY)
    engine = configured(history_model(7, seed=3), Oracle(known), {"num_speculative_tokens": 5, "min_draft": 4})
    [done] = engine.generate([PROMPTS[0]], GREEDY)
    # 20 tokens after the first: blocks of 6, 6, 6; then 2 are left, K would be 1.
    assert (done.stats.drafted, done.stats.drafting_rounds, done.stats.target_steps) == (15, 3, 5)
    assert done.token_ids == known[tuple(PROMPTS[0])]


def test_sp_6_counters_of_a_hand_made_trace():
    """Drafted 3, 3, 3, 3, 0, verified 3, 3, 2, 0, 0, accepted 3, 0, 1, 0, 0: every rate to the last digit.

    https://github.com/sgl-project/sglang/pull/13212, https://github.com/SafeAILab/EAGLE/issues/95,
    https://github.com/SafeAILab/EAGLE/issues/153
    """
    stats = DecodingStats()
    for drafted, verified, accepted in ((3, 3, 3), (3, 3, 0), (3, 2, 1), (3, 0, 0), (0, 0, 0)):
        stats.record(drafted, verified, accepted)
    assert stats.acceptance_by_position == [2 / 3, 1 / 2, 1.0]
    assert stats.prefix_survival == [2 / 3, 1 / 3, 1 / 2]
    assert (stats.accepted, stats.verified, stats.drafted) == (4, 8, 12)
    assert (stats.draft_acceptance_rate, stats.accepted_per_drafted) == (4 / 8, 4 / 12)
    assert stats.mean_accepted_length == 2
    assert stats.tokens_per_step == 9 / 5
    assert (stats.drafting_rounds, stats.target_steps, stats.emitted) == (4, 5, 9)
    assert stats.verify_rate == (4 + 4) / (8 + 4)


def test_sp_6_rates_without_a_denominator_are_absent():
    """Nothing drafted: no rate, neither 0 nor NaN; the sum over requests adds position by position."""
    nothing = DecodingStats()
    assert set(nothing.as_dict()) == {
        "drafted", "verified", "accepted", "emitted", "discarded", "drafting_rounds", "target_steps",
        "invalid_drafts", "drafter_faults", "preemptions", "verified_by_position", "reached_by_position",
        "accepted_by_position", "acceptance_by_position", "prefix_survival", "planned", "probes", "skipped_steps",
        "predicted_accepted", "predicted_rejected", "cached_tokens", "invalid_positions",
    }  # fmt: skip
    assert mean_accepted_length_macro([nothing]) is None
    one, two = DecodingStats(), DecodingStats()
    one.record(3, 3, 2)
    two.record(1, 1, 1)
    two.record(1, 1, 0)
    both = total([one, nothing, two])
    assert both.accepted_by_position == [2, 1, 0]
    assert both.verified_by_position == [3, 1, 1]
    assert (both.accepted, both.emitted, both.target_steps) == (3, 6, 3)
    assert mean_accepted_length_macro([one, nothing, two]) == (3 + 1.5) / 2


@pytest.mark.parametrize(("make", "tau"), [(Oracle, 5.0), (Never, 1.0)])
def test_sp_6_through_the_engine(make, tau):
    """The engine's own counters: 1 + emitted - discarded = tokens, tau is 5 with the oracle and 1 with one that never
    guesses right.
    """
    known = plain(history_model(7, seed=3), PROMPTS, GREEDY)
    drafter = make(known) if make is Oracle else make(known, 7)
    done = engine_of(history_model(7, seed=3), drafter, num_speculative_tokens=4).generate(PROMPTS, GREEDY)
    for one in done:
        stats = one.stats
        assert 1 + stats.emitted - stats.discarded == len(one.token_ids)
        assert stats.emitted == stats.accepted + stats.target_steps
        assert sum(one.from_draft) == stats.accepted
        assert stats.mean_accepted_length == tau
        # Without a draft once, where one token was left.
        assert stats.drafting_rounds == stats.target_steps - (0 if tau == 5 else 1)


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_what_a_form_does_to_drafts_is_counted_in_both_modes(mode):
    """Drafts that are drawn meet the form before they are, those of a lookup when they are verified: all of the former
    are masked, and what the target's filter refuses of them is not laid to the form.
    """

    def no_three(tokens, logits):
        logits[3] = -math.inf
        return logits

    sampling = Sampling(temperature=1, top_k=2, seed=4, max_tokens=20, logits_processors=[no_three])
    for drafter, what in ((drafter_of("other small", {}, 7), "masked"), (Script(lambda view: [3]), "rejected")):
        [done] = engine_of(history_model(7, seed=3), drafter, verify_mode=mode).generate([[1, 2]], sampling)
        assert done.stats.verified > done.stats.accepted
        assert done.stats.invalid_positions == {f"grammar {what}": done.stats.verified}


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize(
    "own",
    [
        {"temperature": 0},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 1e-6},
        {"temperature": 1, "bad_words": [[5]]},
        {"temperature": 1, "allowed_token_ids": [0, 1, 2]},
    ],
    ids=lambda own: list(own)[-1],
)
def test_what_filters_refuse_is_not_laid_to_a_form(own, mode):
    """A draft of 5 under a form that forbids 3 alone: the law of 5 is 0, and the form has no part in that."""

    def no_three(tokens, logits):
        logits[3] = -math.inf
        return logits

    sampling = Sampling(**own, seed=4, max_tokens=20, logits_processors=[no_three])
    engine = engine_of(history_model(7, seed=3), Script(lambda view: [5]), verify_mode=mode)
    [done] = engine.generate([[1, 2]], sampling)
    assert done.stats.verified > done.stats.accepted
    assert done.stats.invalid_positions == {}


def test_sp_7_passes_of_a_small_draft_model():
    """Per round one target pass of K + 1 rows, K drafter passes of one row; the first has two after a full acceptance
    and the whole prompt at the beginning.

    https://github.com/feifeibear/LLMSpeculativeSampling/issues/42
    """
    target, model = history_model(7, seed=3), history_model(7, seed=3)
    engine = engine_of(target, Small(model, 7), num_speculative_tokens=4)
    engine.generate([PROMPTS[0]], GREEDY)
    assert target.passes == [3, 5, 5, 5, 5]
    assert model.passes == [4, 1, 1, 1] + [2, 1, 1, 1] * 3
    engine = engine_of(target, Small(model, 7), num_speculative_tokens=3)
    del target.passes[:], model.passes[:]
    engine.generate([PROMPTS[0]] * 4, GREEDY)
    assert target.passes == [12, *[16] * 5]  # four requests in one pass
    assert model.passes == [16, 4, 4] + [8, 4, 4] * 4


def test_several_drafters_are_asked_in_order():
    """n-gram first, then the draft model where it found nothing: never two drafts for one round, and which one drafts
    is a function of the history alone.
    """
    repeating = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    model = history_model(7, seed=3)
    both = engine_of(history_model(7, seed=3), Ngram(2), Small(model, 7), num_speculative_tokens=3)
    done = both.generate([repeating, [0]], GREEDY)
    assert ids(done) == list(plain(history_model(7, seed=3), [repeating, [0]], GREEDY).values())
    assert done[0].drafter in ("ngram+small", "small+ngram")
    alone = [both.generate([prompt], GREEDY)[0] for prompt in (repeating, [0])]
    assert [one.stats for one in alone] == [one.stats for one in done]
    assert done[0].stats.drafting_rounds <= done[0].stats.target_steps


def test_su_2_time_is_counted_per_token_and_not_per_chunk(monkeypatch):
    """One token, then runs of four every 40 ms on a fake clock: chunks are 40 ms apart, tokens are counted one by one.

    https://github.com/dstackai/dstack/issues/4225
    """
    now = [100.0]
    monkeypatch.setattr(core.time, "perf_counter", lambda: now[0])
    known = plain(history_model(7, seed=3), [PROMPTS[0]], GREEDY)
    engine = engine_of(history_model(7, seed=3), Oracle(known), num_speculative_tokens=3)
    whole = engine.target.forward

    def forward(*args):
        now[0] += 0.04
        return whole(*args)

    engine.target.forward = forward
    chunks, times = [], []
    for chunk in engine.stream([PROMPTS[0]], GREEDY):
        chunks.append(chunk)
        times.append(now[0])
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 4, 4, 4, 4]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == pytest.approx([0.04] * 5)
    done = chunks[-1].completion
    assert (times[-1] - times[0]) / (len(done.token_ids) - 1) == pytest.approx(0.01)
    assert done.seconds == pytest.approx(0.24)
    assert done.tokens_per_second == pytest.approx(21 / 0.24)


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_rate_without_time_is_absent(seconds):
    """A request that computed nothing has no tokens per second."""
    [done] = engine_of(history_model(7, seed=3)).generate([[1]], Sampling(max_tokens=seconds))
    assert (done.tokens_per_second is None) == (seconds == 0)
    assert math.isfinite(done.seconds)


@pytest.mark.parametrize("kind", ["coin", "ngram", "other small"])
def test_chunks_tell_what_was_drafted_and_refused(kind):
    """In each chunk: tokens with their origin, and the drafted ones that were refused or never reached."""
    known = plain(history_model(7, seed=3), PROMPTS, GREEDY)
    engine = engine_of(history_model(7, seed=3), drafter_of(kind, known, 7), num_speculative_tokens=4)
    chunks = list(engine.stream(PROMPTS, GREEDY))
    for index in range(4):
        own = [chunk for chunk in chunks if chunk.prompt_index == index]
        stats = own[-1].completion.stats
        assert sum(len(chunk.rejected) for chunk in own) == stats.drafted - stats.accepted
        assert sum(sum(chunk.from_draft) for chunk in own) == stats.accepted
