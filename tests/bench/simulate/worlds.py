"""Scripted costs and drafters for the simulator: whole numbers where a result is worked out by hand."""

from __future__ import annotations

import math

from forerun.bench.load.arrivals import Load
from forerun.bench.simulate.acceptance import Loaded, Skill, Spread
from forerun.bench.simulate.decoder import World
from forerun.bench.simulate.systems import System
from forerun.bench.simulate.texts import Lengths, Texts
from forerun.budget.costs import ContextCost, DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.profile import Profile, ProfileKey
from forerun.engine.admission import Limits

KEY = ProfileKey("scripted", "float32", "cpu", 1)
EVEN = Spread(math.inf, math.inf)
"""Every text and place alike."""

BFLOAT16 = {1: 1.0, 2: 1.04, 4: 1.09, 6: 1.29, 8: 1.3, 16: 1.55, 32: 2.09, 64: 3.3, 128: 5.7, 256: 10.5, 512: 20.2}
FLOAT32 = {1: 1.0, 2: 2.0, 8: 2.0, 16: 2.05, 32: 2.57, 64: 4.2, 128: 7.6, 256: 14.5, 512: 28.0}
INT4 = {1: 1.0, 2: 1.1, 4: 1.39, 5: 2.38, 8: 2.42, 16: 4.38, 32: 8.5, 64: 16.6, 128: 33.0, 256: 65.0}
CURVES = {"bfloat16": BFLOAT16, "float32": FLOAT32, "int4": INT4}
"""In plain steps, as they were measured on two cores (a jump at two rows, a jump at five)."""


def serial(first: float, per_token: float = 0.0, follow: float = 0.0) -> DraftCost:
    """A call costs `first` and `per_token` for each further token, a tenth more for each further request."""
    samples = {
        k: {n: (first + per_token * (k - 1)) * (1 + 0.1 * (n - 1)) for n in (1, 2, 64, 512)} for k in (1, 2, 8, 16)
    }
    return DraftCost.measured(samples, follow=follow)


def profile(verify, drafts, context: ContextCost | None = None) -> Profile:
    return Profile(KEY, VerifyCost(CostCurve.measured(verify), context or ContextCost()), drafts)


def system(verify=BFLOAT16, **drafts: DraftCost) -> System:
    """Costs with one serial drafter, `small`, unless others are given."""
    made = profile(verify, drafts or {"small": serial(0.1, 0.1)})
    return System("scripted", made, modelled=False, max_num_batched_tokens=1 << 14)


def world(costs: Profile, *skills: Skill, load: Load | None = None, given=(), **options) -> World:
    """A world of even texts; `given` are (prompt, output) of its requests, in turn."""
    loaded = Loaded(skills)
    spread = options.pop("spread", EVEN)
    lengths = options.pop("lengths", Lengths((10, 10), (40, 40)))
    texts = Texts(loaded, spread, lengths, options.pop("seed", 0), given)
    load = load or Load(concurrency=1)
    limits = options.pop("limits", None) or Limits(load.concurrency or 8, 4096)
    return World(costs, loaded, texts, load, limits, **options)
