"""`forerun bench`: drafters measured against plain decoding of the same engine, interleaved and resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import Output, as_json, notes, progress, screen
from forerun.cli.load import with_drafters
from forerun.cli.measuring import check_plots, check_rows, check_seed, numbers, typed
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, flags
from forerun.cli.prompts import check_prompts, named_prompts, prompt_ids
from forerun.errors import OptionError
from forerun.sampling import Sampling

if TYPE_CHECKING:
    from forerun.bench.benchmark import Benchmark, Result
    from forerun.engine import Engine

LENGTHS = (2, 4, 6)
"""Values of K where none are given."""
PROMPTS = 8
"""Of the package's own, where none are named."""


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """What is varied and how often it is measured."""

    k: Annotated[str | None, typer.Option("--k", metavar="LIST", help="Values of K: 1,2,4. Default: 2,4,6.")] = None
    batch: Annotated[str, typer.Option(metavar="LIST", help="Requests decoded together: 1,4.")] = "1"
    temperature: Annotated[str, typer.Option(metavar="LIST", help="Temperatures: 0,0.8.")] = "0"
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 64
    rounds: Annotated[int, typer.Option(help="How often every prompt is decoded, both ways.")] = 3
    seed: Annotated[int, typer.Option(help="Of sampling and of the order of runs.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode all the tokens asked for.")] = False
    rows: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep finished rows here; run again to go on after an interruption."),
    ] = None
    plots: Annotated[str | None, typer.Option(metavar="DIR", help="Write PNG plots and their data here.")] = None

    def check(self) -> None:
        """OptionError names what cannot be measured."""
        for name, least in (("max_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise OptionError(name, f"must be at least {least}, got {getattr(self, name)}")
        check_seed(self.seed)
        check_rows(self.rows)
        check_plots(self.plots)


@dataclass(frozen=True)
class Plan:
    """The values of the grid."""

    lengths: list[int]
    batches: list[int]
    temperatures: list[float]

    @classmethod
    def of(cls, run: BenchFlags, engine: EngineFlags) -> Plan:
        lengths = list(LENGTHS)
        if run.k is not None and engine.num_speculative_tokens is not None:
            raise OptionError("--k", "give either this or --num-speculative-tokens")
        if run.k is not None:
            lengths = numbers("--k", run.k, int, 1)
        elif engine.num_speculative_tokens is not None:
            lengths = numbers("--num-speculative-tokens", str(engine.num_speculative_tokens), int, 1)
        return cls(lengths, numbers("--batch", run.batch, int, 1), numbers("--temperature", run.temperature, float, 0))


@flags
def bench(
    engine: EngineFlags,
    prompts: PromptFlags,
    run: BenchFlags,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> None:
    """Measure drafters at several K, batch sizes and temperatures, always beside plain decoding of the same engine.

    `forerun bench load` measures requests that come and go, and scheduling: see its own --help.

    forerun bench --drafter ngram,small --k 2,4,8 --batch 1,4 --rows rows.jsonl --plots plots
    """
    destination = Output(output)
    run.check()
    plan = Plan.of(run, engine)
    ready = _ready(engine, plan)
    records = named_prompts(prompts)
    with ready.load(max(plan.lengths)) as loaded:
        ids = prompt_ids(records, loaded.target.tokenizer, prompts.limit or PROMPTS)
        check_prompts(loaded, ids, records, Sampling(max_tokens=run.max_tokens))
        benchmark = _benchmark(loaded, run, plan, ids)
        if benchmark.note:
            notes().print(benchmark.note)
        with progress("measuring", benchmark.total) as advance:
            result = benchmark.run(advance)
    _report(result, destination, json_)
    if run.plots is not None:
        from forerun.bench.plots import draw_plots

        for path in draw_plots(result.rows, Path(run.plots), typed()):
            notes().print(f"wrote {path}")


def for_arguments(args: Sequence[str]) -> Callable[..., Any] | Mapping[str, Callable[..., Any]]:
    """This command, unless the first word behind it is that of the other one: `forerun bench load`."""
    if args[:1] != ["load"]:
        return bench
    from forerun.cli.bench_load import load

    return {"load": load}


bench.for_arguments = for_arguments  # type: ignore[attr-defined]


def _ready(engine: EngineFlags, plan: Plan) -> EngineFlags:
    """The flags with K, batch and drafters filled in: one engine serves every row."""
    longest, batch = max(plan.lengths), max(plan.batches)
    if engine.max_num_seqs is not None and batch > engine.max_num_seqs:
        raise OptionError("--batch", f"{batch} is more than --max-num-seqs ({engine.max_num_seqs})")
    from forerun.engine.admission import Limits

    ready = dataclasses.replace(
        with_drafters(engine, "measuring"),
        num_speculative_tokens=None,  # K of every row is asked for with the row
        # Not the batch itself: rows of a larger batch may be added to a file later.
        max_num_seqs=engine.max_num_seqs or max(batch, Limits().max_num_seqs),
    )
    if all(config.name == "vanilla" for config in ready.drafters()):
        raise OptionError("--drafter", "vanilla is what every drafter is measured against; name another one")
    if batch > 32 and engine.max_num_batched_tokens is None:
        # Rows enough for every draft of the batch, also while a quarter of the step is kept for prefill.
        ready = dataclasses.replace(ready, max_num_batched_tokens=2 * batch * (longest + 1))
    return ready


def _benchmark(engine: Engine, run: BenchFlags, plan: Plan, prompts: list[list[int]]) -> Benchmark:
    from forerun.bench.benchmark import Benchmark, Grid
    from forerun.bench.measurement import Workload

    grid = Grid([entry.label for entry in engine.core.loaded], plan.lengths, plan.batches, plan.temperatures)
    workload = Workload(prompts, run.max_tokens, run.rounds, run.ignore_eos, run.seed)
    return Benchmark(engine, grid, workload, None if run.rows is None else Path(run.rows))


def _report(result: Result, destination: Output, json_: bool) -> None:
    from forerun.bench.report import as_text, show

    if json_:
        destination.write(as_json(result.as_dict()))
    elif destination.path is not None:
        destination.write(as_text(result))
    else:
        show(result, screen())
