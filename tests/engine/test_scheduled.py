"""Scheduling in the engine, counted: passes, rows and scripted seconds, never a clock's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from budget.world import BFLOAT16, INT4, profile, serial
from drafters.kinds import drafting
from engine.conftest import PROMPTS, drafter_of, drive, idle, ids, plain, preempt_all
from engine.scheduled import Clock, Named, cycle, right, timed, watched, wrong
from forerun import Sampling
from forerun.budget.costs import ContextCost
from forerun.budget.planner import SchedulerOptions
from forerun.budget.policy import POLICIES
from forerun.budget.scheduler import Scheduler
from forerun.drafters.base import Drafter
from forerun.engine import Engine
from forerun.target.table import history_model

WARM = Sampling(temperature=0.9, top_p=0.95, max_tokens=30, seed=11)
GREEDY = Sampling(temperature=0, max_tokens=30)
CHEAP = serial(0.02, 0.02, follow=0.01)


def seconds_of(engine: Engine) -> float:
    clock = engine.core._clock
    assert isinstance(clock, Clock)
    return clock.now


# -------------------------------------------------------------------------------------- scheduling changes no output

KINDS = ["small", "other small", "ngram", "ngram+small", "never", "dspark", "ngram+dflash"]


def _drafters(kind: str, known, target) -> list[Drafter]:
    learned = ("eagle", "eagle3", "dflash", "dspark")
    return [drafting(k, target) if k in learned else drafter_of(k, known, 7) for k in kind.split("+")]


def _scheduled(kind: str, policy: str, mode: str, sampling: Sampling, curve=INT4) -> tuple[Engine, dict]:
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, sampling, "coupled" if mode == "coupled" else "rejection")
    drafters = _drafters(kind, known, target)
    costs = profile(curve, {drafter.name: CHEAP for drafter in drafters})
    options = SchedulerOptions(policy, min_predicted_gain=0.0, hysteresis=0.0, drop_after=6)
    return timed(target, drafters, costs, options, verify_mode=mode), known


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_coupled_ids_are_plain_decodings_under_every_policy(kind, policy):
    """A batch that joins late, is preempted twice and loses a request, drafted for by one or two drafters, bypassed,
    probed and with states dropped after 6 tokens: every text is plain decoding's, and the books balance."""
    engine, known = _scheduled(kind, policy, "coupled", WARM)
    requests = engine.submit(PROMPTS[:2], WARM)
    victims = engine.submit([PROMPTS[3]], WARM)

    def between(step: int) -> None:
        if step == 2:
            requests.extend(engine.submit(PROMPTS[2:], WARM))
        if step in (4, 9):
            preempt_all(engine)
        if step == 6:
            engine.cancel(victims)

    early = requests[0]
    for step in itertools.count():
        between(step)
        if not engine.step():
            break
        engine.audit()
    assert ids([engine.result(request) for request in requests]) == list(known.values())
    assert early.stats.preemptions > 0
    assert sum(request.stats.drafted for request in requests) > 0
    idle(engine)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "global"])
@pytest.mark.parametrize("kind", ["other small", "ngram+small", "dspark"])
def test_greedy_ids_are_plain_decodings_in_rejection_mode(kind, policy):
    engine, known = _scheduled(kind, policy, "rejection", GREEDY)
    assert ids(engine.generate(PROMPTS, GREEDY)) == list(known.values())
    idle(engine)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("fixed", "global")])
def test_the_policies_do_choose(policy):
    """The control of the two above: under these costs the lengths planned and verified do vary."""
    engine, _ = _scheduled("ngram+small", policy, "coupled", WARM)
    reports = watched(engine)
    engine.generate(PROMPTS, WARM)
    assert len({report.plan.k for report in reports}) > 1
    if policy in ("prefix", "delayed"):
        assert any(report.verified < len(report.draft.tokens) for report in reports)


def test_a_seed_repeats_under_fixed_whoever_shares_the_batch():
    """Policy `fixed` over a profile adapts to nothing: rejection mode, alone and in a batch, the same ids."""
    alone = _scheduled("other small", "fixed", "rejection", WARM)[0].generate([PROMPTS[0]], WARM)
    together = _scheduled("other small", "fixed", "rejection", WARM)[0].generate(PROMPTS, WARM)
    assert alone[0].token_ids == together[0].token_ids
    assert alone[0].stats == together[0].stats


# --------------------------------------------------------------------------------------------------- never much slower


