"""Engines that cheat, each in a way seen in public code. The exact part must find every one of them.

A comparison that passes says something only if it would have failed: these are the failures. All of them are drafters,
since whatever biases speculative decoding is a drafter (or its budget) saying something untrue or knowing too much.
Public cases: conventions of the documentation's certificate page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.bench.exact import Case, after_last
from forerun.drafters.base import Accepted, Draft, Drafter, DraftView, KeepDrafting, Proposal
from forerun.sampling import DRAFT, draw

P = (0.7, 0.3)
"""The target of the counter-examples, at every position (DSpark, arXiv 2607.05147, appendix A)."""
Q = (0.5, 0.5)
"""Its drafter."""


class Scripted(Drafter):
    """Draws K tokens from one law at every position. Honest; what follows differs from it in one respect each."""

    name = "control"

    def __init__(self, law: Sequence[float]):
        self.law = torch.tensor(law, dtype=torch.float64)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        return [self.draft(view) for view in views]

    def draft(self, view: DraftView) -> Draft:
        numbers = [self.number(view, slot) for slot in range(view.k)]
        tokens = draw(self.law.expand(view.k, -1), torch.tensor(numbers, dtype=torch.float64)).tolist()
        return Draft(tokens, self.reported(tokens))

    def number(self, view: DraftView, slot: int) -> float:
        return float(view.noise.uniforms(view.anchor, DRAFT, slot + 1)[slot])

    def reported(self, tokens: Sequence[int]) -> Tensor:
        """[K, V]"""
        return self.law.repeat(len(tokens), 1)


class AcceptedBlindly(Scripted):
    """Reports laws in which its own tokens have probability 0, so that no uniform number ever refuses them."""

    def reported(self, tokens: Sequence[int]) -> Tensor:
        others = 1 - torch.nn.functional.one_hot(torch.tensor(tokens), len(self.law)).double()
        return others / others.sum(-1, keepdim=True)


class PrunedByOwnProbability(Scripted):
    """Cuts the draft before a token it had given less than half: the length depends on the token it decides about."""

    def draft(self, view: DraftView) -> Draft:
        draft = super().draft(view)
        unlikely = [bool(self.law[token] < 0.5) for token in draft.tokens]
        return draft.truncate(unlikely.index(True) if True in unlikely else len(draft.tokens))


class ChosenInRetrospect(Scripted):
    """Picks the most profitable length over all of them after seeing the draft: appendix A's .85 for .70.

    Steps per second for 1, 2, 3 verified tokens are 1, .5, .45, the first survival .8, the second confidence .9 after
    token 0 and 0 after token 1: two tokens are verified after a 0 and none after a 1.
    """

    def draft(self, view: DraftView) -> Draft:
        draft = super().draft(view)
        if len(draft.tokens) < 2:
            return Draft()
        second = 0.9 if draft.tokens[0] == 0 else 0.0
        gains = [1.0, (1 + 0.8) * 0.5, (1 + 0.8 + 0.8 * second) * 0.45]
        return draft.truncate(gains.index(max(gains)))


class ReportedUnfiltered(Scripted):
    """Draws from its two most probable tokens and reports the law it had before that filter."""

    def __init__(self, law: Sequence[float]):
        super().__init__(law)
        self.raw = self.law
        kept = torch.zeros_like(self.raw).scatter(0, self.raw.topk(2).indices, 1.0)
        self.law = self.raw * kept / (self.raw * kept).sum()

    def reported(self, tokens: Sequence[int]) -> Tensor:
        return self.raw.repeat(len(tokens), 1)


class LaggedBudget(Scripted):
    """Verifies a token only if the draft of the round before had a 0 at its position: a budget one round old.

    Lossless as long as no round reads noise of an earlier one. With noise keyed by position instead of anchor, the
    token behind a rejection is drawn again as it was, and the old budget knows it.
    """

    def __init__(self, law: Sequence[float], by_position: bool):
        super().__init__(law)
        self._by_position = by_position
        self._before: dict[int, dict[int, int]] = {}

    def number(self, view: DraftView, slot: int) -> float:
        if self._by_position:
            return float(view.noise.uniforms(view.anchor + 1 + slot, DRAFT, 1)[0])
        return super().number(view, slot)

    def draft(self, view: DraftView) -> Draft:
        draft = super().draft(view)
        first = view.anchor + 1
        before = self._before.get(view.request_id, {})
        self._before[view.request_id] = {first + slot: token for slot, token in enumerate(draft.tokens)}
        refused = [before.get(first + slot, 0) != 0 for slot in range(len(draft.tokens))]
        return draft.truncate(refused.index(True) if True in refused else len(draft.tokens))

    def commit(self, accepted: Sequence[Accepted]) -> None:
        pass  # what it drafted stays known: that is the point

    def release(self, request_id: int) -> None:
        self._before.pop(request_id, None)


def _case(name: str, drafter: type[Scripted], law: Sequence[float] = Q, target: Sequence[float] = P) -> Case:
    logits = [math.log(p) for p in target]
    return Case(
        name=name,
        logits=after_last([logits] * len(target)),
        drafter=partial(drafter, law),
        k=2,
        length=3,
        vocab_size=len(target),
    )


def _lagged(name: str, by_position: bool) -> Case:
    case = _case(name, Scripted)
    return Case(name, case.logits, partial(LaggedBudget, Q, by_position), case.k, 3, case.vocab_size)


def honest() -> list[Case]:
    """The same drafters without the fault, which must pass."""
    return [_case("honest drafts", Scripted), _lagged("lagged budget, noise keyed by anchor", by_position=False)]


def cheating() -> list[Case]:
    """The faults, which must be found."""
    third = 1 / 3
    return [
        _case("drafts accepted blindly", AcceptedBlindly),
        _case("drafts cut by their own probability", PrunedByOwnProbability, law=(0.6, 0.4)),
        _case("length chosen in retrospect", ChosenInRetrospect),
        _case("unfiltered draft law reported", ReportedUnfiltered, law=(0.5, 0.3, 0.2), target=(third, third, third)),
        _lagged("lagged budget, noise keyed by position", by_position=True),
    ]
