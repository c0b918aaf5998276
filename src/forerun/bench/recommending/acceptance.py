"""What a drafter gets right on some prompts, prompt by prompt, so that it can be said how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.bench.profiling.profiler import longest_draft
from forerun.budget.curve import FloatArray
from forerun.budget.history import NEIGHBOUR_PRIOR
from forerun.engine import DecodingStats, Engine
from forerun.engine.propose import LoadedDrafter
from forerun.sampling import Sampling


@dataclass(frozen=True)
class Shown:
    """Counts of one drafter over P prompts, with every draft made and verified whole."""

    reached: FloatArray
    """[P, K] rounds in which position k was verified and everything before it accepted."""
    accepted: FloatArray
    """[P, K] of these, rounds that accepted it as well."""
    drafted: FloatArray
    """[P] rounds with a draft."""
    steps: FloatArray
    """[P] rounds."""

    @classmethod
    def of(cls, stats: Sequence[DecodingStats], k: int) -> Shown:
        def padded(values: Sequence[int]) -> list[int]:
            return [*values, *[0] * (k - len(values))][:k]

        reached = [padded(one.reached_by_position) for one in stats]
        accepted = [padded(one.accepted_by_position) for one in stats]
        rounds = [one.drafting_rounds for one in stats], [one.target_steps for one in stats]
        return cls(*(np.array(counts, dtype=np.float64) for counts in (reached, accepted, *rounds)))

    @property
    def prompts(self) -> int:
        return len(self.steps)

    @property
    def rounds(self) -> int:
        """With a draft."""
        return int(self.drafted.sum())

    def match(self, rows: Sequence[int] | slice = slice(None)) -> float:
        """Share of rounds in which the drafter had something to propose; of these prompts."""
        steps = float(self.steps[rows].sum())
        return float(self.drafted[rows].sum()) / steps if steps else 0.0

    def survival(self, rows: Sequence[int] | slice = slice(None)) -> FloatArray:
        """[K] chance that drafts 1 .. k are all accepted; of these prompts.

        Few rounds reach the last positions: each leans on the one before, as the scheduler's own history does.
        """
        reached, accepted = self.reached[rows].sum(axis=0), self.accepted[rows].sum(axis=0)
        before = float(accepted.sum() / reached.sum()) if reached.sum() else 0.0
        conditional = np.zeros(len(reached))
        for k in range(len(reached)):
            before = (accepted[k] + NEIGHBOUR_PRIOR * before) / (reached[k] + NEIGHBOUR_PRIOR)
            conditional[k] = before
        return np.multiply.accumulate(conditional)

    def as_dict(self) -> dict[str, Any]:
        counts = {"prompts": self.prompts, "rounds": self.rounds}
        return {**counts, "match_rate": self.match(), "survival": self.survival().tolist()}


def shown(
    engine: Engine,
    entry: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    advance: Callable[[int], object] = lambda tokens: None,  # noqa: ARG005
) -> Shown:
    """Decodes the prompts together with this drafter; `advance` is told of tokens.

    Args:
        engine: idle, with policy `fixed`.
        entry: the drafter.
        prompts: ids.
        sampling: of all of them; prompt i has the seed seed + i.
        advance: of `len(prompts) * max_tokens` tokens; a prompt that ends early is filled up.
    """
    assert not engine.core.schedule.scheduler.adapts
    assert sampling.max_tokens is not None
    own = [_seeded(sampling, i) for i in range(len(prompts))]
    stats: dict[int, DecodingStats] = {}
    left = dict.fromkeys(range(len(prompts)), sampling.max_tokens)
    for chunk in engine.stream([list(p) for p in prompts], own, speculative={"method": entry.name}):
        advance(len(chunk.token_ids))
        left[chunk.prompt_index] -= len(chunk.token_ids)
        if chunk.completion is not None:
            stats[chunk.prompt_index] = chunk.completion.stats
            advance(left[chunk.prompt_index])
    return Shown.of([stats[i] for i in range(len(prompts))], max(1, longest_draft(entry)))


def _seeded(sampling: Sampling, prompt: int) -> Sampling:
    return replace(sampling, seed=(sampling.seed or 0) + prompt)


__all__ = ["Shown", "shown"]
