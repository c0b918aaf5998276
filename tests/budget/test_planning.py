"""What drafters promise at a load, how draft rows are shared out, in which order drafters are asked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget.world import BFLOAT16, FLOAT32, FREE_LOOKUP, INT4, profile, serial
from forerun.budget import planning
from forerun.budget.assignment import assign
from forerun.budget.bypass import Reason
from forerun.budget.costs import ContextCost, Costs, VerifyCost
from forerun.budget.curve import CostCurve, FloatArray
from forerun.budget.history import AcceptanceHistory, Outcome
from forerun.budget.planning import Ask, Bids, Load, Option, Outlook, forecast, outlook, probe_length
from forerun.budget.selection import Evidence, Preference, Promise, Promises, chains, evidence, promises, why_not


class Bid(NamedTuple):
    """One request's wish."""

    request_id: int
    context: int
    drafter: str | None
    survival: FloatArray


def share(load, verify, drafts, bids: Sequence[Bid]) -> planning.Shares:
    """Of wishes given one by one."""
    names, width = sorted(drafts), max(len(bid.survival) for bid in bids)
    survival = np.zeros((len(bids), width))
    for row, bid in zip(survival, bids, strict=True):
        row[: len(bid.survival)] = bid.survival
    requests, contexts = [bid.request_id for bid in bids], [bid.context for bid in bids]
    drafter = np.array([-1 if bid.drafter is None else names.index(bid.drafter) for bid in bids])
    return planning.share(load, verify, drafts, Bids(requests, contexts, names, drafter, survival, np.ones(len(bids))))


def costs_of(curve, draft=None, context=None) -> Costs:
    return Costs(VerifyCost(CostCurve.measured(curve), context or ContextCost()), draft or serial(1e-9))


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_a_forecast_is_the_formula(alpha, requests):
    """Gain of K = (1 - alpha^(K+1)) / (1 - alpha) over the cost of a round in plain steps, less 1."""
    costs = costs_of(BFLOAT16, serial(0.1, 0.05))
    seen = forecast(costs, np.cumprod([alpha] * 7), requests)
    for k in range(8):
        tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
        cost = costs.round(requests, k, requests * (1 + k)) / costs.plain(requests)
        assert seen.gains[k] == pytest.approx(tokens / cost - 1)
    assert seen.gain == max(seen.gains)
    assert seen.gains[seen.length] == seen.gain


def test_methods_example_float32_must_speculate():
    """0.5B in float32 (1 -> 2.11 at two rows), acceptance .85, K = 7: 2.3 times as fast with free drafts, 2.1 with
    drafts at .2 of a plain step."""
    survival = np.cumprod([0.85] * 7)
    assert forecast(costs_of(FLOAT32), survival).length == 7
    assert forecast(costs_of(FLOAT32), survival).gain == pytest.approx(1.30, abs=0.01)
    assert forecast(costs_of(FLOAT32, serial(0.2)), survival).gain == pytest.approx(1.10, abs=0.01)


def test_k_ends_at_a_step_edge():
    """int4 weights, a jump at 5 rows: 1 + 3 rows for one request, 2 x 2 for two, and plain decoding for four."""
    survival = np.cumprod([0.7] * 7)
    assert [forecast(costs_of(INT4), survival, r).length for r in (1, 2, 4)] == [3, 1, 0]
    bids, drafts = [Bid(r, 0, "d", survival) for r in range(3)], {"d": serial(1e-9)}
    assert sum(share(Load(3), VerifyCost(CostCurve.measured(INT4)), drafts, bids).lengths) == 1  # 3 + 1 rows
    treads = VerifyCost(CostCurve.measured({1: 1.0, 4: 1.0, 5: 1.3, 8: 1.3, 9: 9.0}))
    assert sum(share(Load(3), treads, drafts, bids).lengths) == 5  # 3 + 5 rows


