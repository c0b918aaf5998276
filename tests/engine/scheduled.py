"""Engines in a scripted world: what passes and drafts cost is given, and a clock adds it up.

`Spy` is a scheduler whose answers a test gives and that remembers what it was told; `timed` puts a real one over costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.conftest import bytes_for
from forerun.budget.costs import DraftCost
from forerun.budget.planner import SchedulerOptions
from forerun.budget.planning import Ask, Plan
from forerun.budget.profile import Profile
from forerun.budget.rounds import Drafted, DraftTime, Judged
from forerun.budget.scheduler import Scheduler
from forerun.drafters.base import Drafter, DraftView
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.fake import Script
from forerun.engine import Engine, EngineOptions
from forerun.engine.propose import LoadedDrafter
from forerun.engine.request import Request
from forerun.engine.schedule import RoundReport, Scheduling
from forerun.target.base import Target
from forerun.target.table import TableTarget, table_model
from forerun.verify import Draft

LETTERS = 7


def cycle() -> TableTarget:
    """Greedily, every token is followed by the next letter."""
    rows = [[4.0 if j == (i + 1) % LETTERS else -0.5 * j for j in range(LETTERS)] for i in range(LETTERS)]
    return table_model(rows)


def right(view: DraftView) -> list[int]:
    return [(view.tokens[-1] + 1 + j) % LETTERS for j in range(view.k)]


def wrong(view: DraftView) -> list[int]:
    return [(token + 1) % LETTERS for token in right(view)]


class Named(Script):
    """A script under a name of its own."""

    def __init__(self, name: str, guess: Callable[[DraftView], Sequence[int]], confidence: float | None = None):
        super().__init__(guess)
        self.name = name
        self._confidence = confidence
        self.asked: list[list[int]] = []
        """Requests of each call."""

    def propose(self, views, keep_drafting):
        self.asked.append([view.request_id for view in views])
        drafts = super().propose(views, keep_drafting)
        if self._confidence is not None:
            for draft in drafts:
                draft.confidence = [self._confidence] * len(draft.tokens)
        return drafts


class Clock:
    """Time that only what is scripted takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tick_by(clock: Clock, profile: Profile, target: Target, drafters: Sequence[Drafter]) -> None:
    """Lets passes of the target and calls of the drafters take what the profile says."""
    forward = target.forward

    def timed_forward(batch, taps=()):
        extra = profile.verify.context.at([segment.start for segment in batch.segments])
        rows = [len(segment.tokens) for segment in batch.segments]
        clock.now += profile.verify.tokens(sum(rows)) + float(extra.request.sum() + extra.row @ rows)
        return forward(batch, taps)

    target.forward = timed_forward
    for drafter in drafters:
        _time_calls(clock, profile.drafts[drafter.name], drafter)


def _time_calls(clock: Clock, cost: DraftCost, drafter: Drafter) -> None:
    propose = drafter.propose

    def timed_propose(views, keep_drafting):
        drafts = propose(views, keep_drafting)
        clock.now += cost.of([max(1, len(d.tokens)) for d in drafts], [len(v.tokens) for v in views])
        return drafts

    drafter.propose = timed_propose


def timed(
    target: Target,
    drafters: Sequence[Drafter],
    profile: Profile,
    scheduler: SchedulerOptions | Scheduler | None = None,
    config: dict[str, object] | None = None,
    **options: object,
) -> Engine:
    """An engine whose steps take what the profile says, under a scheduler that goes by it."""
    clock = Clock()
    tick_by(clock, profile, target, drafters)
    if not isinstance(scheduler, Scheduler):
        scheduler = Scheduler(profile, scheduler or SchedulerOptions())
    return engine_with(Scheduling(scheduler), target, drafters, config, clock=clock, **options)


def engine_with(
    scheduling: Scheduling,
    target: Target,
    drafters: Sequence[Drafter],
    config: dict[str, object] | None = None,
    clock: Clock | None = None,
    **options: object,
) -> Engine:
    memory = bytes_for(512, target, *drafters)
    small = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "kv_cache_memory_bytes": memory}
    chosen = EngineOptions.of({**small, **options})
    loaded = [LoadedDrafter(drafter, SpeculativeConfig(**(config or {}))) for drafter in drafters]
    return Engine(target, loaded, chosen, scheduling=scheduling, clock=clock)


class Spy(Scheduler):
    """As configured, unless a test says otherwise; remembers the conversation."""

    def __init__(
        self,
        change: Callable[[int, Plan], Plan] = lambda step, plan: plan,
        lengths: Callable[[Drafted], int] = lambda draft: draft.count,
        keep: Callable[[str, int, float], bool] = lambda drafter, k, c: True,
    ):
        """`change(step, plan)`, `lengths(draft)` and `keep(drafter, k, c_k)` give the answers."""
        super().__init__(options=SchedulerOptions(policy="delayed"))
        self.step = -1
        self._change, self._lengths, self._keep = change, lengths, keep
        self.asks: list[list[Ask]] = []
        self.others: list[int] = []
        self.told: list[list[Judged]] = []
        self.times: list[tuple[float, list[DraftTime]]] = []
        self.restarted: list[int] = []
        self.forgotten: list[int] = []

    def plan(self, asks, other_rows=0):
        self.step += 1
        self.asks.append(list(asks))
        self.others.append(other_rows)
        plans = [self._change(self.step, plan) for plan in super().plan(asks, other_rows)]
        self._step.plans = {plan.request_id: plan for plan in plans}
        return plans

    def keep_drafting(self, request_id, drafter, k, confidence):
        return super().keep_drafting(request_id, drafter, k, confidence) and self._keep(drafter, k, confidence)

    def choose(self, drafts):
        super().choose(drafts)
        return [self._lengths(draft) for draft in drafts]

    def record(self, rounds):
        self.told.append(list(rounds))
        super().record(rounds)

    def observe(self, target_seconds, calls=()):
        self.times.append((target_seconds, list(calls)))
        super().observe(target_seconds, calls)

    def restart(self, request_id):
        self.restarted.append(request_id)
        super().restart(request_id)

    def forget(self, request_id):
        self.forgotten.append(request_id)
        super().forget(request_id)


class Round(NamedTuple):
    """A report, and what becomes another thing later: the tokens that its request had after it."""

    request: Request
    plan: Plan
    draft: Draft
    drafter: str | None
    verified: int
    accepted: int
    length: int


def watched(engine: Engine) -> list[Round]:
    """The list to which every round of this engine is added."""
    rounds: list[Round] = []

    def note(report: RoundReport) -> None:
        told = (report.request, report.plan, report.draft, report.drafter, report.verified, report.accepted)
        rounds.append(Round(*told, len(report.request.tokens)))

    engine.core.on_round = note
    return rounds
