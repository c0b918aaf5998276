"""The page of the benchmark: Markdown, a picture, and the numbers behind them as JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from costs import prediction
from picture import draw
from rows import Rows
from summary import by_config, comparisons, exactness, summarise
from tables import acceptance_table, filled, interval, line, reach, speed_table

LABELS = {
    ("forerun", "plain"): "forerun, plain",
    ("forerun", "small"): "forerun, `small`",
    ("forerun", "ngram"): "forerun, `ngram`",
    ("transformers", "plain"): "transformers, plain",
    ("transformers", "small"): "transformers, `assistant_model`",
    ("transformers", "ngram"): "transformers, `prompt_lookup_num_tokens`",
}


def write(out: Path, exact: Path | None, page: Path, remarks: str = "") -> None:
    """Writes `page` and beside it its .json, .csv and .png; `remarks` is Markdown that the numbers do not say.

    Raises:
        ValueError: a folder holds no rows.
    """
    results = collect(out, exact)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _write_csv(results["configs"], page.with_suffix(".csv"))
    draw(results["configs"], page.with_suffix(".png"), command(results["setup"]))
    page.write_text(markdown(results, page.with_suffix(".png").name, remarks), encoding="utf-8")


def collect(out: Path, exact: Path | None) -> dict[str, Any]:
    """Everything the page says, as data."""
    rows = list(_rows(out))
    costs = out / "costs.json"
    results = {
        "setup": _setup(out),
        "prompts": len({prompt for row in rows for prompt in row["prompts"]}),
        "trials": 1 + max(row["trial"] for row in rows),
        "measured": [min(row["at"] for row in rows), max(row["at"] for row in rows)],
        "comparisons": comparisons(rows),
        "configs": summarise(by_config(rows)),
        "costs": json.loads(costs.read_text(encoding="utf-8")) if costs.exists() else None,
        "exact": None,
    }
    if exact is not None:
        results["exact"] = {"setup": _setup(exact)} | exactness(_rows(exact))
    return results


def _rows(folder: Path) -> Iterable[dict[str, Any]]:
    rows = Rows(folder)
    if not len(rows):
        raise ValueError(f"{folder} holds no rows; measure some with `qwen.py run --out {folder}`")
    return rows


def _setup(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "setup.json").read_text(encoding="utf-8"))


def command(setup: dict[str, Any]) -> str:
    """The command that measured, with file names in place of paths."""
    target, draft = setup["models"]
    return (
        f"python benchmarks/qwen.py run --target {target} --draft {draft} --prompts {setup['prompts']} "
        f"--dtype {setup['dtype']} --threads {setup['threads']} --max-tokens {setup['max_tokens']} "
        f"--seed {setup['seed']} --out results"
    )


def _write_csv(configs: dict[str, dict[str, Any]], path: Path) -> None:
    names = ("engine", "method", "k", "temperature", "batch", "rows", "tokens")
    spreads = ("tokens_per_second", "speedup", "over_transformers_plain")
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*names, *(f"{name}_{part}" for name in spreads for part in ("median", "min", "max"))])
        for entry in configs.values():
            parts = [(entry[name] or {}).get(part, "") for name in spreads for part in ("median", "min", "max")]
            table.writerow([*(entry[name] for name in names), *(part and round(part, 4) for part in parts)])


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(results: dict[str, Any], picture: str, remarks: str = "") -> str:
    """The page's text."""
    configs, setup = results["configs"], results["setup"]
    fields = {name: str(value) for name, value in setup.items()} | {
        "answers": _answers(results["comparisons"]),
        "picture": picture,
        "remarks": remarks.strip() and f"\n\n{remarks.strip()}",
        "sklearn": setup["scikit-learn"] or "not installed (with it, transformers adapts its confidence threshold)",
        "target": setup["models"][0],
        "draft": setup["models"][1],
        "count": str(results["prompts"]),
        "trials": str(results["trials"]),
        "first": results["measured"][0],
        "last": results["measured"][1],
        "load": reach(entry["load_average"] for entry in configs.values()),
        "busy": reach(entry["cores_used"] for entry in configs.values()),
        "command": command(setup),
        "speeds": "\n\n".join(_speed_tables(configs)),
        "acceptance": acceptance_table(configs),
        "roofline": _roofline(results),
        "exact": _exact(results["exact"]),
    }
    return filled("qwen.md", fields)


