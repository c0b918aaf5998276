"""The exact law with the real learned drafters in the loop, in float64 on an exact target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from drafters.kinds import SETTINGS, drafting
from drafters.learning import give
from forerun import Sampling
from forerun.drafters.base import DraftView
from forerun.sampling import Noise
from forerun.target.table import TableTarget
from forerun.verify import Draft
from laws.cases import PROMPT, logits_of
from laws.kit import EXACT, Model, Tokens, bias, rejection_round, steered

V = 3
OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot, filtered": {"temperature": 1.7, "top_k": 2, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.3},
    "greedy": {"temperature": 0.0},
}


class _Given(Noise):
    """Noise whose draft uniforms are given."""

    def __init__(self, uniforms: Sequence[float]):
        object.__setattr__(self, "given", uniforms)

    def uniforms(self, anchor: int, purpose: int, count: int):
        return self.given[:count]


QUICK = {
    ("dflash", "hot, filtered"), ("dspark", "penalties"), ("dspark-rnn", "cold"),
    ("dspark-pruned", "plain"), ("dspark-pruned copying", "plain"), ("dflash copying", "hot, filtered"),
    ("dspark-pruned copying a prediction", "plain"), ("eagle3 copying", "penalties"), ("eagle", "plain"),
    ("eagle3", "hot, filtered"), ("eagle3-pruned", "greedy"),
}  # fmt: skip
"""Every kind and every option once; the rest of the product runs with the slow tests."""

COPYING = ("dspark-pruned copying", "dspark-pruned copying a prediction", "dflash copying", "eagle3 copying")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if (name, options) in QUICK else pytest.mark.slow)
        for name in [*SETTINGS, *COPYING]
        for options in OPTIONS
    ],
)
def test_output_has_exactly_the_targets_law(name, options):
    """Every draft the network can make, with its probability, verified over two rounds: the law of five tokens."""
    sampling = Sampling(**OPTIONS[options])
    logits = logits_of("history", "target", V)
    target = TableTarget(logits, V, window=32)
    prediction = (1, 2, 0, 1, 1) if "prediction" in name else ()
    pruned = {"draft_vocab_size": V - 1} if "pruned" in name else {}
    drafter = drafting(name, target, scale=0.6, **pruned)

    @cache
    def drafted(prefix: Tokens, uniforms: tuple[float, ...]) -> Draft:
        drafter.allocate(4)
        drafter.release(1)  # another branch of its text
        give(drafter, prefix, 0, len(prefix) - 1)
        view = DraftView(
            request_id=1, tokens=prefix, prompt_length=len(PROMPT), k=2, sampling=sampling, end_ids=frozenset(),
            noise=_Given(uniforms), verify_mode="rejection", prediction=prediction,
        )  # fmt: skip
        return drafter.propose([view], lambda view, k, confidence: True)[0]

    def propose(prefix: Tokens, uniforms: Sequence[float]) -> Draft:
        return drafted(prefix, tuple(uniforms))  # a function of both, which the sum asks for again

    exact = Model(logits, sampling, len(PROMPT))
    assert bias(rejection_round(exact, steered(propose, 2)), exact, PROMPT, 5) < EXACT
