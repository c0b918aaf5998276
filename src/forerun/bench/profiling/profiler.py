"""A whole profile of an idle engine: the target's steps, then every drafter's calls, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from forerun.bench.profiling.drafting import WALK, DraftCalls
from forerun.bench.profiling.fit import draft_cost, verify_cost
from forerun.bench.profiling.grid import (
    CONTEXT_ROWS,
    Call,
    DrafterGrid,
    Step,
    TargetGrid,
    cheaper,
    unplaced_step,
)
from forerun.bench.profiling.passes import TargetPasses
from forerun.bench.profiling.repeats import Clock, Effort, measure, scatter
from forerun.budget.costs import DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.profile import Profile
from forerun.engine import Engine
from forerun.engine.profile_key import engine_key, model_of
from forerun.engine.propose import LoadedDrafter
from forerun.errors import OptionError
from forerun.sampling import Sampling
from forerun.target.base import BLOCK_SIZE

TARGET_SHARE = 0.55
"""Of the time, for the target where there are drafters; they share the rest equally."""
PREFILL_SHARE = 0.25
"""Of the target's time, for computing a long context."""
CONTEXT, LONGEST = 64, 4096
"""Tokens that steps are measured behind: a short prompt's, as what longer ones add is measured on top, and the longest
context that is tried."""
DRAFT_CONTEXT, LONGEST_DRAFT_CONTEXT = 64, 512
"""The same of drafters: their requests have to be taken in one by one."""
CONTEXT_STEPS = 4
"""Each context is so many times the one before."""
DRAFTING_REQUESTS = 32
"""The most that draft together; beyond, the cost goes on as it rose."""
PLACING = 8
"""Further row counts at most that are measured to place steps of the curve."""

Advance = Callable[[int], object]


@dataclass(frozen=True)
class ProfileOptions:
    """How a profile is measured."""

    seconds: float = 90.0
    """For all of it; a little more is taken where a few repeats of the small points take longer."""
    rows: int | None = None
    """The most rows in a step; None: as many as the engine's limits allow."""
    requests: int | None = None
    """The most requests in a step; None: as many as the engine's limits allow."""
    temperature: float = 0.0
    """Of the requests: laws above 0 take longer to compute."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise OptionError("seconds", f"must be positive, got {self.seconds:g}")
        for name in ("rows", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be at least 1, got {value}")


@dataclass
class Findings:
    """A profile and what it was made from."""

    profile: Profile
    steps: Mapping[Step, Sequence[float]] = field(default_factory=dict)
    calls: Mapping[str, Mapping[Call, Sequence[float]]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Every point with the median of its repeats, as JSON types."""
        return {
            "steps": [_point(step, values) for step, values in self.steps.items()],
            "calls": {name: [_point(c, v) for c, v in found.items()] for name, found in self.calls.items()},
        }


def _point(point: Step | Call, values: Sequence[float]) -> dict[str, Any]:
    more = {"seconds": median(values), "repeats": len(values), "scatter": scatter(values)}
    return point._asdict() | more


