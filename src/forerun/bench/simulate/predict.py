"""What was measured, predicted from a cost profile: the same load, lengths and acceptance, costs from the profile.

Reads the JSON of `forerun bench load`, which has the lengths of all its requests, or of `forerun bench`, which has not:
there every prompt has a given length, and every output the mean one. Acceptance is that of the rounds that were
measured, by position; how it varies between texts is in it already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.load.arrivals import Load
from forerun.bench.simulate.acceptance import WITHIN, Loaded, Skill, Spread
from forerun.bench.simulate.decoder import Decoder, World, scheduler_for
from forerun.bench.simulate.specs import PLAIN, Way, parse_way
from forerun.bench.simulate.systems import System
from forerun.bench.simulate.texts import Lengths, Texts
from forerun.engine.admission import Limits
from forerun.errors import OptionError

TOKENS = 4000
"""Decoded for each prediction at least, over several runs with other texts of the same lengths."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One way of decoding one load, as a benchmark had it."""

    load: Load
    lengths: Sequence[tuple[int, int]]
    """(prompt, output) of each request, in the order they came."""
    skills: tuple[Skill, ...]
    """The drafters with the acceptance they showed; empty: plain decoding."""
    way: Way
    tokens_per_second: float
    limits: Limits

    @property
    def drafter(self) -> str:
        return "+".join(skill.name for skill in self.skills) or PLAIN


def measured_ways(document: Mapping[str, Any], prompt_tokens: int | None = None) -> list[Measured]:
    """Every way in the JSON of `forerun bench load` or `forerun bench`.

    Raises:
        OptionError: it is neither, or `prompt_tokens` is missing where the JSON does not have them.
    """
    try:
        rows = document["rows"]
        limits = _limits(document["options"])
        read = _of_load if any("ways" in row for row in rows) else _of_bench
        return [one for row in rows for one in read(row, limits, prompt_tokens)]
    except (KeyError, TypeError, StopIteration) as error:
        raise OptionError("--predict", f"is no JSON of `forerun bench` or `forerun bench load` ({error!r})") from None


def _limits(options: Mapping[str, Any]) -> Limits:
    return Limits(options["max_num_seqs"], options["max_num_batched_tokens"])


def _of_bench(row: Row, limits: Limits, prompt_tokens: int | None) -> Iterator[Measured]:
    if prompt_tokens is None:
        raise OptionError("--prompt-tokens", "the JSON of `forerun bench` has no lengths; give that of its prompts")
    lengths = [(prompt_tokens, max(2, round(row["tokens"] / row["outputs"])))] * row["batch"]
    load = Load(row["batch"])
    skill = _skill(row["drafter"], row["k"], row)
    yield Measured(load, lengths, (), Way(None), row["plain_tokens_per_second"], limits)
    yield Measured(load, lengths, (skill,), Way("fixed", row["k"]), row["tokens_per_second"], limits)


def _of_load(row: Row, limits: Limits, prompt_tokens: int | None) -> Iterator[Measured]:  # noqa: ARG001 - has its own
    lengths = [(prompt, output) for prompt, output in row["workload"]["lengths"]]
    for label, found in row["ways"].items():
        way = parse_way(label)
        skills = () if way.policy is None else tuple(_shown(row, name) for name in row["drafter"].split("+"))
        yield Measured(Load.of(row), lengths, skills, way, found["tokens_per_second"], limits)


def _shown(row: Row, name: str) -> Skill:
    """What a drafter showed where all its drafts were verified: under the longest fixed K, else under any policy."""
    ways = [found for label, found in row["ways"].items() if label != PLAIN and found["acceptance_by_position"]]
    if not ways:
        return _skill(name, 1, {"acceptance_by_position": []})
    longest = max(ways, key=lambda found: (found["draft_tokens"] or 0, len(found["acceptance_by_position"])))
    return _skill(name, row["draft_tokens"], longest)


def _skill(name: str, most: int, found: Mapping[str, Any]) -> Skill:
    """The last acceptance that was seen goes on behind it; without any nothing is accepted."""
    seen: list[float] = []
    for rate in found["acceptance_by_position"]:
        if rate is None:
            break
        seen.append(rate)
    skill = Skill(name, tuple(seen) or (0.0,), most)
    if skill.kind == "lookup" and found.get("target_steps"):
        match = found["drafting_rounds"] / found["target_steps"]
        return Skill(name, skill.acceptance, most, match=min(1.0, match))
    return skill


def predict(system: System, one: Measured, seed: int = 0) -> float:
    """Tokens a second of the simulated run."""
    world = _world(system, one, seed)
    scheduler = scheduler_for(world, one.way)
    if one.way.adapts:  # measured after a warm-up too
        Decoder(_world(system, one, seed + 1), one.way, scheduler).run_all()
    tokens, seconds, turn = 0, 0.0, 2
    while tokens < TOKENS:
        books = Decoder(_world(system, one, seed + turn), one.way, scheduler).run_all()
        tokens, seconds, turn = tokens + books.tokens, seconds + books.seconds, turn + 1
    return tokens / seconds


def _world(system: System, one: Measured, seed: int) -> World:
    loaded = Loaded(one.skills or (Skill(PLAIN, (0.0,), 1),))
    texts = Texts(loaded, Spread(math.inf, WITHIN), Lengths(), seed, one.lengths)
    return World(system.profile, loaded, texts, one.load, one.limits, system.kv_tokens, requests=len(one.lengths))


def predictions(system: System, ways: Sequence[Measured], advance: Callable[[], object] = lambda: None) -> list[Row]:
    """Measured and predicted tokens a second of each, and by how much the prediction is off."""
    rows = []
    for one in ways:
        for skill in one.skills:
            system.profile.costs(skill.name)  # OptionError if there are none
        predicted = predict(system, one)
        rows.append(
            {
                "drafter": one.drafter,
                "policy": str(one.way),
                **one.load.as_dict(),
                "measured_tokens_per_second": one.tokens_per_second,
                "predicted_tokens_per_second": predicted,
                "error": predicted / one.tokens_per_second - 1,
            }
        )
        advance()
    return rows


__all__ = ["Measured", "measured_ways", "predict", "predictions"]
