"""Whether what a drafter is sure of is accepted: calibration error and Brier score on the prompts of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.calibrating.assessment import LEAST_ROUNDS, Quality, Rounds
from forerun.bench.calibrating.place import calibration_file
from forerun.bench.calibrating.recorder import Conditions, Recorder, Recording
from forerun.bench.calibrating.rounds_file import RoundsFile
from forerun.budget.calibration import Table
from forerun.budget.scaling import Scaling
from forerun.engine import Engine
from forerun.engine.propose import LoadedDrafter
from forerun.engine.tuning import usable_calibration
from forerun.errors import OptionError
from forerun.sampling import Sampling
from forerun.target.base import Target


@dataclass(frozen=True)
class Questions:
    """What is decoded to hear confidences, apart from what is timed."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    batch: int
    profiles: Path | None
    """Folder of calibrations that have no drafter's folder to lie in; None: they are not looked for."""

    @property
    def recording(self) -> Recording:
        return Recording(
            self.prompts, self.sampling, [self.sampling.temperature], self.batch, seed=self.sampling.seed or 0
        )


def confidence(engine: Engine, questions: Questions, advance: Callable[[int], object]) -> dict[str, Any]:
    """What became of the confidences of an engine's only drafter, as a row.

    Args:
        engine: idle, with policy `fixed` and one drafter.
        questions: what to decode.
        advance: told of prompts; as many as there are.

    Returns:
        Rounds, and for each position of the draft the quality of predicted survival: raw, and scaled by the
        drafter's calibration where it has one for these conditions. With too few rounds a note instead.
    """
    recorder = Recorder(engine, questions.recording, RoundsFile(None, ""))
    conditions = recorder.conditions()
    if not conditions:
        return {"rounds": 0, "positions": [], "calibrated": False, "note": "drafts nothing"}
    try:
        recorded = recorder.record(conditions[0], advance)
    except OptionError as error:
        return {"rounds": 0, "positions": [], "calibrated": False, "note": str(error).removeprefix("--drafter: ")}
    rounds, table = Rounds.of(recorded), _table(engine, conditions[0], questions)
    count = len(rounds.logits)
    if count < LEAST_ROUNDS:
        note = f"{count} whole rounds are too few to tell; {LEAST_ROUNDS} would do"
        return {"rounds": count, "positions": [], "calibrated": table is not None, "note": note}
    positions = _positions(rounds, table)
    return {"rounds": count, "positions": positions, "calibrated": table is not None, "note": None}


def _table(engine: Engine, conditions: Conditions, questions: Questions) -> Table | None:
    """The calibration that decoding would use."""
    path = calibration_path_of(engine.target, conditions.entry, questions.profiles)
    found = None if path is None else usable_calibration(path)
    return None if found is None else found.table(conditions.key)


def calibration_path_of(target: Target, entry: LoadedDrafter, profiles: Path | None) -> Path | None:
    """The file that decoding would read: the one that was named, else the drafter's own. None: nowhere to look."""
    named = entry.config.confidence_calibration_path
    return calibration_file(target, entry, profiles) if named is None else Path(named)


def _positions(rounds: Rounds, table: Table | None) -> list[dict[str, Any]]:
    k = rounds.labels.shape[1]
    ways = {"raw": Scaling.of([1.0])}
    if table is not None:
        ways["calibrated"] = table.scaling
    predicted = {way: scaling.survival(rounds.logits) for way, scaling in ways.items()}
    return [
        {
            "position": i + 1,
            "survival": float(rounds.labels[:, i].mean()),
            **{
                way: Quality.of(values[:, i], rounds.labels[:, i], rounds.prompts).as_dict()
                for way, values in predicted.items()
            },
        }
        for i in range(k)
    ]


__all__ = ["Questions", "calibration_path_of", "confidence"]
