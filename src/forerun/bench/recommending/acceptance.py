"""What a drafter gets right: on some prompts, prompt by prompt, or as its card tells; and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from forerun.bench.profiling.profiler import longest_draft
from forerun.budget.curve import FloatArray
from forerun.budget.history import CARD_PRIOR, NEIGHBOUR_PRIOR, AcceptanceHistory
from forerun.budget.reliability import Interval, bootstrap
from forerun.engine import DecodingStats, Engine
from forerun.engine.propose import LoadedDrafter
from forerun.engine.schedule import RoundReport
from forerun.sampling import Sampling

LEVEL = 0.9
"""Of intervals: both ends are then bounds of 95 %."""

GainOf = Callable[[FloatArray, float], float]
"""The gain at a survival [K] and a share of rounds with a draft."""


class Acceptance(Protocol):
    """What is known of how often drafts are accepted."""

    def match(self) -> float:
        """Share of rounds in which the drafter has something to propose."""

    def survival(self) -> FloatArray:
        """[K] chance that drafts 1 .. k are all accepted."""

    def bounds(self, gain: GainOf) -> Interval:
        """The gain at the ends of what is known."""

    @property
    def told(self) -> str:
        """Where it is from, in a few words."""

    def as_dict(self) -> dict[str, Any]: ...


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

    def bounds(self, gain: GainOf) -> Interval:
        """By drawing the prompts again."""

        def drawn(rows: Sequence[int]) -> float:
            return gain(self.survival(rows), self.match(rows))

        return bootstrap(range(self.prompts), lambda rows: drawn(rows.tolist()), level=LEVEL)

    @property
    def told(self) -> str:
        return f"{self.rounds} rounds of {self.prompts} prompts"

    def as_dict(self) -> dict[str, Any]:
        counts = {"prompts": self.prompts, "rounds": self.rounds}
        return {**counts, "match_rate": self.match(), "survival": self.survival().tolist()}


@dataclass(frozen=True)
class Carded:
    """What the card of a drafter tells: measured, but on other text. It weighs what the scheduler's history lets such a
    prior weigh, a few rounds, so that its bounds are wide."""

    acceptance: Sequence[float]
    """[K] by position, conditional."""

    def match(self) -> float:
        """A drafter that was trained always proposes."""
        return 1.0

    def survival(self) -> FloatArray:
        return np.multiply.accumulate(np.array(self.acceptance, dtype=np.float64))

    def bounds(self, gain: GainOf) -> Interval:
        """At the 5 % and 95 % points of survival after as many rounds as a card weighs."""
        found = AcceptanceHistory({"": self.acceptance}).estimate("", len(self.acceptance))
        return Interval(gain(found.low, 1.0), gain(found.high, 1.0))

    @property
    def told(self) -> str:
        return f"its card, which weighs {CARD_PRIOR:g} rounds"

    def as_dict(self) -> dict[str, Any]:
        return {"prompts": 0, "rounds": 0, "match_rate": 1.0, "survival": self.survival().tolist(), "card": True}


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
    stats = _decoded(engine, prompts, sampling, [entry.name], advance)
    return Shown.of([stats[i] for i in range(len(prompts))], max(1, longest_draft(entry)))


def shown_in_turn(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    advance: Callable[[int], object] = lambda tokens: None,  # noqa: ARG005
) -> list[Shown]:
    """What each drafter of an engine gets right where it is asked only when those before it have nothing to propose.

    Args:
        engine: idle, with policy `fixed`: it asks its drafters in their order.
        prompts, sampling, advance: as for `shown`.
    """
    entries = engine.core.loaded
    counts = {(entry.name, i): DecodingStats() for entry in entries for i in range(len(prompts))}

    def note(report: RoundReport) -> None:
        prompt = report.request.prompt_index
        for name in report.missed:
            counts[name, prompt].record(0, 0, 0)
        if report.drafter is not None:
            drafted = len(report.draft.tokens)
            counts[report.drafter, prompt].record(drafted, report.verified, report.accepted)

    before, engine.core.on_round = engine.core.on_round, note
    try:
        _decoded(engine, prompts, sampling, [entry.name for entry in entries], advance)
    finally:
        engine.core.on_round = before
    return [
        Shown.of([counts[entry.name, i] for i in range(len(prompts))], max(1, longest_draft(entry)))
        for entry in entries
    ]


def _decoded(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    drafters: Sequence[str],
    advance: Callable[[int], object],
) -> Mapping[int, DecodingStats]:
    """Statistics by prompt, all of them decoded together."""
    assert not engine.core.schedule.scheduler.adapts
    assert sampling.max_tokens is not None
    own = [_seeded(sampling, i) for i in range(len(prompts))]
    stats: dict[int, DecodingStats] = {}
    left = dict.fromkeys(range(len(prompts)), sampling.max_tokens)
    for chunk in engine.stream([list(p) for p in prompts], own, speculative={"method": list(drafters)}):
        advance(len(chunk.token_ids))
        left[chunk.prompt_index] -= len(chunk.token_ids)
        if chunk.completion is not None:
            stats[chunk.prompt_index] = chunk.completion.stats
            advance(left[chunk.prompt_index])
    return stats


def _seeded(sampling: Sampling, prompt: int) -> Sampling:
    return replace(sampling, seed=(sampling.seed or 0) + prompt)


__all__ = ["LEVEL", "Acceptance", "Carded", "GainOf", "Shown", "shown", "shown_in_turn"]
