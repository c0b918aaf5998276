"""The scheduler in the engine keeps the law, exactly: every policy, every kind of drafter, one and two requests.

All randomness of two rounds is enumerated through the real engine with the real scheduler (`laws.scheduled`). Beside
them stand the choices that are known to bias, which the same sum must find.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from drafters.kinds import SETTINGS, drafting
from forerun import Sampling
from forerun.budget.policy import POLICIES, Policy
from forerun.drafters.base import Draft, Drafter
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.errors import OptionError
from forerun.sampling import DRAFT
from forerun.target.table import TableTarget
from laws.cases import logits_of
from laws.scheduled import Case, distance, emitted_law

EXACT = 1e-12
BIASED = 1e-3
DEAR = tuple(1 + 0.45 * n for n in range(8))
"""A row pays where it survives with a chance of about a half: there the confidences over two tokens lie."""
SHARED = tuple(1 + 0.3 * n for n in range(8))
"""The same for two requests, whose anchors are in the pass already."""
CHEAP = tuple(1 + 0.1 * n for n in range(8))
"""For drafters whose random weights give lower confidences."""


def _small(target: TableTarget, salt: str = "draft") -> Drafter:
    return Small(
        TableTarget(logits_of("history", salt, target.vocab_size), target.vocab_size, window=64), target.vocab_size
    )


class Unasking(Small):
    """Drafts all it may, so that only the choice afterwards cuts."""

    def propose(self, views, keep_drafting):
        return super().propose(views, lambda view, k, confidence: True)


def _unasking(target: TableTarget) -> Drafter:
    size = target.vocab_size
    return Unasking(TableTarget(logits_of("history", "draft", size), size, window=64), size)


def _learned(kind: str, target: TableTarget) -> Drafter:
    return drafting(kind, target, scale=0.8)


KINDS: dict[str, tuple[Callable[[TableTarget], Drafter], dict[str, object]]] = {
    "small": (_small, {}),
    "unasking": (_unasking, {}),
    "greedy small": (_small, {"draft_sample_method": "greedy"}),
    "ngram": (lambda target: Ngram(2, 1), {}),
    **{kind: (partial(_learned, kind), {}) for kind in SETTINGS},
}
FREE_TO_LOOK = {"greedy small", "ngram", "dflash"}
"""Point masses and blind confidences: where `global` is allowed in rejection mode."""


def case_of(kind: str, policy: Policy, requests: int = 1, k: int = 2, **options) -> Case:
    make, config = KINDS[kind]
    size = 3 if "pruned" in kind else 2
    prompts = [(0, 1, 0, 1, 1), (1, 1, 0)][:requests]
    seconds = CHEAP if kind in SETTINGS else DEAR if requests == 1 else SHARED
    return Case(
        logits_of("history", "target", size), size, make, policy, seconds, k=k, prompts=prompts, config=config,
        threshold=(0.3 if kind in SETTINGS else 0.55) * (policy == "threshold"), **options,
    )  # fmt: skip


def allowed(kind: str, policy: str) -> bool:
    return policy != "global" or kind in FREE_TO_LOOK


QUICK = {
    ("small", "threshold"), ("small", "prefix"), ("small", "delayed"), ("greedy small", "global"), ("ngram", "delayed"),
    ("dspark", "prefix"), ("eagle", "delayed"), ("eagle3", "prefix"), ("dflash", "global"), ("small", "fixed"),
    ("unasking", "prefix"), ("unasking", "delayed"),
}  # fmt: skip
"""Every policy and every kind of drafter; the rest of the product is slow."""


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(kind, policy, marks=() if (kind, policy) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for policy in POLICIES
        if allowed(kind, policy)
    ],
)
def test_sp_1_the_law_of_one_request(kind, policy):
    """https://github.com/NVIDIA/TensorRT-LLM/pull/17056: the joint law of two tokens over up to two rounds is the
    target's to 1e-12, under every policy and with every kind of drafter."""
    found, runner = distance(case_of(kind, policy))
    assert found < EXACT
    assert any(drafted for drafted, _ in runner.lengths)


@pytest.mark.parametrize(("kind", "policy"), [("small", "threshold"), ("small", "prefix"), ("unasking", "prefix")])
def test_the_lengths_of_the_proof_vary(kind, policy):
    """What is drafted, or verified of it, does depend on the confidences, else the proof would show nothing."""
    _, runner = distance(case_of(kind, policy))
    assert len(runner.lengths) > 1
    if kind == "unasking":
        assert {drafted for drafted, _ in runner.lengths} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "global"])
@pytest.mark.parametrize("k", [1, 3])
def test_sp_1_the_law_of_longer_and_shorter_drafts(policy, k):
    """K = 1 and 3, three tokens compared; with temperature, filters and a penalty."""
    sampling = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.2)
    found, _ = distance(case_of("small", policy, k=k, length=4, sampling=sampling))
    assert found < EXACT


def enumerable(kind: str, policy: str, k: int) -> bool:
    """Three drawn tokens of each of two requests, all of them drafted, are too many outcomes; where drafting stops by
    confidence, and of point masses, there are few."""
    return k < 3 or kind in ("greedy small", "ngram") or (kind == "small" and policy != "fixed")


