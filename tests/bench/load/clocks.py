"""Three engines over exact targets whose clock is their own passes, as `forerun bench load` has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.clocks import VOCAB, Passed, target
from forerun.bench.load.trial import PLAIN, Way
from forerun.budget.planner import SchedulerOptions
from forerun.budget.profile import Profile
from forerun.budget.scheduler import Scheduler
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.schedule import Scheduling

MOST = 4


class PassClock:
    """Seconds of all passes of these engines' targets, and of all waiting; drafting is free."""

    def __init__(self, engines: Sequence[Engine]):
        self._passed = [Passed(engine.target) for engine in engines]
        self._waited = 0.0

    def __call__(self) -> float:
        return self._waited + sum(passed() for passed in self._passed)

    def wait(self, seconds: float) -> None:
        self._waited += seconds


@dataclass
class Engines:
    plain: Engine
    fixed: Engine
    scheduled: Engine

    @property
    def all(self) -> list[Engine]:
        return [self.plain, self.fixed, self.scheduled]

    def ways(self, names: Sequence[str], lengths: Sequence[int] = (MOST,)) -> list[Way]:
        asked = {"method": list(names)}
        fixed = [Way(f"fixed:{k}", self.fixed, {**asked, "max_draft": k}, k) for k in lengths]
        return [Way(PLAIN, self.plain, False), *fixed, Way("delayed", self.scheduled, asked, MOST)]


def three_engines(costs: Profile, names: Sequence[str], **options: object) -> Engines:
    """Plain, with fixed K, and scheduled by these costs: each with a target of its own."""
    scheduling = Scheduling(Scheduler(costs, SchedulerOptions("delayed")))
    return Engines(_engine([], **options), _engine(names, **options), _engine(names, scheduling, **options))


def _engine(names: Sequence[str], scheduling: Scheduling | None = None, **options: object) -> Engine:
    chosen = EngineOptions.of({"num_speculative_tokens": MOST, **options})
    big = target()
    made = {"small": lambda: Small(target(), VOCAB), "ngram": lambda: Ngram(3, 1)}
    loaded = load_drafters([made[name]() for name in names], big, chosen)
    # What the scheduler observes is scripted too.
    return Engine(big, loaded, chosen, scheduling=scheduling, clock=Passed(big))
