"""The picture of the benchmark: speed against draft length, one line per drafter and engine."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {"plain": "0.45", "small": "tab:blue", "ngram": "tab:orange"}
"""One colour per drafter; plain decoding is grey."""

STYLES = {"forerun": ("-", "o"), "transformers": ("--", "s")}


def draw(configs: dict[str, dict[str, Any]], path: Path, command: str) -> None:
    """Batch 1, one panel per temperature: how many times as fast as transformers' plain decoding."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    single = [entry for entry in configs.values() if entry["batch"] == 1 and entry["over_transformers_plain"]]
    temperatures = sorted({entry["temperature"] for entry in single})
    figure, axes = plt.subplots(1, max(1, len(temperatures)), figsize=(10, 4.6), sharey=True, squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=False):
        _panel(axis, [entry for entry in single if entry["temperature"] == temperature])
        axis.set_title(f"temperature {temperature:g}")
    axes[0][0].set_ylabel("times as fast as\ntransformers' plain decoding")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="upper center", ncol=6, frameon=False)
    caption = "Median over prompts; bars from the smallest to the largest prompt. " + command
    figure.text(0.01, 0.01, "\n".join(textwrap.wrap(caption, 170)), fontsize=6.5, va="bottom")
    figure.tight_layout(rect=(0, 0.08, 1, 0.95))
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _panel(axis: Any, entries: Sequence[dict[str, Any]]) -> None:
    axis.axhline(1, color="0.8", linewidth=1)
    for engine, (line, marker) in STYLES.items():
        for method, colour in COLOURS.items():
            mine = [e for e in entries if (e["engine"], e["method"]) == (engine, method) and e["k"] is not None]
            mine.sort(key=lambda e: e["k"])
            if not mine:
                continue
            spreads = [e["over_transformers_plain"] for e in mine]
            label = f"{engine}, {method}"
            if method == "plain":
                axis.axhline(spreads[0]["median"], color=colour, linestyle=line, label=label)
                continue
            middle = [s["median"] for s in spreads]
            reach = [[m - s["min"] for m, s in zip(middle, spreads, strict=True)]]
            reach.append([s["max"] - m for m, s in zip(middle, spreads, strict=True)])
            shift = 0.06 if engine == "transformers" else -0.06  # bars of the two engines side by side
            places = [e["k"] + shift for e in mine]
            options = {"color": colour, "linestyle": line, "marker": marker, "elinewidth": 0.8, "capsize": 2}
            axis.errorbar(places, middle, yerr=reach, label=label, **options)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("K, draft tokens per round")
    axis.set_xticks(sorted({e["k"] for e in entries if e["k"]}))
