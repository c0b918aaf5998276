"""The exact joint law of what an engine emits for several requests under a scheduler that has learnt already.

`bench.enumeration` walks through all random numbers. Each walk is a group of requests with a copy of that scheduler for
itself; the real engine steps many groups together, which saves time and changes nothing. Two rounds are enough to see
what a budget from the past leaks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from budget.world import profile, serial
from forerun.bench import secondlaw
from forerun.bench.enumeration import Key, Law, Run, Script, Scripted, measure
from forerun.bench.exact import cuts, draft_law
from forerun.budget.history import Outcome
from forerun.budget.planner import SchedulerOptions
from forerun.budget.policy import Policy
from forerun.budget.profile import Profile
from forerun.budget.scheduler import Scheduler
from forerun.drafters.base import Drafter
from forerun.drafters.config import SpeculativeConfig
from forerun.engine import Engine, EngineOptions
from forerun.engine.intake import Ask
from forerun.engine.propose import LoadedDrafter
from forerun.engine.request import Request
from forerun.engine.schedule import RoundReport, Scheduling
from forerun.sampling import ACCEPT, DRAFT, FINAL, Row, Sampling
from forerun.target.table import TableTarget
from forerun.verify import Draft

Logits = Callable[[Sequence[int]], Sequence[float]]
WINDOW = 64
TOGETHER = 128
"""Groups that step together."""
PURPOSES = 8
"""Requests read numbers of their own: the purpose of request r is moved up by so many."""


@dataclass(frozen=True)
class Numbered(Scripted):
    """Scripted numbers of one request of several."""

    request: int = 0

    def uniforms(self, anchor: int, purpose: int, count: int) -> Any:
        return super().uniforms(anchor, purpose + PURPOSES * self.request, count)


@dataclass(frozen=True)
class Case:
    """What is enumerated."""

    logits: Logits
    vocab_size: int
    drafter: Callable[[TableTarget], Drafter]
    policy: Policy
    seconds: Sequence[float]
    """[..] of a pass over 1, 2, .. rows."""
    k: int = 2
    length: int = 3
    """Tokens of each request that are compared; the first is fixed."""
    prompts: Sequence[Sequence[int]] = ((0,),)
    sampling: Sampling = field(default_factory=Sampling)
    config: dict[str, Any] = field(default_factory=dict)
    acceptance: Sequence[float] = (0.8, 0.8, 0.8)
    """What the scheduler has learnt before, by position (conditional)."""
    threshold: float = 0.0


@dataclass(frozen=True)
class _Round:
    """One round of one request."""

    anchor: int
    draft: Draft
    verified: int
    accepted: int

    @property
    def act(self) -> tuple[Any, ...]:
        return self.anchor, tuple(self.draft.tokens), self.verified, self.accepted


class Apart:
    """A scheduler for each group of requests."""

    def __init__(self, learnt: Scheduler, profile: Profile):
        self.options = learnt.options
        self.adapts = learnt.adapts
        self._learnt, self._profile = learnt, profile
        self._of: dict[int, Scheduler] = {}

    def add(self, group: Sequence[Request]) -> None:
        fresh = copy.deepcopy(self._learnt, {id(self._profile): self._profile})
        self._of.update({request.id: fresh for request in group})

    def _groups(self, items: Sequence[Any], request_id: Callable[[Any], int]) -> dict[Scheduler, list[Any]]:
        groups: dict[Scheduler, list[Any]] = defaultdict(list)
        for item in items:
            groups[self._of[request_id(item)]].append(item)
        return groups

    def plan(self, asks: Sequence[Any], other_rows: int = 0) -> list[Any]:
        groups = self._groups(asks, lambda ask: ask.request_id)
        plans = {plan.request_id: plan for scheduler, own in groups.items() for plan in scheduler.plan(own)}
        return [plans[ask.request_id] for ask in asks]

    def keep_drafting(self, request_id: int, drafter: str, k: int, confidence: float) -> bool:
        return self._of[request_id].keep_drafting(request_id, drafter, k, confidence)

    def choose(self, drafts: Sequence[Any]) -> list[int]:
        lengths: dict[int, int] = {}
        for scheduler, own in self._groups(drafts, lambda draft: draft.request_id).items():
            lengths.update(zip([draft.request_id for draft in own], scheduler.choose(own), strict=True))
        return [lengths[draft.request_id] for draft in drafts]

    def record(self, rounds: Sequence[Any]) -> None:
        for scheduler, own in self._groups(rounds, lambda judged: judged.draft.request_id).items():
            scheduler.record(own)

    def observe(self, target_seconds: float, calls: Sequence[Any] = ()) -> None:
        """Times are those of all groups together."""

    def restart(self, request_id: int) -> None:
        raise AssertionError("nothing is preempted here")

    def forget(self, request_id: int) -> None:
        self._of.pop(request_id).forget(request_id)


class Runner:
    """One engine over a case."""

    def __init__(self, case: Case):
        self.case = case
        target = TableTarget(case.logits, case.vocab_size, window=WINDOW)
        drafter = case.drafter(target)
        costs = costs_of(case, drafter.name)
        config = SpeculativeConfig(num_speculative_tokens=case.k, **case.config)
        requests = TOGETHER * len(case.prompts)
        options = EngineOptions(max_num_seqs=requests, max_num_batched_tokens=16 * requests)
        self.apart = Apart(learnt(case, costs, drafter.name), costs)
        scheduling = Scheduling(cast(Scheduler, self.apart), case.threshold)
        self.engine = Engine(target, [LoadedDrafter(drafter, config)], options, scheduling=scheduling)
        self.engine.core.on_round = self._note
        self.lengths: set[tuple[int, int]] = set()
        """(drafted, verified) of all rounds."""
        self._rounds: dict[int, list[_Round]] = {}
        self._seen: dict[int, int] = {}

    def _note(self, report: RoundReport) -> None:
        request = report.request
        anchor = self._seen[request.id] - 1
        self._seen[request.id] = len(request.tokens)
        self._rounds[request.id].append(_Round(anchor, report.draft, report.verified, report.accepted))
        self.lengths.add((len(report.draft.tokens), report.verified))

    def __call__(self, scripts: Sequence[Script]) -> list[Run]:
        return [run for start in range(0, len(scripts), TOGETHER) for run in self._runs(scripts[start:][:TOGETHER])]

    def _runs(self, scripts: Sequence[Script]) -> list[Run]:
        groups = [self._group(script) for script in scripts]
        open_ = list(groups)
        while open_:
            self.engine.step()
            for group in [g for g in open_ if all(len(r.output) >= self.case.length for r in g)]:
                self.engine.cancel(group)
                open_.remove(group)
        return [self._run(group) for group in groups]

    def _group(self, script: Script) -> list[Request]:
        """Requests that read this script's numbers, queued."""
        case = self.case
        sampling = dataclasses.replace(case.sampling, max_tokens=case.length + case.k + 1, seed=0)
        group = self.engine.intake.requests([list(p) for p in case.prompts], sampling, Ask())
        self.apart.add(group)
        reads: list[Key] = []
        for number, request in enumerate(group):
            span = range(request.prompt_length + 1, request.prompt_length + case.length)
            request.noise = Numbered(0, script, request.tokens, span, reads, number)
            self._rounds[request.id], self._seen[request.id] = [], request.prompt_length + 1
            self.engine.core.add(request)
        return group

    def _run(self, group: Sequence[Request]) -> Run:
        assert not any(request.stats.drafter_faults or request.stats.invalid_drafts for request in group)
        rounds = [self._rounds.pop(request.id) for request in group]
        outputs = [tuple(request.output[: self.case.length]) for request in group]
        acts = tuple((output, tuple(one.act for one in own)) for output, own in zip(outputs, rounds, strict=True))
        hints = partial(_hints, self.case, group, rounds)
        assert isinstance(group[0].noise, Numbered)
        return Run(group[0].noise.reads, acts, tuple(token for output in outputs for token in output), hints)


