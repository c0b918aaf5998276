"""What the loop asks the scheduler, what it does with the answers, and what it tells it afterwards."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from budget.world import BFLOAT16, profile, serial
from drafters.kinds import SETTINGS, drafting
from engine.conftest import PROMPTS, bytes_for, drafter_of, drive, idle, ids, plain, preempt_all
from engine.scheduled import Named, Spy, cycle, engine_with, right, timed, watched, wrong
from forerun import Sampling
from forerun.budget.bypass import Reason
from forerun.budget.planning import Choice, Plan
from forerun.drafters.base import Draft, Drafter
from forerun.drafters.fake import Oracle
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine.schedule import Scheduling
from forerun.target.table import history_model, position_model

GREEDY = Sampling(temperature=0, max_tokens=21)
WARM = Sampling(temperature=0.9, max_tokens=21, seed=11)


def spied(spy: Spy, *drafters: Drafter, config=None, target=None, **options):
    return engine_with(Scheduling(spy), target or history_model(7, seed=3), drafters, config, **options)


# ---------------------------------------------------------------------------------------------------- before drafting


def test_every_decoding_request_is_asked_about_once_and_before_any_drafts():
    """Each step plans all decoding requests in one call, with what each drafter may make; prefills are not among them
    and count as rows beside."""
    spy = Spy()
    engine = spied(
        spy, Ngram(1), Named("other", right), config={"num_speculative_tokens": 3}, max_num_batched_tokens=40
    )
    requests = engine.submit([PROMPTS[0], PROMPTS[1]], GREEDY)
    engine.step()
    late = engine.submit([PROMPTS[2] * 2], GREEDY)
    drive(engine, requests)
    assert [ask.request_id for ask in spy.asks[0]] == [r.id for r in requests]
    assert [[(o.drafter, o.most) for o in ask.options] for ask in spy.asks[0]] == [[("ngram", 3), ("other", 3)]] * 2
    assert [ask.context for ask in spy.asks[0]] == [4, 2]
    assert [ask.left for ask in spy.asks[0]] == [20, 20]
    assert spy.others[0] == 38  # the prompt that came in between, as far as the step has room for it
    assert spy.others[-1] == 0
    drive(engine, late)
    counts = [len(asks) for asks in spy.asks]
    assert set(counts) == {1, 2, 3}
    idle(engine)


def test_requests_that_wait_for_memory_or_a_place_are_no_load():
    """Rows of prefill are expected where something can be admitted, not for ever while the queue is stuck."""
    for limits in ({"max_num_seqs": 1}, {"kv_cache_memory_bytes": bytes_for(2, cycle())}):
        spy = Spy()
        engine = spied(spy, Named("script", right), target=cycle(), **limits)
        requests = engine.submit([[1] * 14, [2] * 14], Sampling(temperature=0, max_tokens=12))
        drive(engine, requests)
        alone = [others for asks, others in zip(spy.asks, spy.others, strict=True) if len(asks) == 1]
        assert alone
        assert set(alone) == {0}


def test_a_request_at_its_last_token_has_no_options_and_says_why():
    spy = Spy()
    engine = spied(spy, Named("script", wrong), target=cycle(), config={"num_speculative_tokens": 3})
    [done] = engine.generate([[1]], Sampling(temperature=0, max_tokens=5))
    assert [[o.most for o in asks[0].options] for asks in spy.asks] == [[3], [2], [1], []]
    assert spy.asks[-1][0].reason is Reason.REQUEST
    assert done.stats.skipped_steps == {"request": 1}
    assert (done.stats.planned, done.stats.drafted, done.stats.target_steps) == (6, 6, 4)


@pytest.mark.parametrize(
    ("config", "speculative", "reason"),
    [
        ({}, False, "request"),
        ({}, {"method": "vanilla"}, "request"),
        ({}, {"max_draft": 0}, "request"),
        ({"num_speculative_tokens": 0}, None, "request"),
        ({"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}, None, "batch"),
        ({"min_draft": 30, "num_speculative_tokens": 40}, None, "request"),
    ],
)
def test_sp_3_the_reason_for_k_0_is_counted(config, speculative, reason):
    """SP-3: two requests that never draft, and why: the request itself or its configuration, or a table that says so at
    this batch size.

    https://github.com/vllm-project/vllm/issues/42505
    """
    engine = spied(Spy(), Named("script", right), target=cycle(), config=config)
    done = engine.generate([[1], [2]], GREEDY, speculative=speculative)
    for one in done:
        assert one.stats.drafted == one.stats.planned == 0
        assert one.stats.skipped_steps == {reason: one.stats.target_steps} or (
            reason == "batch"
            and set(one.stats.skipped_steps) <= {"batch", "request"}
            and "batch" in one.stats.skipped_steps
        )


def test_the_window_is_a_reason():
    """Target and drafter at the end of their positions: `context`."""
    script = Named("script", wrong)
    script.window = 6
    engine = spied(Spy(), script, target=position_model(7, seed=5, window=9))
    [done] = engine.generate([[1, 2]], Sampling(temperature=0))
    assert len(done.token_ids) == 7
    assert done.stats.skipped_steps["context"] > 0


def test_a_drafter_that_keeps_failing_is_a_reason(caplog):
    class Raising(Named):
        def propose(self, views, keep_drafting):
            raise RuntimeError("on purpose")

    engine = spied(Spy(), Raising("script", right), target=cycle())
    [done] = engine.generate([[1]], GREEDY)
    assert done.stats.drafter_faults == 3
    assert done.stats.skipped_steps["fault"] == done.stats.target_steps - 4
    assert "keeps failing" in caplog.text


def test_an_engine_without_drafters_skips_nothing():
    """Plain decoding is no decision against drafting: nothing is planned, asked or counted."""
    engine = engine_with(Scheduling(Spy()), cycle(), [])
    [done] = engine.generate([[1]], GREEDY)
    assert done.stats.skipped_steps == {}
    assert engine.core.schedule.scheduler.asks == []


def test_a_planned_length_below_min_draft_is_left_out_before_drafting():
    """The scheduler plans 2 where at least 3 were asked for: nothing is drafted, which is not the same as drafting and
    throwing away."""
    script = Named("script", right)
    shorter = Spy(
        lambda step, plan: dataclasses.replace(plan, choices=tuple(Choice(c.drafter, 2) for c in plan.choices))
    )
    engine = spied(shorter, script, target=cycle(), config={"num_speculative_tokens": 5, "min_draft": 3})
    [done] = engine.generate([[1]], GREEDY)
    assert script.asked == []
    assert done.stats.skipped_steps["gain"] >= 17
    assert done.token_ids == [(2 + i) % 7 for i in range(21)]


# ------------------------------------------------------------------------------------------------------ which drafter


def _orders(step: int, plan: Plan) -> Plan:
    """Requests of even number ask the first drafter first, the others the second."""
    return plan if plan.request_id % 2 == 0 else dataclasses.replace(plan, choices=plan.choices[::-1])


def test_choices_are_asked_in_each_requests_own_order():
    """Two requests that want the same two drafters the other way round, both of which propose: each gets its first."""
    engine = spied(Spy(_orders), Named("one", right), Named("two", right), target=cycle())
    reports = watched(engine)
    engine.generate([[1], [2]], GREEDY)
    drafters = {report.request.id % 2: report.drafter for report in reports if report.drafter}
    assert drafters == {0: "one", 1: "two"}


@pytest.mark.parametrize("order", [_orders, lambda step, plan: plan])
def test_a_drafter_makes_one_pass_for_all_that_come_to_it(order):
    """Where one drafter finds nothing, its requests join those that begin with the other: one call each in a step, as
    long as no two wait for each other."""
    nothing, other = Named("one", lambda view: []), Named("two", right)
    engine = spied(Spy(order), nothing, other, target=cycle())
    requests = engine.submit([[1], [2], [3]], GREEDY)
    engine.step()
    engine.step()
    asked_first = [r.id for r in requests if order is not _orders or r.id % 2 == 0]
    assert nothing.asked == [asked_first]
    assert other.asked == [[r.id for r in requests]]
    report = engine.core.schedule.scheduler.told[0]
    assert {judged.draft.request_id: judged.missed for judged in report} == {
        r.id: ("one",) if r.id in asked_first else () for r in requests
    }
    engine.cancel(requests)
    idle(engine)


def test_drafters_are_asked_for_exactly_what_was_planned():
    """K of each view is that of its choice, whatever the configuration would allow."""
    seen = []

    def guess(view):
        seen.append(view.k)
        return right(view)

    plans = Spy(lambda step, plan: dataclasses.replace(plan, choices=(Choice("script", 1 + step % 3),)))
    engine = spied(plans, Named("script", guess), target=cycle(), config={"num_speculative_tokens": 6})
    engine.generate([[1]], Sampling(temperature=0, max_tokens=30))
    assert seen[:6] == [1, 2, 3, 1, 2, 3]


# ----------------------------------------------------------------------------------------------------- while drafting


@pytest.mark.parametrize("name", ["small", *SETTINGS])
def test_serial_drafters_ask_before_every_slot(name):
    """Told to stop at slot 3, every drafter drafts 2 tokens, and the target sees no more rows. Its call counts as one
    for 3 slots, that of a block as one for all 4."""
    target = history_model(7, seed=3)
    drafter = Small(history_model(7, seed=4), 7) if name == "small" else drafting(name, target)
    asked = []

    def keep(drafter, k, confidence):
        asked.append((k, confidence))
        return k < 3

    spy = Spy(keep=keep)
    engine = spied(spy, drafter, config={"num_speculative_tokens": 4}, target=target)
    [done] = engine.generate([PROMPTS[0]], GREEDY)
    assert done.token_ids == plain(history_model(7, seed=3), [PROMPTS[0]], GREEDY)[tuple(PROMPTS[0])]
    assert {k for k, _ in asked} == {1, 2, 3}
    assert all(0 < confidence <= 1 for _, confidence in asked)
    assert len(done.stats.verified_by_position) == 2
    assert max(engine.target.passes) == 3
    computed = max(n for _, calls in spy.times for call in calls for n in call.lengths)
    assert computed == (3 if drafter.max_draft is None else 4)


def test_sp_5_a_threshold_acts_on_the_confidence_of_the_slot():
    """A foreign probability threshold is compared with c_k, which is .63 here at every slot: above it nothing is
    drafted, whatever the configured K. A request may set its own.

    https://github.com/ggml-org/llama.cpp/issues/25908, https://github.com/ggml-org/llama.cpp/issues/10664
    """
    model = history_model(7, seed=4)
    for own, drafted in ((None, True), (0.0, True), (0.999, False)):
        engine = spied(Spy(), Small(model, 7), config={"num_speculative_tokens": 3})
        speculative = None if own is None else {"confidence_threshold": own}
        [done] = engine.generate([PROMPTS[0]], GREEDY, speculative=speculative)
        assert (done.stats.drafted > 0) is drafted
        assert done.stats.planned > 0
    strict = Scheduling(Spy(), confidence_threshold=0.999)
    engine = engine_with(strict, history_model(7, seed=3), [Small(model, 7)])
    assert engine.generate([PROMPTS[0]], GREEDY)[0].stats.drafted == 0
    assert engine.generate([PROMPTS[0]], GREEDY, speculative={"confidence_threshold": 0})[0].stats.drafted > 0


# ----------------------------------------------------------------------------------------------------- after drafting


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("kind", ["oracle", "other small", "ngram", "dspark"])
def test_only_the_chosen_beginning_is_verified(kind, mode):
    """Of 3 drafted tokens 1 is verified: two rows a request, counters that tell the three apart, and a text that is
    plain decoding's in coupled mode."""
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, WARM, mode)
    drafter = drafting("dspark", target) if kind == "dspark" else drafter_of(kind, known, 7)
    engine = spied(
        Spy(lengths=lambda draft: min(draft.count, 1)), drafter, target=target, config={"num_speculative_tokens": 3},
        verify_mode=mode,
    )  # fmt: skip
    target.passes.clear()
    reports = watched(engine)
    chunks = list(engine.stream(PROMPTS, WARM))
    done = sorted((c.completion for c in chunks if c.completion), key=lambda c: c.prompt_index)
    if mode == "coupled":
        assert ids(done) == list(known.values())
    assert max(target.passes[1:]) <= 8
    stats = [one.stats for one in done]
    assert all(len(s.verified_by_position) == 1 for s in stats)
    assert sum(s.drafted for s in stats) > sum(s.verified for s in stats) > 0
    for index, one in enumerate(stats):
        own = [chunk for chunk in chunks if chunk.prompt_index == index]
        assert sum(len(chunk.rejected) for chunk in own) == one.drafted - one.accepted
    assert sum(len(r.draft.tokens) for r in reports) == sum(s.drafted for s in stats)
    assert sum(r.verified for r in reports) == sum(s.verified for s in stats)
    assert sum(r.accepted for r in reports) == sum(s.accepted for s in stats)
    idle(engine)


