"""What the commands that measure for scheduling share: `profile`, `calibrate`, `recommend`."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.console import progress
from forerun.cli.options import EngineFlags
from forerun.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.bench.profiling.profiler import Findings, ProfileOptions
    from forerun.budget.costs import VerifyCost
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine

WIDTH = 170
"""Columns of a table that goes to a file or a pipe."""

TargetArgument = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="As --target: directory, .gguf, hub id, embedded.")
]


def measurable(engine: EngineFlags, target: str | None) -> EngineFlags:
    """The flags with TARGET in place, which is a shorter spelling of --target.

    Raises:
        OptionError: both are given, or an option of scheduling: what is measured must not depend on what was measured
            before.
    """
    for option, value in (("--policy", engine.policy), ("--min-predicted-gain", engine.min_predicted_gain)):
        if value is not None:
            raise OptionError(option, "has no effect while measuring; leave it out")
    if target is None:
        return engine
    if engine.target != EngineFlags().target:
        raise OptionError("--target", f"is given twice: {target} and {engine.target}")
    return dataclasses.replace(engine, target=target)


def load_fixed(engine: EngineFlags) -> Engine:
    """An engine in which every draft is made and verified as configured."""
    from forerun.cli.console import waiting
    from forerun.cli.load import load_with

    configs = [fixed(config) for config in engine.drafters()]
    with waiting("loading"):
        return load_with(engine, configs)


def fixed(config: SpeculativeConfig) -> SpeculativeConfig:
    """The same drafter, never cut. OptionError: it asks for another policy."""
    from forerun.drafters.config import parse_config

    for key in ("policy", "confidence_threshold", "min_draft", "min_predicted_gain", "confidence_cost_table_path"):
        if key in config.model_fields_set and getattr(config, key) not in (None, "fixed", 0):
            raise OptionError(key, "has no effect while measuring; leave it out")
    return parse_config({**config.model_dump(exclude_unset=True), "policy": "fixed"})


def measured(
    engine: Engine, prompts: Sequence[Sequence[int]], options: ProfileOptions, known: VerifyCost | None = None
) -> Findings:
    """The costs of an idle engine's target, unless they are known, and drafters, measured behind a progress bar."""
    from forerun.bench.profiling.profiler import Profiler

    profiler = Profiler(engine, [token for ids in prompts for token in ids], options, known=known)
    with progress("measuring", profiler.total) as advance:
        return profiler.run(advance)


def check_plots(plots: str | None) -> None:
    """OptionError if no picture could be drawn."""
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plots", "needs matplotlib: pip install 'forerun[bench]'")


def typed() -> str:
    """The command line, for what it made."""
    return shlex.join(["forerun", *sys.argv[1:]])


def shown_on(console: Console) -> Console:
    """Wide enough for tables where there is no terminal to fit."""
    if not console.is_terminal:
        console.width = WIDTH
    return console


def text_of(show: Callable[[Console], None]) -> str:
    """What would be shown, for a file."""
    from rich.console import Console

    out = io.StringIO()
    show(Console(file=out, width=WIDTH, highlight=False, soft_wrap=True))
    return out.getvalue()


__all__ = [
    "TargetArgument",
    "check_plots",
    "fixed",
    "load_fixed",
    "measurable",
    "measured",
    "shown_on",
    "text_of",
    "typed",
]
