"""Fitted scalings of a drafter's confidences, the conditions they hold under, and the file they are kept in.

A table is valid for the conditions it was measured under. It changes speed only, never the law of the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from forerun.budget.reliability import Bin
from forerun.budget.scaling import Scaling, scale
from forerun.errors import OptionError
from forerun.parsing import json_of
from forerun.sampling.options import GREEDY_BELOW, Sampling, VerifyMode

VERSION = 2
"""1 had no shifts."""
BUCKETS = (GREEDY_BELOW, 0.5, 0.85, 1.15)
"""Edges of the temperature buckets: greedy, low, medium, around 1 (what drafters are trained at), high."""
BUCKET_NAMES = ("greedy", "low", "medium", "one", "high")

DraftSampleMethod = Literal["greedy", "probabilistic"]


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """The conditions under which a table holds."""

    verify_mode: VerifyMode
    draft_sample_method: DraftSampleMethod
    temperature: str
    """A bucket of `temperature_bucket`."""
    filters: str = "none"
    """What narrows the law after the temperature (`filters_of`)."""

    @classmethod
    def of(cls, sampling: Sampling, verify_mode: VerifyMode, draft_sample_method: DraftSampleMethod) -> CalibrationKey:
        """The key of a request."""
        bucket = temperature_bucket(sampling.temperature)
        return cls(verify_mode, draft_sample_method, bucket, filters_of(sampling))

    def __str__(self) -> str:
        return f"{self.verify_mode}, {self.draft_sample_method}, temperature {self.temperature}, filters {self.filters}"


def temperature_bucket(temperature: float) -> str:
    """The name of the bucket; an edge belongs to the bucket above it."""
    return BUCKET_NAMES[sum(temperature >= edge for edge in BUCKETS)]


def filters_of(sampling: Sampling) -> str:
    """top_k, top_p and min_p where they are on, else `none`. Greedy laws have no filters."""
    if sampling.greedy:
        return "none"
    on = {
        "top_k": sampling.top_k if sampling.top_k > 0 else None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "min_p": sampling.min_p if sampling.min_p > 0 else None,
    }
    return " ".join(f"{name}={value:g}" for name, value in on.items() if value is not None) or "none"


# ------------------------------------------------------------------------------------------------------------ the file


Bars = tuple[tuple[Bin, ...], ...]


@dataclass(frozen=True)
class Table:
    """A fit with what is known of it."""

    key: CalibrationKey
    temperatures: tuple[float, ...]
    dataset: str
    num_samples: int
    """Rounds it was fitted on."""
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    bars_before: Bars = ()
    """Reliability diagram of each position's survival on held-out rounds, empty bins left out."""
    bars_after: Bars = ()
    shifts: tuple[float, ...] = ()
    """In logits, one for each temperature; none given: zeros."""

    def __post_init__(self) -> None:
        if not self.shifts:
            object.__setattr__(self, "shifts", (0.0,) * len(self.temperatures))
        if len(self.shifts) != len(self.temperatures) or not all(map(math.isfinite, self.shifts)):
            raise OptionError("calibration", f"needs a shift for each temperature, got {self.shifts}")
        if not self.temperatures or not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise OptionError("calibration", f"temperatures must be positive, got {self.temperatures}")

    def apply(self, position: int, confidence: float) -> float:
        """The calibrated confidence of a position (from 1); beyond the table its last entry holds."""
        return scale(confidence, *self.scaling.at(position))

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.temperatures, self.shifts)


class Calibration:
    """The tables of one drafter, one per key."""

    def __init__(self, tables: Sequence[Table] = ()):
        self._tables = {table.key: table for table in tables}

    @property
    def keys(self) -> list[CalibrationKey]:
        return list(self._tables)

    def table(self, key: CalibrationKey) -> Table | None:
        """The table of exactly this key: one fitted under other conditions may be worse than none."""
        return self._tables.get(key)

    def with_table(self, table: Table) -> Calibration:
        """A copy with this table added, or in place of the one with its key."""
        return Calibration(list((self._tables | {table.key: table}).values()))

    def dumps(self) -> str:
        """JSON text, the same for the same tables."""
        tables = sorted((asdict(table) for table in self._tables.values()), key=lambda t: sorted(t["key"].items()))
        return json.dumps({"version": VERSION, "tables": tables}, indent=1)

    @classmethod
    def loads(cls, text: str) -> Calibration:
        """From JSON text. OptionError if it is not what `dumps` wrote."""
        try:
            data = json_of(text)
            version = data.get("version")
            if version != VERSION:
                found = f"has version {version!r}, this program reads {VERSION}"
                raise OptionError("calibration", f"{found}; run `forerun calibrate` again")
            return cls([_table(entry) for entry in data["tables"]])
        except OptionError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise OptionError("calibration", f"is damaged ({error!r}); run `forerun calibrate` again") from None


def _table(entry: Mapping[str, Any]) -> Table:
    names = ("temperatures", "ece_before", "ece_after", "shifts")
    temperatures, before, after, shifts = (tuple(map(float, entry[name])) for name in names)
    key = CalibrationKey(**entry["key"])
    bars = [_bars(entry.get(name, ())) for name in ("bars_before", "bars_after")]
    samples = int(entry["num_samples"])
    return Table(key, temperatures, str(entry["dataset"]), samples, before, after, bars[0], bars[1], shifts)


def _bars(positions: Sequence[Sequence[Any]]) -> Bars:
    return tuple(
        tuple(Bin(float(low), float(high), int(rounds), float(p), float(o)) for low, high, rounds, p, o in bars)
        for bars in positions
    )


__all__ = [
    "BUCKET_NAMES",
    "Calibration",
    "CalibrationKey",
    "Table",
    "filters_of",
    "temperature_bucket",
]
