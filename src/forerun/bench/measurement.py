"""Speculative decoding timed against plain decoding of the same engine: one cell of a benchmark, one row of its table.

Every group of prompts is decoded both ways, right after each other, in an order that a seed shuffles; ratios are made
of such neighbours, so that a disturbance of the machine hits both. No speed-up is made without its baseline.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.cold import own_salt
from forerun.bench.timeline import Timeline, latencies
from forerun.drafters.config import methods_of
from forerun.engine import Completion, DecodingStats, Engine
from forerun.engine.request import Chunk
from forerun.engine.stats import mean_accepted_length_macro, total
from forerun.sampling import Sampling

Clock = Callable[[], float]
"""Seconds, monotonic."""

WARM_TOKENS = 8
RESAMPLES = 1000

Row = dict[str, Any]
"""One row as JSON types."""


@dataclass(frozen=True)
class Cell:
    """What one row of the table measures."""

    drafter: str
    """Its label."""
    k: int
    batch: int
    """Requests decoded together."""
    temperature: float

    @property
    def speculative(self) -> Mapping[str, Any]:
        return {"method": methods_of(self.drafter), "max_draft": self.k}


@dataclass(frozen=True)
class Workload:
    """What is decoded in every cell."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int = 64
    rounds: int = 3
    """How often every prompt is decoded, both ways."""
    ignore_eos: bool = False
    seed: int = 0

    def groups(self, batch: int) -> list[list[int]]:
        """Numbers of the prompts of each group; the last one is filled up from the beginning."""
        count = len(self.prompts)
        return [[(start + i) % count for i in range(batch)] for start in range(0, count, batch)]

    def sampling(self, temperature: float, prompt: int, turn: int) -> Sampling:
        """The same seed for plain and speculative decoding, another one for each prompt and round."""
        seed = self.seed + 1_000_003 * turn + prompt
        return Sampling(temperature=temperature, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, seed=seed)


@dataclass
class Run:
    """One group decoded one way, or the sum of several."""

    seconds: float = 0.0
    completions: list[Completion] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def stats(self) -> DecodingStats:
        return total(completion.stats for completion in self.completions)

    @classmethod
    def sum(cls, runs: Sequence[Run]) -> Run:
        return cls(
            sum(run.seconds for run in runs),
            [completion for run in runs for completion in run.completions],
            [timeline for run in runs for timeline in run.timelines],
        )


@dataclass(frozen=True)
class Pair:
    """The same group decoded plainly and with drafts."""

    plain: Run
    drafted: Run

    @property
    def speedup(self) -> float:
        return self.plain.seconds_per_token / self.drafted.seconds_per_token


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    speculative: bool | Mapping[str, Any],
    clock: Clock,
) -> Run:
    """Decodes prompts together, noting when each step's tokens came."""
    start = clock()
    timelines = [Timeline(start) for _ in prompts]

    def note(chunk: Chunk) -> None:
        timelines[chunk.prompt_index].arrived(clock(), len(chunk.token_ids))

    requests = engine.submit(
        [list(p) for p in prompts], sampling, speculative=speculative, cache_salt=own_salt(), listener=note
    )
    while any(request.finish_reason is None for request in requests):
        engine.step()
    seconds = clock() - start
    return Run(seconds, [engine.result(request) for request in requests], timelines)


def measure(
    engine: Engine, cell: Cell, workload: Workload, clock: Clock, advance: Callable[[], object] = lambda: None
) -> Row:
    """Measures one cell; `advance` is called after each pair, `pairs_of(cell, workload)` times."""
    _warm_up(engine, cell, workload, clock)
    pairs = []
    for pair in _pairs(engine, cell, workload, clock):
        pairs.append(pair)
        advance()
    return row_of(cell, pairs, workload.seed)


def pairs_of(cell: Cell, workload: Workload) -> int:
    return workload.rounds * len(workload.groups(cell.batch))


def _warm_up(engine: Engine, cell: Cell, workload: Workload, clock: Clock) -> None:
    group = workload.groups(cell.batch)[0]
    sampling = [Sampling(temperature=cell.temperature, max_tokens=WARM_TOKENS, seed=0) for _ in group]
    for speculative in (False, cell.speculative):
        decode(engine, [workload.prompts[i] for i in group], sampling, speculative, clock)