TOGETHER = {("unasking", "prefix", 1), ("small", "delayed", 1), ("greedy small", "delayed", 2)}
"""Of two requests; the rest of the product is slow."""


@pytest.mark.parametrize(
    ("kind", "policy", "k"),
    [
        pytest.param(kind, policy, k, marks=() if (kind, policy, k) in TOGETHER else pytest.mark.slow)
        for kind in ("small", "unasking", "greedy small", "ngram")
        for policy in POLICIES
        for k in (1, 2, 3)
        if allowed(kind, policy) and enumerable(kind, policy, k)
    ],
)
def test_sp_1_the_joint_law_of_two_requests_that_share_a_budget(kind, policy, k):
    """Whose drafts are verified depends on the other's confidences: the joint law is still the product."""
    found, runner = distance(case_of(kind, policy, requests=2, k=k))
    assert found < EXACT
    assert any(verified for _, verified in runner.lengths)


# ------------------------------------------------------------------------------------------------ what must be found

P, Q = (0.7, 0.3), (0.5, 0.5)
"""Target and drafter of the counter-examples, at every position."""


class Scripted(Drafter):
    """Draws from Q at every place and gives confidences that know its own earlier tokens."""

    name = "control"

    def __init__(self, confidence: Callable[[list[int]], list[float]], by_position: bool = False, blind: bool = False):
        self._confidence, self._by_position, self.blind = confidence, by_position, blind

    def propose(self, views, keep_drafting):
        return [self._draft(view) for view in views]

    def _draft(self, view) -> Draft:
        tokens = [int(self._number(view, slot) >= Q[0]) for slot in range(view.k)]
        laws = torch.tensor([Q] * view.k, dtype=torch.float64)
        return Draft(tokens, laws, self._confidence(tokens))

    def _number(self, view, slot: int) -> float:
        if self._by_position:
            return float(view.noise.uniforms(view.anchor + 1 + slot, DRAFT, 1)[0])
        return float(view.noise.uniforms(view.anchor, DRAFT, slot + 1)[slot])


def _control(drafter: Scripted, policy: Policy, seconds, k: int, acceptance=(0.8, 0.9, 0.9)) -> Case:
    logits = [math.log(p) for p in P]
    return Case(lambda prefix: logits, 2, lambda target: drafter, policy, seconds, k=k, acceptance=acceptance)


def appendix_a(tokens: list[int]) -> list[float]:
    """c_1 = .8; c_2 = .9 if x_1 is A, else 0."""
    return [0.8, 0.9 if tokens[0] == 0 else 0.0][: len(tokens)]


APPENDIX_A = (1.0, 2.0, 1 / 0.45)
"""Seconds of 1, 2 and 3 rows: 1, .5 and .45 steps a second."""


def _second_is_a(case: Case) -> float:
    """Probability that the token after the fixed one is A: the first that a round decides."""
    law, _ = emitted_law(case)
    return sum(weight for output, weight in law.items() if output[1] == 0)


def test_sp_1_global_on_confidences_that_know_tokens_is_refused():
    """Appendix A of the DSpark paper (arXiv 2607.05147): the engine refuses it where a configuration asks for it."""
    from forerun import Engine

    with pytest.raises(OptionError, match="policy: 'global' would change the output"):
        Engine.load(TableTarget(lambda prefix: [0.0, 0.0], 2, window=64), Scripted(appendix_a), policy="global")


@pytest.mark.parametrize(("policy", "expected"), [("global", 0.85), ("prefix", 0.70), ("delayed", 0.70)])
def test_sp_1_global_that_got_past_the_refusal_is_caught(policy, expected):
    """The same numbers with a drafter that falsely calls itself blind: .85 instead of .70 under `global`; the other
    policies do not mind."""
    case = _control(Scripted(appendix_a, blind=True), policy, APPENDIX_A, k=2)
    assert _second_is_a(case) == pytest.approx(expected, abs=1e-9)
    assert (distance(case)[0] < EXACT) is (expected == 0.70)


def behind_the_second(tokens: list[int]) -> list[float]:
    """c_3 is high if x_2 is A, else next to nothing."""
    return [0.9, 0.95, 0.95 if tokens[1:2] == [0] else 0.01][: len(tokens)]


LAST_ROW_DECIDES = (1.0, 2.5, 2.76, 2.8)
"""One or two drafts do not pay; three do where the third is likely."""


@pytest.mark.parametrize("by_position", [True, False])
def test_se_1_a_lagged_budget_with_reused_draft_noise_is_caught(by_position):
    """https://github.com/vllm-project/vllm/issues/6038: under `delayed` the count comes from the round before, whose
    third confidence knew x_2. Behind a rejection of x_1 that position is drafted again: with noise keyed by position it
    is the same token, and the budget a function of what it decides about. Keyed by the anchor the law is kept."""
    drafter = Scripted(behind_the_second, by_position)
    case = _control(drafter, "delayed", LAST_ROW_DECIDES, k=3)
    found, runner = distance(case)
    assert len({verified for _, verified in runner.lengths}) > 1, runner.lengths
    assert (found > BIASED) is by_position
    assert (found < EXACT) is not by_position