def test_the_largest_k_of_each_request_holds():
    """-inf beyond a request's own limit, and a limit of its own for each."""
    seen = outlook(Load(2), costs_of(BFLOAT16), np.array([[0.9, 0.81, 0.7]] * 2), [1, 3], [0, 0])
    assert seen.length.tolist() == [1, 3]
    assert np.isneginf(seen.rate[0, 2:]).all()


def test_sp_4_k_falls_with_context():
    """https://github.com/vllm-project/vllm/issues/54691: with drafting and verifying dearer behind a longer context, K
    falls, request by request in one batch, down to plain decoding."""
    far = ContextCost((0, 10_000), (0.0, 0.2), (0.0, 0.6))
    costs = costs_of(BFLOAT16, serial(0.05, 0.05, context=far), far)
    survival = np.tile(np.cumprod([0.8] * 7), (4, 1))
    lengths = outlook(Load(4), costs, survival, [7] * 4, [0, 2000, 6000, 40_000]).length.tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] == 0
    bids = [Bid(r, context, "d", survival[r]) for r, context in enumerate([0, 2000, 6000, 40_000])]
    shared = share(Load(4), costs.verify, {"d": costs.draft}, bids).lengths
    assert shared == sorted(shared, reverse=True)
    assert shared[0] > shared[-1] == 0


def test_sp_5_a_dear_drafting_call_is_not_made():
    """https://github.com/ggml-org/llama.cpp/issues/25908: 20 ms a call against plain steps of 10 ms, verifying nearly
    free. At an acceptance of .5 no K pays, so K = 0 before anything is drafted; at .95 it does pay."""
    costs = costs_of({1: 0.010, 8: 0.0101}, serial(0.020, 0.0))
    assert forecast(costs, np.cumprod([0.5] * 7)).length == 0
    assert forecast(costs, np.cumprod([0.5] * 7)).gain == 0
    assert forecast(costs, np.cumprod([0.95] * 7)).gain > 0.5


def test_prefill_rows_of_the_step_count():
    """30 prefill rows leave no cheap rows before the jump at 32."""
    curve = {1: 1.0, 32: 1.0, 33: 4.0, 64: 4.0}
    survival = np.array([np.cumprod([0.6] * 4)])
    alone = outlook(Load(1), costs_of(curve), survival, [4], [0])
    beside = outlook(Load(1, 30), costs_of(curve), survival, [4], [0])
    assert alone.length[0] == 4
    assert beside.length[0] == 1


# ------------------------------------------------------------------------------------------------------------- sharing


def share_by_force(load, verify, drafts, bids) -> float:
    """The greatest rate over all lengths of all requests, contexts and draft costs included: geometric mean of the
    requests' tokens over the step's seconds."""
    best = 0.0
    for lengths in itertools.product(*(range(len(bid.survival) + 1) for bid in bids)):
        rows = np.array(lengths) + 1
        extra = verify.context.at([bid.context for bid in bids])
        seconds = verify.tokens(load.other_rows + int(rows.sum())) + extra.request.sum() + extra.row @ rows
        for name in {bid.drafter for bid in bids}:
            mine = [i for i, bid in enumerate(bids) if bid.drafter == name]
            seconds += drafts[name].of([lengths[i] for i in mine], [bids[i].context for i in mine])
        tokens = [1 + bid.survival[:n].sum() for bid, n in zip(bids, lengths, strict=True)]
        best = max(best, math.prod(tokens) ** (1 / len(bids)) / seconds)
    return best


acceptances = st.lists(st.floats(0.05, 0.99), min_size=1, max_size=3)


@given(st.lists(acceptances, min_size=1, max_size=3), st.sampled_from([BFLOAT16, FLOAT32, INT4]), st.integers(0, 3))
def test_sharing_equals_brute_force_with_cheap_drafts(batch, curve, other_rows):
    """Where drafts cost next to nothing the shares are the best of all lengths, on any staircase."""
    bids = [Bid(r, 0, "d", np.cumprod(values)) for r, values in enumerate(batch)]
    verify, drafts, load = VerifyCost(CostCurve.measured(curve)), {"d": serial(1e-12)}, Load(len(batch), other_rows)
    shares = share(load, verify, drafts, bids)
    plain = 1 / verify.tokens(load.other_rows + load.requests)
    assert (shares.gain + 1) * plain == pytest.approx(share_by_force(load, verify, drafts, bids), rel=1e-6)


