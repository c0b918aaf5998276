"""From a drafter's scores to confidences that can be reckoned with: a fitted scaling, then what verdicts show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.budget.calibration import Calibration, CalibrationKey, Table
from forerun.budget.online import OnlineCalibration


class Confidences:
    """Calibrates c_k of every drafter.

    Args:
        calibrations: fitted tables by drafter; a drafter without is corrected by its verdicts alone.
    """

    def __init__(self, calibrations: Mapping[str, Calibration]):
        self._fitted = dict(calibrations)
        self._online = OnlineCalibration()

    def calibrated(self, drafter: str, key: CalibrationKey | None, position: int, confidence: float) -> float:
        """c of a position (from 1) under the conditions of a request; NaN stays NaN."""
        return self._online.apply(drafter, position, self._scaled(drafter, key, position, confidence))

    def all_of(self, drafter: str, key: CalibrationKey | None, confidence: Sequence[float]) -> list[float]:
        """c_1 .. of a draft."""
        table = self._table(drafter, key)
        scaled = confidence if table is None else [table.apply(k, c) for k, c in enumerate(confidence, 1)]
        return self._online.apply_all(drafter, scaled)

    def trust(self, drafter: str, key: CalibrationKey | None, count: int) -> list[float]:
        """[count] how far calibrated confidences of positions 1 .. may stand in for a verdict: 1 where a table
        was fitted."""
        return [1.0] * count if self._table(drafter, key) is not None else self._online.trust(drafter, count)

    def record(
        self, drafter: str, key: CalibrationKey | None, confidence: Sequence[float], verified: int, accepted: int
    ) -> None:
        """A verdict: every position that was verified behind an accepted prefix is a lesson."""
        for k, c in enumerate(confidence[: min(accepted + 1, verified)], 1):
            self._online.record(drafter, k, self._scaled(drafter, key, k, c), k <= accepted)

    def _scaled(self, drafter: str, key: CalibrationKey | None, position: int, confidence: float) -> float:
        table = self._table(drafter, key)
        return confidence if table is None else table.apply(position, confidence)

    def _table(self, drafter: str, key: CalibrationKey | None) -> Table | None:
        if key is None or not self._fitted:
            return None
        calibration = self._fitted.get(drafter)
        return None if calibration is None else calibration.table(key)


__all__ = ["Confidences"]
