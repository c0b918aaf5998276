"""The simulated loop: exact where a result can be worked out by hand, and no request, token or second is lost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.simulate.worlds import BFLOAT16, EVEN, profile, serial, world
from forerun.bench.load.arrivals import Load, arrival_times
from forerun.bench.simulate.acceptance import Skill, Spread
from forerun.bench.simulate.decoder import Decoder
from forerun.bench.simulate.specs import Way, parse_way
from forerun.bench.simulate.texts import Lengths
from forerun.budget.costs import ContextCost, DraftCost
from forerun.budget.policy import POLICIES
from forerun.engine.admission import Limits

PLAIN = Way(None)
ROWS = {n: 10.0 + n for n in (1, 2, 3, 4, 6, 8, 16, 512)}
"""A pass costs 10 seconds and one for each of its rows."""
TWO_A_PASS = DraftCost.measured({1: {1: 2.0, 64: 2.0}, 8: {1: 16.0, 64: 16.0}})
"""A pass of the drafter costs 2 seconds for any number of requests."""
PERFECT, WRONG = Skill("small", (1.0,), 3), Skill("small", (0.0,), 3)


def scripted(*skills: Skill, **options):
    return world(profile(ROWS, {"small": TWO_A_PASS}), *skills, **options)


def test_a_tiny_case_is_exactly_what_it_is_by_hand():
    """A prompt of 3, 9 tokens of output, K = 3, all accepted: a prefill of 3 rows gives the first token, then two
    rounds of 4 rows and 3 drafting passes give 4 tokens each. 13 + 2 (14 + 6) = 53 seconds."""
    decoder = Decoder(scripted(PERFECT, given=[(3, 9)], requests=1), Way("fixed"))
    books = decoder.run_all()
    assert books.seconds == decoder.now == 13 + 2 * (14 + 6)
    assert (books.steps, books.rows, books.rounds, books.tokens) == (3, 3 + 4 + 4, 2, 9)
    assert (books.drafted, books.verified, books.accepted) == (6, 6, 6)
    assert books.drafting_seconds == 12
    [ended] = books.ended
    assert (ended.tokens, ended.first, ended.last) == (9, 13.0, 53.0)
    row = books.as_row()
    assert row["tokens_per_second"] == 9 / 53
    assert row["tokens_per_second_per_user"] == 8 / 40
    assert row["verify_budget"] == row["drafted_per_round"] == 3
    assert row["mean_accepted_length"] == row["tokens_per_step"] == 4
    assert row["acceptance_by_position"] == [1, 1, 1]


def test_a_tiny_case_where_nothing_is_accepted():
    """The same with wrong drafts and 3 tokens of output: K is cut to what the request may still use, 1 in the first
    round and 0 in the last: 13 + (12 + 2) + 11."""
    books = Decoder(scripted(WRONG, given=[(3, 3)], requests=1), Way("fixed")).run_all()
    assert books.seconds == 13 + 14 + 11
    assert (books.drafted, books.accepted, books.rounds, books.plain_rounds) == (1, 0, 2, 1)
    assert {str(reason): n for reason, n in books.reasons.items()} == {"request": 1}


def test_two_requests_share_their_passes_by_hand():
    """Prompts of 3 and 5 in one prefill of 8 rows; then both verify 3 drafts each: 8 rows a step. Outputs of 5 and 9:
    one round of both, and one of the second alone."""
    pair = [(3, 5), (5, 9)]
    made = scripted(PERFECT, given=pair, requests=2, load=Load(concurrency=2))
    books = Decoder(made, Way("fixed")).run_all()
    assert books.seconds == 18 + (18 + 6) + (14 + 6)
    assert [one.last for one in books.ended] == [42.0, 62.0]
    assert books.round_seconds == 2 * 24 + 20


def test_a_prefill_goes_in_chunks():
    """A prompt of 20 with at most 8 rows a step: 8, 8 and 4 rows; only the last one emits."""
    made = scripted(WRONG, given=[(20, 1)], requests=1, limits=Limits(1, 8))
    books = Decoder(made, PLAIN).run_all()
    assert books.seconds == 18 + 18 + 14
    assert (books.steps, books.tokens, books.rounds) == (3, 1, 0)


def test_contexts_and_upkeep_cost_what_the_profile_says():
    """100 seconds for a context of 100, half per request and half per row; a drafter that follows for 1 second a token
    and is never asked, as K is 0 at the last token: prefill of 10 rows behind 5 others on average, then one row behind
    10. 20 + 2.5 + 10 x 2.5 + 10 following; 11 + 5 + 5 + 1 following."""
    context = ContextCost((0, 100), (0.0, 50.0), (0.0, 50.0))
    costs = profile(ROWS, {"eagle3": dataclasses.replace(TWO_A_PASS, follow=1.0)}, context)
    perfect = dataclasses.replace(PERFECT, name="eagle3")
    books = Decoder(world(costs, perfect, given=[(10, 2)], requests=1), Way("fixed")).run_all()
    assert books.seconds == pytest.approx(20 + 2.5 + 25 + 10 + 11 + 5 + 5 + 1)
    assert books.following_seconds == 11


def test_a_drafter_without_features_catches_up_when_it_drafts():
    """`small` does nothing at the prefill of 10 rows, and takes them in with its first draft, K = 1: 20, then 12 for
    two rows, 2 for the draft and 10 to catch up. Where it never drafts it costs nothing."""
    costs = profile(ROWS, {"small": dataclasses.replace(TWO_A_PASS, follow=1.0)})
    books = Decoder(world(costs, PERFECT, given=[(10, 3)], requests=1), Way("fixed")).run_all()
    assert books.seconds == 20 + 12 + 2 + 10
    assert Decoder(world(costs, PERFECT, given=[(10, 2)], requests=1), Way("fixed")).run_all().following_seconds == 0


def test_perfect_free_drafts_make_it_k_plus_one_times_as_fast():
    """Passes that cost the same for any number of rows, drafts for nothing: 4 tokens a pass."""
    flat = profile({1: 1.0, 512: 1.0}, {"small": serial(0.0)})
    made = world(flat, PERFECT, given=[(1, 41)], requests=5)
    plain, fixed = (Decoder(made, way).run_all() for way in (PLAIN, Way("fixed")))
    assert (plain.seconds - 5) / (fixed.seconds - 5) == 4  # five prefills are the same in both
    assert plain.tokens == fixed.tokens == 5 * 41


@pytest.mark.parametrize("policy", ["delayed", "prefix"])
def test_scheduled_perfect_free_drafts_come_close(policy):
    """The same scheduled: 4 tokens a pass from the first round on, as an unknown drafter is trusted."""
    flat = profile({1: 1.0, 512: 1.0}, {"small": serial(1e-9)})
    made = world(flat, PERFECT, given=[(1, 41)], requests=5)
    plain, scheduled = (Decoder(made, way).run_all() for way in (PLAIN, Way(policy)))
    assert (plain.seconds - 5) / (scheduled.seconds - 5) == pytest.approx(4, rel=1e-6)


def test_plain_decoding_pays_for_nothing():
    """No drafter is called, followed or verified: every second is that of the target's own rows, and a drafter that
    is loaded but never drafts adds its upkeep alone."""
    costs = profile(ROWS, {"small": dataclasses.replace(TWO_A_PASS, follow=0.25)})
    made = world(costs, PERFECT, given=[(7, 30)], requests=6, load=Load(concurrency=3))
    books = Decoder(made, PLAIN).run_all()
    assert books.drafting_seconds == books.following_seconds == 0
    assert not books.calls
    assert books.seconds == 10 * books.steps + books.rows
    assert (books.drafted, books.verified, books.planned) == (0, 0, 0)
    assert books.tokens == books.rounds + books.first_tokens == 180


def test_the_same_seed_gives_the_same_numbers():
    """Twice the same run, then another seed."""
    spread, lengths = Spread(4.0, 0.5), Lengths((5, 50), (20, 80))

    def row(seed: int) -> dict:
        skill = Skill("small", (0.8, 0.7), 5)
        made = world(
            profile(BFLOAT16, {"small": serial(0.1, 0.05)}), skill, spread=spread, lengths=lengths, seed=seed,
            load=Load(concurrency=4),
        )  # fmt: skip
        return Decoder(made, Way("delayed"), steady=True).run(800).as_row()

    assert row(3) == row(3)
    assert row(3) != row(4)


WAYS = ("plain", "fixed", "fixed:2", "threshold:0.5", "prefix", "delayed", "global")


@pytest.mark.parametrize("label", WAYS)
@pytest.mark.parametrize("load", [Load(concurrency=5), Load(rate=0.3)], ids=str)
def test_requests_and_tokens_are_conserved(label, load):
    """Every request gets exactly its tokens, under every policy, with little memory (requests are preempted), few rows
    a step (prompts come in chunks), and two drafters of which one often has nothing to propose."""
    drafts = {"small": serial(0.2, 0.1, follow=0.01), "ngram": serial(1e-4)}
    skills = Skill("ngram", (0.9,), 4, match=0.4), Skill("small", (0.8, 0.6), 3)
    pairs = [(int(p), int(o)) for p, o in np.random.default_rng(1).integers(1, 70, (40, 2))]
    made = world(
        profile(BFLOAT16, drafts), *skills, load=load, given=pairs, requests=40, limits=Limits(5, 32), kv_tokens=256,
        spread=Spread(3.0, 0.7),
    )  # fmt: skip
    decoder = Decoder(made, parse_way(label))
    while decoder.step():
        decoder.audit()
    books = decoder.books
    assert sorted(one.number for one in books.ended) == list(range(40))
    assert all(one.tokens == pairs[one.number][1] for one in books.ended)
    assert books.tokens == sum(output for _, output in pairs)
    assert books.first_tokens == 40
    assert books.accepted <= books.verified <= books.drafted <= books.planned or label == "plain"
    assert books.seconds == pytest.approx(decoder.now)
    assert decoder.batch.admission.pool.used == 0
    if load.concurrency:
        assert books.preemptions > 0, "memory was no limit: the case shows nothing"


def test_under_an_open_loop_requests_come_when_they_come():
    """Arrivals far apart: each request is alone, its first token comes one prefill after its arrival, and the clock
    jumps over the time between."""
    made = scripted(PERFECT, load=Load(rate=0.001), given=[(3, 5)], requests=6, seed=2)
    decoder = Decoder(made, Way("fixed"))
    books = decoder.run_all()
    times = arrival_times(Load(rate=0.001), 6, 2)
    assert [one.arrived for one in books.ended] == pytest.approx(times)
    gaps = np.diff(times)
    assert gaps.min() > 40, "two of them overlap: choose another seed"
    assert [one.first - one.arrived for one in books.ended] == pytest.approx([13.0] * 6)
    assert books.seconds == pytest.approx(times[-1] + 13 + 20)


def test_a_text_is_the_same_whoever_decodes_it():
    """Which places are accepted belongs to the text, so that a longer K never takes more rounds: of twelve texts,
    each by itself."""
    rounds = []
    for number in range(12):
        pairs, spread = [(4, 60)], Spread(float("inf"), 0.5)
        made = scripted(Skill("small", (0.8,), 6), given=pairs, requests=1, spread=spread, seed=number)
        rounds.append([Decoder(made, Way("fixed", k)).run_all().rounds for k in (1, 2, 4, 6)])
    assert all(each == sorted(each, reverse=True) for each in rounds)
    assert sum(each[0] for each in rounds) > 1.3 * sum(each[-1] for each in rounds)


def test_what_is_accepted_is_what_was_said():
    """Over 40 texts, acceptance by position is the one that was given: within four standard errors."""
    skill = Skill("small", (0.9, 0.7, 0.5), 3)
    for spread in (EVEN, Spread(float("inf"), 0.5)):
        made = scripted(skill, given=[(2, 200)], requests=40, spread=spread)
        found = Decoder(made, Way("fixed")).run_all().stats()
        for given, seen, count in zip(
            (0.9, 0.7, 0.5), found.acceptance_by_position, found.reached_by_position, strict=True
        ):
            assert seen == pytest.approx(given, abs=4 * (given * (1 - given) / count) ** 0.5)


def test_a_drafter_that_is_stopped_early_has_not_become_slow():
    """Drafts are cut where it is no longer worth it, which takes a pass more than was drafted, and a whole one of a
    block: steps that take what is believed leave the costs as they are."""
    drafts = {name: serial(0.04, 0.04) for name in ("small", "dspark")}
    for name in drafts:
        made = world(profile(BFLOAT16, drafts), Skill(name, (0.6,), 7), spread=Spread(2.0, 0.5), given=[(20, 200)])
        decoder = Decoder(made, Way("delayed"), steady=True)
        books = decoder.run(600)
        assert 0 < books.drafted < books.planned
        believed = decoder.scheduler.profile.drafts[name]
        assert believed(1, 7) == pytest.approx(drafts[name](1, 7), rel=1e-6)


def test_costs_that_are_believed_wrongly_are_corrected():
    """The scheduler takes drafting for ten times as cheap as it is; at an acceptance of .5 it does not pay. Observed
    times correct it: at least .95 of plain decoding after the first thousand tokens."""
    truth, believed = (profile(BFLOAT16, {"small": serial(n * 0.04, n * 0.04)}) for n in (10, 1))
    speeds = []
    for policy in ("plain", "delayed"):
        made = world(truth, Skill("small", (0.5,), 5), known=believed, lengths=Lengths((20, 20), (200, 200)))
        decoder = Decoder(made, parse_way(policy), steady=True)
        decoder.run(1500)
        decoder.new_books()
        speeds.append(decoder.run(1500).as_row()["tokens_per_second"])
    assert speeds[1] >= 0.95 * speeds[0]


@pytest.mark.slow
def test_the_adversary_costs_little_whatever_the_policy():
    """Drafts that are always wrong, from a confident and from a silent drafter, at 1 and 8 requests: after the first
    hundreds of tokens at least .95 of plain decoding under every policy that adapts."""
    drafts = {"small": serial(0.1, 0.1, follow=0.001), "dspark": serial(0.15, 0.01, follow=0.001)}
    for skill in (
        Skill("small", (0.0,), 5),
        Skill("dspark", (0.0,), 7, bias=6.0),
        Skill("dspark", (0.0,), 7, confident=False),
    ):
        for requests in (1, 8):
            speeds = {}
            for policy in ("plain", *(p for p in POLICIES if p not in ("fixed", "threshold"))):
                load, lengths = Load(concurrency=requests), Lengths((50, 50), (300, 300))
                made = world(profile(BFLOAT16, drafts), skill, load=load, lengths=lengths)
                decoder = Decoder(made, parse_way(policy), steady=True)
                decoder.run(300 * requests)
                decoder.new_books()
                speeds[policy] = decoder.run(900).as_row()["tokens_per_second"]
            slowest = min(speeds.values()) / speeds["plain"]
            assert slowest >= 0.95, (skill, requests, speeds)