def test_nothing_verified_of_what_was_drafted_is_plain_decoding():
    """Length 0 for every draft: the target's rows are those of plain decoding, the drafts count as drafted."""
    known = plain(history_model(7, seed=3), [PROMPTS[0]], GREEDY)
    engine = spied(Spy(lengths=lambda draft: 0), Oracle(known))
    [done] = engine.generate([PROMPTS[0]], GREEDY)
    assert engine.target.passes == [3] + [1] * 20
    assert (done.stats.drafted > 0, done.stats.verified, done.stats.accepted) == (True, 0, 0)
    assert done.token_ids == known[tuple(PROMPTS[0])]


# ----------------------------------------------------------------------------------------------------- after the step


def test_the_scheduler_is_told_every_round_and_the_time_it_took():
    """Scripted costs: each step reports its drafts, verdicts, the seconds of the target and of each drafter's call; the
    pass of a prompt is no step of decoding."""
    known = profile(BFLOAT16, {"script": serial(0.25, 0.5)})
    spy = Spy()
    engine = timed(cycle(), [Named("script", right, confidence=0.8)], known, spy, {"num_speculative_tokens": 3})
    [done] = engine.generate([[1]], Sampling(temperature=0, max_tokens=9))
    assert done.token_ids == [(2 + i) % 7 for i in range(9)]
    assert [[(j.draft.drafter, j.draft.count, j.verified, j.accepted) for j in step] for step in spy.told] == [
        [("script", 3, 3, 3)], [("script", 3, 3, 3)],
    ]  # fmt: skip
    assert [list(step[0].draft.confidence) for step in spy.told] == [[0.8] * 3] * 2
    for seconds, [call] in spy.times:
        assert seconds == pytest.approx(BFLOAT16[4])
        assert (call.drafter, list(call.lengths), call.seconds) == ("script", [3], pytest.approx(1.25))
    assert [call.contexts for _, [call] in spy.times] == [[2], [6]]


