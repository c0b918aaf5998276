"""Scalings fitted on some prompts and judged on the others: a fit is never judged by what it was made from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.bench.calibrating.rounds_file import PromptRounds
from forerun.budget.calibration import CalibrationKey, Table
from forerun.budget.curve import FloatArray
from forerun.budget.reliability import (
    Bin,
    Interval,
    auroc,
    bootstrap,
    brier_score,
    calibration_floor,
    expected_calibration_error,
    reliability,
)
from forerun.budget.scaling import Scaling, fit, fit_temperatures
from forerun.errors import OptionError

LEAST_ROUNDS = 100
"""On each side of the split: with fewer the error of a perfect predictor is above 5 %."""
LEAST_PROMPTS = 2
"""On each side: rounds of one prompt are no sample of a workload."""


@dataclass(frozen=True)
class Rounds:
    """Rounds as arrays."""

    logits: FloatArray
    """[n, K]"""
    labels: FloatArray
    """[n, K] 1 where drafts 1 .. k were accepted."""
    prompts: list[int]
    """[n]"""

    @classmethod
    def of(cls, prompts: Sequence[PromptRounds]) -> Rounds:
        logits = [row for one in prompts for row in one.logits]
        accepted = np.array([n for one in prompts for n in one.accepted])
        positions = np.arange(1, (len(logits[0]) if logits else 0) + 1)
        labels = (accepted[:, None] >= positions).astype(np.float64) if logits else np.zeros((0, 0))
        numbers = [one.prompt for one in prompts for _ in one.accepted]
        return cls(np.array(logits, dtype=np.float64).reshape(labels.shape), labels, numbers)


@dataclass(frozen=True)
class Quality:
    """How good predicted survivals of one position are, on held-out rounds."""

    ece: float
    ece_interval: Interval
    """95 %, prompts drawn with replacement. Near the floor it lies too high, as drawing adds the same noise again: its
    upper end is a safe bound."""
    floor: float
    """The error that a perfect predictor shows with as many rounds."""
    brier: float
    auroc: float | None
    bins: list[Bin]

    @classmethod
    def of(cls, predicted: FloatArray, labels: FloatArray, prompts: Sequence[int]) -> Quality:
        interval = bootstrap(prompts, lambda rows: expected_calibration_error(predicted[rows], labels[rows]))
        return cls(
            expected_calibration_error(predicted, labels),
            interval,
            calibration_floor(predicted),
            brier_score(predicted, labels),
            auroc(predicted, labels),
            reliability(predicted, labels),
        )

    @property
    def bars(self) -> tuple[Bin, ...]:
        """The bins that are not empty."""
        return tuple(one for one in self.bins if one.rounds)

    def as_dict(self) -> dict[str, Any]:
        """As JSON types; an empty bin has no means."""
        bins = [one._asdict() for one in self.bars]
        numbers = {"ece": self.ece, "ece_interval_95": list(self.ece_interval), "floor": self.floor}
        return {**numbers, "excess": self.ece - self.floor, "brier": self.brier, "auroc": self.auroc, "bins": bins}


@dataclass(frozen=True)
class Position:
    """One position of the draft."""

    position: int
    survival: float
    """Share of rounds that survive it."""
    before: Quality
    by_temperatures: Quality
    """What temperatures alone come to (sequential temperature scaling)."""
    after: Quality


@dataclass(frozen=True)
class Assessment:
    """A table and what it is worth on prompts that it was not fitted on."""

    drafter: str
    table: Table
    fitted_prompts: int
    held_out_rounds: int
    held_out_prompts: int
    left_out: int
    """Rounds that could not be used, on both sides."""
    temperatures_alone: tuple[float, ...]
    """Sequential temperature scaling on the same rounds: for engines that know no shifts, and for comparison."""
    positions: list[Position]

    @property
    def holds(self) -> bool:
        """Whether scaling does no harm on held-out prompts: its error is not above the one before by more than the
        floor. A fit on few rounds may do harm."""
        return _harmless((position.before, position.after) for position in self.positions)

    @property
    def temperatures_hold(self) -> bool:
        """The same of temperatures alone."""
        return _harmless((position.before, position.by_temperatures) for position in self.positions)

    def as_dict(self) -> dict[str, Any]:
        ways = ("before", "by_temperatures", "after")
        positions = [
            {"position": p.position, "survival": p.survival} | {way: getattr(p, way).as_dict() for way in ways}
            for p in self.positions
        ]
        counts = ("drafter", "fitted_prompts", "held_out_rounds", "held_out_prompts", "left_out")
        own = {name: getattr(self, name) for name in (*counts, "holds", "temperatures_alone")}
        return own | {"table": asdict(self.table), "positions": positions}

    def sglang(self) -> dict[str, Any]:
        """What SGLang reads (`--speculative-dspark-confidence-sts-path`): it knows temperatures alone, and no field
        for the key; say it in the file's name."""
        return {
            "temperatures": list(self.temperatures_alone),
            "dataset": self.table.dataset,
            "num_samples": self.table.num_samples,
            "ece_before": [position.before.ece for position in self.positions],
            "ece_after": [position.by_temperatures.ece for position in self.positions],
        }


