"""The page of the ablations: Markdown, a picture, and the numbers behind them as JSON."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from string import Template
from typing import Any

from ablations import SEEDS
from commands import setting

HERE = Path(__file__).parent
SHOWN = "accepted length, T = 1"
"""In the picture."""


def write(results: dict[str, Any], page: Path, remarks: Path | None) -> None:
    """Writes the page, and its .json and .png beside it."""
    results["made_with"] = _made_with()
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(results, page.with_suffix(".png"))
    text = "" if remarks is None else remarks.read_text(encoding="utf-8").strip()
    page.write_text(markdown(results, page.with_suffix(".png").name, text), encoding="utf-8")


def _made_with() -> dict[str, str]:
    """Of the machine that writes the page, which is the one that trained."""
    from forerun.bench.machine import versions
    from forerun.engine.profile_key import cpu_name

    known = versions()
    return {
        "forerun": known["forerun"], "torch": known["torch"], "python": platform.python_version(),
        "processor": cpu_name(),
    }  # fmt: skip


def markdown(results: dict[str, Any], picture: str, remarks: str) -> str:
    """The page's text."""
    runs, plan = results["runs"], results["plan"]
    asked = plan["asked"]
    changed = "".join(f" --set {one}" for one in asked["set"])
    command = (
        f"python recipes/embedded/ablations.py run --target {asked['target']} --minutes {asked['minutes']:g}"
        f"{changed} --data DATA --work WORK"
    )
    base = SEEDS[0].settings(dict(map(setting, asked["set"])))
    judged = [m["resolved"] for run in runs.values() if run["group"] != "base" for m in run["metrics"].values()]
    fields = results["made_with"] | {
        "steps": f"{plan['steps']:,}",
        "tokens_per_step": str(base["tokens-per-step"]),
        "table": _table(results),
        "seeds": str(sum(run["group"] == "base" for run in runs.values())),
        "comparisons": str(sum(one is not None for one in judged)),
        "picture": picture,
        "remarks": remarks,
        "base": ", ".join(f"{name} {value}" for name, value in base.items() if name != "seed"),
        "cost": _cost(results),
        "command": command,
    }
    text = Template((HERE / "ablations.md").read_text(encoding="utf-8")).substitute(fields)
    return text.replace("\n\n\n\n", "\n\n").replace("\n\n\n", "\n\n")


def _table(results: dict[str, Any]) -> str:
    names = list(results["base"])
    lines = [_line(["", "", *names]), _line(["---"] * (len(names) + 2))]
    base = results["base"]
    for label, part in (("mean", "mean"), ("spread", "spread")):
        cells = ["" if base[name] is None else f"{base[name][part]:.3f}" for name in names]
        lines.append(_line(["base", label, *cells]))
    for run in results["runs"].values():
        metrics = [_cell(run["metrics"][name]) for name in names]
        cut = "" if run["steps"] == run["planned_steps"] else f" ({run['steps']:,} steps)"
        lines.append(_line([run["group"], f"{run['value']}{cut}", *metrics]))
    if results["missing"]:
        lines.append(f"\nNot run yet: {', '.join(results['missing'])}.")
    return "\n".join(lines)


def _cell(metric: dict[str, Any]) -> str:
    if metric["value"] is None:
        return ""
    shown = f"{metric['value']:.3f}"
    return f"*{shown}*" if metric["resolved"] is False else shown


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cost(results: dict[str, Any]) -> str:
    runs = results["runs"].values()
    seconds = [run["cpu_seconds"] for run in runs]
    tokens = [run["tokens"] for run in runs]
    return (
        f"- {len(seconds)} runs of {min(seconds):,.0f} to {max(seconds):,.0f} CPU-seconds, at most "
        f"{results['plan']['cpu_seconds']:,.0f} allowed before the evaluation; {min(tokens):,} to {max(tokens):,} "
        "tokens each; what ended earlier than planned says after how many steps\n"
        f"- peak memory {max(run['peak_memory'] for run in runs) / 1e9:.2f} GB"
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """The accepted length of each run, with a band of two spreads about the base's mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [run for run in results["runs"].values() if run["metrics"][SHOWN]["value"] is not None]
    figure = Figure(figsize=(7.5, 0.28 * len(runs) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    base = results["base"][SHOWN]
    if base is not None:
        low, high = base["mean"] - 2 * base["spread"], base["mean"] + 2 * base["spread"]
        axes.axvspan(low, high, color="0.9", label="two spreads about the base")
        axes.axvline(base["mean"], color="0.6", linewidth=1)
        axes.legend(frameon=False, fontsize=8)
    for place, run in enumerate(runs):
        metric = run["metrics"][SHOWN]
        colour = "#0072b2" if metric["resolved"] else "0.5"
        axes.plot(metric["value"], place, marker="o", color=colour)
    axes.set_yticks(range(len(runs)), [f"{run['group']}: {run['value']}" for run in runs], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"mean {SHOWN}, held-out prompts", fontsize=9)
    figure.savefig(path, dpi=140)
