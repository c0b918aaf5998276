"""How good a simulated drafter is: acceptance by position, how it varies between texts and along one, what it knows.

A drafter is described by its conditional acceptance by position, averaged over texts. Around that average

- some texts are harder: text r has a difficulty g_r, Gamma distributed with mean 1 and shape `between`. A draft token
  is rejected at a rate (in the sense of survival analysis: -log of its chance) in proportion to it;
- some places of a text are harder: the same once more for every output token, with shape `within`.

Both averages are exact: E[exp(-h g)] = (1 + h / shape)^-shape for a Gamma g, which is solved for h. The chance p of a
token is what a calibrated confidence says. A verdict compares p with one uniform number per output token. Difficulties
and uniforms belong to the text, so every drafter and policy meets the same texts, and a comparison is one of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forerun.budget.curve import FloatArray

BETWEEN = 4.0
"""Shape of texts' difficulties: at an acceptance of .8 a tenth of the texts lie below .68 and a tenth above .90."""
WITHIN = 0.5
"""Shape of places' difficulties: most are easy, some hard."""
TINY = 1e-12

Kind = Literal["lookup", "serial", "block"]
KINDS: dict[str, Kind] = {"ngram": "lookup", "dflash": "block", "dspark": "block"}
"""How a drafting call is paid: one look-up; a pass over all K slots; else a pass for each slot, a refused one too."""
NEVER_ASKS = ("ngram", "dflash")
"""They draft all they may: neither has a step between two tokens at which to ask."""


@dataclass(frozen=True)
class Skill:
    """One simulated drafter."""

    name: str
    """Which costs it has: a drafter of the profile."""
    acceptance: tuple[float, ...]
    """Conditional acceptance by position, averaged over texts; the last one goes on."""
    most: int = 7
    """K, the longest draft."""
    match: float = 1.0
    """Share of output tokens behind which it has anything to propose."""
    run: float = 16.0
    """Mean length, in output tokens, of a stretch in which it has."""
    bias: float = 0.0
    """Added to the logit of every confidence: above 0 it is overconfident."""
    confident: bool = True
    """Whether it gives confidences at all."""

    @property
    def kind(self) -> Kind:
        return KINDS.get(self.name, "serial")

    @property
    def asks(self) -> bool:
        """Whether it asks before each slot if that is worth drafting."""
        return self.confident and self.name not in NEVER_ASKS

    @property
    def mean(self) -> float:
        """Acceptance over its K positions, for labels and axes."""
        return sum(self.at(k) for k in range(1, self.most + 1)) / self.most

    def at(self, position: int) -> float:
        return self.acceptance[min(position, len(self.acceptance)) - 1]

    def passes(self, planned: int, made: int) -> int:
        """Tokens that a drafting call is paid for, which was planned for `planned` and made `made`.

        A block is one pass over all its slots. Slot by slot, the pass that told c of a refused slot was made as well.
        """
        return min(planned, made + 1) if self.kind == "serial" else planned

    def __str__(self) -> str:
        levels = ",".join(f"{a:g}" for a in self.acceptance)
        return f"{self.name}:{levels}" + (f":match={self.match:g}" if self.match < 1 else "")


@dataclass(frozen=True)
class Spread:
    """How acceptance varies; infinity is not at all."""

    between: float = BETWEEN
    within: float = WITHIN

    def rates(self, skill: Skill) -> FloatArray:
        """[most] rejection rate of each position for a text of difficulty 1.

        Chosen so that survival over all texts is the product of the given acceptances: the prefix that survives comes
        from easier texts, so later positions need a higher rate than their own acceptance alone would give.
        """
        survival = np.multiply.accumulate([skill.at(k) for k in range(1, skill.most + 1)])
        total = hazard(survival, self.between)
        before = np.concatenate(([0.0], total[:-1]))
        # Behind a position that is never reached any rate will do: rejected for certain.
        return np.where(np.isfinite(total), total - np.where(np.isfinite(before), before, 0.0), np.inf)

    def chances(self, rates: FloatArray, text: FloatArray, places: FloatArray) -> FloatArray:
        """[R, K] chance of each draft token.

        Args:
            rates: [K] of the drafter.
            text: [R] difficulties of the texts.
            places: [R, K] difficulties of the places.
        """
        mean = np.exp(-rates * text[:, None])
        if math.isinf(self.within):
            return mean
        return np.exp(-hazard(mean, self.within) * places)

    def draw(self, rng: np.random.Generator, places: int) -> tuple[float, FloatArray]:
        """A text's difficulty, and those of its places."""
        text = 1.0 if math.isinf(self.between) else float(rng.gamma(self.between, 1 / self.between))
        if math.isinf(self.within):
            return max(text, TINY), np.ones(places)
        return max(text, TINY), np.maximum(rng.gamma(self.within, 1 / self.within, places), TINY)


def hazard(chance: FloatArray, shape: float) -> FloatArray:
    """h with E[exp(-h g)] = chance for a Gamma g of mean 1 and this shape; infinite for a chance of 0."""
    with np.errstate(divide="ignore", over="ignore"):
        if math.isinf(shape):
            return np.asarray(-np.log(chance), dtype=np.float64)
        return np.asarray(shape * (np.power(chance, -1 / shape) - 1), dtype=np.float64)


def confidences(chance: FloatArray, bias: float) -> FloatArray:
    """What the drafter says of chances: the chances themselves, or moved by `bias` logits."""
    if bias == 0:
        return chance
    inside = np.clip(chance, TINY, 1 - TINY)
    return np.asarray(1 / (1 + (1 - inside) / inside * math.exp(-bias)), dtype=np.float64)


def stretches(rng: np.random.Generator, match: float, run: float, length: int) -> NDArray[np.bool_]:
    """[length] whether a look-up finds something behind each output token: stretches of both kinds, geometric lengths.

    A share `match` of them on average, in stretches of `run` tokens on average; the text begins as any place may.
    """
    if match >= 1:
        return np.ones(length, dtype=np.bool_)
    if match <= 0:
        return np.zeros(length, dtype=np.bool_)
    run = max(run, 1.0, match / (1 - match))  # stretches without a match last at least one token
    gap = max(1.0, run * (1 - match) / match)  # rounding may leave it just below
    found, finds = np.zeros(length, dtype=np.bool_), bool(rng.random() < match)
    at = 0
    while at < length:
        size = int(rng.geometric(1 / (run if finds else gap)))
        found[at : at + size] = finds
        at, finds = at + size, not finds
    return found


@dataclass(frozen=True)
class Loaded:
    """Drafters that are loaded together, in this order; usually one."""

    skills: tuple[Skill, ...]
    label: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", "+".join(map(str, self.skills)))

    @property
    def name(self) -> str:
        return "+".join(skill.name for skill in self.skills)

    @property
    def mean(self) -> float | None:
        """Acceptance of a single drafter; None of several."""
        return self.skills[0].mean if len(self.skills) == 1 else None

    def up_to(self, k: int) -> Sequence[int]:
        """K of each where no more than k may be drafted."""
        return [min(k, skill.most) for skill in self.skills]


__all__ = ["BETWEEN", "WITHIN", "Loaded", "Skill", "Spread", "confidences", "hazard", "stretches"]
