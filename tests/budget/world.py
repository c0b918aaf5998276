"""A scripted world for the scheduler: costs and acceptance are given, time is added up, nothing is random but a seed.

`run` drives the very `Scheduler` that the engine drives, step by step, and counts seconds and tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.budget.bypass import Reason
from forerun.budget.costs import ContextCost, DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.planner import SchedulerOptions
from forerun.budget.planning import Ask, Option
from forerun.budget.policy import Exposure
from forerun.budget.profile import Profile, ProfileKey
from forerun.budget.rounds import Drafted, DraftTime, Judged
from forerun.budget.scheduler import Scheduler

KEY = ProfileKey("tiny", "float32", "cpu", 1)

BFLOAT16 = {1: 1.0, 2: 1.04, 4: 1.09, 6: 1.29, 8: 1.24, 16: 1.55, 32: 2.09, 64: 3.3, 128: 5.7, 256: 10.5, 512: 20.2}
"""0.5B in bfloat16 on two cores, in plain steps: measured to 32 rows, the rest by the matrix rate."""
FLOAT32 = {1: 1.0, 2: 2.11, 4: 1.89, 6: 1.89, 8: 1.81, 16: 1.94, 32: 2.57, 64: 4.2, 128: 7.6, 256: 14.5, 512: 28.0}
"""0.5B in float32: a step at the second row."""
INT4 = {1: 1.0, 2: 1.1, 4: 1.39, 5: 2.38, 6: 2.38, 8: 2.42, 16: 4.38, 32: 8.5, 64: 16.6, 128: 33.0, 256: 65.0}
"""0.5B with int4 weights: a step at the fifth row."""


def profile(
    verify: Mapping[int, float], drafts: Mapping[str, DraftCost], context: ContextCost | None = None
) -> Profile:
    return Profile(KEY, VerifyCost(CostCurve.measured(verify), context or ContextCost()), drafts)


def serial(first: float, per_token: float = 0.0, follow: float = 0.0, context: ContextCost | None = None) -> DraftCost:
    """A drafter whose call costs `first` and a pass of `per_token` for each further token, a tenth more per request."""
    samples = {
        k: {n: (first + per_token * (k - 1)) * (1 + 0.1 * (n - 1)) for n in (1, 2, 64, 512)} for k in (1, 2, 8, 16)
    }
    return DraftCost.measured(samples, context, follow)


FREE_LOOKUP = serial(1e-5, 0.0)


@dataclass(frozen=True)
class Ability:
    """How a drafter does in truth."""

    acceptance: Sequence[float] | float
    """By position (the last one goes on), or at all of them."""
    match: float = 1.0
    """Chance that it proposes anything."""
    confident: bool = True
    """Whether it gives confidences, noisy around its acceptance but calibrated."""

    def at(self, position: int) -> float:
        if isinstance(self.acceptance, float):
            return self.acceptance
        return self.acceptance[min(position, len(self.acceptance)) - 1]


@dataclass
class Tally:
    """What a run came to."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Of the same number of plain steps, were one taken for every token of a request."""
    tokens: int = 0
    steps: int = 0
    drafting_calls: int = 0
    draft_rows: int = 0
    probes: int = 0
    probe_rows: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    """K planned for the first request, by step."""
    drafters: Counter[str] = field(default_factory=Counter)

    @property
    def speedup(self) -> float:
        """Against plain decoding of as many tokens."""
        return self.plain_seconds / self.seconds


Skill = Callable[[int, str], Ability]
"""`skill(request, drafter)`"""


