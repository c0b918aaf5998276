"""The page of trained drafters: Markdown, pictures, and the numbers behind them as JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import Config
from learned import SET_SIZE
from learned_picture import draw_acceptance, draw_speed, draw_training
from rows import Rows
from summary import Row, best, by_config, config_of, lead, summarise
from tables import acceptance_table, filled, filled_table, interval, number, reach, span, speed_table, table
from trained import cost_table, features_cost, run_of, same_samples

UNTRAINED = ("plain", "ngram", "small")
"""Of our methods, those that `forerun train` need not have made."""
THEIRS = {("transformers", "plain"): "transformers, plain", ("transformers", "ngram"): "transformers, prompt lookup"}

THEIR_WAY = " transformers is its own `generate` on the same weights; prompt lookup is `prompt_lookup_num_tokens` = K."


class Page:
    """A report on the rows of a folder.

    Args:
        out: folder of the rows.
        runs: method -> folder of its training run.
        title: of the page.
        remarks: Markdown for what the numbers do not say.
        features: report on the features that the runs read.

    Raises:
        ValueError: a folder holds no rows, or no run.
    """

    def __init__(
        self,
        out: Path,
        runs: Mapping[str, Path],
        title: str | None = None,
        remarks: str | None = None,
        features: Path | None = None,
    ):
        self.rows = list(Rows(out))
        if not self.rows:
            raise ValueError(f"{out} holds no rows; measure some with `learned.py run --out {out}`")
        self.setup: dict[str, Any] = json.loads((out / "setup.json").read_text(encoding="utf-8"))
        self.title, self.remarks = title or f"Trained drafters for {self.setup['target']}", remarks or ""
        self.features = "" if features is None else f" {features_cost(features)}"
        self.results = self._collect({method: run_of(run, method) for method, run in runs.items()})

    def write(self, page: Path) -> None:
        """Writes the page, and its .json, .csv and pictures beside it."""
        page.parent.mkdir(parents=True, exist_ok=True)
        page.with_suffix(".json").write_text(json.dumps(self.results, indent=2) + "\n", encoding="utf-8")
        self._write_csv(page.with_suffix(".csv"))
        pictures = {name: page.with_name(f"{page.stem}-{name}.png") for name in ("speed", "acceptance", "training")}
        caption = self.command()
        draw_speed(self.results["sets"], pictures["speed"], caption)
        draw_acceptance(self.results["sets"], pictures["acceptance"], caption)
        if self.results["trained"]:
            draw_training(self.results["trained"], pictures["training"], caption)
        page.write_text(self._markdown({name: path.name for name, path in pictures.items()}), encoding="utf-8")

    def command(self) -> str:
        """The command that measured, with file names in place of paths."""
        setup = self.setup
        drafters = " ".join(
            f"--drafter {name}" + ("" if files is None or files["packaged"] else "=FOLDER")
            for name, files in setup["drafters"].items()
        )
        sets = " ".join(f"--set {name}={one['file']}:{one['prompts']}" for name, one in self.results["sets"].items())
        theirs = " --transformers" if any(row["config"].startswith("transformers") for row in self.rows) else ""
        return (
            f"python benchmarks/learned.py run --target {setup['target']} {drafters}{theirs} {sets} "
            f"--dtype {setup['dtype']} --threads {setup['threads']} --max-tokens {setup['max_tokens']} "
            f"--seed {setup['seed']} --out results"
        )

    # --------------------------------------------------------------------------------------------------------- numbers

    def _collect(self, trained: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Everything the page says, as data."""
        sets = {}
        for number_, one in enumerate(self.setup["sets"]):
            rows = [row for row in self.rows if row["prompts"][0] // SET_SIZE == number_]
            if rows:
                prompts = len({row["prompts"][0] for row in rows})
                configs = summarise(by_config(rows))
                sets[one["name"]] = {
                    "file": one["file"], "sha256": one["sha256"], "prompts": prompts, "configs": configs,
                    "best": [config.name for config in _best(rows)], "leads": list(_leads(rows)),
                }  # fmt: skip
        return {
            "setup": self.setup,
            "trials": 1 + max(row["trial"] for row in self.rows),
            "measured": [min(row["at"] for row in self.rows), max(row["at"] for row in self.rows)],
            "sets": sets,
            "trained": dict(trained),
        }

    def _write_csv(self, path: Path) -> None:
        names = ("engine", "method", "k", "temperature", "rows", "tokens")
        spreads = ("tokens_per_second", "speedup", "over_transformers_plain")
        parts = [(name, part) for name in spreads for part in ("median", "low", "high")]
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(["set", *names, "mean_accepted_length", "tokens_per_step", *map("_".join, parts)])
            for set_name, one in self.results["sets"].items():
                for entry in one["configs"].values():
                    rates = [entry["acceptance"].get(name) for name in ("mean_accepted_length", "tokens_per_step")]
                    values = [*rates, *((entry[name] or {}).get(part) for name, part in parts)]
                    shown = ["" if value is None else round(value, 4) for value in values]
                    lines.writerow([set_name, *(entry[name] for name in names), *shown])

    # -------------------------------------------------------------------------------------------------------- Markdown

    def _markdown(self, pictures: Mapping[str, str]) -> str:
        results, setup, sets = self.results, self.setup, self.results["sets"]
        entries = [entry for one in sets.values() for entry in one["configs"].values()]
        fields = {name: str(value) for name, value in setup.items()} | {
            "title": self.title,
            "remarks": self.remarks.strip(),
            "best": self._best_table(),
            "leads": self._lead_table(),
            "trained": self._trained(pictures["training"]),
            "speeds": "\n\n".join(self._speed_tables()),
            "acceptance": "\n\n".join(self._acceptance_tables()),
            "speed_picture": pictures["speed"],
            "acceptance_picture": pictures["acceptance"],
            "drafters": ", ".join(f"`{_described(name, files)}`" for name, files in setup["drafters"].items()),
            "sets": "; ".join(
                f"{name}: the first {one['prompts']} of `{one['file']}` (sha256 `{one['sha256']}`)"
                for name, one in sets.items()
            ),
            "temperatures": ", ".join(f"{t:g}" for t in sorted({entry["temperature"] for entry in entries})),
            "trials": str(results["trials"]),
            "theirs": THEIR_WAY if any(entry["engine"] == "transformers" for entry in entries) else "",
            "first": results["measured"][0],
            "last": results["measured"][1],
            "load": reach(entry["load_average"] for entry in entries),
            "busy": reach(entry["cores_used"] for entry in entries),
            "command": self.command(),
        }
        text = filled("learned.md", fields)
        while "\n\n\n" in text:  # of parts that are empty
            text = text.replace("\n\n\n", "\n\n")
        return text

    def _best_table(self) -> str:
        head = ("prompts", "temperature", "", "K", "mean accepted length", "tokens per step", "tokens/s")
        head += ("speed-up", "interval", "over transformers' plain")
        rows = []
        for name, one in self.results["sets"].items():
            for entry in (one["configs"][config] for config in one["best"]):
                acceptance = entry["acceptance"]
                own = None if entry["method"] == "plain" else entry["speedup"]
                cells = [name, f"{entry['temperature']:g}", _label(entry["engine"], entry["method"]), str(entry["k"])]
                cells += [number(acceptance.get("mean_accepted_length")), number(acceptance.get("tokens_per_step"))]
                cells += [number(entry["tokens_per_second"]["median"]), span(own), interval(own)]
                rows.append([*cells, span(entry["over_transformers_plain"])])
        return f"Each at the K with which it is fastest there:\n\n{filled_table(head, rows)}"

    def _lead_table(self) -> str:
        head = ("prompts", "temperature", "K", "", "over", "accepted length", "longer?", "tokens per step", "more?")
        rows = [
            [
                name, f"{found['temperature']:g}", str(found["k"]), f"`{found['first']}`", f"`{found['second']}`",
                _difference(found["accepted_length"]), verdict(found["accepted_length"]),
                _difference(found["tokens_per_step"]), verdict(found["tokens_per_step"]),
            ]
            for name, one in self.results["sets"].items()
            for found in one["leads"]
        ]  # fmt: skip
        return table(head, rows) if rows else "There is no pair to compare."

    def _speed_tables(self) -> Iterator[str]:
        for name, one in self.results["sets"].items():
            for temperature in sorted({entry["temperature"] for entry in one["configs"].values()}):
                mine = [entry for entry in one["configs"].values() if entry["temperature"] == temperature]
                yield f"## Speed on {name} at temperature {temperature:g}\n\n{speed_table(mine, _labels(mine))}"

    def _acceptance_tables(self) -> Iterator[str]:
        for name, one in self.results["sets"].items():
            yield f"On {name}:\n\n{acceptance_table(longest(one['configs']))}"

    def _trained(self, picture: str) -> str:
        """What training took; nothing where no run was named."""
        trained = self.results["trained"]
        if not trained:
            return ""
        settings = "\n".join(f"- `{method}`: {_settings(one['settings'])}" for method, one in trained.items())
        return (
            f"## What training took\n\nAs each run counted it, evaluations included; {same_samples(trained)}."
            f"{self.features}\n\n{cost_table(trained)}\n\n"
            f"![Held-out accepted length while training]({picture})\n\n{settings}"
        )


def _best(rows: Sequence[Row]) -> list[Config]:
    """Of each engine and method the K with the fewest seconds per token, temperature by temperature."""
    known = [config_of(name) for name in by_config(rows)]
    pairs = dict.fromkeys((config.engine, config.method) for config in sorted(known, key=_place))
    temperatures = sorted({config.temperature for config in known})
    found = [best(rows, engine, method, t) for t in temperatures for engine, method in pairs]
    return [config for config in found if config is not None]


def _place(config: Config) -> tuple[bool, int]:
    """Ours first, the untrained before the trained."""
    untrained = UNTRAINED.index(config.method) if config.method in UNTRAINED else len(UNTRAINED)
    return config.engine != "forerun", untrained


def _leads(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Every trained drafter beside `ngram` and `small`, `dspark` beside the other trained ones, and one with prompt
    lookup beside itself without, at the longest K that both were measured with."""
    groups = by_config(rows)
    ours = [config_of(name) for name in groups]
    ours = [config for config in ours if config.engine == "forerun" and config.method != "plain"]
    methods = list(dict.fromkeys(config.method for config in ours))
    trained = [method for method in methods if method not in UNTRAINED]
    pairs = [(first, second) for first in trained for second in methods if second in UNTRAINED]
    pairs += [("dspark", second) for second in trained if second.partition("+")[0] != "dspark" and "dspark" in trained]
    pairs += [(mixed, own) for mixed in trained for own in trained if mixed.startswith(f"{own}+")]
    for temperature in sorted({config.temperature for config in ours}):
        for first, second in pairs:
            lengths = [
                {c.k for c in ours if (c.method, c.temperature) == (method, temperature)} for method in (first, second)
            ]
            common = [k for k in lengths[0] & lengths[1] if k is not None]
            if common:
                names = [Config("forerun", method, max(common), temperature).name for method in (first, second)]
                mine, other = (groups[name] for name in names)
                yield {
                    "temperature": temperature, "k": max(common), "first": first, "second": second,
                    "accepted_length": lead(mine, other, "mean_accepted_length"),
                    "tokens_per_step": lead(mine, other, "tokens_per_step"),
                }  # fmt: skip


def verdict(difference: Mapping[str, float] | None) -> str:
    """What an interval allows to say."""
    if difference is None:
        return ""
    if difference["low"] > 0:
        return "yes"
    return "**no**" if difference["high"] < 0 else "not resolved"


def _difference(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else f"{spread['mean']:+.2f} [{spread['low']:+.2f} .. {spread['high']:+.2f}]"


def longest(configs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each of our drafters and temperatures the entry with the largest K: it has every position."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for entry in configs.values():
        key = entry["method"], entry["temperature"]
        if entry["engine"] == "forerun" and entry["k"] and entry["k"] > found.get(key, {"k": 0})["k"]:
            found[key] = entry
    return {f"{method}, K = {e['k']}, T = {temperature:g}": e for (method, temperature), e in sorted(found.items())}


def _label(engine: str, method: str) -> str:
    return THEIRS.get((engine, method)) or (f"{engine}, plain" if method == "plain" else f"{engine}, `{method}`")


def _labels(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """In the order of the page."""
    configs = [Config(e["engine"], e["method"], e["k"], e["temperature"]) for e in entries]
    return {(c.engine, c.method): _label(c.engine, c.method) for c in sorted(configs, key=_place)}


def _settings(settings: Mapping[str, Any]) -> str:
    """Without what was left open: the kind's own default."""
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)


def _described(name: str, files: Mapping[str, Any] | None) -> str:
    return name if files is None else f"{name} ({files['bytes'] / 1e6:.1f} MB, sha256 {files['weights'][:16]})"