def tokens_of(engine: Engine, requests: int, tokens: int) -> Sequence:
    return engine.generate([[i % 7] for i in range(requests)], Sampling(temperature=0, max_tokens=tokens))


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("confidence", [None, 0.95])
def test_sp_2_an_always_wrong_drafter_is_bypassed_and_its_cost_is_bounded(requests, confidence):
    """https://github.com/vllm-project/vllm/issues/49548: a drafter that is never right, or also sure of itself.
    Behind the first 40 rounds at most 2 % of the time is lost; without a probe no drafter is called and the target has
    the rows of plain decoding."""
    drafter = Named("script", wrong, confidence)
    engine = timed(cycle(), [drafter], profile(BFLOAT16, {"script": serial(0.1, 0.1)}))
    reports = watched(engine)
    done = tokens_of(engine, requests, 400)
    assert all(one.token_ids == [(i % 7 + 1 + j) % 7 for j in range(400)] for i, one in enumerate(done))
    steps = list(_by_step(reports, requests))
    plainly = BFLOAT16[1] if requests == 1 else BFLOAT16[4]
    late = steps[40:]
    assert sum(len(r.draft.tokens) > 0 for step in late for r in step) == sum(r.plan.probe for s in late for r in s)
    assert len(drafter.asked) < 40 + 10
    assert seconds_of(engine) < 1.02 * plainly * 400 + 40 * 0.5 * plainly
    assert set(done[0].stats.skipped_steps) <= {"gain", "batch", "request"}
    for passes, step in zip(engine.target.passes[41:], late, strict=False):
        assert passes == len(step) + sum(r.verified for r in step)


def _by_step(reports, requests: int):
    """Reports of each step, while no request has ended."""
    for start in range(0, len(reports) - len(reports) % requests, requests):
        yield reports[start : start + requests]


def test_sp_2_where_rows_are_dear_the_whole_batch_decodes_plainly():
    """A row costs more than a token is worth: not even perfect drafts would pay, so nothing is ever drafted. Target
    passes and rows are plain decoding's, no drafter is called."""
    curve = {1: 1.0, 2: 4.0, 3: 6.5, 4: 9.0, 8: 20.0, 16: 44.0}
    drafter = Named("script", right)
    engine = timed(cycle(), [drafter], profile(curve, {"script": serial(0.05)}), config={"num_speculative_tokens": 2})
    done = tokens_of(engine, 3, 60)
    plainly = timed(cycle(), [], profile(curve, {}))
    tokens_of(plainly, 3, 60)
    assert engine.target.passes == plainly.target.passes
    assert seconds_of(engine) == seconds_of(plainly)
    assert drafter.asked == []
    assert all(sum(one.stats.skipped_steps.values()) == one.stats.target_steps for one in done)


FALLING = {1: 1.0, 8: 1.02, 12: 1.1, 13: 2.2, 16: 3.0, 24: 4.5, 48: 9.0, 96: 18.0}
"""Rows are free up to 12 and dear behind."""