def test_a_step_beside_a_prefill_says_nothing_of_decoding():
    """Its time is reported as none, its rounds and drafting calls are."""
    spy = Spy()
    known = profile(BFLOAT16, {"script": serial(0.25, 0.5)})
    engine = timed(cycle(), [Named("script", right)], known, spy, max_num_batched_tokens=32)
    first = engine.submit([[1]], GREEDY)
    engine.step()
    second = engine.submit([[2] * 50], GREEDY)
    engine.step()
    assert len(spy.told) == 1
    assert len(spy.told[0]) == 1
    [(seconds, [call])] = spy.times
    assert seconds == 0
    assert call.seconds > 0
    engine.cancel([*first, *second])


def test_a_step_that_fails_tells_nothing():
    """The target raises: neither rounds nor times of that step reach the scheduler, and its requests are forgotten."""
    spy = Spy()
    engine = spied(spy, Named("script", right), target=cycle())
    forward, calls = engine.target.forward, itertools.count()

    def failing(batch, taps=()):
        if next(calls) == 3:
            raise RuntimeError("on purpose")
        return forward(batch, taps)

    engine.target.forward = failing
    requests = engine.submit([[1], [2]], Sampling(temperature=0, max_tokens=60))
    for _ in range(4):
        engine.step()
    assert spy.step == 2
    assert len(spy.told) == len(spy.times) == 2
    assert all(isinstance(request.error, RuntimeError) for request in requests)
    assert sorted(spy.forgotten) == sorted(r.id for r in requests)
    idle(engine)


