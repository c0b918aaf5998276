"""The engine's loop over requests that are numbers: its admission, the real scheduler, a clock that adds up costs.

    arrive - admission.choose(plan) -> keep_drafting .. -> choose -> verdicts - commit - record, observe

Nothing is random but the texts, which are functions of their numbers. Time is what the profile says of each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.bench.load.arrivals import Load, arrival_times
from forerun.bench.simulate.acceptance import Loaded, Spread
from forerun.bench.simulate.batch import Batch, Live, options, tokens_for
from forerun.bench.simulate.books import Books, Ended
from forerun.bench.simulate.drafting import Drafting, Proposals, Upkeep
from forerun.bench.simulate.specs import Way
from forerun.bench.simulate.texts import Texts
from forerun.budget.bypass import Reason
from forerun.budget.planner import SchedulerOptions
from forerun.budget.planning import Ask, Plan
from forerun.budget.policy import Exposure
from forerun.budget.profile import Profile
from forerun.budget.rounds import Judged
from forerun.budget.scheduler import Scheduler
from forerun.engine.admission import Limits, Work
from forerun.engine.request import Request

PENDING = 64
"""Arrivals of an open loop that are drawn ahead."""


@dataclass(frozen=True)
class World:
    """What a run is about, whatever the policy."""

    truth: Profile
    """What steps really cost."""
    loaded: Loaded
    texts: Texts
    load: Load
    limits: Limits
    kv_tokens: int | None = None
    window: int = 1 << 17
    known: Profile | None = None
    """What the scheduler believes of costs, where that is not the truth."""
    requests: int | None = None
    """How many come in all; None: without end."""
    exposure: Exposure = field(default_factory=Exposure)

    @property
    def spread(self) -> Spread:
        return self.texts.spread


def scheduler_for(world: World, way: Way) -> Scheduler:
    """A fresh scheduler, that knows the costs if its policy looks at them."""
    if way.policy is None or not way.adapts:
        return Scheduler(None, SchedulerOptions(policy="fixed"))
    return Scheduler(world.known or world.truth, SchedulerOptions(policy=way.policy))


class Decoder:
    """Requests of one world, decoded in one way.

    Args:
        world: see there.
        way: policy, K and threshold.
        scheduler: one that has learnt already; None: a fresh one.
        steady: a closed loop begins in the middle of things, with requests that are somewhere in their output.
    """

    def __init__(self, world: World, way: Way, scheduler: Scheduler | None = None, steady: bool = False):
        self.world, self.way = world, way
        self.scheduler = scheduler or scheduler_for(world, way)
        self.now = 0.0
        self._most: list[tuple[str, int]] = [] if way.policy is None else self._lengths()
        exposure = Exposure(verify_mode="coupled") if way.policy == "global" else world.exposure
        self._drafting = Drafting(world.loaded, world.spread, world.truth, exposure, way.threshold)
        self._upkeep = Upkeep(world.loaded if way.policy is not None else Loaded(()), world.truth)
        self._room = max((most for _, most in self._most), default=0)
        self.books = self.new_books()
        self.batch = Batch(world.limits, self._kv_tokens(), self._preempted)
        self._number = 0
        self._arrivals: deque[float] = deque()
        self._drawn = 0
        self._start(steady)

    def new_books(self) -> Books:
        """Empty ones, also put in use: what was counted so far is over."""
        self.books = Books(self._room)
        return self.books

    def _lengths(self) -> list[tuple[str, int]]:
        k = self.way.k
        skills = self.world.loaded.skills
        return [(skill.name, skill.most if k is None else min(k, skill.most)) for skill in skills]

    def _kv_tokens(self) -> int:
        world = self.world
        return world.kv_tokens or tokens_for(world.limits.max_num_seqs, world.texts.longest + self._room)

    # --------------------------------------------------------------------------------------------------------- arriving

    def _start(self, steady: bool) -> None:
        load = self.world.load
        if load.concurrency is None:
            return
        rng = np.random.default_rng([self.world.texts.seed, 2**32 - 1])
        for _ in range(load.concurrency):
            self._submit(float(rng.random()) if steady else 0.0)

    def _submit(self, progress: float = 0.0) -> None:
        """The next request arrives, with this share of its output already there."""
        if self.world.requests is not None and self._number >= self.world.requests:
            return
        text = self.world.texts.text(self._number)
        self.batch.add(self._number, text, self.now, min(int(progress * text.output), text.output - 1))
        self._number += 1

    def _arrive(self) -> None:
        """Those of an open loop whose time has come."""
        load = self.world.load
        if load.rate is None:
            return
        while self._next_arrival() <= self.now:
            arrived = self._arrivals.popleft()
            number = self._number
            self._submit()
            if number in self.batch.live:
                self.batch.live[number].arrived = arrived

    def _next_arrival(self) -> float:
        world = self.world
        if world.load.rate is None or (world.requests is not None and self._number >= world.requests):
            return float("inf")
        if not self._arrivals:
            self._drawn += max(PENDING, self._drawn)
            times = arrival_times(world.load, self._drawn, world.texts.seed)
            self._arrivals.extend(times[self._number :])
        return self._arrivals[0]

    # ---------------------------------------------------------------------------------------------------------- running

    def run(self, tokens: int) -> Books:
        """Steps until so many more tokens are emitted, or nothing is left to do."""
        goal = self.books.tokens + tokens
        while self.books.tokens < goal and self.step():
            pass
        return self.books

    def run_all(self) -> Books:
        """Steps until every request is done."""
        assert self.world.requests is not None, "it would not end"
        while self.step():
            pass
        return self.books

    def step(self) -> bool:
        """One step of everything that is there; False if nothing is, and nothing will come."""
        self._arrive()
        works = self.batch.choose(self._plan)
        if not works:
            ahead = self._next_arrival()
            if ahead == float("inf"):
                assert not len(self.batch), "requests wait for memory that nobody will free"
                return False
            self.books.seconds += ahead - self.now
            self.now = ahead
            return True
        rounds = [work for work in works if work.plan is not None]
        lives = [self.batch.live[work.request.id] for work in rounds]
        plans = [work.plan for work in rounds if work.plan is not None]
        self._upkeep.release(plans)
        proposals = self._drafting.propose(self.scheduler, plans, lives)
        drafts = [proposals.drafts[live.id] for live in lives]
        lengths = self.scheduler.choose(drafts) if any(draft.drafter for draft in drafts) else [0] * len(rounds)
        self._settle(works, rounds, lives, proposals, lengths)
        return True

    def _plan(self, requests: Sequence[Request], rows_left: int, other_rows: int) -> list[Plan]:
        if self.way.policy is None:
            return [Plan(request.id) for request in requests]
        asks = []
        for request in requests:
            may = tuple(options(request, self._most, self.world.window, rows_left))
            reason = None if may else Reason.REQUEST if rows_left else Reason.BATCH
            asks.append(Ask(request.id, len(request.tokens), may, reason, self.way.threshold))
        return self.scheduler.plan(asks, other_rows)

    def _settle(
        self,
        works: Sequence[Work],
        rounds: Sequence[Work],
        lives: Sequence[Live],
        proposals: Proposals,
        lengths: Sequence[int],
    ) -> None:
        accepted = self._verdicts(lives, proposals, lengths)
        verified = dict(zip((live.id for live in lives), lengths, strict=True))
        target = self._target_seconds(works, verified)
        drafts = [proposals.drafts[live.id] for live in lives]
        following = self._commit(works, dict(zip((live.id for live in lives), accepted, strict=True)), proposals)
        plans = [work.plan for work in rounds if work.plan is not None]
        drafted = np.array([draft.count for draft in drafts], dtype=np.int64)
        self.books.judged(plans, drafted, np.array(lengths, dtype=np.int64), np.array(accepted, dtype=np.int64))
        judged = [
            Judged(draft, n, a, tuple(proposals.missed.get(draft.request_id, ())))
            for draft, n, a in zip(drafts, lengths, accepted, strict=True)
        ]
        if rounds and self.scheduler.adapts:  # else nothing would come of it
            self.scheduler.record(judged)
            # Beside a prefill a step says nothing about decoding.
            self.scheduler.observe(target if len(rounds) == len(works) else 0.0, proposals.calls)
        self._pass_time(works, target + following + proposals.seconds, verified, len(rounds))
        self.books.drafting_seconds += proposals.seconds
        self.books.following_seconds += following
        self.books.calls.update(call.drafter for call in proposals.calls)
        self._finish(works)

    def _verdicts(self, lives: Sequence[Live], proposals: Proposals, lengths: Sequence[int]) -> list[int]:
        """Accepted tokens of each round: the leading ones whose chance exceeds the text's number for their place."""
        width = max(lengths, default=0)
        if width == 0:
            return [0] * len(lives)
        kept = np.zeros((len(lives), width + 1), dtype=np.bool_)
        for row, live, n in zip(kept, lives, lengths, strict=True):
            if n:
                row[:n] = live.text.uniforms[live.made : live.made + n] < proposals.chances[live.id][:n]
        found: list[int] = np.argmin(kept, axis=1).tolist()
        return found

    def _target_seconds(self, works: Sequence[Work], verified: dict[int, int]) -> float:
        """Of all but drafting: one pass over all rows, behind their contexts; a chunk's rows are behind half of it."""
        cost = self.world.truth.verify
        rows = np.array([work.count + verified.get(work.request.id, 0) for work in works])
        chunks = np.array([0 if work.plan is not None else work.count / 2 for work in works])
        extra = cost.context.at(np.array([work.request.rows for work in works]) + chunks)
        return cost.tokens(int(rows.sum())) + float(extra.request.sum() + extra.row @ rows)

    def _commit(self, works: Sequence[Work], accepted: dict[int, int], proposals: Proposals) -> float:
        """Commits what was emitted; the seconds it took drafters to keep up."""
        following = 0.0
        for work in works:
            live = self.batch.live[work.request.id]
            is_round = work.plan is not None
            emitted = accepted[live.id] + 1 if is_round else int(work.is_round)
            drafter = proposals.drafts[live.id].drafter if is_round else None
            following += self._upkeep.seconds(live, emitted if is_round else work.count, drafter)
            self.books.first_tokens += emitted if not is_round else 0
            self.batch.commit(work, emitted)
        return following

    def _pass_time(self, works: Sequence[Work], seconds: float, verified: dict[int, int], decoding: int) -> None:
        rows = sum(work.count for work in works) + sum(verified.values())
        assert rows <= self.world.limits.max_num_batched_tokens, f"{rows} rows in a step"
        self.now += seconds
        self.books.passed(seconds, rows, decoding, self.batch.running)

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            live = self.batch.live[work.request.id]
            if live.made == 1 and live.first is None:
                live.first = self.now
            if live.done:
                if live.first is not None:
                    self.books.ended.append(Ended(live.id, live.made, live.arrived, live.first, self.now))
                self.books.preemptions += live.request.stats.preemptions
                self._leave(live)

    def _leave(self, live: Live) -> None:
        self.batch.remove(live)
        self.scheduler.forget(live.id)
        self._upkeep.forget(live.id)
        if not self.world.load.is_open:
            self._submit()

    def _preempted(self, request_id: int) -> None:
        self.scheduler.restart(request_id)
        self._upkeep.forget(request_id)

    def audit(self) -> None:
        """Asserts that no request and no block is lost."""
        self.batch.audit()


__all__ = ["Decoder", "World", "scheduler_for"]
