"""Prompt lookup mixed into a drafter's laws: the arithmetic, what is copied, and what is left as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import Engine, Sampling
from forerun.drafters.base import Accepted, DraftView
from forerun.drafters.config import parse_config
from forerun.drafters.copying import Found, mix
from forerun.drafters.lookup import NgramIndex
from forerun.drafters.small import Small
from forerun.errors import OptionError
from forerun.sampling import Noise
from forerun.target.table import TableTarget

V = 6


def view(tokens: Sequence[int], k: int = 4, request_id: int = 1, **sampling: float) -> DraftView:
    return DraftView(
        request_id=request_id, tokens=tokens, prompt_length=1, k=k,
        sampling=Sampling(**({"temperature": 0.0} | sampling)), end_ids=frozenset(),
        noise=Noise.of(0), verify_mode="rejection",
    )  # fmt: skip


def drafter(logits: Sequence[float] = (0.0,) * V, **lookup: int) -> Small:
    """A draft model that says the same law whatever came before."""
    made = Small(TableTarget(lambda prefix: list(logits), V, window=256), V)
    made.allocate(32)
    made.copy_from_text(lookup)
    return made


@given(
    logits=st.lists(st.floats(-4, 4), min_size=V, max_size=V),
    token=st.integers(0, V - 1),
    chance=st.floats(0.01, 0.99),
    unknown=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_look_up_gets_its_share_of_the_law(logits, token, chance, unknown):
    """(1 - chance) q + chance at the token, also where the drafter cannot say it; other rows stay as they are."""
    given_logits = torch.tensor([logits, logits], dtype=torch.float64)
    if unknown:
        given_logits[:, token] = -math.inf
    before = given_logits.clone()
    out, known = mix(given_logits, [0.3, 0.4], [Found(1, token, chance)])
    assert torch.equal(given_logits, before)
    assert torch.equal(out[0], before[0])
    assert known[0] == 0.3
    own = torch.softmax(before[1], -1)
    want = (1 - chance) * own + chance * torch.nn.functional.one_hot(torch.tensor(token), V)
    law = torch.softmax(out[1], -1)
    torch.testing.assert_close(law, want)
    leads = float(law[token]) >= float(law.max())
    assert known[1] == pytest.approx(float(law[token]) if leads else (1 - chance) * 0.4)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=25),
    drafted=st.lists(st.integers(0, 2), max_size=4),
    sizes=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
)
@settings(max_examples=200, deadline=None)
def test_what_is_foreseen_followed_the_longest_known_end(tokens, drafted, sizes):
    """By scanning the text for the end of text and draft together, longest first, latest first."""
    index = NgramIndex(range(sizes[0], sizes[1] + 1), ())
    index.extend(tokens)
    whole = [*tokens, *drafted]
    want = None
    for n in range(sizes[1], sizes[0] - 1, -1):
        places = [p for p in range(n, len(tokens)) if tokens[p - n : p] == whole[len(whole) - n :] and n <= len(whole)]
        if places and want is None:
            want = tokens[places[-1]], n
    assert index.foresee(drafted) == (None if want is None else (*want, False))


def test_a_repeated_text_is_copied_and_a_new_one_is_not():
    """The draft model would say 5 for ever. Behind a known pair the text goes on as it did, through the whole draft."""
    sure = [0.0] * 5 + [2.0]
    [copied] = drafter(sure, prompt_lookup_max=2).propose([view([5, 1, 2, 3, 4, 0, 1, 2])], lambda *_: True)
    assert copied.tokens == [3, 4, 0, 1]
    assert min(copied.confidence) > 0.6
    [own] = drafter(sure, prompt_lookup_max=2).propose([view([5, 1, 2, 3, 4, 0])], lambda *_: True)
    [plain] = drafter(sure).propose([view([5, 1, 2, 3, 4, 0])], lambda *_: True)
    assert own.tokens == plain.tokens == [5] * 4
    assert own.confidence == plain.confidence


def test_what_the_request_expects_is_copied_and_counted():
    """The first tokens that the prediction said, whatever of it comes later; behind another one nothing counts."""
    made = drafter([0.0] * 5 + [1.0], prompt_lookup_max=1)
    [draft] = made.propose([replace(view([4, 1]), prediction=(1, 2, 3, 0))], lambda *_: True)
    assert (draft.tokens, draft.predicted) == ([2, 3, 0, 5], 3)
    assert draft.truncate(2).predicted == 2
    [draft] = made.propose([replace(view([1, 3, 1], request_id=2), prediction=(0, 3, 2, 1, 4))], lambda *_: True)
    assert (draft.tokens[0], draft.predicted) == (3, 0)


def test_look_ups_that_were_wrong_lose_to_the_drafter():
    """A text in which pairs say nothing of what follows: the drafter's own law leads there, and not in one that repeats
    itself."""
    rng, sure = random.Random(1), [0.0] * 5 + [5.0]
    noise = [rng.randrange(5) for _ in range(200)]
    [draft] = drafter(sure, prompt_lookup_max=2).propose([view(noise, k=1)], lambda *_: True)
    assert draft.tokens == [5]
    [believed] = drafter(sure, prompt_lookup_max=2).propose([view([1, 2, 3, 1, 2, 3, 1, 2], k=1)], lambda *_: True)
    assert believed.tokens == [3]


def test_a_request_is_forgotten_when_it_is_cut_back_or_released():
    """Both start the index over: nothing of the old branch is copied."""
    made = drafter([0.0] * 5 + [1.0], prompt_lookup_max=1)

    def next_of(tokens: Sequence[int]) -> int:
        [draft] = made.propose([view(tokens, k=1)], lambda *_: True)
        return draft.tokens[0]

    assert next_of([1, 2, 3, 1]) == 2
    made.commit([Accepted(1, 0, 1, None)])
    assert next_of([1, 4, 0]) == 5
    assert next_of([1, 2, 3, 1]) == 2 or made.copying.by_request[1].length == 4
    made.release(1)
    assert made.copying.by_request == {}


def test_the_law_that_was_drawn_from_is_the_mixed_one():
    [draft] = drafter(prompt_lookup_max=1).propose([view([1, 2, 3, 1], k=1, temperature=1.0)], lambda *_: True)
    assert draft.probs is not None
    rate = 0.5  # of a single token, before any evidence
    want = torch.full((V,), (1 - rate) / V)
    want[2] += rate
    torch.testing.assert_close(draft.probs[0].float(), want)


def test_a_row_without_a_law_stays_one():
    [draft] = drafter([math.nan] * V, prompt_lookup_max=1).propose([view([1, 2, 1])], lambda *_: True)
    assert draft.invalid
    assert draft.tokens == []


@pytest.mark.parametrize("method", ["small", "dspark"])
def test_an_engine_copies_and_says_the_same(method):
    """The embedded drafters on nonsense to be repeated: the same tokens as without any drafter, in fewer steps than
    with the drafter alone."""
    salad = "# kelp 71 vow, tin [quartz] 409 / ozone; fig = 8.25 umbra\n"
    text = salad * 3 + salad[:9]
    sampling = Sampling(temperature=0.0, max_tokens=24)
    plain = Engine.load("embedded").generate(text, sampling)[0]

    def run(**options: int):
        config = {"method": method, "num_speculative_tokens": 4, "policy": "fixed", **options}
        return Engine.load("embedded", drafter=config).generate(text, sampling)[0]

    alone, copying = run(), run(prompt_lookup_min=2, prompt_lookup_max=4)
    assert copying.token_ids == alone.token_ids == plain.token_ids
    assert copying.stats.target_steps < alone.stats.target_steps


def test_sizes_that_contradict_each_other_are_refused_by_name():
    config = parse_config({"method": "dspark", "prompt_lookup_min": 4, "prompt_lookup_max": 2})
    with pytest.raises(OptionError, match="prompt_lookup_min"):
        Engine.load("embedded", drafter=config)
