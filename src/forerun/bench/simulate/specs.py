"""What is to be simulated, as it is typed: drafters with their acceptance, and policies.

dspark:0.85                        acceptance at every position
dspark:0.9,0.85,0.8                by position, the last one goes on
dspark:0.3/0.5/0.7                 several drafters, one for each
ngram:0.8:match=0.3:run=16:k=7     further settings
ngram:0.8:match=0.3+dspark:0.85    loaded together; the scheduler chooses

plain  fixed:4  threshold:0.6  prefix  delayed  global
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.simulate.acceptance import Loaded, Skill
from forerun.budget.policy import POLICIES, Policy
from forerun.errors import OptionError, nearest

SETTINGS = ("k", "match", "run", "bias", "confident")
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Way:
    """A policy with what it needs."""

    policy: Policy | None
    """None: plain decoding, without any drafter."""
    k: int | None = None
    """Under `fixed`: K, instead of the drafter's own."""
    threshold: float = 0.0

    @property
    def adapts(self) -> bool:
        return self.policy not in (None, "fixed")

    def __str__(self) -> str:
        if self.policy is None:
            return PLAIN
        if self.policy == "fixed" and self.k is not None:
            return f"fixed:{self.k}"
        return f"{self.policy}:{self.threshold:g}" if self.threshold else self.policy


def parse_way(text: str) -> Way:
    """OptionError names --policy."""
    name, _, value = text.partition(":")
    if name == PLAIN and not value:
        return Way(None)
    if name == "fixed":
        return Way("fixed", k=int(_number("--policy", text, value, 1)) if value else None)
    if name == "threshold":
        return Way("threshold", threshold=_number("--policy", text, value, 0, 1))
    if name not in POLICIES or value:
        known = (PLAIN, "fixed:K", "threshold:C", *POLICIES[2:])
        raise OptionError("--policy", f"unknown: {text!r}; known: {', '.join(known)}")
    policy: Policy = next(p for p in POLICIES if p == name)
    return Way(policy)


def parse_ways(text: str) -> list[Way]:
    """Policies separated by commas, each once."""
    return list(dict.fromkeys(parse_way(item.strip()) for item in text.split(",")))


def parse_drafters(texts: Sequence[str]) -> list[Loaded]:
    """Drafters, one or several for each text. OptionError names --drafter."""
    loaded: list[Loaded] = []
    for text in texts:
        parts = [_alternatives(part.strip()) for part in text.split("+")]
        for combination in itertools.product(*parts):
            names = [skill.name for skill in combination]
            if len(set(names)) < len(names):
                raise OptionError("--drafter", f"{text!r}: each can be loaded once")
            loaded.append(Loaded(tuple(combination)))
    return list(dict.fromkeys(loaded))


def _alternatives(text: str) -> list[Skill]:
    """One drafter for each acceptance given."""
    name, levels, *settings = text.split(":") if ":" in text else (text, "")
    if not name or not levels:
        raise OptionError(
            "--drafter", f"{text!r}: name it with its acceptance, such as dspark:0.8 or ngram:0.8:match=0.3"
        )
    base = _with_settings(Skill(name, (0.0,)), text, settings)
    return [replace(base, acceptance=_levels(text, level)) for level in levels.split("/")]


def _levels(text: str, levels: str) -> tuple[float, ...]:
    return tuple(_number("--drafter", text, level, 0, 1) for level in levels.split(","))


def _with_settings(skill: Skill, text: str, settings: Sequence[str]) -> Skill:
    given: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in SETTINGS:
            raise OptionError("--drafter", f"{text!r}: unknown setting {name!r}; {nearest(name, SETTINGS)}")
        given[name] = value
    ranges: Mapping[str, tuple[float, float]] = {"match": (0, 1), "run": (1, math.inf), "bias": (-math.inf, math.inf)}
    changes: dict[str, Any] = {
        name: _number("--drafter", text, given[name], *limits) for name, limits in ranges.items() if name in given
    }
    if "k" in given:
        changes["most"] = int(_number("--drafter", text, given["k"], 1))
    if "confident" in given:
        if given["confident"] not in ("yes", "no"):
            raise OptionError("--drafter", f"{text!r}: confident is yes or no, got {given['confident']!r}")
        changes["confident"] = given["confident"] == "yes"
    return replace(skill, **changes)


def _number(option: str, text: str, value: str, low: float, high: float = math.inf) -> float:
    try:
        number = float(value)
    except ValueError:
        raise OptionError(option, f"{text!r}: {value!r} is not a number") from None
    if not low <= number <= high or math.isnan(number):
        raise OptionError(option, f"{text!r}: {value} must be from {low:g} to {high:g}")
    return number


__all__ = ["PLAIN", "Way", "parse_drafters", "parse_way", "parse_ways"]