@dataclass
class World:
    """Requests in a closed loop: each is replaced by a new one after `tokens` tokens."""

    truth: Profile
    skill: Skill
    requests: int = 1
    most: Mapping[str, int] = field(default_factory=lambda: {"small": 7})
    tokens: int = 200
    context: int = 0
    exposure: Exposure = field(default_factory=Exposure)
    rebuilds: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.left = dict.fromkeys(range(self.requests), self.tokens)
        self.done = dict.fromkeys(self.left, 0)
        self._next = self.requests

    def run(self, scheduler: Scheduler, steps: int, tally: Tally | None = None) -> Tally:
        out = tally or Tally()
        for _ in range(steps):
            self._step(scheduler, out)
        return out

    def _step(self, scheduler: Scheduler, out: Tally) -> None:
        asks = [self._ask(request) for request in self.left]
        plans = scheduler.plan(asks)
        drafts, calls, missed = self._draft(scheduler, plans)
        lengths = scheduler.choose(drafts)
        rounds = [self._judge(d, n, missed[d.request_id]) for d, n in zip(drafts, lengths, strict=True)]
        seconds = self._verify_seconds(asks, lengths)
        scheduler.record(rounds)
        scheduler.observe(seconds, calls)
        self._count(out, plans, asks, seconds + sum(c.seconds for c in calls), rounds, len(calls))
        self._advance(scheduler, rounds)

    def _ask(self, request: int) -> Ask:
        most = min(max(self.most.values()), self.left[request] - 1)
        options = [Option(d, min(k, most), self.rebuilds) for d, k in self.most.items() if min(k, most) > 0]
        return Ask(request, self.context + self.done[request], tuple(options))

    def _draft(self, scheduler, plans):
        drafts = {plan.request_id: Drafted(plan.request_id, exposure=self.exposure) for plan in plans}
        missed: dict[int, list[str]] = {plan.request_id: [] for plan in plans}
        calls = []
        for level in range(2):
            asked: dict[str, list[tuple[int, int]]] = {}
            for plan in plans:
                if level < len(plan.choices) and drafts[plan.request_id].drafter is None:
                    choice = plan.choices[level]
                    asked.setdefault(choice.drafter, []).append((plan.request_id, choice.k))
            for drafter, pairs in asked.items():
                made = []
                for request, k in pairs:
                    ability = self.skill(request, drafter)
                    confidence = self._confidences(scheduler, request, drafter, ability, k)
                    made.append(len(confidence))
                    if confidence:
                        given = confidence if ability.confident else ()
                        drafts[request] = Drafted(request, drafter, len(confidence), given, self.exposure)
                    else:
                        missed[request].append(drafter)
                contexts = [self.context + self.done[request] for request, _ in pairs]
                computed = [max(1, n) for n in made]  # a lookup that finds nothing has looked
                seconds = self.truth.drafts[drafter].of(computed, contexts)
                calls.append(DraftTime(drafter, computed, contexts, seconds))
        return list(drafts.values()), calls, missed

    def _confidences(self, scheduler, request: int, drafter: str, ability: Ability, k: int) -> list[float]:
        if self.rng.random() >= ability.match:
            return []
        out: list[float] = []
        for slot in range(1, k + 1):
            mean = ability.at(slot)
            c = float(self.rng.beta(4 * mean, 4 * (1 - mean))) if 0 < mean < 1 and ability.confident else mean
            if ability.confident and not scheduler.keep_drafting(request, drafter, slot, c):
                break
            out.append(c)
        return out

    def _judge(self, draft: Drafted, verified: int, missed: Sequence[str]) -> Judged:
        accepted = 0
        if draft.drafter is not None:
            ability = self.skill(draft.request_id, draft.drafter)
            chances = draft.confidence or [ability.at(k) for k in range(1, draft.count + 1)]
            while accepted < verified and self.rng.random() < chances[accepted]:
                accepted += 1
        return Judged(draft, verified, accepted, tuple(missed))

    def _verify_seconds(self, asks: Sequence[Ask], lengths: Sequence[int]) -> float:
        rows = np.array(lengths) + 1
        extra = self.truth.verify.context.at([ask.context for ask in asks])
        return self.truth.verify.tokens(int(rows.sum())) + float(extra.request.sum() + extra.row @ rows)

    def _count(self, out: Tally, plans, asks, seconds, rounds, calls) -> None:
        emitted = sum(judged.accepted + 1 for judged in rounds)
        out.seconds += seconds
        out.plain_seconds += self._verify_seconds(asks, [0] * len(asks)) * emitted / len(asks)
        out.tokens += emitted
        out.steps += 1
        out.drafting_calls += calls
        out.draft_rows += sum(judged.verified for judged in rounds)
        out.probes += sum(plan.probe for plan in plans)
        out.probe_rows += sum(plan.k for plan in plans if plan.probe)
        out.reasons.update(plan.reason for plan in plans if plan.reason is not None)
        out.lengths.append(plans[0].k)
        out.drafters.update(judged.draft.drafter for judged in rounds if judged.draft.drafter)

    def _advance(self, scheduler: Scheduler, rounds: Sequence[Judged]) -> None:
        for judged in rounds:
            request = judged.draft.request_id
            self.left[request] -= judged.accepted + 1
            self.done[request] += judged.accepted + 1
            if self.left[request] <= 0:
                scheduler.forget(request)
                del self.left[request], self.done[request]
                self.left[self._next], self.done[self._next] = self.tokens, 0
                self._next += 1


def everywhere(acceptance: Sequence[float] | float, **options: float) -> Skill:
    """The same ability for every request and drafter."""
    ability = Ability(acceptance, **options)
    return lambda request, drafter: ability


def scheduled(known: Profile, **options: object) -> Scheduler:
    return Scheduler(known, SchedulerOptions(**options))
