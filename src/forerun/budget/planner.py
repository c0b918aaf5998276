"""Planning a step: every request's drafters and K, from history, load and costs. Nothing has been drafted yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from forerun.budget.assignment import Assignment, assign
from forerun.budget.backlog import Backlog
from forerun.budget.bypass import (
    DROP_AFTER,
    HYSTERESIS,
    MIN_PREDICTED_GAIN,
    PROBING_SHARE,
    Gate,
    Reason,
    StateKeeper,
)
from forerun.budget.curve import FloatArray
from forerun.budget.history import AcceptanceHistory
from forerun.budget.planning import Ask, Choice, Load, Option, Plan
from forerun.budget.policy import Policy, check_policy
from forerun.budget.probing import Current, Prober
from forerun.budget.profile import Profile
from forerun.budget.selection import IntArray, Preference, Promises, evidence, promises, why_not


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How to schedule. Names are those of `--speculative-config` where it has them."""

    policy: Policy = "delayed"
    min_predicted_gain: float = MIN_PREDICTED_GAIN
    hysteresis: float = HYSTERESIS
    probing_share: float = PROBING_SHARE
    drop_after: int = DROP_AFTER

    def __post_init__(self) -> None:
        check_policy(self.policy)


Wishes = dict[int, tuple[tuple[Option, ...], Reason | None]]
"""By request: options whose drafters have not dropped it, and why it came without any."""

REPLAN = 8
"""Steps for which an answer is kept while the question stays the same: planning costs time as well."""
REPLAN_CONTEXT = 64
"""Tokens by which contexts may grow meanwhile."""


@dataclass(slots=True)
class _Question:
    """What a decision is made for, besides contexts and history."""

    load: Load
    profile: Profile
    wishes: Wishes

    def same_as(self, other: _Question) -> bool:
        return self.load == other.load and self.profile is other.profile and self.wishes == other.wishes


@dataclass(slots=True)
class _Answer:
    """The last decision and what it was for."""

    question: _Question
    contexts: dict[int, int]
    plans: dict[int, Plan]
    promised: Promises
    drafting: IntArray
    """[R] first drafter of each request, by its place among the promises; -1: it does not draft."""
    draft_rows: int
    """Planned for all of them."""
    entries: int
    """Of the history, when it was given."""
    age: int = 0


