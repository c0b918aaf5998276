"""`forerun profile`: what a step costs here, measured and kept for scheduling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.screen import fitted, text_of
from forerun.cli.console import Output, as_json, notes, screen
from forerun.cli.measuring import (
    TargetArgument,
    check_plots,
    load_fixed,
    measurable,
    measured,
    typed,
)
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, flags
from forerun.cli.prompts import named_prompts, prompt_ids

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.bench.profiling.profiler import Findings, ProfileOptions
    from forerun.engine import Engine

PROMPTS = 8
"""Of the package's own, where none are named."""


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """How much is measured. Defaults are those of `ProfileOptions`."""

    seconds: Annotated[float | None, typer.Option(help="Time to measure. Default: 90.")] = None
    rows: Annotated[int | None, typer.Option(help="Most rows of a step. Default: what the limits allow.")] = None
    requests: Annotated[
        int | None, typer.Option(help="Most requests of a step. Default: --max-num-seqs, 32 that draft.")
    ] = None
    temperature: Annotated[float | None, typer.Option(help="Of the requests measured. Default: 0.")] = None
    plots: Annotated[str | None, typer.Option(metavar="DIR", help="Write PNG plots and their data here.")] = None

    def options(self) -> ProfileOptions:
        from forerun.bench.profiling.profiler import ProfileOptions
        from forerun.sampling import Sampling

        names = ("seconds", "rows", "requests", "temperature")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        options = ProfileOptions(**given)
        Sampling(temperature=options.temperature)  # OptionError names one that cannot be used
        return options


@flags
def profile(
    engine: EngineFlags,
    prompts: PromptFlags,
    amount: ProfileFlags,
    model: TargetArgument = None,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> None:
    """Measure what a step costs on this machine: the target by rows, requests and context, each drafter by requests and
    K. Kept for scheduling, by model, dtype, device and threads; drafters measured before stay.

    forerun profile embedded --drafter ngram,small
    """
    from forerun.budget.stored import check_cache, check_kept, profile_path, profiles_folder, write_profile
    from forerun.engine.profile_key import engine_key

    destination = Output(output)
    check_plots(amount.plots)
    options = amount.options()
    folder = profiles_folder(engine.calibration_cache)
    check_cache(folder)
    ready = measurable(engine, model)
    named = named_prompts(prompts)
    with load_fixed(ready) as loaded:
        if folder is not None:
            check_kept(profile_path(engine_key(loaded.target), folder))
        ids = prompt_ids(named, loaded.target.tokenizer, prompts.limit or PROMPTS)
        findings = measured(loaded, ids, options)
        path = None if folder is None else write_profile(findings.profile, folder)
        _report(findings, loaded, path, destination, json_)
    if amount.plots is not None:
        from forerun.bench.profiling.report import draw_profile

        for picture in draw_profile(findings.profile, Path(amount.plots), typed()):
            notes().print(f"wrote {picture}")


# ------------------------------------------------------------------------------------------------------------- showing


def _report(findings: Findings, engine: Engine, path: Path | None, destination: Output, json_: bool) -> None:
    if json_:
        destination.write(as_json(_document(findings, engine, path)))
    elif destination.path is not None:
        destination.write(text_of(lambda console: _show(findings, console)))
    else:
        _show(findings, fitted(screen()))
    where = "not kept: --calibration-cache off" if path is None else f"kept in {path}"
    notes().print(where)


def _document(findings: Findings, engine: Engine, path: Path | None) -> dict[str, Any]:
    from forerun.bench.provenance import provenance

    made = json.loads(findings.profile.dumps())
    return {"profile": made, "path": None if path is None else str(path), **findings.as_dict(), **provenance(engine)}


def _show(findings: Findings, console: Console) -> None:
    from forerun.bench.profiling.report import drafter_table, remarks, target_table

    console.print(target_table(findings.profile))
    if findings.profile.drafts:
        console.print()
        console.print(drafter_table(findings.profile))
    console.print()
    for line in remarks(findings.profile):
        console.print(line, style="dim", markup=False)