@given(st.lists(acceptances, min_size=1, max_size=3), st.sampled_from([BFLOAT16, FLOAT32, INT4]), st.booleans())
def test_sharing_is_near_the_best_with_dear_drafts_and_long_contexts(batch, curve, two):
    """Passes shared by several requests make the search greedy: it stays within a tenth of the best, predicts what the
    same lengths cost, and never less than plain decoding."""
    far = ContextCost((0, 1000), (0.0, 0.1), (0.0, 0.05))
    drafts = {"d": serial(0.1, 0.05, context=far), "e": serial(0.05, 0.2)}
    bids = [Bid(r, 700 * r, "e" if two and r else "d", np.cumprod(values)) for r, values in enumerate(batch)]
    verify, load = VerifyCost(CostCurve.measured(curve), far), Load(len(batch))
    shares = share(load, verify, drafts, bids)
    best = share_by_force(load, verify, drafts, bids)
    plain = share_by_force(load, verify, drafts, [bid._replace(survival=bid.survival[:0]) for bid in bids])
    assert shares.gain >= 0
    assert 0.9 * best <= (shares.gain + 1) * plain <= best * (1 + 1e-9)
    assert all(0 <= n <= len(bid.survival) for n, bid in zip(shares.lengths, bids, strict=True))


def test_who_does_not_bid_gets_nothing_and_counts_as_load():
    bids = [Bid(0, 0, None, np.zeros(0)), Bid(1, 0, "d", np.array([0.9]))]
    verify = VerifyCost(CostCurve.measured({1: 1.0, 2: 1.0, 3: 1.1}))
    assert share(Load(2), verify, {"d": serial(1e-9)}, bids).lengths == [0, 1]
    assert share(Load(2), verify, {}, bids[:1]).gain == 0.0


def test_hard_texts_get_rows_where_these_shorten_their_own_time():
    """A row costs half a plain step of each request: the hard text's draft (.6) brings it 1.6 times the tokens. The sum
    of all tokens a second would rather leave it out, so that hard texts would pile up in the batch."""
    verify = VerifyCost(CostCurve.measured({2: 2.0, 3: 2.5, 4: 3.0, 5: 3.5, 6: 4.0}))
    bids = [Bid(0, 0, "d", np.cumprod([0.99] * 2)), Bid(1, 0, "d", np.array([0.6]))]
    assert share(Load(2), verify, {"d": serial(1e-12)}, bids).lengths == [2, 1]
    tokens = 2 + bids[0].survival.sum()
    assert tokens / verify.tokens(4) > (tokens + 0.6) / verify.tokens(5)


def test_equal_bids_are_served_by_request_and_not_by_place():
    """The same requests in another order get the same rows."""
    survival = np.cumprod([0.7] * 4)
    verify, drafts = VerifyCost(CostCurve.measured(INT4)), {"d": serial(0.01, 0.01)}
    there = [Bid(r, 10, "d", survival) for r in (4, 1, 3)]
    first, second = (share(Load(3), verify, drafts, bids).lengths for bids in (there, there[::-1]))
    assert first == second[::-1]


def test_a_probe_learns_the_most_for_its_time():
    """One token where nothing is expected; on float32, where the second row costs all, the whole block of a free
    drafter, and of a dear one more the more is accepted."""
    none, much = np.zeros(7), np.cumprod([0.8] * 7)
    assert probe_length(costs_of(BFLOAT16, serial(0.1, 0.1)), Load(1), none) == 1
    assert probe_length(costs_of(FLOAT32), Load(1), much) == 7
    assert probe_length(costs_of(FLOAT32, serial(0.2, 0.2)), Load(1), none) == 1
    assert 1 < probe_length(costs_of(FLOAT32, serial(0.2, 0.2)), Load(1), much) <= 7


# ----------------------------------------------------------------------------------------------------------- selection