def test_sp_3_drafting_comes_back_when_the_load_falls():
    """SP-3: twelve requests fill the free rows, so nothing is drafted, by reason of the batch. When eleven of them have
    ended the last one drafts again and its drafts are accepted.

    https://github.com/vllm-project/vllm/issues/42505
    """
    engine = timed(
        cycle(), [Named("script", right, confidence=0.9)], profile(FALLING, {"script": serial(0.05, 0.01)}),
        config={"num_speculative_tokens": 5},
    )  # fmt: skip
    reports = watched(engine)
    lengths = [60] * 11 + [240]
    samplings = [Sampling(temperature=0, max_tokens=n) for n in lengths]
    done = engine.generate([[i % 7] for i in range(12)], samplings)
    full = [r for r in reports if r.length < 50 and not r.plan.probe]
    assert sum(r.plan.k for r in full[len(full) // 2 :]) == 0
    stats = done[-1].stats
    assert stats.skipped_steps["batch"] > 20
    late = [r for r in reports if r.request.id == reports[-1].request.id and r.length > 120]
    assert sum(1 + r.accepted for r in late) / len(late) > 4
    assert late[0].drafter == "script"


def test_sp_3_a_rising_load_ends_it():
    """SP-3: one request drafts; eleven join: within a few steps nothing is drafted, no step is slower than plain by
    more than a tenth, and all texts are right."""
    engine = timed(
        cycle(), [Named("script", right)], profile(FALLING, {"script": serial(0.05, 0.01)}),
        config={"num_speculative_tokens": 5},
    )  # fmt: skip
    reports = watched(engine)
    first = engine.submit([[0]], Sampling(temperature=0, max_tokens=200))
    for _ in range(12):
        engine.step()
    assert reports[-1].plan.k > 0
    rest = engine.submit([[i % 7] for i in range(11)], Sampling(temperature=0, max_tokens=60))
    for _ in range(4):
        engine.step()
    before, start = len(reports), seconds_of(engine)
    for _ in range(20):
        engine.step()
    joined = reports[before:]
    assert len(joined) == 20 * 12
    assert sum(r.plan.k > 0 and not r.plan.probe for r in joined) == 0
    assert seconds_of(engine) - start < 1.1 * 20 * FALLING[12]
    drive(engine, [*first, *rest])
    idle(engine)


def test_sp_4_drafts_get_shorter_and_end_as_the_context_grows():
    """https://github.com/vllm-project/vllm/issues/54691: rows and drafts that cost more behind a longer context, and
    three tokens of four right: K falls to 0 within one request, by reason of the context."""
    wrong_at = {place for place in range(600) if random.Random(place).random() < 0.25}
    far = ContextCost((16, 416), (0.0, 1.5), (0.0, 1.5))
    costs = profile(BFLOAT16, {"script": serial(0.05, 0.05, context=far)}, far)

    def mostly(view):
        good = right(view)
        return [(token + (len(view.tokens) + j in wrong_at)) % 7 for j, token in enumerate(good)]

    engine = timed(cycle(), [Named("script", mostly)], costs, config={"num_speculative_tokens": 4})
    reports = watched(engine)
    [done] = tokens_of(engine, 1, 500)
    early = [r.plan.k for r in reports if 20 < r.length < 60 and not r.plan.probe]
    late = [r for r in reports[-60:] if not r.plan.probe]
    assert sum(early) / len(early) > 1
    assert sum(r.plan.k for r in late) == 0
    assert done.stats.skipped_steps["context"] > 40


def test_sp_7_what_is_cut_is_not_fed():
    """https://github.com/feifeibear/LLMSpeculativeSampling/issues/42: under `prefix` on dear rows the target's pass has
    the anchors and the chosen drafts, nothing else, step by step."""
    costs = profile(INT4, {"small": CHEAP})
    target = history_model(7, seed=3)
    engine = timed(
        target, [drafter_of("small", {}, 7)], costs, SchedulerOptions("prefix", min_predicted_gain=0.0),
        verify_mode="coupled", config={"num_speculative_tokens": 5},
    )  # fmt: skip
    rows: list[int] = []
    reports = watched(engine)
    requests = engine.submit(PROMPTS[:2], WARM)
    engine.step()
    target.passes.clear()
    while engine.step():
        rows.append(len(reports) + sum(r.verified for r in reports))
        reports.clear()
    rows.append(len(reports) + sum(r.verified for r in reports))
    assert target.passes == rows
    assert all(request.stats.verified <= request.stats.drafted for request in requests)


# ---------------------------------------------------------------------------------------------------------- the choice


def test_the_drafter_that_is_right_is_chosen():
    """Two drafters of equal cost, the first never right: after some rounds the second drafts, the first is only probed,
    and the text comes three times as fast as plainly."""
    bad, good = Named("bad", wrong), Named("good", right)
    costs = profile(BFLOAT16, {"bad": serial(0.05), "good": serial(0.05)})
    engine = timed(cycle(), [bad, good], costs, config={"num_speculative_tokens": 4})
    reports = watched(engine)
    [done] = tokens_of(engine, 1, 600)
    late = [r for r in reports if r.length > 200]
    assert sum(r.drafter == "bad" for r in late) <= sum(r.plan.probe for r in late) <= 0.1 * len(late)
    assert seconds_of(engine) < 600 / 3
    assert set(done.drafter.split("+")) == {"bad", "good"}


def test_times_that_differ_from_the_profile_are_learnt():
    """Passes and drafting calls take twice what the profile says: within 150 rounds the scheduler believes it, of the
    rows it has seen, and believes it of both."""
    said = profile({1: 1.0, 2: 1.01, 8: 1.05}, {"script": serial(0.02)})
    truth = profile({1: 2.0, 2: 2.02, 8: 2.1}, {"script": serial(0.04)})
    engine = timed(cycle(), [Named("script", right)], truth, Scheduler(said), {"num_speculative_tokens": 3})
    tokens_of(engine, 1, 600)
    learnt = engine.core.schedule.scheduler.profile
    assert learnt.verify.tokens(4) == pytest.approx(truth.verify.tokens(4), rel=0.05)
    assert learnt.drafts["script"](1, 3) == pytest.approx(truth.drafts["script"](1, 3), rel=0.05)


def test_the_clock_is_the_one_given():
    """Seconds of a completion are those of the engine's clock."""
    engine = timed(cycle(), [], profile({1: 2.0, 8: 2.0}, {}))
    [done] = tokens_of(engine, 1, 5)
    assert done.seconds == pytest.approx(10.0)
