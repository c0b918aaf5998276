"""Prompt lookup: what is found, in what order, and what it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Sampling
from forerun.drafters.base import Accepted, DraftView
from forerun.drafters.ngram import Ngram
from forerun.errors import OptionError
from forerun.sampling import Noise


def _view(tokens, k=4, request_id=1, prediction=()) -> DraftView:
    return DraftView(
        request_id=request_id, tokens=tokens, prompt_length=1, k=k, sampling=Sampling(), end_ids=frozenset(),
        noise=Noise.of(0), verify_mode="rejection", prediction=prediction,
    )  # fmt: skip


def _lookup(drafter, tokens, **view) -> list[int]:
    [draft] = drafter.propose([_view(tokens, **view)], lambda *_: True)
    assert draft.probs is None
    return draft.tokens


def _naive(tokens, k, sizes, prediction=()) -> list[int]:
    """The longest suffix seen before, its latest occurrence, and what followed, by scanning everything."""
    corpus = [*prediction, None, *tokens] if prediction else list(tokens)
    for n in sorted(sizes, reverse=True):
        if n > len(corpus):
            continue
        for place in range(len(corpus) - 1, n - 1, -1):
            if corpus[place - n : place] == corpus[len(corpus) - n :]:
                draft = []
                while len(draft) < k:
                    token = [*corpus, *draft][place + len(draft)]
                    if token is None:
                        break
                    draft.append(token)
                if draft:
                    return draft
                break
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    prediction=st.lists(st.integers(0, 2), max_size=12),
    k=st.integers(1, 8),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    steps=st.lists(st.integers(1, 7), min_size=30, max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_lookup_equals_a_scan_of_everything(tokens, prediction, k, sizes, steps):
    """Tokens arriving in any portions: each lookup is that of a naive search over prediction, prompt and output."""
    drafter = Ngram(prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[1])
    length = 0
    for step in steps:
        length = min(length + step, len(tokens))
        seen = tokens[:length]
        want = _naive(seen, k, range(sizes[0], sizes[1] + 1), prediction)
        assert _lookup(drafter, seen, k=k, prediction=prediction) == want


@given(
    tokens=st.lists(st.integers(0, 2), min_size=3, max_size=25),
    cut=st.integers(0, 24),
    more=st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_after_a_cut_nothing_of_the_old_branch_is_left(tokens, cut, more):
    """A request that goes on from fewer rows looks up what a fresh drafter would, also if only its newest indexed token
    changed.
    """
    drafter = Ngram(1)
    _lookup(drafter, tokens)
    rows = min(cut, len(tokens) - 1)
    drafter.commit([Accepted(1, rows, rows, None)])
    branch = [*tokens[:rows], *more]
    assert _lookup(drafter, branch) == _lookup(Ngram(1), branch)


def test_the_longest_match_wins_then_the_latest():
    """Matches of 4 and 3 tokens: the longer one's continuation; two places of one length: the later one's."""
    drafter = Ngram(prompt_lookup_min=2, prompt_lookup_max=4)
    assert _lookup(drafter, [1, 2, 3, 4, 9, 0, 3, 4, 8, 1, 2, 3, 4], k=1) == [9]
    assert _lookup(Ngram(2), [3, 4, 9, 3, 4, 8, 3, 4], k=1) == [8]


def test_a_repetition_is_continued_into_the_draft_itself():
    """The text a b a b a b is drafted for as long as K allows, though its end is reached after one token."""
    assert _lookup(Ngram(2), [0, 1, 2, 1, 2, 1, 2], k=7) == [1, 2, 1, 2, 1, 2, 1]


def test_a_prediction_is_a_corpus_in_front():
    """The prediction alone can be matched; no n-gram spans its border; the request's own text is later, so it wins."""
    drafter = Ngram(2)
    assert _lookup(drafter, [5, 6], prediction=[4, 5, 6, 7, 8]) == [7, 8]
    assert _lookup(Ngram(2), [7, 1, 8, 7], prediction=[8, 7]) == []  # what follows 8 7 is the border
    assert _lookup(Ngram(2), [5, 6, 9, 5, 6], prediction=[5, 6, 7], k=1) == [9]


def test_released_requests_are_forgotten():
    """After `release` the same id starts over; other requests keep their index."""
    drafter = Ngram(1)
    _lookup(drafter, [1, 2, 1])
    _lookup(drafter, [3, 4, 3], request_id=2)
    drafter.release(1)
    drafter.release(1)
    drafter.release(99)
    assert set(drafter._indexes.by_request) == {2}
    assert _lookup(drafter, [7, 8]) == []


def test_the_index_grows_with_new_tokens_only():
    """5,000 rounds cost n-grams of the new tokens only: the index enters each place once for each size."""
    rng = random.Random(3)
    tokens, drafter = [0], Ngram(prompt_lookup_min=2, prompt_lookup_max=4)
    entered = 0

    class Counted(dict):
        def __setitem__(self, key, value):
            nonlocal entered
            entered += 1
            super().__setitem__(key, value)

    _lookup(drafter, tokens)
    drafter._indexes.by_request[1]._places = Counted()
    for _ in range(5000):
        tokens.append(rng.randrange(50))
        _lookup(drafter, tokens)
    assert entered <= 3 * len(tokens)


@pytest.mark.parametrize(
    ("given_sizes", "want"), [((None, None), (2, 4)), ((3, None), (3, 3)), ((None, 5), (5, 5)), ((6, 2), (2, 6))]
)
def test_sizes(given_sizes, want):
    """One size given sets both; none is 2 to 4."""
    sizes = Ngram(prompt_lookup_max=given_sizes[0], prompt_lookup_min=given_sizes[1]).sizes
    assert (sizes.start, sizes.stop - 1) == want


@pytest.mark.parametrize("sizes", [(2, 3), (0, 0), (-1, None)])
def test_sizes_that_make_no_sense(sizes):
    """min above max, and sizes below one, are refused."""
    with pytest.raises(OptionError, match="prompt_lookup_min"):
        Ngram(prompt_lookup_max=sizes[0], prompt_lookup_min=sizes[1])
