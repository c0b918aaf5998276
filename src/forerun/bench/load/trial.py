"""One cell: a drafter under one load, decoded plainly, with fixed K and as scheduled, interleaved in pairs.

In every turn each way decodes the same requests, right after one another, in an order that a seed shuffles; what is
compared are such neighbours, so that a disturbance of the machine hits all of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.load.arrivals import Load
from forerun.bench.load.drive import Clock, LoadRun, Task, drive
from forerun.bench.measurement import Row
from forerun.bench.timeline import latencies
from forerun.engine import Engine
from forerun.engine.stats import total
from forerun.errors import OptionError
from forerun.sampling import Sampling

PLAIN = "plain"
FEW = 8
"""Requests of a run at least."""
WARM_UP = -1
"""Turn whose runs are not measured: everything is loaded and compiled, and the scheduler has learnt."""


@dataclass(frozen=True)
class Way:
    """One way to decode: an engine, and what is asked of it."""

    label: str
    """plain, fixed:K, or a policy."""
    engine: Engine
    speculative: bool | Mapping[str, Any]
    draft_tokens: int = 0
    """Longest draft."""


@dataclass(frozen=True)
class Cell:
    """What one row measures."""

    drafter: str
    load: str
    """`Load` as text."""
    temperature: float


@dataclass(frozen=True)
class Traffic:
    """What comes in, whichever way it is decoded."""

    prompts: Sequence[Sequence[int]]
    domains: Sequence[str] = ()
    """Of each prompt; empty: none is named."""
    max_tokens: tuple[int, int] = (64, 64)
    """Least and most tokens of an output, log-uniform between."""
    requests: int | None = None
    """In each run; None: twice as many as are decoded at once, `FEW` at least."""
    pairs: int = 8
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0

    def under(self, load: Load) -> Traffic:
        """The same with a number of requests that suits a load."""
        if self.requests is not None:
            return self
        return replace(self, requests=max(FEW, 2 * (load.concurrency or FEW)))

    def tasks(self, turn: int) -> list[Task]:
        """Requests of a turn: prompts go round, lengths and seeds are drawn anew. Turn -1 is the warm-up."""
        rng, count = random.Random(repr((self.seed, turn))), self.requests or FEW
        first = (turn - WARM_UP) * count
        return [self._task(rng, (first + i) % len(self.prompts)) for i in range(count)]

    def _task(self, rng: random.Random, prompt: int) -> Task:
        low, high = self.max_tokens
        tokens = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
        sampling = Sampling(
            temperature=self.temperature, max_tokens=tokens, ignore_eos=self.ignore_eos, seed=rng.getrandbits(48)
        )
        return Task(self.prompts[prompt], sampling, self.domains[prompt] if self.domains else "")


def measure(
    ways: Sequence[Way],
    drafter: str,
    load: Load,
    traffic: Traffic,
    clock: Clock,
    advance: Callable[[], object] = lambda: None,
    keep: Callable[[str, LoadRun], object] = lambda label, run: None,  # noqa: ARG005 - nobody looks at them
) -> Row:
    """The row of a cell; `advance` is called after each run, the warm-up's included: `runs_of` times. `keep` is given
    every run that counts, with its way, in the order of turns."""
    runs: dict[str, list[LoadRun]] = {way.label: [] for way in ways}
    order = random.Random(repr((traffic.seed, drafter, str(load))))
    for turn in range(WARM_UP, traffic.pairs):
        tasks = traffic.tasks(turn)
        for way in order.sample(list(ways), len(ways)):
            run = drive(way.engine, tasks, load, way.speculative, clock, seed=traffic.seed + turn)
            if turn != WARM_UP:
                runs[way.label].append(run)
                keep(way.label, run)
            advance()
    return row_of(ways, drafter, load, traffic, runs)


def runs_of(ways: Sequence[Way | str], traffic: Traffic) -> int:
    return len(ways) * (traffic.pairs + 1)


# ---------------------------------------------------------------------------------------------------------------- rows


def row_of(
    ways: Sequence[Way], drafter: str, load: Load, traffic: Traffic, runs: Mapping[str, Sequence[LoadRun]]
) -> Row:
    """Rates of every way, and the seconds per token of each pair, which verdicts are made of."""
    plain = runs[PLAIN]
    return {
        "drafter": drafter,
        "draft_tokens": max(way.draft_tokens for way in ways),
        **load.as_dict(),
        "temperature": traffic.temperature,
        "pairs": traffic.pairs,
        "requests": traffic.requests,
        "ways": {way.label: _way(way, runs[way.label], plain) for way in ways},
        "seconds_per_token": {label: [_cost(run, load) for run in each] for label, each in runs.items()},
        "workload": {
            "lengths": [[len(c.prompt_token_ids), len(c.token_ids)] for run in plain for c in run.completions],
            "domains": dict(Counter(task.domain for task in traffic.tasks(0) if task.domain)),
        },
    }


def _cost(run: LoadRun, load: Load) -> float:
    """Seconds per token, of all requests together; under an open loop, where arrivals set that, of a user.

    Raises:
        OptionError: under an open loop, where every output is a single token: no user waited for a further one.
    """
    if not load.is_open:
        return run.seconds_per_token
    if not run.seconds_per_token_per_user:
        raise OptionError("--rate", "every output of a run ended with its first token; see --ignore-eos, --prompts")
    return run.seconds_per_token_per_user


def _way(way: Way, runs: Sequence[LoadRun], plain: Sequence[LoadRun]) -> dict[str, Any]:
    stats = total(run.stats for run in runs)
    tokens = sum(run.tokens for run in runs)
    later = tokens - sum(len(run.completions) for run in runs)
    waited = sum(run.decoding_seconds for run in runs)
    steps = stats.target_steps
    both = [(run.completions, other.completions) for run, other in zip(runs, plain, strict=True)]
    pairs = [pair for mine, its in both for pair in zip(mine, its, strict=True)]
    return {
        "draft_tokens": way.draft_tokens,
        "tokens_per_second": tokens / sum(run.seconds for run in runs),
        "tokens_per_second_per_user": later / waited if waited else None,
        "verify_budget": stats.verified / steps if steps else None,
        "drafted_per_round": stats.drafted / steps if steps else None,
        "bypass_share": sum(stats.skipped_steps.values()) / steps if steps else None,
        **{"mean_accepted_length": None, "acceptance_by_position": []},
        **stats.as_dict(),
        **latencies(line for run in runs for line in run.timelines),
        "tokens": tokens,
        "outputs": len(pairs),
        "outputs_identical": sum(one.token_ids == other.token_ids for one, other in pairs),
        "grid": runs[0].grid,
        "by_drafter": {name: _rounds(name, runs) for name in sorted({name for run in runs for name in run.by_drafter})},
    }


def _rounds(drafter: str, runs: Sequence[LoadRun]) -> dict[str, Any]:
    """What one drafter did in the rounds it was asked in."""
    stats = total(run.by_drafter[drafter] for run in runs if drafter in run.by_drafter)
    names = ("target_steps", "drafting_rounds", "verified", "accepted")
    return {name: getattr(stats, name) for name in names} | {"acceptance_by_position": stats.acceptance_by_position}


__all__ = ["PLAIN", "Cell", "Traffic", "Way", "measure", "row_of", "runs_of"]
