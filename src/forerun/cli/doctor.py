"""`forerun doctor [TARGET [DRAFTER]]`: what is here, and will this pair work?"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.checks.check import EXIT, Check, worst
from forerun.cli.console import Output, as_json, screen, waiting
from forerun.cli.load import chosen_drafters
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, flags
from forerun.errors import ModelError, OptionError

if TYPE_CHECKING:
    from forerun.drafters.config import SpeculativeConfig

STYLE = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorFlags(EngineFlags):
    """Without a target only the machine is looked at."""

    target: Annotated[
        str | None, typer.Option("--target", "--model", help="As TARGET.", rich_help_panel="Models", show_default=False)
    ] = None


@flags
def doctor(
    engine: DoctorFlags,
    model: Annotated[str | None, typer.Argument(metavar="TARGET", help="Directory, .gguf, hub id, embedded.")] = None,
    draft: Annotated[str | None, typer.Argument(metavar="DRAFTER", help="As --drafter.")] = None,
    prompts: Annotated[int, typer.Option("--probe", help="Prompts of the acceptance probe; 0 leaves it out.")] = 16,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> int:
    """Machine, target and drafter: versions, rates, window, vocabularies, verify cost, acceptance.

    Exit code 0: fine, 1: warnings, 2: errors.

    forerun doctor embedded small
    """
    destination = Output(output)
    chosen = _chosen(engine, model, draft)
    if prompts < 0:
        raise OptionError("--probe", f"must be at least 0, got {prompts}")
    chosen_drafters(chosen)  # what is wrong there is told before anything is looked at
    checks: list[Check] = []
    shows = not json_ and output is None
    for check in _examine(chosen, prompts):
        checks.append(check)
        if shows:
            _show(check)
    status = worst(checks)
    if not shows:
        document = {"status": status, "checks": [dataclasses.asdict(check) for check in checks]}
        destination.write(as_json(document) if json_ else "\n".join(line for c in checks for line in c.lines()))
    return EXIT[status]


def _chosen(engine: DoctorFlags, model: str | None, draft: str | None) -> DoctorFlags:
    """TARGET and DRAFTER are shorter spellings of --target and --drafter; both at once contradict each other."""
    if draft is not None and engine.drafter:
        raise OptionError("--drafter", f"is given twice: {draft} and {', '.join(engine.drafter)}")
    chosen = dataclasses.replace(engine.at(model), drafter=engine.drafter if draft is None else [draft])
    if chosen.target is None and (chosen.drafter or chosen.speculative_config or chosen.speculative_config_key):
        raise OptionError("--target", "a drafter is checked against a target; name one")
    return chosen


def _examine(engine: DoctorFlags, prompts: int) -> Iterator[Check]:
    """All checks, each as soon as it is made. A model that cannot be loaded is a finding, and ends the examination."""
    with waiting("looking at the machine"):
        from forerun.cli.checks.machine import machine_checks
        from forerun.target.threads import use_threads

        use_threads(engine.threads)
        found = list(machine_checks())
    yield from found
    if engine.target is None:
        return
    with waiting("loading the target"):
        from forerun.cli.checks.target import target_checks
        from forerun.cli.load import load_target_of

        try:
            target = load_target_of(engine)
        except ModelError as error:
            yield Check("target", "error", str(error), "a model that can be decoded exactly", "see the message")
            return
    yield from target_checks(target)
    yield from _examine_drafters(engine, target, prompts)


def _examine_drafters(engine: DoctorFlags, target: Any, prompts: int) -> Iterator[Check]:
    from forerun.cli.checks.drafter import acceptance_checks, drafter_checks
    from forerun.cli.load import load_drafters_of

    configs = engine.drafters()
    with waiting("loading the drafter"):
        try:
            with _only_errors():
                loaded = load_drafters_of(engine, target, [_for_any_target(config) for config in configs])
        except ModelError as error:
            yield Check("drafter", "error", str(error), "a drafter that fits the target", "see the message")
            return
    for entry, config in zip(loaded, configs, strict=True):
        yield from drafter_checks(target, entry, bool(config.allow_target_mismatch))
    if loaded and prompts:
        yield from acceptance_checks(target, loaded, prompts)


def _for_any_target(config: SpeculativeConfig) -> SpeculativeConfig:
    """The same drafter, loaded beside a target it was not trained for as well: here a difference is a finding, and the
    examination goes on."""
    from forerun.drafters import drafter_class

    try:
        keys = drafter_class(config.name).config_keys
    except OptionError:
        return config  # loading it says what is wrong with the name
    known = "allow_target_mismatch" in keys
    return config.model_copy(update={"allow_target_mismatch": True}) if known else config


@contextmanager
def _only_errors() -> Iterator[None]:
    """Within, nothing is warned of: the checks say it."""
    logger = logging.getLogger("forerun")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _show(check: Check) -> None:
    first, *more = check.lines()
    width = len("warning ")
    screen().print(f"[{STYLE[check.status]}]{first[:width]}[/]", end="")
    for line in (first[width:], *more):
        screen().print(line, markup=False)