class Offer(NamedTuple):
    """What a drafter promises a request; behind another drafter it is worth the same unless said otherwise."""

    drafter: str
    gain: float
    match: float = 1.0
    survival: tuple[float, ...] = (0.8, 0.6, 0.4)
    behind: float | None = None


def offered(*requests: Sequence[Offer]) -> Promises:
    """Promises to requests 0 .., each by the same drafters; rates do not matter."""
    columns, shape = list(zip(*requests, strict=True)), (len(requests[0]), len(requests))
    survival = np.array([[offer.survival for offer in own] for own in columns])
    nothing = np.zeros((shape[1], survival.shape[2] + 1))
    places, most = np.arange(shape[1]), np.full(shape[1], survival.shape[2])
    known = [
        Evidence(own[0].drafter, places, most, [0] * shape[1], s, most)
        for own, s in zip(columns, survival, strict=True)
    ]
    gain, match = (np.array([[getattr(offer, name) for offer in own] for own in columns]) for name in ("gain", "match"))
    behind = np.array([[offer.gain if offer.behind is None else offer.behind for offer in own] for own in columns])
    seen = [Outlook(most, g, nothing, nothing, nothing, g) for g in gain]
    given = np.full(shape, True), gain, match, survival, np.full(shape, 3), behind
    return Promises(range(shape[1]), known, seen, *given)


def preference(current: int = -1, requests: int = 1) -> Preference:
    return Preference(0.04, np.full(requests, current), 0.02)


def chain(*own: Offer, current: int = -1) -> list[str]:
    """The drafters a single request asks."""
    made = offered(own)
    found = chains(made, np.array([True]), preference(current))
    return [made.drafters[d] for d in found.order[found.asked]]


def test_the_best_drafter_is_asked_first_and_one_that_always_proposes_last():
    assert chain(Offer("small", 0.3), Offer("ngram", 0.9, 0.2), Offer("dspark", 0.6)) == ["ngram", "dspark"]


def test_a_drafter_that_does_not_pay_is_not_asked_after_another():
    assert chain(Offer("ngram", 0.9, 0.2), Offer("dspark", 0.5, behind=0.03)) == ["ngram"]


def test_a_drafter_behind_another_is_judged_by_the_requests_that_come_to_it():
    """Eight requests of which n-gram serves most: a dear pass that paid for eight does not pay for one."""
    known = profile(BFLOAT16, {"n": FREE_LOOKUP, "d": serial(0.8)})
    asks = [Ask(r, 0, (Option("n", 4), Option("d", 4))) for r in range(8)]
    for match, pays in ((0.05, True), (0.9, False)):
        behind = promised(asks, learnt({"n": 0.9, "d": 0.8}, {"n": match}), known)[0, "d"].fallback
        assert (behind[1] > 0.04) is pays


def test_the_drafter_in_use_stays_for_a_small_difference():
    near = Offer("a", 0.50), Offer("b", 0.51)
    assert chain(*near, current=0) == ["a"]
    assert chain(*near) == ["b"]
    assert chain(Offer("a", 0.50), Offer("b", 0.53), current=0) == ["b"]


def promised(asks: Sequence[Ask], history: AcceptanceHistory, known) -> dict[tuple[int, str], Promise]:
    """What each drafter promises each request that may use it."""
    requests = [ask.request_id for ask in asks]
    found = promises(requests, evidence(asks, history), Load(len(asks)), known)
    pairs = itertools.product(requests, found.drafters)
    return {pair: made for pair in pairs if (made := found.of(*pair)) is not None}


def learnt(acceptance: dict[str, float], match: dict[str, float] | None = None) -> AcceptanceHistory:
    history, rng = AcceptanceHistory(), np.random.default_rng(2)
    for drafter, alpha in acceptance.items():
        for _ in range(300):
            if rng.random() < (match or {}).get(drafter, 1.0):
                accepted = next((k for k in range(4) if rng.random() >= alpha), 4)
                history.record(drafter, 99, Outcome(4, accepted))
            else:
                history.record_miss(drafter, 99)
    return history