def test_a_request_that_fails_alone_has_no_round():
    """A processor that raises for one request: its batch-mate's round is told, its own is not."""

    def raising(tokens, logits):
        if len(tokens) > 6:
            raise KeyError("on purpose")
        return logits

    spy = Spy()
    engine = spied(spy, Named("script", right), target=cycle())
    greedy = Sampling(temperature=0, max_tokens=30)
    requests = engine.submit(
        [[1], [2]], [greedy, dataclasses.replace(greedy, logits_processors=[raising])]
    )  # fmt: skip
    while any(request.finish_reason is None for request in requests):
        engine.step()
    assert isinstance(requests[1].error, KeyError)
    for asks, told in zip(spy.asks, spy.told, strict=True):
        failed = requests[1].id in {a.request_id for a in asks} - {j.draft.request_id for j in told}
        assert failed == (spy.asks.index(asks) == max(i for i, a in enumerate(spy.asks) if len(a) == 2))
    assert spy.told[-1][0].draft.request_id == requests[0].id
    idle(engine)


def test_ba_2_a_preempted_request_is_restarted_and_its_plan_forgotten():
    """A request that loses its room after it was planned has no round in that step; the scheduler hears of a restart,
    and what it had shown stays.

    https://github.com/vllm-project/vllm/pull/31955, https://github.com/vllm-project/vllm/pull/49620
    """
    spy, target = Spy(), history_model(7, seed=3)
    drafter = Small(history_model(7, seed=4), 7)
    engine = spied(
        spy, drafter, target=target, verify_mode="coupled", kv_cache_memory_bytes=bytes_for(6, target, drafter)
    )
    longer = dataclasses.replace(WARM, max_tokens=40)
    want = plain(history_model(7, seed=3), PROMPTS, longer, "coupled")
    requests = engine.submit(PROMPTS, longer)
    done = drive(engine, requests)
    assert ids(done) == list(want.values())
    assert len(spy.restarted) == sum(one.stats.preemptions for one in done) > 0
    dropped = [
        {a.request_id for a in asks} - {j.draft.request_id for j in told}
        for asks, told in zip(spy.asks, spy.told, strict=True)
    ]
    assert any(dropped)
    assert set().union(*dropped) <= set(spy.restarted)
    for lost, (seconds, _) in zip(dropped, spy.times, strict=True):
        assert not (lost and seconds)
    assert sorted(set(spy.forgotten)) == sorted(r.id for r in requests)
    idle(engine)


