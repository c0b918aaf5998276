"""From rows to numbers: speeds, ratios over prompts, acceptance. Pure functions of the rows."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any

from contenders import Config

Row = dict[str, Any]
RESAMPLES = 2000


def config_of(name: str) -> Config:
    """The configuration behind a row's name."""
    engine, method, k, temperature, batch = name.split("-")
    length = None if k == "kdefault" else int(k[1:])
    return Config(engine, method, length, float(temperature[1:]), int(batch[1:]))  # type: ignore[arg-type]


def tokens(row: Row) -> int:
    return sum(map(len, row["ids"]))


def seconds_per_token(row: Row) -> float:
    """Wall time of the whole call, prompt included, by tokens generated."""
    return row["seconds"] / tokens(row)


def busy(row: Row, threads: int) -> float:
    """Processor time it had, by what its threads could have had: near 1 on a machine that is not shared."""
    return row["cpu_seconds"] / (row["seconds"] * threads)


def by_config(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Configuration name -> its rows, by prompt."""
    out: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["prompts"], row["trial"])):
        out[row["config"]].append(row)
    return dict(out)


def per_prompt(rows: Sequence[Row]) -> dict[tuple[int, ...], float]:
    """Seconds per token of each group of prompts, the median over its trials."""
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for row in rows:
        groups[tuple(row["prompts"])].append(seconds_per_token(row))
    return {group: median(values) for group, values in groups.items()}


def ratios(slow: Sequence[Row], fast: Sequence[Row]) -> list[float]:
    """How many times as fast the second is, on each group of prompts that both were measured on."""
    before, after = per_prompt(slow), per_prompt(fast)
    return [before[group] / after[group] for group in sorted(before.keys() & after.keys())]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median with its 95 % bootstrap interval over prompts, and the extremes; None of nothing."""
    if not values:
        return None
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return {
        "median": median(values),
        "low": low,
        "high": high,
        "min": min(values),
        "max": max(values),
        "prompts": len(values),
    }


def mean_spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean with its 95 % bootstrap interval over prompts; None of nothing."""
    if not values:
        return None
    draw = random.Random(0)
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return {
        "mean": mean(values),
        "low": means[int(0.025 * RESAMPLES)],
        "high": means[int(0.975 * RESAMPLES) - 1],
        "prompts": len(values),
    }


def rates(rows: Sequence[Row], name: str) -> dict[tuple[int, ...], float]:
    """One of forerun's rates for each group of prompts, over its trials; without those that have none (nothing was
    drafted)."""
    from forerun.engine.stats import DecodingStats, total

    groups: dict[tuple[int, ...], list[DecodingStats]] = defaultdict(list)
    for row in rows:
        groups[tuple(row["prompts"])].append(DecodingStats(**row["counters"]))
    found = {group: getattr(total(stats), name) for group, stats in groups.items()}
    return {group: value for group, value in found.items() if value is not None}


def lead(mine: Sequence[Row], other: Sequence[Row], name: str) -> dict[str, float] | None:
    """By how much a rate of the first is above the second's, prompt by prompt, on those where both have one."""
    first, second = rates(mine, name), rates(other, name)
    return mean_spread([first[group] - second[group] for group in sorted(first.keys() & second.keys())])


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which that share lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def summarise(groups: dict[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """One entry per configuration."""
    return {name: _entry(config_of(name), groups) for name in sorted(groups)}


def _entry(config: Config, groups: dict[str, list[Row]]) -> dict[str, Any]:
    rows = groups[config.name]
    plain, other = (_plain(engine, config).name for engine in (config.engine, "transformers"))
    gaps = [b - a for row in rows for a, b in zip(row["arrivals"], row["arrivals"][1:], strict=False)]
    speeds = [1 / value for value in per_prompt(rows).values()]
    return {
        "engine": config.engine,
        "method": config.method,
        "k": config.k,
        "temperature": config.temperature,
        "batch": config.batch,
        "rows": len(rows),
        "tokens": sum(map(tokens, rows)),
        "tokens_per_second": spread(speeds),
        "seconds_to_first_token": median(row["arrivals"][0] for row in rows),
        "gap_p50": quantile(gaps, 0.5),
        "gap_p95": quantile(gaps, 0.95),
        "speedup": spread(ratios(groups.get(plain, []), rows)),
        "over_transformers_plain": spread(ratios(groups.get(other, []), rows)),
        "same_ids": _same(groups, config),
        "acceptance": _acceptance(rows),
        "load_average": median(row["load_average"] for row in rows),
        "cores_used": median(row["cpu_seconds"] / row["seconds"] for row in rows),
    }


def _plain(engine: str, config: Config) -> Config:
    return Config(engine, "plain", 0, config.temperature, config.batch)  # type: ignore[arg-type]


def _same(groups: dict[str, list[Row]], config: Config) -> list[int] | None:
    """[rows with the very ids of plain decoding, rows compared]; our plain decoding is compared with transformers'."""
    engine = "transformers" if config.method == "plain" else config.engine
    base = _plain(engine, config)
    if config.temperature > 0 or base == config:
        return None
    expected = {tuple(row["prompts"]): row["ids"] for row in groups.get(base.name, [])}
    rows = [row for row in groups[config.name] if tuple(row["prompts"]) in expected]
    return [sum(row["ids"] == expected[tuple(row["prompts"])] for row in rows), len(rows)]


def _acceptance(rows: Sequence[Row]) -> dict[str, Any]:
    """forerun's own rates over all rows; of transformers what its passes tell."""
    if rows[0]["counters"] is None:
        steps = sum(row["target_passes"] - 1 for row in rows)
        behind = sum(tokens(row) - len(row["ids"]) for row in rows)
        batch = len(rows[0]["prompts"])
        return {"tokens_per_step": behind / (steps * batch) if steps else None}
    from forerun.engine.stats import DecodingStats, total

    return total(DecodingStats(**row["counters"]) for row in rows).as_dict()


def best(rows: Iterable[Row], engine: str, method: str, temperature: float) -> Config | None:
    """The K at batch 1 with the fewest seconds per token, median over prompts; None if none was measured."""
    medians = {
        config: median(per_prompt(mine).values())
        for name, mine in by_config(rows).items()
        if _is(config := config_of(name), engine, method, temperature)
    }
    return min(medians, key=lambda config: medians[config]) if medians else None


def best_drafted(rows: Iterable[Row]) -> list[Config]:
    """Our best K of each drafter at batch 1, for every temperature measured."""
    kept = list(rows)
    temperatures = sorted({config_of(row["config"]).temperature for row in kept})
    found = [best(kept, "forerun", method, t) for t in temperatures for method in ("small", "ngram")]
    return [config for config in found if config is not None]


def _is(config: Config, engine: str, method: str, temperature: float) -> bool:
    return (config.engine, config.method, config.temperature, config.batch) == (engine, method, temperature, 1)


def comparisons(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The two questions, at every temperature: plain against plain, our best `small` against the best assisted run."""
    kept = list(rows)
    groups = by_config(kept)
    out = []
    for temperature in sorted({config_of(name).temperature for name in groups}):
        ours, theirs = (Config(engine, "plain", 0, temperature) for engine in ("forerun", "transformers"))
        out.append(_compare("plain decoding", ours, theirs, groups))
        small, assisted = (best(kept, engine, "small", temperature) for engine in ("forerun", "transformers"))
        if small is not None and assisted is not None:
            out.append(_compare("best `small` over best assisted", small, assisted, groups))
    return out


def _compare(question: str, ours: Config, theirs: Config, groups: dict[str, list[Row]]) -> dict[str, Any]:
    ratio = spread(ratios(groups.get(theirs.name, []), groups.get(ours.name, [])))
    return {
        "question": question,
        "temperature": ours.temperature,
        "ours": ours.name,
        "theirs": theirs.name,
        "ratio": ratio,
    }


def exactness(rows: Iterable[Row]) -> dict[str, Any]:
    """The float32 check: every run that differs from our plain decoding, and the smallest leads of the best token."""
    kept = list(rows)
    plain = {tuple(row["prompts"]): row for row in kept if row["config"] == "forerun-plain-k0-t0-b1"}
    pairs = [(row, plain[tuple(row["prompts"])]) for row in kept if tuple(row["prompts"]) in plain]
    drafted = [(row, base) for row, base in pairs if row is not base]
    leads = sorted(
        (lead, group[0], place) for group, row in plain.items() for place, lead in enumerate(row["margins"][0])
    )
    return {
        "prompts": len(plain),
        "tokens": sum(map(tokens, plain.values())),
        "runs": dict(Counter(config_of(row["config"]).engine for row, _ in drafted)),
        "differences": [_difference(row, base) for row, base in drafted if row["ids"] != base["ids"]],
        "smallest_margins": [
            {"margin": lead, "prompt": prompt, "position": place} for lead, prompt, place in leads[:5]
        ],
    }


def _difference(row: Row, plain: Row) -> dict[str, Any]:
    mine, base = row["ids"][0], plain["ids"][0]
    place = next((i for i, (a, b) in enumerate(zip(mine, base, strict=False)) if a != b), min(len(mine), len(base)))
    margins = plain["margins"][0]
    return {
        "config": row["config"],
        "prompt": row["prompts"][0],
        "position": place,
        "margin": margins[place] if place < len(margins) else None,
    }
