"""The page of the server's benchmark: Markdown, and the numbers behind it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import Rows
from serving_overhead import SIDES, summarise
from tables import filled, table

GOAL = 0.05
"""Overhead at 16 streams that the server is held to."""


def write(out: Path, page: Path) -> None:
    """Writes `page` and beside it its .json.

    Raises:
        ValueError: nothing has been measured.
    """
    found = collect(out)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    page.write_text(markdown(found), encoding="utf-8")


def collect(out: Path) -> dict[str, Any]:
    """Everything the page says, as data."""
    loads = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "load").glob("*.row.json"))]
    rows = list(Rows(out / "overhead")) if (out / "overhead").is_dir() else []
    if not loads and not rows:
        raise ValueError(f"{out} holds no results; measure some with `serving.py load` and `serving.py overhead`")
    return {
        "load": {"setup": _setup(out / "load"), "rows": loads},
        "overhead": {"setup": _setup(out / "overhead"), **summarise(rows)},
    }


def _setup(folder: Path) -> dict[str, Any] | None:
    path = folder / "setup.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(found: Mapping[str, Any]) -> str:
    """The page's text."""
    load, overhead = found["load"], found["overhead"]
    return filled("serving.md", {"load": _load(load), "overhead": _overhead(overhead), "machine": _machine(found)})


def _load(load: Mapping[str, Any]) -> str:
    if not load["rows"]:
        return "Not measured: `serving.py load` has not been run."
    rows, setup = load["rows"], load["setup"]
    head = ("", "streams", "requests", "errors", "output tokens/s", "first token p50 / p95", "time per token p50 / p95")
    cells = [_load_cells(row) for row in sorted(rows, key=lambda row: (row["load"]["streams"], row["way"] != "plain"))]
    return "\n\n".join(
        [
            f"GuideLLM {rows[0]['version']}, `kind=concurrent`, {setup['prompt_tokens']} prompt and "
            f"{setup['output_tokens']} output tokens, temperature 0, {_model(setup)}. Times in milliseconds.",
            table((*head, "latency p50", "tokens counted by tool and server"), cells),
        ]
    )


def _model(setup: Mapping[str, Any]) -> str:
    drafters = ", ".join(setup["drafters"]) or "none"
    return f"target {setup['target']} ({setup['dtype']}, {setup['threads']} threads), drafters {drafters}"


def _load_cells(row: Mapping[str, Any]) -> list[str]:
    requests, latency = row["requests"], row["request_latency"]["median"]
    tool, server = row["output_token_count"]["total_sum"], row["counted"]["generation_tokens_total"]
    return [
        row["way"], str(row["load"]["streams"]), f"{requests['successful']}/{row['load']['requests']}",
        str(requests["errored"] + requests["incomplete"]), _number(row["output_tokens_per_second"]["mean"]),
        _pair(row["time_to_first_token_ms"]), _pair(row["time_per_output_token_ms"]),
        "" if latency is None else f"{latency:.2f} s", f"{tool:.0f} / {server:.0f}",
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _pair(spread: Mapping[str, float | None]) -> str:
    return f"{_number(spread['median'])} / {_number(spread['p95'])}"


def _overhead(overhead: Mapping[str, Any]) -> str:
    setup, ways = overhead["setup"], [way for way in ("plain", "drafted") if overhead.get(way)]
    if not ways:
        return "Not measured: `serving.py overhead` has not been run."
    head = ("", "pairs", "overhead, median", "bounds", "min - max", "bare engine, tokens/s", "server, tokens/s")
    head += ("draft tokens verified by both", "same texts")
    cells = [_overhead_cells(way, overhead[way]) for way in ways]
    verdicts = [verdict(way, overhead[way]["overhead"]) for way in ways]
    return "\n\n".join(
        [
            f"{setup['concurrency']} requests at once, {setup['max_tokens']} tokens each, temperature 0, "
            f"{_model(setup)}, policy {setup['policy']}, {setup['prompts']} prompts in turn. {' '.join(verdicts)}",
            table(head, cells),
        ]
    )


def _overhead_cells(way: str, one: Mapping[str, Any]) -> list[str]:
    added, rates = one["overhead"], one["tokens_per_second"]
    cells = [way, str(one["pairs"]), f"**{_percent(added['median'])}**", _bounds(added)]
    cells.append(f"{_percent(added['min'])} - {_percent(added['max'])}")
    cells += [f"{rates[side]['median']:.1f} [{rates[side]['min']:.1f} - {rates[side]['max']:.1f}]" for side in SIDES]
    return [*cells, " / ".join(str(one["verified"][side]) for side in SIDES), "/".join(map(str, one["same_texts"]))]


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _bounds(added: Mapping[str, float | None]) -> str:
    low, high = added["low"], added["high"]
    return "" if low is None or high is None else f"{_percent(low)} - {_percent(high)}"


def verdict(way: str, added: Mapping[str, float | None]) -> str:
    """What the bounds allow to say: a median alone says nothing."""
    low, high, goal = added["low"], added["high"], f"the {100 * GOAL:.0f} % the server is held to"
    if low is not None and high is not None and high < GOAL:
        return f"Of {way} decoding the overhead is below {goal}."
    if low is not None and low >= GOAL:
        return f"Of {way} decoding the overhead is not below {goal}."
    return f"Of {way} decoding it is not resolved whether the overhead is below {goal}: measure more `--pairs`."


def _machine(found: Mapping[str, Any]) -> str:
    setups: Sequence[Mapping[str, Any]] = [s for s in (found["load"]["setup"], found["overhead"]["setup"]) if s]
    machine = setups[0]["machine"]
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
