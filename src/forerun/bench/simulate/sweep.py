"""Every load x drafter x policy, each beside plain decoding of the same texts under the same load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.bench.load.arrivals import Load
from forerun.bench.simulate.acceptance import Loaded, Spread
from forerun.bench.simulate.decoder import Decoder, World
from forerun.bench.simulate.specs import PLAIN, Way
from forerun.bench.simulate.systems import System
from forerun.bench.simulate.texts import Lengths, Texts
from forerun.engine.admission import Limits
from forerun.errors import OptionError

Row = dict[str, Any]
"""One row as JSON types."""

OPEN_SEQS = 256
"""Requests decoded at once under an open loop, where nothing else is said."""
WARM_STEPS, STEPS = 24, 24
"""Plain steps whose tokens are decoded before anything is measured, and while it is: for every request of the load, and
at least the tokens below, and at least half of all outputs, so that requests come and go as they do in the long run."""
WARM_TOKENS, TOKENS = 1500, 6000
BAR = 0.97
"""Speed of plain decoding, and of the best fixed K, below which a scheduled cell has failed."""


@dataclass(frozen=True)
class Plan:
    """A sweep."""

    system: System
    loaded: Sequence[Loaded]
    ways: Sequence[Way]
    loads: Sequence[Load]
    lengths: Lengths = field(default_factory=Lengths)
    spread: Spread = field(default_factory=Spread)
    seeds: Sequence[int] = (0,)
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    effort: float = 1.0
    """Factor on the tokens that are decoded."""

    def __post_init__(self) -> None:
        for loaded in self.loaded:
            for skill in loaded.skills:
                self.system.profile.costs(skill.name)  # OptionError if there are none
                if max((way.k or 0 for way in self.ways), default=0) > skill.most:
                    raise OptionError("--policy", f"a fixed K is more than {skill} may draft (k={skill.most})")
        if not 0 < self.effort < math.inf:
            raise OptionError("--effort", f"must be positive, got {self.effort}")
        memory = self.system.kv_tokens
        if memory is not None and memory < 2 * self.lengths.longest:
            raise OptionError("--prompt-tokens", f"{self.lengths.longest} tokens do not fit in memory ({memory})")

    @property
    def adaptive(self) -> list[Way]:
        return [way for way in self.ways if way.adapts]

    @property
    def cells(self) -> int:
        """Runs that `sweep` makes: plain decoding is shared by the drafters of a load."""
        drafting = [way for way in self.ways if way.policy is not None]
        return len(self.seeds) * len(self.loads) * (1 + len(self.loaded) * len(drafting))

    def limits(self, load: Load) -> Limits:
        seqs = self.max_num_seqs or (OPEN_SEQS if load.concurrency is None else load.concurrency)
        rows = self.max_num_batched_tokens or max(self.system.max_num_batched_tokens, seqs)
        return Limits(seqs, rows)

    def world(self, loaded: Loaded, load: Load, seed: int) -> World:
        texts = Texts(loaded, self.spread, self.lengths, seed)
        return World(self.system.profile, loaded, texts, load, self.limits(load), self.system.kv_tokens)

    def options(self) -> dict[str, Any]:
        """For the JSON: what every row was made with."""
        return {
            "lengths": asdict(self.lengths),
            "spread": {name: None if math.isinf(v) else v for name, v in asdict(self.spread).items()},
            "seeds": list(self.seeds),
            "effort": self.effort,
            "max_num_batched_tokens": self.max_num_batched_tokens or self.system.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
        }


def sweep(plan: Plan, advance: Callable[[], object] = lambda: None) -> list[Row]:
    """All rows, plain decoding first under each load; `advance` is called after each of `plan.cells` runs."""
    rows: list[Row] = []
    for load in plan.loads:
        by_seed = [list(_of_load(plan, load, seed, advance)) for seed in plan.seeds]
        rows += [_merged(list(same)) for same in zip(*by_seed, strict=True)]
    _compare(rows)
    return rows


def _of_load(plan: Plan, load: Load, seed: int, advance: Callable[[], object]) -> Iterator[Row]:
    """Plain decoding, then each drafter in each way."""
    plain = run(plan, plan.loaded[0], load, Way(None), seed)
    advance()
    yield plain
    for loaded in plan.loaded:
        for way in plan.ways:
            if way.policy is not None:
                yield run(plan, loaded, load, way, seed)
                advance()


def run(plan: Plan, loaded: Loaded, load: Load, way: Way, seed: int) -> Row:
    """One cell: warmed up, then measured over as many tokens as every other way of it."""
    decoder = Decoder(plan.world(loaded, load, seed), way, steady=True)
    decoder.run(_tokens(plan, load, WARM_TOKENS, WARM_STEPS))
    decoder.new_books()
    books = decoder.run(_tokens(plan, load, TOKENS, STEPS))
    drafter: Row = {"drafter": None, "label": PLAIN, "acceptance": None, "draft_tokens": 0}
    if way.policy is not None:
        most = max(loaded.up_to(way.k or max(skill.most for skill in loaded.skills)))
        drafter = {"drafter": loaded.name, "label": loaded.label, "acceptance": loaded.mean, "draft_tokens": most}
    place = {"system": plan.system.name, "modelled": plan.system.modelled}
    return {**place, **drafter, "policy": str(way), **load.as_dict(), **books.as_row()}


def _tokens(plan: Plan, load: Load, least: int, steps: int) -> int:
    requests = load.concurrency or 0
    return math.ceil(plan.effort * max(least, steps * requests, requests * plan.lengths.mean_output / 2))


SUMMED = ("seconds", "steps", "rounds", "tokens", "preemptions")


def _merged(rows: Sequence[Row]) -> Row:
    """Rows of several seeds: counts added up, rates averaged, the rest of the first."""
    first = rows[0]
    if len(rows) == 1:
        return first
    merged = dict(first)
    for name, value in first.items():
        values = [row[name] for row in rows]
        if name in SUMMED:
            merged[name] = sum(values)
        elif isinstance(value, float) and name not in ("acceptance", "rate") and None not in values:
            merged[name] = sum(values) / len(values)
    return merged


# ------------------------------------------------------------------------------------------------------------ comparing


def speed(row: Row) -> float:
    """What a way is judged by: all tokens a second; under an open loop, where those are given, per user."""
    return float(row["tokens_per_second_per_user" if row["load"] == "open" else "tokens_per_second"])


def _compare(rows: Sequence[Row]) -> None:
    """Adds to every row its speed over plain decoding's under its load, and over the best fixed K's of its drafter."""
    for row in rows:
        beside = [other for other in rows if _same_load(other, row)]
        plain = next(other for other in beside if other["policy"] == PLAIN)
        row["speedup"] = speed(row) / speed(plain)
        row["gain"] = row["speedup"] - 1
        fixed = [o for o in beside if o["policy"].startswith("fixed") and o["label"] == row["label"]]
        best = max(fixed, key=speed, default=None)
        row["best_fixed"] = None if best is None else best["policy"]
        row["over_best_fixed"] = None if best is None else speed(row) / speed(best)


def _same_load(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("load", "concurrency", "rate"))


def worst(rows: Sequence[Row]) -> list[Row]:
    """For each policy that drafts, its cell with the least `margin`."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["policy"] == PLAIN:
            continue
        entry = {
            "policy": row["policy"],
            "over_plain": row["speedup"],
            "over_best_fixed": row["over_best_fixed"],
            "margin": margin(row),
            "label": row["label"],
            **{name: row[name] for name in ("load", "concurrency", "rate")},
        }
        if row["policy"] not in found or entry["margin"] < found[row["policy"]]["margin"]:
            found[row["policy"]] = entry
    return list(found.values())


def margin(row: Row) -> float:
    """Speed over the better of plain decoding and, for a scheduled way, the best fixed K."""
    rivals = [row["speedup"]]
    if not row["policy"].startswith("fixed") and row["over_best_fixed"] is not None:
        rivals.append(row["over_best_fixed"])
    return float(min(rivals))


def document(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """Rows with what they were made with, as JSON types."""
    system = plan.system
    made = {"name": system.name, "modelled": system.modelled, "key": asdict(system.profile.key)}
    return {
        "system": made | {"kv_tokens": system.kv_tokens},
        "options": plan.options(),
        "worst": worst(rows),
        "rows": list(rows),
    }


__all__ = ["BAR", "Plan", "Row", "document", "margin", "run", "speed", "sweep", "worst"]
