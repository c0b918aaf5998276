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
        """A target pass over so many tokens, which `now` predicted."""
        measured, told = self.measured.verify.tokens, self._now.verify.tokens
        region = measured.nearest(tokens)
        learnt = _learnt(self._target.factor(region), measured.seconds[region], told.seconds[region])
        self._target.observe(region, predicted * learnt, seconds)
        self._observed += 1

    def observe_draft(self, drafter: str, k: int, predicted: float, seconds: float) -> None:
        """A call of a drafter for K tokens, which `now` predicted."""
        measured, told, drift = self.measured.drafts[drafter], self._now.drafts[drafter], self._drafters[drafter]
        region = min(range(len(measured.lengths)), key=lambda i: abs(measured.lengths[i] - k))
        of_all = (cost.curves[region].seconds[-1] for cost in (measured, told))  # one factor for all of the curve
        drift.observe(region, predicted * _learnt(drift.factor(region), *of_all), seconds)
        self._observed += 1

    def _verify(self) -> VerifyCost:
        verify = self.measured.verify
        factors = [self._target.factor(i) for i in range(len(verify.tokens.counts))]
        return replace(verify, tokens=verify.tokens.scaled(factors))

    def _draft(self, name: str, cost: DraftCost) -> DraftCost:
        drift = self._drafters[name]
        curves = (c.scaled([drift.factor(i)] * len(c.counts)) for i, c in enumerate(cost.curves))
        return replace(cost, curves=tuple(curves))


def _learnt(factor: float, measured: float, told: float) -> float:
    """A region's seconds by its factor as it is now, over those that were told.

    What was told is older, by up to `REFRESH` observations: if each of them corrected the same error again, costs would
    swing ever further to both sides. And a region that is told to cost what a smaller one does, as curves never fall,
    may be cheaper in truth: if that were an error to correct, what is shared with others would pay for it, without end.
    """
    return factor * measured / told if told > 0 else 1.0


__all__ = ["CLIP", "MOST", "RATE", "Drift", "LiveCosts"]