def test_a_finished_cancelled_or_failed_request_is_forgotten_after_its_last_round():
    """Nothing of a request is left in the scheduler, whichever way it ends."""
    spy = Spy()
    engine = spied(spy, Named("script", right, confidence=0.9), target=cycle())
    requests = engine.submit([[1], [2], [3]], Sampling(temperature=0, max_tokens=12))
    engine.step()
    engine.step()
    engine.cancel([requests[0]])
    drive(engine, requests[1:])
    assert set(spy.forgotten) == {r.id for r in requests}
    assert spy._past._kept == {}
    assert spy.history._own == {}


def test_a_conversation_is_one_request_to_the_scheduler():
    """Its turns go on with what they have shown; it is forgotten when it is closed."""
    spy = Spy()
    engine = spied(spy, Ngram(1), config={"num_speculative_tokens": 3})
    talk = engine.conversation()
    first = talk.generate([1, 2, 3], GREEDY)
    assert spy.forgotten == []
    talk.generate([1, 2, 3, *first.token_ids, 4], GREEDY)
    assert len({ask.request_id for asks in spy.asks for ask in asks}) == 1
    talk.close()
    assert set(spy.forgotten) == {spy.asks[0][0].request_id}


# ---------------------------------------------------------------------------------------------------- drafters' states


def _releasing(names: tuple[str, ...], at: int) -> Spy:
    return Spy(lambda step, plan: dataclasses.replace(plan, release=names) if step == at else plan)


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_a_released_drafter_that_needs_features_does_not_come_back(name):
    """Its state of the request goes at once; it is neither told of the request's rows nor asked again, which is counted
    as `state dropped`. A preemption computes them again, and it drafts again. The text is plain decoding's."""
    target = history_model(7, seed=3)
    drafter = drafting(name, target)
    told, commit = [], drafter.commit

    def watch(accepted):
        told.append([rows.request_id for rows in accepted])
        commit(accepted)

    drafter.commit = watch
    spy = _releasing((name,), at=4)
    engine = spied(spy, drafter, target=target, config={"num_speculative_tokens": 2})
    sampling = Sampling(temperature=0, max_tokens=40)
    want = plain(history_model(7, seed=3), PROMPTS[:2], sampling)
    reports = watched(engine)
    requests = engine.submit(PROMPTS[:2], sampling)
    for _ in range(9):
        engine.step()
    assert told[4] == [r.id for r in requests]
    assert told[5:] == [[]] * 4
    drafted = [bool(r.drafter) for r in reports if r.request is requests[0]]
    assert drafted == [True] * 4 + [False] * 4
    assert requests[0].stats.skipped_steps["state dropped"] > 0
    preempt_all(engine)
    before = len(reports)
    done = drive(engine, requests)
    assert ids(done) == list(want.values())
    assert all(any(r.drafter for r in reports[before:] if r.request is request) for request in requests)
    idle(engine)