def costs_of(case: Case, name: str) -> Profile:
    return profile(dict(enumerate(case.seconds, 1)), {name: serial(1e-6)})


def learnt(case: Case, costs: Profile, name: str) -> Scheduler:
    """A scheduler that knows the drafter: it needs no probes, and drafts unless the costs forbid it."""
    scheduler = Scheduler(costs, SchedulerOptions(case.policy, min_predicted_gain=-1.0, hysteresis=0.0))
    for _ in range(20):
        for accepted in range(case.k + 1):
            before = math.prod(case.acceptance[:accepted])
            stops = before * (1 - case.acceptance[accepted]) if accepted < case.k else before
            for _ in range(round(5 * stops)):
                scheduler.history.record(name, -1, Outcome(case.k, accepted))
    scheduler.history.forget(-1)
    return scheduler


def _hints(case: Case, requests: Sequence[Request], rounds: Sequence[Sequence[_Round]], key: Key) -> Sequence[float]:
    """Where this number's decision changes if the engine is right. Only a hint: `measure` looks for itself."""
    anchor, moved, slot = key
    number, purpose = divmod(moved, PURPOSES)
    own = next((one for one in rounds[number] if one.anchor == anchor), None)
    if own is None:
        return []
    before, tokens, laws = requests[number].tokens[: anchor + 1], own.draft.tokens, own.draft.probs
    if purpose == DRAFT:
        return [] if laws is None or slot >= len(tokens) else cuts(laws[slot].tolist())
    if purpose == ACCEPT and slot < own.verified:
        target = _law(case, requests[number], before, tokens[:slot])[tokens[slot]]
        return [min(1.0, target / draft_law(own.draft, slot, case.vocab_size)[tokens[slot]])]
    if purpose != FINAL:
        return []
    law = _law(case, requests[number], before, tokens[: own.accepted])
    if own.accepted < own.verified:
        law = [max(p - q, 0.0) for p, q in zip(law, draft_law(own.draft, own.accepted, case.vocab_size), strict=True)]
    return cuts(law)


