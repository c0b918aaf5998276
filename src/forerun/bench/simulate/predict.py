"""What was measured, predicted from a cost profile: the same load, lengths and acceptance, costs from the profile.

Reads the JSON of `forerun bench load`, which has the lengths of all its requests, or of `forerun bench`, which has not:
there every prompt has a given length, and every output the mean one. Acceptance is that of the rounds that were
measured, by position; how it varies between texts is in it already. Of drafters that take turns each has that of the
rounds it was asked in. Copying from the text (`dspark+lookup`) changes the acceptance, which is the row's own; costs a
profile has by kind, those of the drafter as it was profiled, and the scheduler goes by the same.
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
from forerun.drafters.config import methods_of
from forerun.engine.admission import Limits
from forerun.errors import OptionError

TOKENS = 4000
"""Decoded for each prediction at least, over several runs with other texts of the same lengths."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One way of decoding one load, as a benchmark had it."""

    load: Load
    runs: Sequence[Sequence[tuple[int, int]]]
    """(prompt, output) of each request of each run, in the order they came."""
    skills: tuple[Skill, ...]
    """The drafters with the acceptance they showed; empty: plain decoding."""
    way: Way
    tokens_per_second: float
    limits: Limits
    drafter: str = PLAIN
    """As the benchmark calls it: one that copies has its own name and acceptance, and the costs of its kind."""


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


def check_costs(system: System, document: Mapping[str, Any]) -> None:
    """OptionError: costs that are not those of what was measured, as far as both say what they were made with."""
    if system.modelled:
        raise OptionError("--profile", f"{system.name} is modelled; name the file of `forerun profile` on that machine")
    key = system.profile.key
    for name, mine, part in (("dtype", key.dtype, "target"), ("threads", key.threads, "hardware")):
        made = document.get(part) if isinstance(document, Mapping) else None
        theirs = made.get(name, mine) if isinstance(made, Mapping) else mine
        if mine not in (theirs, 0):
            raise OptionError("--profile", f"was measured with {name} {mine}, the benchmark with {theirs}")


def _limits(options: Mapping[str, Any]) -> Limits:
    return Limits(options["max_num_seqs"], options["max_num_batched_tokens"])


def _of_bench(row: Row, limits: Limits, prompt_tokens: int | None) -> Iterator[Measured]:
    if prompt_tokens is None:
        raise OptionError("--prompt-tokens", "the JSON of `forerun bench` has no lengths; give that of its prompts")
    runs = [[(prompt_tokens, max(2, round(row["tokens"] / row["outputs"])))] * row["batch"]]
    load = Load(row["batch"])
    skill = _skill(methods_of(row["drafter"])[0], row["k"], row)
    yield Measured(load, runs, (), Way(None), row["plain_tokens_per_second"], limits)
    yield Measured(load, runs, (skill,), Way("fixed", row["k"]), row["tokens_per_second"], limits, row["drafter"])


def _of_load(row: Row, limits: Limits, prompt_tokens: int | None) -> Iterator[Measured]:
    if prompt_tokens is not None:
        raise OptionError("--prompt-tokens", "the JSON of `forerun bench load` has the lengths; leave it out")
    lengths, each = [(prompt, output) for prompt, output in row["workload"]["lengths"]], row["requests"]
    runs = [lengths[start : start + each] for start in range(0, len(lengths), each)]
    for label, found in row["ways"].items():
        way = parse_way(label)
        skills = () if way.policy is None else tuple(_shown(row, name) for name in methods_of(row["drafter"]))
        drafter = row["drafter"] if skills else PLAIN
        yield Measured(Load.of(row), runs, skills, way, found["tokens_per_second"], limits, drafter)


def _shown(row: Row, name: str) -> Skill:
    """What a drafter showed where all its drafts were verified: under the longest fixed K, else under any policy."""
    ways = [found for label, found in row["ways"].items() if label != PLAIN and found["acceptance_by_position"]]
    if not ways:
        return _skill(name, 1, {"acceptance_by_position": []})
    longest = max(ways, key=lambda found: (found["draft_tokens"] or 0, len(found["acceptance_by_position"])))
    return _skill(name, row["draft_tokens"], longest.get("by_drafter", {}).get(name, longest))


def _skill(name: str, most: int, found: Mapping[str, Any]) -> Skill:
    """The last acceptance that was seen goes on behind it; without any nothing is accepted."""
    seen: list[float] = []
    for rate in found["acceptance_by_position"]:
        if rate is None:
            break
        seen.append(rate)
    skill = Skill(name, tuple(seen) or (0.0,), most)
    if skill.kind == "lookup" and found.get("target_steps"):
        match = min(1.0, found["drafting_rounds"] / found["target_steps"])
        # Drawn anew at every place, so that the share of rounds is the share of places: in stretches rounds with a
        # match would take more places than others, and be fewer than they were.
        return Skill(name, skill.acceptance, most, match=match, run=1 / (1 - match) if match < 1 else 1.0)
    return skill


def predict(system: System, one: Measured, seed: int = 0) -> float:
    """Tokens a second of the simulated run."""
    world = _world(system, one, seed)
    scheduler = scheduler_for(world, one.way)
    if one.way.adapts:  # measured after a warm-up too
        Decoder(_world(system, one, seed + 1), one.way, scheduler).run_all()
    tokens, seconds, turn = 0, 0.0, 2
    while tokens < TOKENS or turn < 2 + len(one.runs):
        books = Decoder(_world(system, one, seed + turn), one.way, scheduler).run_all()
        tokens, seconds, turn = tokens + books.tokens, seconds + books.seconds, turn + 1
    return tokens / seconds


def _world(system: System, one: Measured, seed: int) -> World:
    """One of the runs that were measured, in turn, with texts of its own."""
    loaded, lengths = Loaded(one.skills or (Skill(PLAIN, (0.0,), 1),)), one.runs[seed % len(one.runs)]
    texts = Texts(loaded, Spread(math.inf, WITHIN), Lengths(), seed, lengths)
    return World(system.profile, loaded, texts, one.load, one.limits, system.kv_tokens, requests=len(lengths))


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


__all__ = ["Measured", "check_costs", "measured_ways", "predict", "predictions"]
