"""Drafting in a simulated step: who is asked, how many tokens each makes, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.bench.simulate.acceptance import Loaded, Skill, Spread, confidences
from forerun.bench.simulate.batch import FOLLOWS_FEATURES, Live
from forerun.budget.curve import FloatArray
from forerun.budget.planning import Choice, Plan
from forerun.budget.policy import Exposure
from forerun.budget.profile import Profile
from forerun.budget.rounds import Drafted, DraftTime
from forerun.budget.scheduler import Scheduler

SURE = Exposure(point_masses=True)
"""Of a look-up."""


@dataclass
class Proposals:
    """Everything that was drafted in a step."""

    drafts: dict[int, Drafted]
    """By request, those without a draft included."""
    chances: dict[int, FloatArray] = field(default_factory=dict)
    """[K] chance of each token of a request that has a draft."""
    missed: dict[int, list[str]] = field(default_factory=dict)
    calls: list[DraftTime] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)


class Drafting:
    """Simulated drafters, asked as the engine asks real ones.

    Args:
        loaded: in the order they are loaded.
        spread: how their acceptance varies.
        costs: what drafting really costs.
        exposure: of drafts that are drawn.
        threshold: below which confidence nothing is drafted.
    """

    def __init__(self, loaded: Loaded, spread: Spread, costs: Profile, exposure: Exposure, threshold: float = 0.0):
        self._skills = loaded.skills
        self._spread = spread
        self._costs = costs
        self._exposure = exposure
        self._threshold = threshold
        self._rates = [spread.rates(skill) for skill in self._skills]

    def propose(self, scheduler: Scheduler, plans: Sequence[Plan], lives: Sequence[Live]) -> Proposals:
        """Every request's choices in its order; it goes on to the next where the one before proposes nothing."""
        out = Proposals({plan.request_id: Drafted(plan.request_id, exposure=self._exposure) for plan in plans})
        left = [(live, list(plan.choices)) for plan, live in zip(plans, lives, strict=True) if plan.choices]
        while left:
            number = self._next([choices for _, choices in left])
            name = self._skills[number].name
            mine = [(live, choices.pop(0)) for live, choices in left if choices[0].drafter == name]
            self._ask(scheduler, number, mine, out)
            left = [(live, choices) for live, choices in left if choices and out.drafts[live.id].drafter is None]
        return out

    def _next(self, left: Sequence[Sequence[Choice]]) -> int:
        """The first drafter that nobody will come to later, so that each makes one pass."""
        here = {choices[0].drafter for choices in left}
        later = {choice.drafter for choices in left for choice in choices[1:]}
        waiting = [i for i, skill in enumerate(self._skills) if skill.name in here]
        return next((i for i in waiting if self._skills[i].name not in later), waiting[0])

    def _ask(self, scheduler: Scheduler, number: int, mine: Sequence[tuple[Live, Choice]], out: Proposals) -> None:
        """One call of a drafter."""
        skill = self._skills[number]
        lives, planned = [live for live, _ in mine], [choice.k for _, choice in mine]
        chances = self._chances(number, lives, max(planned))
        said = confidences(chances, skill.bias)
        made = []
        for i, (live, k) in enumerate(zip(lives, planned, strict=True)):
            found = bool(live.text.found[number][live.made])
            made.append(self._count(scheduler, skill, live, said[i, :k]) if found else 0)
            if made[i] == 0:
                out.missed.setdefault(live.id, []).append(skill.name)
                continue
            given = said[i, : made[i]].tolist() if skill.confident else []
            exposure = SURE if skill.kind == "lookup" else self._exposure
            out.drafts[live.id] = Drafted(live.id, skill.name, made[i], given, exposure)
            out.chances[live.id] = chances[i]
        contexts = [len(live.request.tokens) for live in lives]
        paid = [skill.passes(k, n) for k, n in zip(planned, made, strict=True)]
        seconds = self._costs.drafts[skill.name].of(paid, contexts)
        out.calls.append(DraftTime(skill.name, paid, contexts, seconds))

    def _chances(self, number: int, lives: Sequence[Live], most: int) -> FloatArray:
        """[R, most]"""
        text = np.array([live.text.difficulty for live in lives])
        places = np.stack([live.text.places[live.made : live.made + most] for live in lives])
        return self._spread.chances(self._rates[number][:most], text, places)

    def _count(self, scheduler: Scheduler, skill: Skill, live: Live, said: FloatArray) -> int:
        """Tokens it makes: all, or as many as the scheduler finds worth it, asked slot by slot."""
        if not skill.asks or not (scheduler.adapts or self._threshold > 0):  # else every answer is yes
            return len(said)
        for slot, confidence in enumerate(said.tolist(), 1):
            if not scheduler.keep_drafting(live.id, skill.name, slot, confidence):
                return slot - 1
        return len(said)


class Upkeep:
    """What it costs that drafters keep up with requests they do not draft for.

    One that needs the target's features takes in every row when it becomes final, unless it has dropped the request.
    Any other drops none and catches up when it drafts again, with all the rows since.
    """

    def __init__(self, loaded: Loaded, costs: Profile):
        follow = {skill.name: costs.drafts[skill.name].follow for skill in loaded.skills}
        self._eager = {name: each for name, each in follow.items() if name in FOLLOWS_FEATURES}
        self._lazy = {name: each for name, each in follow.items() if name not in FOLLOWS_FEATURES}
        self._dropped: dict[int, set[str]] = {}
        self._behind: dict[tuple[int, str], int] = {}
        """Rows a lazy drafter has not taken in."""

    def release(self, plans: Sequence[Plan]) -> None:
        """States that plans drop."""
        for plan in plans:
            if plan.release:
                self._dropped.setdefault(plan.request_id, set()).update(plan.release)

    def seconds(self, live: Live, rows: int, drafter: str | None) -> float:
        """Of a step that made so many rows of a request final, with a draft of this drafter or without one."""
        dropped = self._dropped.get(live.id, set())
        total = sum(each * rows for name, each in self._eager.items() if name != drafter and name not in dropped)
        for name, each in self._lazy.items():
            key = live.id, name
            if name == drafter:
                total += each * self._behind.pop(key, 0)
            else:
                self._behind[key] = self._behind.get(key, 0) + rows
        return total

    def forget(self, request_id: int) -> None:
        """It is gone, or will be computed again."""
        self._dropped.pop(request_id, None)
        for name in self._lazy:
            self._behind.pop((request_id, name), None)


__all__ = ["Drafting", "Proposals", "Upkeep"]
