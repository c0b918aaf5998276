"""Sequential temperature scaling: confidences that mean what they say (methods, 8.1; section 3.2.1 of the DSpark paper,
arXiv 2607.05147).

Raw scores are overconfident. Position by position one temperature is fitted so that predicted *survival*, the product
over all positions so far, agrees with how often a draft survives that far. A table is valid for the conditions it was
measured under. It changes speed only, never the law of the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from forerun.budget.curve import FloatArray
from forerun.budget.reliability import BINS, Bin, expected_calibration_error, negative_log_likelihood
from forerun.errors import OptionError
from forerun.parsing import json_of
from forerun.sampling.options import GREEDY_BELOW, Sampling, VerifyMode

VERSION = 1
GRID: tuple[float, ...] = tuple(float(t) for t in np.logspace(-1, 1, 41))
"""Temperatures tried at each position (SGLang's grid)."""
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


# ------------------------------------------------------------------------------------------------------------ the fit


class Fit(NamedTuple):
    """One temperature for each position, and the survival's calibration error before and after, on the fit set."""

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


def fit(logits: FloatArray, labels: FloatArray, grid: Sequence[float] = GRID, bins: int = BINS) -> Fit:
    """Sequential temperature scaling.

    For k = 1 .. K the temperature that minimises the calibration error of the survival of tokens 1 .. k, earlier ones
    fixed. The error is piecewise constant in it, so ties are broken by the likelihood, then by the grid's order.

    Args:
        logits: [n, K] raw scores of drafts that were verified whole (a cut draft has no labels behind the cut).
        labels: [n, K] 1 where tokens 1 .. k were accepted, 0 from the first rejection on; or the chance of it.
        grid: temperatures to try, positive.
        bins: of the calibration error.

    Raises:
        OptionError: shapes or ranges do not fit, or labels that rise along a draft.
    """
    _check_rounds(logits, labels)
    temperatures, ece_before, ece_after = [], [], []
    before, after = np.ones(len(logits)), np.ones(len(logits))
    for z, label in zip(logits.T, labels.T, strict=True):
        misfits = [_misfit(after * sigmoid(z / t), label, bins) for t in grid]
        temperatures.append(float(grid[misfits.index(min(misfits))]))
        before, after = before * sigmoid(z), after * sigmoid(z / temperatures[-1])
        ece_before.append(expected_calibration_error(before, label, bins))
        ece_after.append(expected_calibration_error(after, label, bins))
    return Fit(tuple(temperatures), tuple(ece_before), tuple(ece_after))


def _misfit(survival: FloatArray, label: FloatArray, bins: int) -> tuple[float, float]:
    # Rounded, so that sums in another order are still a tie.
    return round(expected_calibration_error(survival, label, bins), 12), negative_log_likelihood(survival, label)


def _check_rounds(logits: FloatArray, labels: FloatArray) -> None:
    if logits.ndim != 2 or logits.shape != labels.shape or 0 in logits.shape:
        raise OptionError("labels", f"need [rounds, K] like the logits: {labels.shape}, {logits.shape}")
    if not bool(np.isfinite(logits).all()):
        raise OptionError("logits", "must be finite")
    if bool((np.diff(labels, axis=1) > 1e-9).any()):
        raise OptionError("labels", "rise along a draft: they must be survivals (0 from the first rejection on)")


def sigmoid(z: FloatArray) -> FloatArray:
    """1 / (1 + exp(-z)) without overflow."""
    small = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1.0, small) / (1 + small), dtype=np.float64)


def scale(confidence: float, temperature: float) -> float:
    """sigmoid(logit(confidence) / temperature): keeps the order, and 0, 1 and NaN as they are."""
    if not 0 < confidence < 1:
        return confidence
    z = math.log(confidence / (1 - confidence)) / temperature
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


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

    def __post_init__(self) -> None:
        if not self.temperatures or not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise OptionError("calibration", f"temperatures must be positive, got {self.temperatures}")

    def apply(self, position: int, confidence: float) -> float:
        """The calibrated confidence of a position (from 1); beyond the table its last temperature holds."""
        return scale(confidence, self.temperatures[min(position, len(self.temperatures)) - 1])

    def sglang(self) -> dict[str, Any]:
        """What SGLang reads (`--speculative-dspark-confidence-sts-path`). Its file has no field for the key: say it in
        the file's name."""
        errors = {name: list(v) for name, v in (("ece_before", self.ece_before), ("ece_after", self.ece_after)) if v}
        head = {"temperatures": list(self.temperatures), "dataset": self.dataset, "num_samples": self.num_samples}
        return head | errors


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
    temperatures, before, after = (tuple(map(float, entry[n])) for n in ("temperatures", "ece_before", "ece_after"))
    key = CalibrationKey(**entry["key"])
    bars = [_bars(entry.get(name, ())) for name in ("bars_before", "bars_after")]
    return Table(key, temperatures, str(entry["dataset"]), int(entry["num_samples"]), before, after, bars[0], bars[1])


def _bars(positions: Sequence[Sequence[Any]]) -> Bars:
    return tuple(
        tuple(Bin(float(low), float(high), int(rounds), float(p), float(o)) for low, high, rounds, p, o in bars)
        for bars in positions
    )


__all__ = [
    "BUCKET_NAMES",
    "GRID",
    "Calibration",
    "CalibrationKey",
    "Fit",
    "Table",
    "filters_of",
    "fit",
    "scale",
    "sigmoid",
    "temperature_bucket",
]