def _answers(entries: Sequence[dict[str, Any]]) -> str:
    lines = ["| question | temperature | forerun | transformers | ratio | interval | smallest - largest | prompts |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for entry in entries:
        ratio = entry["ratio"]
        if ratio is not None:
            cells = [entry["question"], f"{entry['temperature']:g}", f"`{entry['ours']}`", f"`{entry['theirs']}`"]
            cells += [f"**{ratio['median']:.2f}x**", interval(ratio)]
            cells += [f"{ratio['min']:.2f} - {ratio['max']:.2f}", str(ratio["prompts"])]
            lines.append(line(cells))
    return "\n".join(lines)


def _speed_tables(configs: dict[str, dict[str, Any]]) -> list[str]:
    out = []
    for batch, temperature in sorted({(entry["batch"], entry["temperature"]) for entry in configs.values()}):
        mine = [e for e in configs.values() if (e["batch"], e["temperature"]) == (batch, temperature)]
        out += [f"## Speed at temperature {temperature:g}, batch {batch}", speed_table(mine, LABELS)]
    return out


def _roofline(results: dict[str, Any]) -> str:
    costs = results["costs"]
    if costs is None:
        return "Not measured: `qwen.py costs` has not been run on these results."
    fields = {
        "bandwidth": f"{costs['bandwidth_gb_s']:.1f}",
        "context": str(costs["context"]),
        "passes": _pass_table(costs),
        "predictions": _prediction_table(results),
    }
    return filled("roofline.md", fields).rstrip()


def _pass_table(costs: dict[str, Any]) -> str:
    models = costs["models"]
    columns = list(models["target"]["forerun_ms"])
    lines = [line(["pass of", "GB read", "floor", *(f"{rows} rows" for rows in columns)])]
    lines.append(line(["---"] * (len(columns) + 3)))
    for role, model in models.items():
        floor = model["bytes"] / costs["bandwidth_gb_s"] / 1e6
        for engine in ("forerun", "transformers"):
            cells = [f"{role}, {engine}", f"{model['bytes'] / 1e9:.2f}", f"{floor:.3g}"]
            lines.append(line([*cells, *(f"{ms:.3g}" for ms in model[f"{engine}_ms"].values())]))
    return "\n".join(lines)


def _prediction_table(results: dict[str, Any]) -> str:
    lines = [line(["configuration", "mean accepted length", "by bytes", "by passes", "measured speed-up"])]
    lines.append(line(["---"] * 5))
    for name, entry in results["configs"].items():
        length = entry["acceptance"].get("mean_accepted_length")
        if (
            (entry["engine"], entry["method"], entry["batch"]) == ("forerun", "small", 1)
            and length
            and entry["speedup"]
        ):
            bound = prediction(results["costs"], entry["k"], length)
            cells = [length, bound["from_bytes"], bound["from_passes"], entry["speedup"]["median"]]
            lines.append(line([f"`{name}`", *(f"{value:.2f}" for value in cells)]))
    return "\n".join(lines)


def _exact(exact: dict[str, Any] | None) -> str:
    if exact is None:
        return "Not measured: `--exact` was not given."
    leads = ", ".join(
        f"{m['margin']:.6f} (prompt {m['prompt']}, position {m['position']})" for m in exact["smallest_margins"]
    )
    return (
        f"forerun's plain decoding of {exact['prompts']} prompts, {exact['tokens']} tokens, is the reference. "
        f"{_compared(exact, 'forerun')} {_compared(exact, 'transformers')} Observed, not proven: the smallest leads of "
        f"the best logit over the second were {leads}."
    )


def _compared(exact: dict[str, Any], engine: str) -> str:
    found = [d for d in exact["differences"] if d["config"].startswith(engine)]
    runs = exact["runs"].get(engine, 0)
    if not runs:
        return f"No run of {engine} was compared with it."
    if not found:
        return f"In {runs} other runs of {engine} no id differed from it."
    places = (f"`{d['config']}`, prompt {d['prompt']}, position {d['position']} (lead {d['margin']})" for d in found)
    return f"{len(found)} of {runs} runs of {engine} differed from it: {'; '.join(places)}."
