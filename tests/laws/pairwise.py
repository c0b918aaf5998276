"""Covering arrays: every pair of values of two different factors occurs in some case."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence

Case = dict[str, Hashable]


def product(factors: Mapping[str, Sequence[Hashable]]) -> list[Case]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairs_of(case: Mapping[str, Hashable]) -> set[frozenset[tuple[str, Hashable]]]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def pairwise(factors: Mapping[str, Sequence[Hashable]]) -> list[Case]:
    """A greedy covering array of strength 2, the same in every run.

    Each case starts with the first pair still missing and takes, factor by factor, the value that adds most new pairs.
    """
    missing = {
        frozenset({(f, x), (g, y)}): None
        for f, g in itertools.combinations(factors, 2)
        for x in factors[f]
        for y in factors[g]
    }
    cases = []
    while missing:
        case: Case = dict(next(iter(missing)))
        for name in sorted(factors.keys() - case.keys()):
            case[name] = max(
                factors[name], key=lambda v: sum(frozenset({(name, v), had}) in missing for had in case.items())
            )
        for pair in pairs_of(case):
            missing.pop(pair, None)
        cases.append({name: case[name] for name in factors})
    return cases