def _pairs(engine: Engine, cell: Cell, workload: Workload, clock: Clock) -> Iterator[Pair]:
    order = random.Random(repr((workload.seed, cell)))
    for turn in range(workload.rounds):
        for group in workload.groups(cell.batch):
            prompts = [workload.prompts[i] for i in group]
            sampling = [workload.sampling(cell.temperature, i, turn) for i in group]
            runs: dict[bool, Run] = {}
            for drafted in order.sample([False, True], 2):
                runs[drafted] = decode(engine, prompts, sampling, cell.speculative if drafted else False, clock)
            yield Pair(runs[False], runs[True])


# ---------------------------------------------------------------------------------------------------------------- rows


def row_of(cell: Cell, pairs: Sequence[Pair], seed: int = 0) -> Row:
    """The row of a cell: rates, speed-up with its spread, every counter, latencies of both ways, parity with plain."""
    plain, drafted = (Run.sum([getattr(pair, way) for pair in pairs]) for way in ("plain", "drafted"))
    speedups = [pair.speedup for pair in pairs]
    stats = drafted.stats
    return {
        "drafter": cell.drafter,
        "k": cell.k,
        "batch": cell.batch,
        "temperature": cell.temperature,
        "tokens_per_second": 1 / drafted.seconds_per_token,
        "plain_tokens_per_second": 1 / plain.seconds_per_token,
        "speedup": plain.seconds_per_token / drafted.seconds_per_token,
        "speedup_spread": {
            "median": statistics.median(speedups),
            "min": min(speedups),
            "max": max(speedups),
            "pairs": len(pairs),
            "interval_95": interval(pairs, seed),
        },
        **_rates(stats),
        "mean_accepted_length_macro": mean_accepted_length_macro(c.stats for c in drafted.completions),
        "accepted_histogram": accepted_histogram(stats),
        **latencies(drafted.timelines),
        **{f"plain_{name}": value for name, value in latencies(plain.timelines).items()},
        **_parity(plain, drafted),
    }


def _rates(stats: DecodingStats) -> Row:
    """Counters and rates by name; the two that readers look for are there even if nothing was drafted."""
    return {"mean_accepted_length": None, "acceptance_by_position": []} | stats.as_dict()


def accepted_histogram(stats: DecodingStats) -> list[int]:
    """[K + 1] rounds with at least one draft verified that accepted exactly 0, 1, .. K of them."""
    if not stats.verified_by_position:
        return []
    at_least = [stats.verified_by_position[0], *stats.accepted_by_position]
    return [here - more for here, more in zip(at_least, [*at_least[1:], 0], strict=True)]


def interval(pairs: Sequence[Pair], seed: int) -> list[float]:
    """Bootstrap interval of the speed-up over pairs, 2.5 % to 97.5 %; one pair shows no spread."""
    rng = random.Random(seed)
    sums = [(pair.plain.seconds, pair.plain.tokens, pair.drafted.seconds, pair.drafted.tokens) for pair in pairs]
    ratios = []
    for _ in range(RESAMPLES):
        plain, plain_tokens, drafted, tokens = map(sum, zip(*rng.choices(sums, k=len(sums)), strict=True))
        ratios.append((plain / plain_tokens) / (drafted / tokens))
    ratios.sort()
    return [ratios[round(0.025 * (RESAMPLES - 1))], ratios[round(0.975 * (RESAMPLES - 1))]]


def _parity(plain: Run, drafted: Run) -> Row:
    """Whether both ways did the same work. Ids are the same at temperature 0 and in coupled mode only."""
    outputs = list(zip(plain.completions, drafted.completions, strict=True))
    return {
        "outputs": len(outputs),
        "outputs_identical": sum(one.token_ids == other.token_ids for one, other in outputs),
        "tokens": drafted.tokens,
        "plain_tokens": plain.tokens,
        "finish_reasons": dict(Counter(c.finish_reason for c in drafted.completions)),
        "plain_finish_reasons": dict(Counter(c.finish_reason for c in plain.completions)),
    }
