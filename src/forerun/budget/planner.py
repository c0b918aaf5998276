"""Planning a step: every request's drafters and K, from history, load and costs. Nothing has been drafted yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from forerun.budget.assignment import Assignment, assign
from forerun.budget.bypass import (
    DROP_AFTER,
    HYSTERESIS,
    MIN_PREDICTED_GAIN,
    PROBING_SHARE,
    Gate,
    Reason,
    StateKeeper,
)
from forerun.budget.history import AcceptanceHistory
from forerun.budget.planning import Ask, Choice, Load, Option, Plan
from forerun.budget.policy import Policy, check_policy
from forerun.budget.probing import Current, Prober
from forerun.budget.profile import Profile
from forerun.budget.selection import Promise, evidence, order, promises, why_not


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


Promised = dict[int, list[Promise]]
"""By request, in the order of its options."""
Usable = dict[int, tuple[Option, ...]]
"""By request, the options whose drafters have their state of it or can get it back."""
Reasons = dict[int, Reason | None]
"""By request, why it came without options."""

REPLAN = 8
"""Steps for which an answer is kept while the question stays the same: planning costs time as well."""
REPLAN_CONTEXT = 64
"""Tokens by which contexts may grow meanwhile."""


@dataclass(slots=True)
class _Answer:
    """The last decision and what it was for."""

    load: Load
    profile: Profile | None
    usable: Usable
    given: Reasons
    contexts: dict[int, int]
    plans: dict[int, Plan]
    promised: Promised
    entries: int = 0
    """Of the history, when it was given."""
    age: int = 0


class Planner:
    """Chooses drafters and K, and remembers what it takes not to change its mind at every step."""

    def __init__(self, options: SchedulerOptions, history: AcceptanceHistory):
        self._options = options
        self._history = history
        self._keeper = StateKeeper(options.drop_after)
        self._prober = Prober(options.min_predicted_gain, options.probing_share)
        self._batch_gate = self._gate()
        self._gates: dict[int, Gate] = {}
        self._in_use: dict[int, str] = {}  # request -> first drafter of its last plan
        self._last_in_use: str | None = None
        self._released: dict[int, set[str]] = {}
        self._answer = _Answer(Load(0), None, {}, {}, {}, {}, {})

    def _gate(self) -> Gate:
        return Gate(self._options.min_predicted_gain, self._options.hysteresis)

    def plan(self, asks: Sequence[Ask], load: Load, profile: Profile) -> tuple[list[Plan], Promised]:
        """A plan for each request, and what every drafter promised it."""
        if not asks:
            return [], {}
        usable = {a.request_id: tuple(o for o in a.options if self._usable(a, o, profile)) for a in asks}
        if not self._answer_holds(asks, usable, load, profile):
            self._answer = self._decide(asks, usable, load, profile)
        answer = self._answer
        answer.age += 1
        plans = {ask.request_id: answer.plans[ask.request_id] for ask in asks}
        for ask in asks:
            release = self._newly_dropped(ask, profile)
            if release:
                plans[ask.request_id] = replace(plans[ask.request_id], release=release)
        self._probe(plans, answer.promised, load, {ask.request_id: ask.context for ask in asks}, profile)
        return list(plans.values()), answer.promised

    def _answer_holds(self, asks: Sequence[Ask], usable: Usable, load: Load, profile: Profile) -> bool:
        """Whether the last answer is still good: the same question, and history had no time to change much."""
        last = self._answer
        fresh = last.age < REPLAN or last.entries == self._history.entries
        same = fresh and last.load == load and last.profile is profile and last.usable == usable
        same = same and last.given == {ask.request_id: ask.reason for ask in asks}
        return same and all(0 <= ask.context - last.contexts[ask.request_id] < REPLAN_CONTEXT for ask in asks)

    def _decide(self, asks: Sequence[Ask], usable: Usable, load: Load, profile: Profile) -> _Answer:
        minimum = self._options.min_predicted_gain
        known = evidence([replace(ask, options=usable[ask.request_id]) for ask in asks], self._history)
        promised = promises(known, load, profile)
        opened = {request for request, own in promised.items() if self._pays(request, own)}
        reasons = why_not(known, promised.keys() - opened, profile, minimum) if opened != promised.keys() else {}
        best = assign(asks, load, profile, partial(self._chain, promised, opened), self._last_in_use)
        paying = bool(opened) and self._batch_pays(best, load)
        plans = {}
        for ask in asks:
            request = ask.request_id
            chosen = [(p, k) for p, k in zip(best.chains[request], best.lengths[request], strict=True) if k > 0]
            drafts = paying and chosen
            plans[request] = self._drafting(request, chosen) if drafts else self._plain(ask, promised, reasons)
        given = {ask.request_id: ask.reason for ask in asks}
        contexts = {ask.request_id: ask.context for ask in asks}
        return _Answer(load, profile, usable, given, contexts, plans, promised, self._history.entries)

    # ------------------------------------------------------------------------------------------- drafters and their K

    def _pays(self, request_id: int, promised: Sequence[Promise]) -> bool:
        """The request's own gate."""
        gate = self._gates.setdefault(request_id, self._gate())
        return gate.update(max(promise.gain for promise in promised))

    def _batch_pays(self, best: Assignment, load: Load) -> bool:
        """The gain of the step is asked of the requests that draft, so that one of many may draft alone."""
        return self._batch_gate.update(best.gain * load.requests / best.drafting if best.drafting else 0.0)

    def _chain(self, promised: Promised, opened: Set[int], request_id: int, without: Collection[str]) -> list[Promise]:
        """Drafters to ask, best first; none while the request's gate is closed."""
        if request_id not in opened:
            return []
        left = [promise for promise in promised[request_id] if promise.drafter not in without]
        options = self._options
        return order(left, options.min_predicted_gain, self._in_use.get(request_id), options.hysteresis)

    def _drafting(self, request: int, chosen: Sequence[tuple[Promise, int]]) -> Plan:
        self._in_use[request] = self._last_in_use = chosen[0][0].drafter
        return Plan(request, tuple(Choice(promise.drafter, k) for promise, k in chosen), gain=chosen[0][0].gain)

    def _plain(self, ask: Ask, promised: Mapping[int, Sequence[Promise]], reasons: Mapping[int, Reason]) -> Plan:
        if not ask.options:
            return Plan(ask.request_id, reason=ask.reason or Reason.REQUEST)
        if ask.request_id not in promised:
            return Plan(ask.request_id, reason=Reason.STATE_DROPPED)
        return Plan(ask.request_id, reason=reasons.get(ask.request_id, Reason.BATCH))

    # ------------------------------------------------------------------------------------------------- drafters' states

    def _usable(self, ask: Ask, option: Option, profile: Profile) -> bool:
        """Whether the drafter has, or can get back, its state of the request."""
        return option.rebuilds or not self._is_dropped(ask.request_id, option.drafter, profile)

    def _is_dropped(self, request_id: int, drafter: str, profile: Profile) -> bool:
        return self._keeper.is_dropped(request_id, drafter) and profile.drafts[drafter].follow > 0

    def _newly_dropped(self, ask: Ask, profile: Profile) -> tuple[str, ...]:
        """Drafters whose state of this request goes now; each is named once."""
        dropped = {o.drafter for o in ask.options if self._is_dropped(ask.request_id, o.drafter, profile)}
        new = dropped - self._released.get(ask.request_id, set())
        self._released[ask.request_id] = dropped
        return tuple(sorted(new))

    # ---------------------------------------------------------------------------------------------------------- probing

    def _probe(
        self, plans: dict[int, Plan], promised: Promised, load: Load, contexts: dict[int, int], profile: Profile
    ) -> None:
        """Lets at most one request draft to learn, and books the step's time."""
        drafting = {request: plan.choices[0].drafter for request, plan in plans.items() if plan.choices}
        current = Current(load, contexts, drafting, sum(plan.k for plan in plans.values()))
        probe = self._prober.pick(current, promised, profile, self._history)
        if probe is not None:
            gain = next(p.gain for p in promised[probe.request_id] if p.drafter == probe.drafter)
            choices = (Choice(probe.drafter, probe.length),)
            plan = plans[probe.request_id]
            plans[probe.request_id] = replace(plan, choices=choices, reason=None, gain=gain, probe=True)
        mean = sum(contexts.values()) / len(contexts) if contexts else 0.0
        self._prober.earn(profile.verify(load.requests, load.other_rows + load.requests, mean))

    # ------------------------------------------------------------------------------------------------------------ books

    def record(self, ask: Ask, plan: Plan, drafter: str | None, emitted: int) -> None:
        """A round of a request emitted so many tokens, with this drafter's part in it or with nobody's."""
        for option in ask.options:
            if option.drafter == drafter and not plan.probe:
                self._keeper.used(ask.request_id, option.drafter)
            else:
                self._keeper.followed(ask.request_id, option.drafter, emitted)

    def restart(self, request_id: int) -> None:
        """The drafters' states of a request are fresh."""
        self._keeper.forget(request_id)

    def forget(self, request_id: int) -> None:
        self._keeper.forget(request_id)
        self._gates.pop(request_id, None)
        self._in_use.pop(request_id, None)
        self._released.pop(request_id, None)


__all__ = ["Planner", "Promised", "SchedulerOptions"]
