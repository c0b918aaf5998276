"""Plain decoding beside speculative decoding on a real model: where they differ, and by how much they could have.

Plain decoding is the same engine with nothing proposed, one request at a time. Where an output leaves it, the run goes
on teacher-forced: the plain ids up to there are put in its place, so that one early difference hides no later one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from forerun.bench.cold import own_salt
from forerun.bench.margins import Choice, Difference
from forerun.engine import Completion, DecodingStats, Engine
from forerun.engine.intake import Ask
from forerun.engine.stats import total
from forerun.sampling import Noise, Row, Sampling, VerifyMode
from forerun.target.noise import PassNoise, measure_noise

if TYPE_CHECKING:
    from torch import Tensor

EXACT_DTYPES = (torch.float32, torch.float64)
"""Here no difference at all is accepted; the margin rule is for lower precision."""

Advance = Callable[[int], None]
"""Told after every so many tokens of work."""


@dataclass(frozen=True)
class Task:
    """One prompt and how it is decoded."""

    prompt: Sequence[int]
    sampling: Sampling
    mode: VerifyMode

    def __post_init__(self) -> None:
        assert self.sampling.seed is not None or self.sampling.greedy, "a comparison needs a seed"

    @property
    def plainly(self) -> Mapping[str, Any]:
        return {"method": (), "verify_mode": self.mode}

    def drafted(self, drafter: str, k: int) -> Mapping[str, Any]:
        return {"method": drafter, "max_draft": k, "verify_mode": self.mode}


@dataclass(frozen=True)
class Plain:
    """What plain decoding made of a task."""

    task: Task
    completion: Completion
    margins: Sequence[float]
    """Gap between best and second best score at every position of the output."""

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids


@dataclass
class Findings:
    """What comparing several outputs with plain decoding has shown."""

    outputs: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    stats: DecodingStats = field(default_factory=DecodingStats)

    @property
    def explained(self) -> bool:
        return all(difference.explained for difference in self.differences)

    def add(self, completion: Completion, differences: Sequence[Difference]) -> None:
        self.outputs += 1
        self.tokens += len(completion.token_ids)
        self.differences += differences
        self.stats = total([self.stats, completion.stats])


class Comparison:
    """Compares decoding through one engine. `noise` is measured only where a difference asks for it."""

    def __init__(self, engine: Engine, advance: Advance = lambda _: None):
        self.engine = engine
        self.advance = advance
        self._noise: dict[tuple[tuple[int, ...], int], PassNoise] = {}

    @property
    def exact(self) -> bool:
        """Whether every difference counts."""
        return self.engine.target.dtype in EXACT_DTYPES

    def plain(self, task: Task) -> Plain:
        """Decodes without drafts, noting how near every choice was."""
        watch = _Watch(self.engine, task)
        completion = run(self.engine, task, task.plainly, watch=watch)
        self.advance(len(completion.token_ids))
        start = len(task.prompt)
        return Plain(task, completion, [watch.margins[start + i] for i in range(len(completion.token_ids))])

    def check(self, findings: Findings, plain: Plain, drafter: str, k: int, prompt: int) -> None:
        """One output with a drafter and K, alone, into the findings."""
        completion = run(self.engine, plain.task, plain.task.drafted(drafter, k))
        self.advance(len(plain.token_ids))
        findings.add(completion, self.differences(plain, completion, drafter, k, prompt))

    def check_together(self, findings: Findings, plains: Sequence[Plain], drafter: str, k: int) -> None:
        """All outputs in one batch, which must not make a difference either."""
        tasks = [plain.task for plain in plains]
        asked = tasks[0].drafted(drafter, k)
        prompts, samplings = [t.prompt for t in tasks], [t.sampling for t in tasks]
        done = self.engine.generate(prompts, samplings, speculative=asked, cache_salt=own_salt())
        for prompt, (plain, completion) in enumerate(zip(plains, done, strict=True)):
            self.advance(len(plain.token_ids))
            findings.add(completion, self.differences(plain, completion, drafter, k, prompt, len(plains)))

    def differences(
        self, plain: Plain, completion: Completion, drafter: str, k: int, prompt: int, batch: int = 1
    ) -> list[Difference]:
        """Every difference along the plain ids; the first one that nothing explains ends the search."""
        found: list[Difference] = []
        emitted, ids = completion.token_ids, plain.token_ids
        passes = {batch * (k + 1)}
        while (at := first_difference(ids, emitted)) is not None:
            token = emitted[at] if at < len(emitted) else None
            found.append(self._difference(plain, at, token, prompt, passes))
            if not found[-1].explained or at + 1 >= len(ids):
                break
            emitted = run(self.engine, plain.task, plain.task.drafted(drafter, k), forced=ids[: at + 1]).token_ids
            passes.add(len(ids))  # what is forced is computed in one pass, whose rounding counts from here on
        return found

    def _difference(self, plain: Plain, at: int, token: int | None, prompt: int, passes: Iterable[int]) -> Difference:
        """`passes` are the numbers of rows of the passes that may have rounded in another way."""
        expected = plain.token_ids[at] if at < len(plain.token_ids) else None
        margin = math.inf  # an output that ends too early or too late is no matter of rounding
        if expected is not None and token is not None:
            margin = self.choice(plain, at).margin(token)
        noise = 0.0 if self.exact else max(self.noise(plain, rows).max_difference for rows in passes)
        return Difference(prompt, at, expected, token, margin, noise)

    def choice(self, plain: Plain, at: int) -> Choice:
        """Where plain decoding chose the token at a position of its output.

        It is decoded again from the start, in the same single rows: a prefill of what came before would round in
        another way, and near a tie choose another token.
        """
        task = plain.task
        shorter = replace(task.sampling, max_tokens=at + 1, min_tokens=min(task.sampling.min_tokens, at + 1))
        watch = _Watch(self.engine, task, keep=len(task.prompt) + at)
        run(self.engine, replace(task, sampling=shorter), task.plainly, watch=watch)
        assert watch.kept is not None
        return watch.kept

    def noise(self, plain: Plain, rows: int) -> PassNoise:
        """How far logits move between single rows and blocks of `rows`, over the very positions of a plain output."""
        ids = [*plain.task.prompt, *plain.token_ids]
        rows = min(rows, len(ids) - 1)
        key = tuple(ids), rows
        if key not in self._noise:
            prefill = min(len(plain.task.prompt), len(ids) - rows)
            self._noise[key] = measure_noise(self.engine.target, ids, rows, prefill)
            # The measurement took the target's storage. Nothing is running, so an empty one is as good.
            self.engine.target.allocate(self.engine.core.pool.num_blocks)
            self.engine.core.prefix_cache.clear()
        return self._noise[key]


def run(
    engine: Engine,
    task: Task,
    speculative: Mapping[str, Any],
    forced: Sequence[int] = (),
    watch: _Watch | None = None,
) -> Completion:
    """Decodes one task alone, its output beginning with `forced`."""
    sampling = task.sampling
    if watch is not None:
        sampling = replace(sampling, logits_processors=(*sampling.logits_processors, watch))
    [request] = engine.intake.requests([task.prompt], sampling, Ask(speculative, cache_salt=own_salt()))
    request.commit(forced, 0)
    for _ in engine.follow([request]):
        pass
    return engine.result(request)


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which two outputs differ; the end of the shorter one if that is all."""
    for at, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return at
    return None if len(ids) == len(others) else min(len(ids), len(others))


class _Watch:
    """A logits processor that changes nothing: it sees the logits of every row and notes how near the choice was."""

    def __init__(self, engine: Engine, task: Task, keep: int | None = None):
        self.margins: dict[int, float] = {}
        self.kept: Choice | None = None
        self._task = task
        self._keep = keep
        ends = frozenset() if task.sampling.ignore_eos else engine.target.eos_token_ids
        self._ends = ends | frozenset(task.sampling.stop_token_ids)
        self._coupled = task.mode == "coupled" and not task.sampling.greedy

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        if self._keep is None or self._keep == len(tokens):
            choice = self._choice(tokens, logits)
            self.margins[len(tokens)] = choice.top_margin
            self.kept = choice if self._keep is not None else None
        return logits

    def _choice(self, tokens: Sequence[int], logits: Tensor) -> Choice:
        sampling = self._task.sampling
        row = Row(sampling, list(tokens), len(self._task.prompt), end_ids=self._ends)
        gumbel = None
        if self._coupled:
            noise = Noise.of(sampling.seed or 0).gumbel(len(tokens), logits.shape[-1])
            gumbel = torch.from_numpy(noise).to(logits.device)
        return Choice(logits.clone(), row, gumbel)
