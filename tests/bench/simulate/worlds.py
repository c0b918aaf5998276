"""Scripted costs and drafters for the simulator: whole numbers where a result is worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

from forerun.bench.load.arrivals import Load
from forerun.bench.simulate.acceptance import Loaded, Skill, Spread
from forerun.bench.simulate.decoder import World
from forerun.bench.simulate.systems import System
from forerun.bench.simulate.texts import Lengths, Texts
from forerun.budget.costs import DraftCost
from forerun.budget.profile import Profile
from forerun.engine.admission import Limits
from scripts import script

EVEN = Spread(math.inf, math.inf)
"""Every text and place alike."""


# By its file: benchmarks/ is on nobody's path (tests/benchmarks/conftest.py).
grid = script(Path(__file__).parents[3] / "benchmarks" / "never_slower_grid.py", "never_slower_grid")
BFLOAT16 = grid.BFLOAT16
serial, profile = grid.serial, grid.scripted


def system(verify=BFLOAT16, **drafts: DraftCost) -> System:
    """Costs with one serial drafter, `small`, unless others are given."""
    return grid.system(verify, drafts or {"small": serial(0.1, 0.1)})


def world(costs: Profile, *skills: Skill, load: Load | None = None, given=(), **options) -> World:
    """A world of even texts; `given` are (prompt, output) of its requests, in turn."""
    loaded = Loaded(skills)
    spread = options.pop("spread", EVEN)
    lengths = options.pop("lengths", Lengths((10, 10), (40, 40)))
    texts = Texts(loaded, spread, lengths, options.pop("seed", 0), given)
    load = load or Load(concurrency=1)
    limits = options.pop("limits", None) or Limits(load.concurrency or 8, 4096)
    return World(costs, loaded, texts, load, limits, **options)