def _harmless(pairs: Iterable[tuple[Quality, Quality]]) -> bool:
    return sum(after.ece - before.ece - after.floor for before, after in pairs) <= 0


def assess(
    key: CalibrationKey,
    recorded: Sequence[PromptRounds],
    dataset: str,
    held_out: float = 0.5,
    seed: int = 0,
) -> Assessment:
    """Fits on a share of the prompts and judges on the rest.

    Args:
        key: the conditions that the rounds were recorded under.
        recorded: the rounds, by prompt.
        dataset: name of the prompts, for the table.
        held_out: share of the prompts that are not fitted on.
        seed: of the split.

    Raises:
        OptionError: too few rounds or prompts.
    """
    fitting, judging = split(recorded, held_out, seed)
    train, test = Rounds.of(fitting), Rounds.of(judging)
    _check(recorded[0].drafter if recorded else "", fitting, judging)
    alone, scaling = fit_temperatures(train.logits, train.labels), fit(train.logits, train.labels)
    positions = _judged(test, Scaling.of(alone), scaling)
    qualities = ([p.before for p in positions], [p.after for p in positions])
    errors, bars = ([tuple(getattr(q, what) for q in each) for each in qualities] for what in ("ece", "bars"))
    rounds = len(train.logits)
    table = Table(key, scaling.temperatures, dataset, rounds, errors[0], errors[1], bars[0], bars[1], scaling.shifts)
    return Assessment(
        recorded[0].drafter,
        table,
        len(fitting),
        len(test.logits),
        len(judging),
        sum(one.left_out for one in recorded),
        alone,
        positions,
    )


def _judged(test: Rounds, alone: Scaling, scaling: Scaling) -> list[Position]:
    predicted = [way.survival(test.logits) for way in (Scaling.of([1.0]), alone, scaling)]
    return [
        Position(k + 1, float(label.mean()), *(Quality.of(p[:, k], label, test.prompts) for p in predicted))
        for k, label in enumerate(test.labels.T)
    ]


def split(
    recorded: Sequence[PromptRounds], held_out: float, seed: int
) -> tuple[list[PromptRounds], list[PromptRounds]]:
    """(to fit on, to judge on): whole prompts, drawn by the seed. Prompts without a round count for neither."""
    usable = sorted((one for one in recorded if one.accepted), key=lambda one: one.prompt)
    random.Random(seed).shuffle(usable)
    count = min(max(round(held_out * len(usable)), 1), max(0, len(usable) - 1))
    return usable[count:], usable[:count]


def _check(drafter: str, fitting: Sequence[PromptRounds], judging: Sequence[PromptRounds]) -> None:
    for side, prompts in (("to fit on", fitting), ("to judge on", judging)):
        rounds = sum(len(one.accepted) for one in prompts)
        if rounds < LEAST_ROUNDS or len(prompts) < LEAST_PROMPTS:
            raise OptionError(
                "--prompts",
                f"{drafter!r} came to {rounds} whole rounds of {len(prompts)} prompts {side}, which is less than "
                f"{LEAST_ROUNDS} of {LEAST_PROMPTS}; give more prompts, or more --max-tokens",
            )


__all__ = ["LEAST_ROUNDS", "Assessment", "Position", "Quality", "Rounds", "assess", "split"]
