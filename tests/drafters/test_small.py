"""A draft model over its own rows: what it is fed, what it draws, and what its vocabulary lacks."""

from __future__ import annotations

import math

import pytest
import torch

from forerun import Sampling
from forerun.drafters.base import Accepted, DraftView, draw_drafts, is_deterministic
from forerun.drafters.small import INGEST_ROWS, STALE, Small
from forerun.sampling import NOTHING, Noise, Row, distribution
from forerun.target.table import TableTarget, history_model, position_model, table_model


def _view(tokens, k=4, request_id=1, **options) -> DraftView:
    fields = {
        "prompt_length": 1, "sampling": Sampling(temperature=0.8), "end_ids": frozenset(),
        "noise": Noise.of(request_id), "verify_mode": "rejection",
    }  # fmt: skip
    return DraftView(request_id=request_id, tokens=tokens, k=k, **{**fields, **options})


def _small(model=None, vocab_size=7, **options) -> Small:
    drafter = Small(model or history_model(7, seed=3), vocab_size, **options)
    drafter.allocate(64)
    return drafter


def _always(view, k, confidence) -> bool:
    return True


def test_the_reported_law_is_the_one_drawn_from():
    """Each row of `probs` is the processed law of the draft model along the drafted path, bit by bit."""
    sampling = Sampling(temperature=0.7, top_k=4, top_p=0.9, repetition_penalty=1.2)
    [draft] = _small().propose([_view([1, 2, 3], sampling=sampling)], _always)
    exact = history_model(7, seed=3)
    for slot in range(4):
        prefix = [1, 2, 3, *draft.tokens[:slot]]
        logits = torch.tensor([exact._logits(prefix)], dtype=torch.float64)
        assert torch.equal(
            draft.probs[slot : slot + 1], distribution(logits, [Row(sampling, [1, 2, 3], 1, draft.tokens[:slot])])
        )
        assert draft.probs[slot, draft.tokens[slot]] > 0


@pytest.mark.parametrize(
    ("options", "law"),
    [
        ({}, True),
        ({"sampling": Sampling(temperature=0)}, False),
        ({"draft_greedily": True}, False),
        ({"verify_mode": "coupled"}, False),
    ],
)
def test_point_masses_have_no_law(options, law):
    """A law is reported exactly where the tokens were drawn for `rejection`."""
    view = _view([1, 2, 3], **options)
    [draft] = _small().propose([view], _always)
    assert (draft.probs is not None) == law
    if is_deterministic(view):
        exact = history_model(7, seed=3)
        path = [1, 2, 3]
        for token in draft.tokens:
            row = exact._logits(path)
            assert token == row.index(max(row))
            path.append(token)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_eq_1_a_greedy_draft_takes_the_lowest_of_equal_ids(temperature):
    """EQ-1: two equal largest logits after every token, drafted greedily, for a sampled request too.

    https://github.com/vllm-project/vllm/issues/7627
    """
    table = [[0, 5, 1, 5, 2], [5, 1, 5, 0, 2], [1, 0, 2, 5, 5], [2, 5, 5, 1, 0], [5, 5, 2, 1, 0]]
    view = _view([4], draft_greedily=True, sampling=Sampling(temperature=temperature))
    [draft] = _small(table_model(table), 5).propose([view], _always)
    assert draft.tokens == [0, 1, 0, 1]


def test_drafts_of_a_batch_are_those_of_each_alone():
    """Different K, modes and temperatures in one call: each draft as by itself."""
    views = [
        _view([1, 2, 3], k=4, request_id=1),
        _view([4], k=1, request_id=2, verify_mode="coupled"),
        _view([5, 5, 6], k=3, request_id=3, sampling=Sampling(temperature=0)),
        _view([2, 2], k=2, request_id=4, draft_greedily=True),
    ]
    together = _small().propose(views, _always)
    for view, draft in zip(views, together, strict=True):
        [alone] = _small().propose([view], _always)
        assert draft.tokens == alone.tokens
        assert (draft.probs is None) == (alone.probs is None)
        assert draft.probs is None or torch.equal(draft.probs, alone.probs)
        assert draft.confidence == alone.confidence
        assert len(draft.tokens) == view.k


def test_rows_are_fed_once_and_none_is_left_out():
    """After full acceptance, partial acceptance, rejection and rounds without drafting the model has seen exactly the
    committed tokens: its drafts are those of a fresh one.
    """
    drafter = _small()
    tokens = [1, 2, 3]
    for accepted, plain_tokens in ((4, 0), (2, 0), (0, 0), (1, 7), (4, 1)):
        [draft] = drafter.propose([_view(tokens)], _always)
        [fresh] = _small().propose([_view(tokens)], _always)
        assert draft.tokens == fresh.tokens
        start = len(tokens) - 1
        tokens = [*tokens, *draft.tokens[:accepted], 6]
        drafter.commit([Accepted(1, start, len(tokens) - 1, None)])
        assert drafter._tables.rows(1) <= len(tokens) - 1
        for _ in range(plain_tokens):
            tokens = [*tokens, 5]
            drafter.commit([Accepted(1, len(tokens) - 2, len(tokens) - 1, None)])
        drafter.audit()
    drafter.release(1)
    drafter.audit()
    assert drafter._tables.used == 0


