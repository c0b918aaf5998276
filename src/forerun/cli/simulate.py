"""`forerun simulate`: loads, drafters and policies on measured or modelled hardware, decided by the real scheduler."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.screen import text_of
from forerun.cli.console import Output, as_json, notes, progress, screen
from forerun.cli.measuring import check_plots, numbers, typed
from forerun.cli.options import JsonFlag, OutputFlag, flags
from forerun.errors import OptionError
from forerun.parsing import json_of

if TYPE_CHECKING:
    from forerun.bench.load.arrivals import Load
    from forerun.bench.simulate.sweep import Plan

DRAFTERS = ("dspark:0/0.5/0.8", "ngram:0.8:match=0.3")
"""Simulated where none are named: an always-wrong one among them."""


@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """What is varied."""

    profile: Annotated[
        str, typer.Option(metavar="FILE|NAME", help="Costs: of `forerun profile`, or h200-8b, h200-70b, h200-moe.")
    ] = "h200-8b"
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:ACCEPTANCE",
            help="dspark:0.8, dspark:0.9,0.8, dspark:0.3/0.8, ngram:0.8:match=0.3; repeatable.",
        ),
    ] = None
    policy: Annotated[
        str, typer.Option(metavar="LIST", help="plain, fixed:K, threshold:C, prefix, delayed, global.")
    ] = "fixed:3,fixed:7,delayed"
    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="Requests in a closed loop: 1,4,16 (default to 1024).")
    ] = None
    rate: Annotated[str | None, typer.Option(metavar="LIST", help="Requests a second in an open loop: 5,20.")] = None
    prompt_tokens: Annotated[str, typer.Option(metavar="RANGE", help="Of a prompt: 64-256, log-uniform.")] = "64-256"
    output_tokens: Annotated[str, typer.Option(metavar="RANGE", help="Of an output.")] = "64-256"
    between: Annotated[float, typer.Option(help="How alike texts are; inf: all the same.")] = 4.0
    within: Annotated[float, typer.Option(help="How alike the places of one text are; inf: all the same.")] = 0.5
    seeds: Annotated[str, typer.Option(metavar="LIST", help="Of the texts; rows are means over them.")] = "0"
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests decoded at once. Default: the load.")] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Rows of one step.")] = None
    effort: Annotated[float, typer.Option(help="Factor on the tokens that are decoded for each row.")] = 1.0
    predict: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Instead: predict what `bench load --json` (or `bench --json`) measured, from --profile FILE.",
        ),
    ] = None
    plots: Annotated[str | None, typer.Option(metavar="DIR", help="Write PNG plots and their data here.")] = None


@flags
def simulate(run: SimulateFlags, json_: JsonFlag = False, output: OutputFlag = None) -> None:
    """Simulate loads, drafters and policies beyond this machine, with the scheduler that decides when decoding.

    forerun simulate --profile h200-70b --drafter dspark:0.8 --concurrency 1,16,256 --plots plots
    """
    destination = Output(output)
    check_plots(run.plots)
    if run.predict is not None:
        _predict(run, destination, json_)
        return
    from forerun.bench.simulate.report import show
    from forerun.bench.simulate.sweep import document, sweep

    plan = _plan(run)
    with progress("simulating", plan.cells) as advance:
        rows = sweep(plan, advance)
    made = document(plan, rows)
    if json_:
        destination.write(as_json(made))
    elif destination.path is not None:
        destination.write(text_of(lambda console: show(made, console)))
    else:
        show(made, screen())
    if run.plots is not None:
        from forerun.bench.simulate.plots import draw

        for path in draw(rows, Path(run.plots), typed()):
            notes().print(f"wrote {path}")


def _plan(run: SimulateFlags) -> Plan:
    from forerun.bench.simulate.acceptance import Spread
    from forerun.bench.simulate.specs import parse_drafters, parse_ways
    from forerun.bench.simulate.sweep import Plan
    from forerun.bench.simulate.systems import system
    from forerun.bench.simulate.texts import Lengths

    for name in ("between", "within"):
        if not getattr(run, name) > 0:
            raise OptionError(f"--{name}", f"must be positive, or inf; got {getattr(run, name)}")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(run, name)
        if value is not None and value < 1:
            raise OptionError(name, f"must be at least 1, got {value}")
    return Plan(
        system=system(run.profile),
        loaded=parse_drafters(run.drafter or DRAFTERS),
        ways=parse_ways(run.policy),
        loads=_loads(run),
        lengths=Lengths(_range("--prompt-tokens", run.prompt_tokens), _range("--output-tokens", run.output_tokens)),
        spread=Spread(run.between, run.within),
        seeds=[int(n) for n in _numbers("--seeds", run.seeds, 0)],
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
        effort=run.effort,
    )


def _loads(run: SimulateFlags) -> list[Load]:
    from forerun.bench.load.arrivals import Load

    closed = run.concurrency or ("" if run.rate else "1,4,16,64,256,1024")
    loads = [Load(concurrency=int(n)) for n in _numbers("--concurrency", closed, 1)] if closed else []
    return loads + ([Load(rate=rate) for rate in _numbers("--rate", run.rate, 1e-9)] if run.rate else [])


def _numbers(option: str, text: str, least: float) -> list[float]:
    values = numbers(option, text, float, least)
    if option != "--rate" and any(value != int(value) for value in values):
        raise OptionError(option, f"must be whole numbers, got {text!r}")
    return values


def _range(option: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise OptionError(option, f"must be a number or a range like 128-512, got {text!r}") from None


# ---------------------------------------------------------------------------------------------------------- predictions


def _predict(run: SimulateFlags, destination: Output, json_: bool) -> None:
    """What a benchmark measured, from the costs in a profile."""
    from forerun.bench.simulate.predict import check_costs, measured_ways, predictions
    from forerun.bench.simulate.report import show_predictions
    from forerun.bench.simulate.systems import system

    assert run.predict is not None
    for field in fields(run):
        if field.name not in ("predict", "profile", "prompt_tokens") and getattr(run, field.name) != field.default:
            raise OptionError(field.name, "has no effect on a prediction of what was measured; leave it out")
    costs, document = system(run.profile), _document(Path(run.predict))
    check_costs(costs, document)
    given = run.prompt_tokens != SimulateFlags().prompt_tokens
    prompt = round(sum(_range("--prompt-tokens", run.prompt_tokens)) / 2) if given else None
    ways = measured_ways(document, prompt)
    with progress("predicting", len(ways)) as advance:
        rows = predictions(costs, ways, advance)
    if json_:
        destination.write(as_json({"profile": run.profile, "predictions": rows}))
    elif destination.path is not None:
        destination.write(text_of(lambda console: show_predictions(rows, console)))
    else:
        show_predictions(rows, screen())


def _document(path: Path) -> Any:
    try:
        return json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError("--predict", f"cannot read {path}: {error}") from None