class Profiler:
    """Measures the costs of an engine's target and drafters.

    Args:
        engine: idle; its storage is used and given back.
        text: ids of realistic text, repeated as often as need be.
        options: how.
        clock: seconds.
        known: costs of the target that were measured before; only drafters are measured then.
    """

    def __init__(
        self,
        engine: Engine,
        text: Sequence[int],
        options: ProfileOptions,
        clock: Clock = time.perf_counter,
        known: VerifyCost | None = None,
    ):
        assert not engine.core.busy
        assert text
        self._engine, self._options, self._clock = engine, options, clock
        self._known = known
        need = LONGEST + _step_rows(engine, options) + WALK + 1
        self._text = (list(text) * (need // len(text) + 1))[: min(need, engine.target.window)]
        self._sampling = Sampling(temperature=options.temperature, max_tokens=None, seed=0)

    def run(self, advance: Callable[..., object] = lambda steps, note="": None) -> Findings:  # noqa: ARG005
        """Everything. `advance(measurements, note=..)`, `total` of them."""
        entries = self._entries
        share = 0.0 if self._known is not None else TARGET_SHARE if entries else 1.0
        verify, steps = self._target(share * self._options.seconds, partial(_noting, advance, "target"))
        drafts: dict[str, DraftCost] = {}
        calls: dict[str, Mapping[Call, Sequence[float]]] = {}
        for entry in entries:
            seconds = (1 - share) * self._options.seconds / len(entries)
            plain = verify(1, 1, context=1)
            cost, found = self._drafter(entry, seconds, plain, partial(_noting, advance, entry.name))
            drafts[entry.name], calls[entry.name] = cost, found
        models = {entry.name: model for entry in entries if (model := model_of(entry.config))}
        profile = Profile(engine_key(self._engine.target), verify, drafts, models)
        return Findings(profile, steps, calls)

    @property
    def total(self) -> int:
        """Measurements that `run` will make, or leave out for lack of time."""
        effort = Effort(self._options.seconds)
        steps = len(self._target_grid(LONGEST).points()) if self._known is None else 0
        calls = [len(self._drafter_grid(entry).points()) for entry in self._entries]
        return sum(effort.turns(points) for points in (steps, *calls))

    @property
    def _entries(self) -> list[LoadedDrafter]:
        return [entry for entry in self._engine.core.loaded if entry.name != "vanilla"]

    @property
    def _capacity(self) -> int:
        """Rows that one request may take of the storage, so that there is room for others beside it."""
        return self._engine.core.pool.num_blocks * BLOCK_SIZE // 8

    # ---------------------------------------------------------------------------------------------------------- target

    def _target(self, seconds: float, advance: Advance) -> tuple[VerifyCost, Mapping[Step, Sequence[float]]]:
        if self._known is not None:
            return self._known, {}
        passes = TargetPasses(self._engine, self._text, self._sampling, self._clock)
        try:
            [first, *longer] = self._contexts(LONGEST)
            begun = self._clock()
            reach = passes.prepare(first, max([first, *longer]), PREFILL_SHARE * seconds)
            grid = self._target_grid(reach)
            left = max(0.0, seconds - (self._clock() - begun))
            return measure_target(passes, grid, Effort(left), self._clock, passes.fits, advance)
        finally:
            passes.close()

    def _contexts(self, longest: int) -> list[int]:
        """Ascending, in whole blocks; the first is a quarter of a small window."""
        window = self._engine.target.window
        first = min(CONTEXT, window // 4, self._capacity) // BLOCK_SIZE * BLOCK_SIZE
        most = min(longest, window - max(CONTEXT_ROWS) - 1, self._capacity)
        contexts = [first]
        while first and contexts[-1] * CONTEXT_STEPS <= most:
            contexts.append(contexts[-1] * CONTEXT_STEPS)
        return contexts

    def _target_grid(self, longest: int) -> TargetGrid:
        contexts = self._contexts(longest)
        room = self._engine.target.window - contexts[0] - 1
        requests = min(self._options.requests or _most_requests(self._engine), _most_requests(self._engine))
        return TargetGrid(min(_step_rows(self._engine, self._options), room * requests), requests, contexts)

    # -------------------------------------------------------------------------------------------------------- drafters

    def _drafter(
        self, entry: LoadedDrafter, seconds: float, plain: float, advance: Advance
    ) -> tuple[DraftCost, Mapping[Call, Sequence[float]]]:
        grid = self._drafter_grid(entry)
        calls = DraftCalls(self._engine, entry, self._text, self._sampling, self._clock)
        try:
            calls.prepare(min(grid.contexts[-1] + WALK, len(self._text)))
            if not any(calls.fits(call) for call in grid.points()):
                raise OptionError("kv_cache_memory_bytes", f"leaves {entry.name!r} no room to draft in; raise it")
            follow = calls.follow(grid.contexts[0])
            return measure_drafter(calls, grid, Effort(seconds), self._clock, calls.fits, (follow, plain), advance)
        finally:
            calls.close()

    def _drafter_grid(self, entry: LoadedDrafter) -> DrafterGrid:
        engine = self._engine
        k = max(1, longest_draft(entry))
        window = min(engine.target.window, entry.drafter.window or engine.target.window, len(self._text))
        room = min(window - WALK - k - 1, self._capacity)
        contexts = [c for c in (DRAFT_CONTEXT, LONGEST_DRAFT_CONTEXT) if c <= room] or [max(1, room)]
        requests = min(self._options.requests or DRAFTING_REQUESTS, DRAFTING_REQUESTS, _most_requests(engine))
        return DrafterGrid(k, requests, contexts)


def _noting(advance: Callable[..., object], what: str, steps: int) -> None:
    advance(steps, note=what)


def longest_draft(entry: LoadedDrafter) -> int:
    """The largest K that the configuration lets a drafter make, at any batch size; 0 for one that never drafts."""
    table = entry.config.num_speculative_tokens_per_batch_size or ()
    return max(entry.longest(batch_size) for batch_size in (1, *(low for low, _, _ in table)))


def _most_requests(engine: Engine) -> int:
    return engine.options.limits.max_num_seqs


def _each(engine: Engine) -> int:
    """Rows of a request that verifies the longest draft."""
    return 1 + max((longest_draft(entry) for entry in engine.core.loaded), default=0)


def _step_rows(engine: Engine, options: ProfileOptions) -> int:
    limits = engine.options.limits
    requests = min(options.requests or limits.max_num_seqs, limits.max_num_seqs)
    return min(limits.max_num_batched_tokens, options.rows or requests * max(8, _each(engine)))


# --------------------------------------------------------------------------------------------------------- measuring


def measure_target(
    run: Callable[[Step], float],
    grid: TargetGrid,
    effort: Effort,
    clock: Clock,
    fits: Callable[[Step], bool] = lambda step: True,  # noqa: ARG005 - there is room for everything
    advance: Advance = lambda steps: None,  # noqa: ARG005
) -> tuple[VerifyCost, Mapping[Step, Sequence[float]]]:
    """Costs of steps, and the measurements they are made of.

    Args:
        run: seconds of one step.
        grid: what is measured.
        effort: how much of it.
        clock: for the time limit.
        fits: whether there is memory for a step; one that does not fit is left out.
        advance: told of measurements made or left out.
    """
    end = clock() + effort.seconds
    found = measure([step for step in grid.points() if fits(step)], run, effort, clock, cheaper, advance)
    for _ in range(PLACING):
        count = unplaced_step(_by_rows(found, grid))
        if count is None or clock() >= end or not fits(grid.of_rows(count)):
            break
        step = grid.of_rows(count)
        found[step] = [run(step) for _ in range(1 + effort.repeats)][1:]
    return verify_cost(found, grid), found


def _by_rows(found: Mapping[Step, Sequence[float]], grid: TargetGrid) -> CostCurve:
    return CostCurve.measured({step.rows: v for step, v in found.items() if step == grid.of_rows(step.rows)})


def measure_drafter(
    run: Callable[[Call], float],
    grid: DrafterGrid,
    effort: Effort,
    clock: Clock,
    fits: Callable[[Call], bool] = lambda call: True,  # noqa: ARG005
    follow: tuple[float, float] = (0.0, 1.0),
    advance: Advance = lambda steps: None,  # noqa: ARG005
) -> tuple[DraftCost, Mapping[Call, Sequence[float]]]:
    """Costs of calls, like `measure_target`; `follow`: seconds of following a request for a token, of a plain step."""
    found = measure([call for call in grid.points() if fits(call)], run, effort, clock, cheaper, advance)
    return draft_cost(found, grid, *follow), found


__all__ = [
    "Findings",
    "ProfileOptions",
    "Profiler",
    "longest_draft",
    "measure_drafter",
    "measure_target",
]