def test_a_released_model_of_its_own_comes_back_by_catching_up():
    """`small` is fed again with everything since its state was dropped, in one pass before its next draft."""
    model = history_model(7, seed=3)
    engine = spied(_releasing(("small",), at=2), Small(model, 7), config={"num_speculative_tokens": 4})
    [done] = engine.generate([PROMPTS[0]], Sampling(temperature=0, max_tokens=26))
    assert done.stats.accepted == done.stats.drafted
    passes = [rows for rows in model.passes if rows > 2]
    assert passes == [4, 3 + 1 + 2 * 5]  # the prompt and the first token; later prompt, first token and two rounds


class Bypassing(Spy):
    """No drafts in some steps."""

    def __init__(self, steps: range):
        quiet = lambda step, plan: Plan(plan.request_id, reason=Reason.GAIN) if step in steps else plan  # noqa: E731
        super().__init__(quiet)


@pytest.mark.parametrize("name", ["small", "ngram", *SETTINGS])
def test_a_request_that_comes_back_drafts_as_if_it_had_never_paused(name):
    """After ten plain steps its drafts are those it would have made: coming back costs no accepted length beyond the
    pass that catches up."""
    sampling = Sampling(temperature=0, max_tokens=40)

    def drafts(spy: Spy) -> dict[tuple[int, ...], list[int]]:
        target = history_model(7, seed=3)
        makers = {"small": lambda: Small(history_model(7, seed=4), 7), "ngram": lambda: Ngram(1)}
        drafter = makers[name]() if name in makers else drafting(name, target)
        engine = spied(spy, drafter, target=target, config={"num_speculative_tokens": 2})
        reports, seen = watched(engine), {}
        for chunk in engine.stream([PROMPTS[2]], sampling):
            for report in reports:
                if report.drafter:
                    seen[len(report.request.tokens) - len(chunk.token_ids)] = report.draft.tokens
            reports.clear()
        return seen

    always, paused = drafts(Spy()), drafts(Bypassing(range(3, 13)))
    common = [at for at in paused if at in always]
    later = [at for at in common if at > len(PROMPTS[2]) + 14]
    assert later, (sorted(always), sorted(paused))
    for at in common:
        assert paused[at] == always[at][: len(paused[at])] or always[at] == paused[at][: len(always[at])]


# ------------------------------------------------------------------------------------------------- a malformed answer


@pytest.mark.parametrize("confidence", [[0.5], [1.5, 0.2, 0.1], [-0.1] * 3, ["high"] * 3, [None] * 3])
def test_confidences_that_are_none_cost_no_request(confidence):
    """Too few of them, or no probabilities: survivals could rise along a draft, and a choice of its length then looks
    at tokens. The draft is not used, the fault is counted."""

    class Odd(Drafter):
        name = "odd"

        def propose(self, views, keep_drafting):
            return [Draft([1] * view.k, None, list(confidence)) for view in views]

    engine = spied(Spy(), Odd(), config={"num_speculative_tokens": 3})
    [done] = engine.generate([PROMPTS[0]], GREEDY)
    assert done.token_ids == plain(history_model(7, seed=3), [PROMPTS[0]], GREEDY)[tuple(PROMPTS[0])]
    assert (done.stats.drafted, done.stats.drafter_faults) == (0, 3)


def test_a_deterministic_drafter_with_laws_is_a_fault():
    """What calls itself a function of the history may have its length chosen in any way; a law says it is none."""

    class Lying(Small):
        deterministic = True

    engine = spied(Spy(), Lying(history_model(7, seed=4), 7))
    [done] = engine.generate([PROMPTS[0]], WARM)
    assert (done.stats.drafted, done.stats.drafter_faults) == (0, 3)


def test_probes_and_plans_are_counted():
    """`probes` counts rounds that drafted to learn; `planned` the longest draft of each round."""
    spy = Spy(lambda step, plan: dataclasses.replace(plan, probe=step == 1 and bool(plan.choices)))
    engine = spied(spy, Named("script", right), target=cycle(), config={"num_speculative_tokens": 3})
    [done] = engine.generate([[1]], Sampling(temperature=0, max_tokens=13))
    assert (done.stats.probes, done.stats.planned, done.stats.drafted) == (1, 9, 9)