class Planner:
    """Chooses drafters and K, and remembers what it takes not to change its mind at every step."""

    def __init__(self, options: SchedulerOptions, history: AcceptanceHistory):
        self._options = options
        self._history = history
        self._keeper = StateKeeper(options.drop_after)
        self._prober = Prober(options.min_predicted_gain, options.probing_share)
        self._gate = Gate(options.min_predicted_gain, options.hysteresis)
        self._in_use: dict[int, str] = {}  # request -> first drafter of its last plan
        self._last_in_use: str | None = None
        self._released: dict[int, set[str]] = {}
        self._backlog = Backlog()
        self._answer: _Answer | None = None

    def plan(self, asks: Sequence[Ask], load: Load, profile: Profile) -> tuple[list[Plan], Promises | None]:
        """A plan for each request, and what every drafter promised it."""
        if not asks:
            return [], None
        for ask in asks:
            self._backlog.saw(ask.request_id, ask.context, ask.left)
        usable, answer = self._usable(asks, profile), self._answer
        question = _Question(load, profile, {ask.request_id: (ask.options, ask.reason) for ask in usable})
        if answer is None or not self._holds(answer, question, asks):
            answer = self._answer = self._decide(asks, usable, question)
        answer.age += 1
        plans = {ask.request_id: answer.plans[ask.request_id] for ask in asks}
        for request, release in self._newly_dropped(asks, profile):
            plans[request] = replace(plans[request], release=release)
        self._probe(plans, answer, {ask.request_id: ask.context for ask in asks})
        return list(plans.values()), answer.promised

    def _holds(self, last: _Answer, question: _Question, asks: Sequence[Ask]) -> bool:
        """Whether the last answer is still good: the same question, and history had no time to change much."""
        fresh = last.age < REPLAN or last.entries == self._history.entries
        if not (fresh and last.question.same_as(question)):
            return False
        return all(0 <= ask.context - last.contexts[ask.request_id] < REPLAN_CONTEXT for ask in asks)

    def _decide(self, asks: Sequence[Ask], usable: Sequence[Ask], question: _Question) -> _Answer:
        load, profile = question.load, question.profile
        requests, contexts = [ask.request_id for ask in asks], [ask.context for ask in asks]
        known = evidence(usable, self._history, partial(self._catch_up, profile=profile))
        promised = promises(requests, known, load, profile)
        gains = promised.gain.max(axis=0, initial=-np.inf)
        # No minimum here: requests share the cost of a step's drafts, and whoever is left out makes it dearer for the
        # others. Each row still has to bring more than it costs.
        gaining, best = gains > 0, None
        if gaining.any():
            preference = self._preference(promised)
            best = assign(promised, contexts, gaining, preference, load, profile, self._last_in_use)
        lengths = np.zeros((1, len(asks)), dtype=np.int64)
        plans: dict[int, Plan] = {}
        drafting = np.full(len(asks), -1)
        # A step in which nobody may draft says nothing about drafting.
        pays = promised.offered_any.any() and self._pays(best, load)
        if best is not None and pays:
            lengths = best.lengths
            plans, drafting = self._drafting(promised, best)
        if len(plans) < len(asks):
            reasons = self._why_not(asks, promised, gains, profile)
            plans |= {r: Plan(r, reason=why) for r, why in zip(requests, reasons, strict=True) if r not in plans}
        where, rows = dict(zip(requests, contexts, strict=True)), int(lengths.max(axis=0).sum())
        return _Answer(question, where, plans, promised, drafting, rows, self._history.entries)

    # ------------------------------------------------------------------------------------------- drafters and their K

    def _preference(self, promised: Promises) -> Preference:
        names = {name: i for i, name in enumerate(promised.drafters)}
        current = np.array([names.get(self._in_use.get(request, ""), -1) for request in promised.requests])
        return Preference(self._options.min_predicted_gain, current, self._options.hysteresis)

    def _pays(self, best: Assignment | None, load: Load) -> bool:
        """The gain of the step is asked of the requests that draft, so that one of many may draft alone."""
        return self._gate.update(best.gain * load.requests / best.drafting if best and best.drafting else 0.0)

    def _drafting(self, promised: Promises, best: Assignment) -> tuple[dict[int, Plan], IntArray]:
        """Plans of the requests that draft, and [R] their first drafters, by place; -1: it does not draft."""
        drafts, requests = best.lengths > 0, np.arange(len(promised.requests))
        place = np.argmax(drafts, axis=0)
        first = np.where(drafts.any(axis=0), best.order[place, requests], -1)
        gains = promised.gain[first, requests].tolist()
        asked = zip(*best.order.tolist(), *best.lengths.tolist(), strict=True)  # of each request: drafters, then K
        plans, known = {}, {}  # few requests ask for what no other does
        for request, i, gain, key in zip(promised.requests, first.tolist(), gains, asked, strict=True):
            if i >= 0:
                if key not in known:
                    known[key] = _choices(promised.drafters, key)
                plans[request] = Plan(request, known[key], gain=gain)
                self._in_use[request] = self._last_in_use = promised.drafters[i]
        return plans, first

    def _why_not(self, asks: Sequence[Ask], promised: Promises, gains: FloatArray, profile: Profile) -> list[Reason]:
        """[R] why a request does not draft, if it does not; `gains` [R] of its best drafter."""
        worth_it = (gains > 0) & (gains >= self._options.min_predicted_gain)
        closed = promised.offered_any & ~worth_it
        reasons = why_not(closed, promised.known, profile, self._options.min_predicted_gain)
        for i in np.flatnonzero(~closed).tolist():
            if not asks[i].options:
                reasons[i] = asks[i].reason or Reason.REQUEST
            else:
                reasons[i] = Reason.BATCH if worth_it[i] else Reason.STATE_DROPPED
        return reasons

    # ------------------------------------------------------------------------------------------------- drafters' states

    def _usable(self, asks: Sequence[Ask], profile: Profile) -> Sequence[Ask]:
        """With the options whose drafters have not dropped the request."""
        if not self._keeper.any_dropped:
            return asks
        left = [
            tuple(o for o in ask.options if not self._is_dropped(ask.request_id, o.drafter, profile)) for ask in asks
        ]
        return [replace(ask, options=options) for ask, options in zip(asks, left, strict=True)]

    def _is_dropped(self, request_id: int, drafter: str, profile: Profile) -> bool:
        return self._keeper.is_dropped(request_id, drafter) and profile.drafts[drafter].follow > 0

    def _newly_dropped(self, asks: Sequence[Ask], profile: Profile) -> list[tuple[int, tuple[str, ...]]]:
        """Requests with the drafters whose state of them goes now; each is named once."""
        if not self._keeper.any_dropped:
            self._released.clear()
            return []
        found = []
        for ask in asks:
            request = ask.request_id
            dropped = {o.drafter for o in ask.options if self._is_dropped(request, o.drafter, profile)}
            new = dropped - self._released.get(request, set())
            self._released[request] = dropped
            if new:
                found.append((request, tuple(sorted(new))))
        return found

    # ---------------------------------------------------------------------------------------------------------- probing

    def _probe(self, plans: dict[int, Plan], answer: _Answer, contexts: dict[int, int]) -> None:
        """Lets at most one request draft to learn, and books the step's time."""
        load, profile, promised = answer.question.load, answer.question.profile, answer.promised
        where = [contexts[request] for request in promised.requests]
        wishes = answer.question.wishes
        current = Current(
            load, promised, where, answer.drafting, answer.draft_rows,
            lambda request, drafter: self._behind(wishes[request][0], request, drafter),
        )  # fmt: skip
        probe = self._prober.pick(current, profile, self._history)
        if probe is not None:
            promise = promised.of(probe.request_id, probe.drafter)
            assert promise is not None
            plan, choices = plans[probe.request_id], (Choice(probe.drafter, probe.length),)
            plans[probe.request_id] = replace(plan, choices=choices, reason=None, gain=promise.gain, probe=True)
        mean = sum(where) / len(where)
        self._prober.earn(profile.verify(load.requests, load.other_rows + load.requests, mean))

    def _behind(self, options: Sequence[Option], request: int, drafter: str) -> int:
        """Tokens that a drafter has to take in before it drafts: one that follows every step has none, whoever can
        rebuild its state does so only when it is asked."""
        lazy = any(option.drafter == drafter and option.rebuilds for option in options)
        return self._backlog.behind(request, drafter) if lazy else 0

    def _catch_up(self, ask: Ask, option: Option, profile: Profile) -> float:
        """Seconds for each token that the request is expected to emit yet."""
        follow = profile.costs(option.drafter).draft.follow
        behind = self._behind((option,), ask.request_id, option.drafter) if follow > 0 else 0
        return follow * behind / self._backlog.ahead(ask.request_id)

    # ------------------------------------------------------------------------------------------------------------ books

    def record(self, ask: Ask, plan: Plan, drafter: str | None, emitted: int, missed: Sequence[str] = ()) -> None:
        """A round of a request emitted so many tokens, with this drafter's part in it or with nobody's; `missed` were
        asked and had nothing to propose."""
        for name in (*missed, *([] if drafter is None else [drafter])):
            self._backlog.took_in(ask.request_id, name, ask.context + emitted)
        for option in ask.options:
            if option.rebuilds:
                continue  # it takes in nothing until it is asked: to keep what it has is free
            if option.drafter == drafter and not plan.probe:
                self._keeper.used(ask.request_id, option.drafter)
            else:
                self._keeper.followed(ask.request_id, option.drafter, emitted)

    def restart(self, request_id: int) -> None:
        """The drafters' states of a request are fresh."""
        self._keeper.forget(request_id)
        self._backlog.restart(request_id)

    def forget(self, request_id: int) -> None:
        self._keeper.forget(request_id)
        self._in_use.pop(request_id, None)
        self._released.pop(request_id, None)
        self._backlog.forget(request_id)


def _choices(names: Sequence[str], asked: Sequence[int]) -> tuple[Choice, ...]:
    """Of the drafters that are asked for any tokens; `asked` are their places, then K of each."""
    half = len(asked) // 2
    return tuple(Choice(names[i], k) for i, k in zip(asked[:half], asked[half:], strict=True) if k > 0)


__all__ = ["Planner", "SchedulerOptions"]
