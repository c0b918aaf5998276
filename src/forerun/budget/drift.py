"""A profile kept true while it is used: real step times move it, each by a bounded amount.

A machine gets slower when it is shared or hot. One disturbed step must not change a plan, a lasting change must.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from forerun.budget.costs import DraftCost, VerifyCost
from forerun.budget.profile import Profile

RATE = 0.1
"""Share of the remaining error that an observation corrects."""
CLIP = math.log(1.25)
"""Error of one observation that counts at most, so one moves a factor by at most exp(RATE * CLIP), 2.3 %."""
MOST = math.log(4)
"""A factor stays within [1/4, 4]: beyond that the profile is not of this machine."""


REFRESH = 32
"""Observations between two looks at the result: one moves it by little, and planning keeps tables of it."""


class Drift:
    """Factors on measured costs, one for each region, made of a part they share and a part of their own.

    A region nobody visits follows the shared part: where plain steps get slower, so will the others.
    """

    def __init__(self) -> None:
        self._shared = 0.0
        self._own: defaultdict[int, float] = defaultdict(float)

    def factor(self, region: int) -> float:
        return math.exp(_bounded(self._shared + self._own[region], MOST))

    def observe(self, region: int, predicted: float, seconds: float) -> None:
        """A step of this region took `seconds` where `predicted`, the factor included, was expected."""
        if not (predicted > 0 and seconds > 0 and math.isfinite(seconds)):
            return  # nothing was predicted, or a clock went backwards: no ratio to learn from
        step = RATE * _bounded(math.log(seconds / predicted), CLIP) / 2
        self._shared = _bounded(self._shared + step, MOST)
        self._own[region] = _bounded(self._own[region] + step, MOST)


def _bounded(value: float, most: float) -> float:
    return max(-most, min(most, value))


class LiveCosts:
    """A profile with its drift: what planning reads.

    Regions are the measured points: token counts for the target, measured K for a drafter.
    """

    def __init__(self, profile: Profile):
        self.measured = profile
        self._target = Drift()
        self._drafters = {name: Drift() for name in profile.drafts}
        self._observed = 0
        self._now = profile

    @property
    def now(self) -> Profile:
        """The profile with what was learnt."""
        if self._observed >= REFRESH:
            drafts = {name: self._draft(name, cost) for name, cost in self.measured.drafts.items()}
            self._now = replace(self.measured, verify=self._verify(), drafts=drafts)
            self._observed = 0
        return self._now

    def observe_target(self, tokens: int, predicted: float, seconds: float) -> None:
        """A target pass over so many tokens."""
        self._target.observe(self.measured.verify.tokens.nearest(tokens), predicted, seconds)
        self._observed += 1

    def observe_draft(self, drafter: str, k: int, predicted: float, seconds: float) -> None:
        """A call of a drafter for K tokens."""
        lengths = self.measured.drafts[drafter].lengths
        region = min(range(len(lengths)), key=lambda i: abs(lengths[i] - k))
        self._drafters[drafter].observe(region, predicted, seconds)
        self._observed += 1

    def _verify(self) -> VerifyCost:
        verify = self.measured.verify
        factors = [self._target.factor(i) for i in range(len(verify.tokens.counts))]
        return replace(verify, tokens=verify.tokens.scaled(factors))

    def _draft(self, name: str, cost: DraftCost) -> DraftCost:
        drift = self._drafters[name]
        curves = (c.scaled([drift.factor(i)] * len(c.counts)) for i, c in enumerate(cost.curves))
        return replace(cost, curves=tuple(curves))


__all__ = ["CLIP", "MOST", "RATE", "Drift", "LiveCosts"]