def _law(case: Case, request: Request, before: Sequence[int], drafted: Sequence[int]) -> list[float]:
    row = Row(case.sampling, before, request.prompt_length, drafted)
    return secondlaw.law(case.logits([*before, *drafted]), row)


# ---------------------------------------------------------------------------------------------------------- comparison


def emitted_law(case: Case) -> tuple[Law, Runner]:
    """The joint law of all outputs, one after the other, and the runner with what it saw."""
    runner = Runner(case)
    return measure(runner), runner


def plain_law(case: Case, firsts: Sequence[int]) -> Law:
    """The target's own: the product over the requests, whose first tokens are given."""
    joint: Law = {(): 1.0}
    for prompt, first in zip(case.prompts, firsts, strict=True):
        own: Law = {(first,): 1.0}
        for _ in range(case.length - 1):
            after: Law = defaultdict(float)
            for output, weight in own.items():
                row = Row(case.sampling, [*prompt, *output], len(prompt))
                for token, p in enumerate(secondlaw.law(case.logits([*prompt, *output]), row)):
                    after[(*output, token)] += weight * p
            own = dict(after)
        joint = {(*left, *right): a * b for left, a in joint.items() for right, b in own.items()}
    return joint


def distance(case: Case) -> tuple[float, Runner]:
    """Total variation between what the engine emits and the target's own law."""
    law, runner = emitted_law(case)
    some = next(iter(law))
    want = plain_law(case, [some[r * case.length] for r in range(len(case.prompts))])
    total = math.fsum(abs(law.get(output, 0.0) - want.get(output, 0.0)) for output in law.keys() | want.keys()) / 2
    return total, runner