def test_promises_follow_history_and_costs():
    """Of two equally good drafters the cheaper one promises more; a request may use only what it names."""
    known = profile(BFLOAT16, {"cheap": serial(0.01), "dear": serial(0.4, 0.4)})
    asks = [
        Ask(0, 0, (Option("cheap", 4), Option("dear", 4))),
        Ask(1, 0, (Option("dear", 2),)),
        Ask(2, 0, (), Reason.REQUEST),
    ]
    found = promised(asks, learnt({"cheap": 0.8, "dear": 0.8}), known)
    assert set(found) == {(0, "cheap"), (0, "dear"), (1, "dear")}
    cheap, dear = found[0, "cheap"], found[0, "dear"]
    assert cheap.gain > dear.gain
    assert len(found[1, "dear"].survival) == 2
    assert cheap.acceptance(3).tolist() == pytest.approx([0.8] * 3, abs=0.1)


def test_a_rare_match_pays_for_its_lookups():
    """A drafter that proposes in one of ten rounds and whose calls cost .4 has ten of them to pay per proposal: it pays
    where it always proposes, and does not where it rarely does."""
    known = profile(BFLOAT16, {"n": serial(0.4)})
    asks = [Ask(0, 0, (Option("n", 4),))]
    often = promised(asks, learnt({"n": 0.9}), known)[0, "n"]
    rarely = promised(asks, learnt({"n": 0.9}, {"n": 0.1}), known)[0, "n"]
    assert rarely.drafting[1] - often.drafting[1] == pytest.approx(0.4 / rarely.match - 0.4 / often.match)
    assert rarely.gain == 0.0
    assert often.gain > 1.0


def test_why_not_names_load_context_and_worth():
    """The same drafter at the same prices: too many requests, too long a context, too rarely right."""
    far = ContextCost((0, 10_000), (0.0, 2.0), (0.0, 1.0))
    known = profile(INT4, {"good": serial(0.05, 0.05, context=far), "bad": serial(0.05, 0.05)}, far)
    history = learnt({"good": 0.9, "bad": 0.05})
    asks = [
        Ask(0, 0, (Option("good", 3),)),
        Ask(1, 90_000, (Option("good", 3),)),
        Ask(2, 0, (Option("bad", 3),)),
    ]
    reasons = why_not(np.full(3, True), evidence(asks, history), known, 0.04)
    assert reasons == [Reason.BATCH, Reason.CONTEXT, Reason.GAIN]


def test_one_drafting_pass_for_all_beats_two():
    """Each request has a favourite, by a little; two passes would cost more than either is better."""
    drafts = {"a": serial(0.4, 0.01), "b": serial(0.4, 0.01)}
    known, load = profile(BFLOAT16, drafts), Load(2)
    good, fair = (tuple(np.cumprod([alpha] * 3)) for alpha in (0.8, 0.79))
    made = offered(
        [Offer("a", 0.50, survival=good), Offer("b", 0.45, survival=fair)],
        [Offer("a", 0.45, survival=fair), Offer("b", 0.50, survival=good)],
    )
    best = assign(made, [0, 0], np.full(2, True), preference(requests=2), load, known, current="b")
    assert {made.drafters[d] for d in best.order[best.lengths > 0]} == {"b"}
    two = share(load, known.verify, drafts, [Bid(0, 0, "a", np.array(good)), Bid(1, 0, "b", np.array(good))])
    assert best.gain > two.gain


def test_a_lookup_takes_part_in_any_plan():
    """n-gram before dspark, each request with its own first choice: one plan, both drafters."""
    known = profile(BFLOAT16, {"ngram": FREE_LOOKUP, "dspark": serial(0.15)})
    made = offered(*[[Offer("ngram", 0.9, 0.3), Offer("dspark", 0.6)]] * 2)
    best = assign(made, [0, 0], np.full(2, True), preference(requests=2), Load(2), known, None)
    assert best.order.T.tolist() == [[0, 1]] * 2
    assert (best.lengths > 0).all()
