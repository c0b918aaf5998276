"""What the commands that measure share."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from forerun.cli.console import progress
from forerun.cli.options import EngineFlags
from forerun.errors import OptionError
from forerun.folders import check_file, check_folder

if TYPE_CHECKING:
    from forerun.bench.profiling.profiler import Findings, ProfileOptions
    from forerun.budget.costs import VerifyCost
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine

TargetArgument = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="As --target: directory, .gguf, hub id, embedded.")
]

PairsFlag = Annotated[int, typer.Option(help="Turns in which every way decodes the same requests.")]
RequestsFlag = Annotated[int | None, typer.Option(help="Of each run. Default: twice the concurrency, 8 at least.")]
TokensFlag = Annotated[str, typer.Option(metavar="RANGE", help="Of an output: 64, or 32-128, log-uniform.")]
TemperatureFlag = Annotated[float, typer.Option(help="0 is greedy.")]
SeedFlag = Annotated[int, typer.Option(help="Of all that is drawn: lengths, sampling, the order of runs.")]
IgnoreEosFlag = Annotated[bool, typer.Option("--ignore-eos", help="Decode all the tokens asked for.")]


def measurable(engine: EngineFlags, target: str | None) -> EngineFlags:
    """The flags with TARGET in place.

    Raises:
        OptionError: as `EngineFlags.at`; or an option of scheduling: what is measured must not depend on what was
            measured before.
    """
    for option, value in (("--policy", engine.policy), ("--min-predicted-gain", engine.min_predicted_gain)):
        if value is not None:
            raise OptionError(option, "has no effect while measuring; leave it out")
    return engine.at(target)


def load_fixed(engine: EngineFlags) -> Engine:
    """An engine in which every draft is made and verified as configured. OptionError: as `chosen_drafters`."""
    from forerun.cli.console import waiting
    from forerun.cli.load import chosen_drafters, load_with

    configs = [fixed(config) for config in chosen_drafters(engine)]
    with waiting("loading"):
        return load_with(engine, configs)


def fixed(config: SpeculativeConfig) -> SpeculativeConfig:
    """The same drafter, never cut. OptionError: it asks for another policy."""
    from forerun.drafters.config import parse_config

    for key in ("policy", "confidence_threshold", "min_draft", "min_predicted_gain", "confidence_cost_table_path"):
        if key in config.model_fields_set and getattr(config, key) not in (None, "fixed", 0):
            raise OptionError(key, "has no effect while measuring; leave it out")
    return parse_config({**config.model_dump(exclude_unset=True), "policy": "fixed"})


def labels_of(configs: Sequence[SpeculativeConfig]) -> list[str]:
    """The kind, and whether it copies; where there are two of that, with what tells them apart.

    Raises:
        OptionError: nothing does.
    """
    names = [config.labelled(config.name) for config in configs]
    labels = [
        name if names.count(name) == 1 else f"{name} ({_own(config)})"
        for name, config in zip(names, configs, strict=True)
    ]
    for label in labels:
        if labels.count(label) > 1:
            raise OptionError("--drafter", f"{label} is given twice")
    return labels


def _own(config: SpeculativeConfig) -> str:
    from forerun.drafters.lookup import USUAL

    usual = config.copies and USUAL.items() <= config.model_dump().items()
    given = config.model_dump(exclude_unset=True, exclude={"method", *(USUAL if usual else ())})
    return str(given["model"]) if set(given) == {"model"} else json.dumps(given) if given else "defaults"


def measured(
    engine: Engine, prompts: Sequence[Sequence[int]], options: ProfileOptions, known: VerifyCost | None = None
) -> Findings:
    """The costs of an idle engine's target, unless they are known, and drafters, measured behind a progress bar."""
    from forerun.bench.profiling.profiler import Profiler

    profiler = Profiler(engine, [token for ids in prompts for token in ids], options, known=known)
    with progress("measuring", profiler.total) as advance:
        return profiler.run(advance)


_Number = TypeVar("_Number", int, float)


def numbers(option: str, text: str, kind: Callable[[str], _Number], least: float) -> list[_Number]:
    """The values of a list like 1,2,4, each once. OptionError: it is none, or one is out of range."""
    try:
        values = [kind(item) for item in text.split(",")]
    except ValueError:
        raise OptionError(option, f"must be numbers like 1,2,4; got {text!r}") from None
    if any(not least <= value < math.inf for value in values):
        raise OptionError(option, f"must all be at least {least:g}, got {text!r}")
    return list(dict.fromkeys(values))


def check_rows(rows: str | None) -> None:
    """OptionError if the file could not be made or added to."""
    if rows is not None:
        check_file("--rows", rows, grows=True)


def check_seed(seed: int | None) -> None:
    """OptionError if seeds could not be counted from it: every run of a measurement has one of its own."""
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise OptionError("--seed", f"must be a signed 64-bit integer, got {seed}")


def check_plots(plots: str | None) -> None:
    """OptionError if no picture could be drawn, or none be written there."""
    if plots is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plots", "needs matplotlib: pip install 'forerun[bench]'")
    check_folder("--plots", plots)


def typed() -> str:
    """The command line, for what it made."""
    return shlex.join(["forerun", *sys.argv[1:]])


__all__ = [
    "IgnoreEosFlag",
    "PairsFlag",
    "RequestsFlag",
    "SeedFlag",
    "TargetArgument",
    "TemperatureFlag",
    "TokensFlag",
    "check_plots",
    "check_rows",
    "check_seed",
    "fixed",
    "labels_of",
    "load_fixed",
    "measurable",
    "measured",
    "numbers",
    "typed",
]