def test_requests_that_go_on_without_drafts_make_room():
    """Four blocks, of which one request holds two. Others have them once it has gone on for 256 rows without a draft,
    if that takes it; then it is taken in again. A request that drafts in the same call gives nothing away."""
    drafter = Small(history_model(7, seed=3), 7)
    drafter.allocate(4)
    texts = {1: [1] * 20, 2: [2] * 14, 3: [3] * 30}

    def propose(*requests: int) -> list[bool]:
        drafts = drafter.propose([_view(texts[r], k=2, request_id=r) for r in requests], _always)
        drafter.audit()
        return [bool(draft.tokens) for draft in drafts]

    def committed(request: int, rows: int) -> None:
        drafter.commit([Accepted(request, 0, rows, None)])

    assert propose(1, 2) == [True, True]
    held = drafter._tables.rows(1)
    for behind, room in ((STALE, False), (STALE + 1, True)):
        committed(1, held + behind)
        committed(2, 13)
        assert propose(2) == [True]
        assert drafter._tables.rows(1) == held
        assert propose(3) == [room]
    assert set(drafter._tables.lengths) == {2, 3}
    committed(3, 29)
    drafter._behind[3] = STALE + 1
    assert propose(3, 1) == [True, False]
    assert propose(1) == [True]


def test_a_long_prompt_is_ingested_in_bounded_passes():
    """No pass over the draft model is longer than INGEST_ROWS, and every token is fed once."""
    model = TableTarget(lambda prefix: [float(len(prefix) % 7 == i) for i in range(7)], 7)
    drafter = Small(model, 7)
    drafter.allocate(200)
    tokens = [i % 7 for i in range(3 * INGEST_ROWS + 5)]
    [draft] = drafter.propose([_view(tokens, k=2, sampling=Sampling(temperature=0))], _always)
    assert draft.tokens == [len(tokens) % 7, (len(tokens) + 1) % 7]
    assert model.passes == [INGEST_ROWS] * 3 + [5, 1]


def test_keep_drafting_is_asked_before_each_draw():
    """It sees the slot, from 1, and a confidence that does not depend on the token about to be drawn; where it declines
    the draft ends.
    """
    asked = []

    def keep(view, k, confidence):
        asked.append((view.request_id, k, confidence))
        return k <= view.request_id

    views = [_view([1, 2, 3], request_id=i) for i in (0, 1, 2)]
    drafts = _small().propose(views, keep)
    assert [len(draft.tokens) for draft in drafts] == [0, 1, 2]
    assert [(i, k) for i, k, _ in asked] == [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (2, 3)]
    assert all(len(draft.confidence) == len(draft.tokens) for draft in drafts)
    first = {confidence for _, k, confidence in asked if k == 1}
    assert len(first) == 1  # the same history
    top = torch.tensor(history_model(7, seed=3)._logits([1, 2, 3])).softmax(-1).max()
    assert first.pop() == pytest.approx(float(top), rel=1e-6)


@pytest.mark.parametrize(("columns", "shared"), [(5, 5), (9, 7), (9, 6), (7, 3)])
def test_ids_that_are_not_shared_have_no_mass(columns, shared):
    """A smaller and a larger table, and one that shares fewer ids than both have: laws over the target's 7 ids, 0
    beyond what is shared, renormalised before anything is drawn.
    """
    drafter = _small(position_model(columns, seed=1), 7, shared_ids=shared)
    [draft] = drafter.propose([_view([1, 2, 6, 4])], _always)
    assert draft.probs.shape == (4, 7)
    assert (draft.probs[:, shared:] == 0).all()
    assert torch.allclose(draft.probs.sum(-1), torch.ones(4, dtype=torch.float64))
    assert max(draft.tokens) < shared


def test_a_law_that_is_not_there_is_not_drawn_from():
    """NaN logits, and masks that leave nothing, yield NOTHING in every mode; other rows are not touched."""
    logits = torch.zeros(6, 7, dtype=torch.float64)
    logits[3:] = math.nan
    nothing = Sampling(temperature=0.8, allowed_token_ids=[6])
    logits[1:3, 6] = -math.inf
    views = [
        _view([1]),
        _view([1], sampling=nothing),
        _view([1], sampling=Sampling(temperature=0, allowed_token_ids=[6])),
        _view([1]),
        _view([1], sampling=Sampling(temperature=0)),
        _view([1], verify_mode="coupled"),
    ]
    tokens, _ = draw_drafts(logits, views, [[] for _ in views])
    assert tokens[0] in range(7)
    assert tokens[1:] == [NOTHING] * 5


def test_a_shorter_window_than_the_models_can_be_asked_for():
    """`max_model_len` of the config only shortens."""
    model = history_model(7, window=50)
    assert Small(model, 7, window=20).window == 20
    assert Small(model, 7, window=90).window == 50
