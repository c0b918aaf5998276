"""The grid on which scheduled decoding is held to be never slower: machines, drafters, acceptances, loads, policies.

A cell is decoded as scheduled, plainly, and with each fixed K, on the same texts, by the simulator
(`forerun simulate`). Costs are scripted, in plain steps of one row, and the scheduler knows them: looked at is what it
makes of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from forerun.bench.load.arrivals import Load
from forerun.bench.simulate.specs import PLAIN, parse_drafters, parse_way
from forerun.bench.simulate.sweep import BAR, Plan, run, speed
from forerun.bench.simulate.systems import System
from forerun.bench.simulate.texts import Lengths
from forerun.budget.costs import ContextCost, DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.profile import Profile, ProfileKey

Row = dict[str, Any]

BFLOAT16 = {1: 1.0, 2: 1.04, 4: 1.09, 6: 1.29, 8: 1.3, 16: 1.55, 32: 2.09, 64: 3.3, 128: 5.7, 256: 10.5, 512: 20.2}
FLOAT32 = {1: 1.0, 2: 2.0, 8: 2.0, 16: 2.05, 32: 2.57, 64: 4.2, 128: 7.6, 256: 14.5, 512: 28.0}
INT4 = {1: 1.0, 2: 1.1, 4: 1.39, 5: 2.38, 8: 2.42, 16: 4.38, 32: 8.5, 64: 16.6, 128: 33.0, 256: 65.0}
CURVES = {"bfloat16": BFLOAT16, "float32": FLOAT32, "int4": INT4}
"""{rows: cost of a pass}, in plain steps, as they were measured on two cores (a jump at two rows, a jump at five)."""


def serial(first: float, per_token: float = 0.0, follow: float = 0.0) -> DraftCost:
    """A call costs `first` and `per_token` for each further token, a tenth more for each further request."""
    samples = {
        k: {n: (first + per_token * (k - 1)) * (1 + 0.1 * (n - 1)) for n in (1, 2, 64, 512)} for k in (1, 2, 8, 16)
    }
    return DraftCost.measured(samples, follow=follow)


def scripted(
    verify: Mapping[int, float], drafts: Mapping[str, DraftCost], context: ContextCost | None = None
) -> Profile:
    """Costs of a machine that is not there."""
    key = ProfileKey("scripted", "float32", "cpu", 1)
    return Profile(key, VerifyCost(CostCurve.measured(verify), context or ContextCost()), drafts)


def system(verify: Mapping[int, float], drafts: Mapping[str, DraftCost]) -> System:
    """A machine with these costs and more room than the grid needs."""
    return System("scripted", scripted(verify, drafts), modelled=False, max_num_batched_tokens=1 << 14)


# ------------------------------------------------------------------------------------------------------------- the grid


class Subject(NamedTuple):
    """Drafters of a cell, and what they draft for."""

    drafts: Mapping[str, DraftCost]
    text: str
    """What `forerun simulate --drafter` takes, for an acceptance {0}."""
    lengths: Lengths = Lengths((50, 150), (150, 300))


DSPARK, NGRAM = serial(0.15, 0.01, follow=0.001), serial(1e-4, 0.0)
DRAFTERS = {
    "small": Subject({"small": serial(0.1, 0.1, follow=0.001)}, "small:{0}:k=5"),
    "small-reads": Subject({"small": serial(0.1, 0.1, follow=0.025)}, "small:{0}:k=5", Lengths((300, 900), (20, 120))),
    "dspark": Subject({"dspark": DSPARK}, "dspark:{0}:k=5"),
    "ngram": Subject({"ngram": NGRAM}, "ngram:{0}:k=5:match=0.35"),
    "mixed": Subject({"ngram": NGRAM, "dspark": DSPARK}, "ngram:{0}:k=5:match=0.35+dspark:{0}:k=5"),
}
"""`small-reads` has long prompts to read before it drafts the first token of a short answer."""
ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
REQUESTS = (1, 4, 16, 32)
"""At once, each replaced when it ends."""
POLICIES = ("delayed", "prefix")
FIXED = ("fixed:1", "fixed:2", "fixed:3", "fixed:5")
ALWAYS_WRONG_BAR = 0.95
"""Speed of plain decoding that is asked where nothing is ever accepted: to find that out is not free."""


@dataclass(frozen=True)
class Cell:
    """One place of the grid, or beside it: nothing says that a value has to be one of those above."""

    curve: str
    drafter: str
    acceptance: float
    """At every position, averaged over texts."""
    requests: int
    policy: str = "delayed"
    seed: int = 0
    """Of the texts."""

    @property
    def bar(self) -> float:
        """Least `margin` that is asked of it."""
        return BAR if self.acceptance > 0 else ALWAYS_WRONG_BAR


def cells(
    policy: str,
    seed: int = 0,
    curves: Collection[str] = tuple(CURVES),
    drafters: Collection[str] = tuple(DRAFTERS),
    acceptances: Collection[float] = ACCEPTANCES,
    requests: Collection[int] = REQUESTS,
) -> Iterator[Cell]:
    """All of one policy and seed."""
    for place in itertools.product(curves, drafters, acceptances, requests):
        yield Cell(*place, policy, seed)


SIZE = len(POLICIES) * len(list(cells(POLICIES[0])))
"""Cells of the whole grid, on one seed."""

# ------------------------------------------------------------------------------------------------------------ measuring


def simulated(cell: Cell, way: str, effort: float) -> Row:
    """One run over the cell's texts, in a way as `forerun simulate --policy` names it.

    Args:
        effort: factor on the tokens that are decoded.

    Raises:
        OptionError: `effort` is not positive.
    """
    drafts, text, lengths = DRAFTERS[cell.drafter]
    loaded, load = parse_drafters((text.format(cell.acceptance),)), Load(concurrency=cell.requests)
    plan = Plan(system(CURVES[cell.curve], drafts), loaded, (), [load], lengths, seeds=(cell.seed,), effort=effort)
    return run(plan, loaded[0], load, parse_way(way), cell.seed)


@cache
def _plain_speed(curve: str, lengths: Lengths, requests: int, seed: int, effort: float) -> float:
    """That of every drafter and acceptance: without drafts texts of the same lengths are the same."""
    drafter = next(name for name, subject in DRAFTERS.items() if subject.lengths == lengths)
    return speed(simulated(Cell(curve, drafter, 0.0, requests, seed=seed), PLAIN, effort))


def baselines(cell: Cell, effort: float) -> dict[str, float]:
    """Tokens a second of plain decoding and of each fixed K."""
    plain = _plain_speed(cell.curve, DRAFTERS[cell.drafter].lengths, cell.requests, cell.seed, effort)
    return {PLAIN: plain} | {way: speed(simulated(cell, way, effort)) for way in FIXED}


def measure(cell: Cell, effort: float, known: Mapping[str, float] | None = None) -> Row:
    """A cell as a row of JSON types.

    Args:
        effort: factor on the tokens that are decoded.
        known: its `baselines`, if another policy's cell had them simulated.
    """
    own = simulated(cell, cell.policy, effort)
    return asdict(cell) | {
        "tokens_per_second": speed(own),
        "baselines": dict(known or baselines(cell, effort)),
        "bypass_share": own["bypass_share"],
        "verify_budget": own["verify_budget"],
    }


def compared(row: Row) -> Row:
    """The speed of a row of `measure` over those of its rivals; `margin` is over the faster of both."""
    rivals, own = row["baselines"], row["tokens_per_second"]
    best = max(FIXED, key=rivals.__getitem__)
    over_plain, over_best_fixed = own / rivals[PLAIN], own / rivals[best]
    return {
        "over_plain": over_plain,
        "over_best_fixed": over_best_fixed,
        "best_fixed": best,
        "best_fixed_gain": rivals[best] / rivals[PLAIN],
        "margin": min(over_plain, over_best_fixed),
    }


def cell_of(row: Row) -> Cell:
    """What a row is of."""
    return Cell(*(row[name] for name in Cell.__dataclass_fields__))
