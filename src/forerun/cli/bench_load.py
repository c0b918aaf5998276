"""`forerun bench load`: decoding under load, plainly, with fixed K and as scheduled, interleaved and resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.screen import text_of
from forerun.cli.console import Output, as_json, notes, progress, screen
from forerun.cli.load import with_drafters
from forerun.cli.measuring import (
    IgnoreEosFlag,
    PairsFlag,
    RequestsFlag,
    SeedFlag,
    TemperatureFlag,
    TokensFlag,
    check_plots,
    check_rows,
    numbers,
    typed,
)
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, flags
from forerun.cli.prompts import PromptRecord, named_prompts, prompt_ids, read_prompts
from forerun.errors import OptionError

if TYPE_CHECKING:
    from forerun.bench.load.arrivals import Load
    from forerun.bench.load.study import Subject
    from forerun.bench.load.trial import Traffic
    from forerun.budget.profile import ProfileKey
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine
    from forerun.target.base import Tokenizer

FAILED = 1
"""Exit code where a claim has failed."""
PROMPTS = 16
"""Of the package's own, where none are named."""
SCHEDULING = ("policy", "min_predicted_gain", "confidence_threshold", "confidence_cost_table_path")
"""Keys of a drafter's config that a fixed K must not have."""


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """What is varied, what is decoded, and how often."""

    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="Requests in a closed loop: 1,4,16. Default: 1,4.")
    ] = None
    rate: Annotated[str | None, typer.Option(metavar="LIST", help="Requests a second in an open loop: 0.5,2.")] = None
    fixed: Annotated[str, typer.Option("--fixed", metavar="LIST", help="Values of a fixed K to compare with.")] = "2,4"
    mixed: Annotated[bool, typer.Option("--mixed", help="Also all drafters together; the scheduler chooses.")] = False
    pairs: PairsFlag = 8
    requests: RequestsFlag = None
    max_tokens: TokensFlag = "64"
    temperature: TemperatureFlag = 0.0
    seed: SeedFlag = 0
    ignore_eos: IgnoreEosFlag = False
    domain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Prompts of a domain, instead of --prompts; repeat for a mixture."),
    ] = None
    bar: Annotated[float, typer.Option(help="Speed over a rival's below which a claim fails.")] = 0.97
    rows: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep finished rows here; run again to go on after an interruption."),
    ] = None
    plots: Annotated[str | None, typer.Option(metavar="DIR", help="Write PNG plots and their data here.")] = None

    def check(self) -> None:
        """OptionError names what cannot be measured; nothing is loaded for it."""
        for name, least in (("pairs", 1), ("requests", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(name, f"must be at least {least}, got {value}")
        if not self.temperature >= 0:
            raise OptionError("--temperature", f"must be at least 0, got {self.temperature}")
        if not 0 < self.bar <= 1:
            raise OptionError("--bar", f"must be in (0, 1], got {self.bar}")
        check_rows(self.rows)
        _ = self.lengths, self.tokens  # each refuses what it cannot read
        most = max((load.concurrency or 0 for load in self.loads), default=0)
        if self.requests is not None and self.requests < most:
            raise OptionError("--requests", f"{self.requests} are never {most} at once (--concurrency); give more")
        check_plots(self.plots)

    @property
    def loads(self) -> list[Load]:
        from forerun.bench.load.arrivals import Load

        closed = self.concurrency or ("" if self.rate else "1,4")
        loads = [Load(concurrency=n) for n in sorted(numbers("--concurrency", closed, int, 1))] if closed else []
        return loads + ([Load(rate=rate) for rate in _rates(self.rate)] if self.rate else [])

    @property
    def lengths(self) -> list[int]:
        return sorted(numbers("--fixed", self.fixed, int, 1))

    @property
    def tokens(self) -> tuple[int, int]:
        low, _, high = self.max_tokens.partition("-")
        try:
            least, most = int(low), int(high or low)
        except ValueError:
            raise OptionError("--max-tokens", f"must be like 64 or 32-128, got {self.max_tokens!r}") from None
        if not 2 <= least <= most:
            raise OptionError("--max-tokens", f"need 2 <= least <= most, got {self.max_tokens}")
        return least, most


def _rates(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(item) for item in text.split(",")))
    except ValueError:
        raise OptionError("--rate", f"must be numbers like 0.5,2; got {text!r}") from None


@flags
def load(
    engine: EngineFlags,
    prompts: PromptFlags,
    run: LoadFlags,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> int:
    """Decode under load: plainly, with fixed K and as scheduled, in turns; is scheduling ever slower?

    Exit code 1 where a claim has failed. Costs must have been measured: forerun profile TARGET --drafter ...

    forerun bench load --drafter ngram,small --concurrency 1,4,16 --fixed 2,4 --rows rows.jsonl --plots plots
    """
    from forerun.bench.load.drive import WallClock
    from forerun.bench.load.study import Study

    destination = Output(output)
    run.check()
    if run.domain and (prompts.prompt is not None or prompts.prompts is not None):
        raise OptionError("--domain", "give either this or --prompts")
    ready = _ready(engine, run)
    records = {"": named_prompts(prompts)} if not run.domain else dict(_domains(run.domain, prompts))
    with ExitStack() as stack:
        engines = {way: stack.enter_context(made) for way, made in _engines(ready, run)}
        _check_lengths(engines["fixed"], run.lengths)
        _check_scheduled(engines["scheduled"])
        place = _place(engines["scheduled"], ready)
        traffic = _traffic(run, prompts.limit, engines["plain"].target.tokenizer, records)
        rows = None if run.rows is None else Path(run.rows)
        study = Study(engines["scheduled"], _subjects(engines, run), run.loads, traffic, WallClock(), rows)
        if study.note:
            notes().print(study.note)
        with progress("measuring", study.total) as advance:
            result = study.run(advance)
        if place is not None:
            _keep(result, *place)
    return _report(result, destination, run, json_)


# -------------------------------------------------------------------------------------------------------------- engines


def _ready(engine: EngineFlags, run: LoadFlags) -> EngineFlags:
    """The flags with limits for the largest load, and drafters."""
    seqs = max((load.concurrency or 0 for load in run.loads), default=0)
    if engine.max_num_seqs is not None and seqs > engine.max_num_seqs:
        raise OptionError("--concurrency", f"{seqs} is more than --max-num-seqs ({engine.max_num_seqs})")
    if engine.num_speculative_tokens is not None:
        raise OptionError("--num-speculative-tokens", "K is given by --fixed; its largest is also the scheduler's most")
    ready = with_drafters(engine, "measuring", embedded="ngram,dspark")
    if engine.max_num_seqs is None and seqs > 0 and run.rate is None:
        ready = dataclasses.replace(ready, max_num_seqs=seqs)
    if seqs > 32 and engine.max_num_batched_tokens is None:
        # Rows enough for every draft of the batch, also while a quarter of the step is kept for prefill.
        ready = dataclasses.replace(ready, max_num_batched_tokens=2 * seqs * (max(run.lengths) + 1))
    configs = ready.drafters()
    if all(config.name == "vanilla" for config in configs):
        raise OptionError("--drafter", "vanilla is what every drafter is measured against; name another one")
    return dataclasses.replace(ready, policy=_policy(ready, configs))


def _engines(ready: EngineFlags, run: LoadFlags) -> Iterator[tuple[str, Engine]]:
    """One each for plain decoding, fixed K and scheduling, with a copy of the target of its own: plain decoding pays
    for no drafter, and one policy learns nothing from another's rounds."""
    from forerun.cli.console import waiting
    from forerun.cli.load import load_with

    bare = dataclasses.replace(ready, policy=None, min_predicted_gain=None)
    configs, most = ready.drafters(), max(run.lengths)
    with waiting("loading"):
        yield "plain", load_with(bare, [])
        yield "fixed", load_with(dataclasses.replace(bare, policy="fixed"), [_bare(c) for c in configs], most)
        yield "scheduled", load_with(ready, configs, most)


def _policy(ready: EngineFlags, configs: Sequence[SpeculativeConfig]) -> str:
    given = ready.policy or next((config.policy for config in configs if config.policy is not None), None) or "delayed"
    if given == "fixed":
        raise OptionError("--policy", "is the scheduled way's; fixed ones are given by --fixed")
    return given


def _bare(config: SpeculativeConfig) -> SpeculativeConfig:
    """The same drafter without anything that a fixed K does not look at."""
    from forerun.drafters.config import parse_config

    given: dict[str, Any] = config.model_dump(exclude_unset=True)
    return parse_config({key: value for key, value in given.items() if key not in SCHEDULING})


def _check_lengths(engine: Engine, lengths: Sequence[int]) -> None:
    """OptionError: a fixed K that a drafter cannot make, so that a shorter one would go by its name."""
    from forerun.bench.profiling.profiler import longest_draft

    for entry in engine.core.loaded:
        most = longest_draft(entry)
        if entry.name != "vanilla" and max(lengths) > most:
            raise OptionError("--fixed", f"{max(lengths)} is more than {entry.name} drafts ({most})")


def _check_scheduled(engine: Engine) -> None:
    """OptionError where nothing would be scheduled, since no costs are known."""
    if not engine.core.schedule.scheduler.adapts:
        raise OptionError("--policy", "no costs of these models have been measured here; run `forerun profile` first")


def _subjects(engines: dict[str, Engine], run: LoadFlags) -> list[Subject]:
    """Each drafter by itself, and with --mixed all of them together."""
    from forerun.bench.load.study import Subject

    named = {entry.label: entry.name for entry in engines["fixed"].core.loaded if entry.name != "vanilla"}
    subjects = [Subject(label, _ways(engines, run, [name])) for label, name in named.items()]
    if run.mixed and len(named) > 1:
        subjects.append(Subject("+".join(named), _ways(engines, run, [*named.values()])))
    return subjects


def _ways(engines: dict[str, Engine], run: LoadFlags, names: Sequence[str]) -> list[Any]:
    from forerun.bench.load.trial import PLAIN, Way

    scheduled, most = engines["scheduled"], max(run.lengths)
    policy = scheduled.core.schedule.scheduler.options.policy
    ways = [Way(PLAIN, engines["plain"], False)]
    for k in run.lengths:
        ways.append(Way(f"fixed:{k}", engines["fixed"], {"method": list(names), "max_draft": k}, k))
    return [*ways, Way(policy, scheduled, {"method": list(names)}, most)]


# -------------------------------------------------------------------------------------------------------------- traffic


def _domains(items: Sequence[str], flags: PromptFlags) -> Iterator[tuple[str, list[PromptRecord]]]:
    """The prompts of each domain, before a model is loaded. OptionError names --domain."""
    names = [item.partition("=")[0] for item in items]
    for item in items:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise OptionError("--domain", f"must be NAME=FILE, got {item!r}")
        if names.count(name) > 1:
            raise OptionError("--domain", f"{name!r} is given twice; put its prompts into one file, or name them apart")
        try:
            yield name, read_prompts(dataclasses.replace(flags, prompts=path))
        except OptionError as error:
            about = "--domain" if error.option == "--prompts" else error.option
            raise OptionError(about, error.reason) from None


def _traffic(
    run: LoadFlags, limit: int | None, tokenizer: Tokenizer, records: Mapping[str, Sequence[PromptRecord] | None]
) -> Traffic:
    """Prompts of the domains in turn, as many of each; of a single one as they come."""
    from forerun.bench.load.trial import Traffic

    found = {name: prompt_ids(some, tokenizer, limit or PROMPTS) for name, some in records.items()}
    longest = max(map(len, found.values()))
    mixed = [(each[i % len(each)], name) for i in range(longest) for name, each in found.items()]
    ids, domains = [ids for ids, _ in mixed], [name for _, name in mixed if name]
    return Traffic(
        ids, domains, run.tokens, run.requests, run.pairs, run.temperature, ignore_eos=run.ignore_eos, seed=run.seed
    )


# --------------------------------------------------------------------------------------------------------------- report


def _place(scheduled: Engine, ready: EngineFlags) -> tuple[ProfileKey, Path] | None:
    """Where the page of `forerun serve` looks for the speeds: beside this profile, in this folder. None, with
    `--calibration-cache off`; and with a note where it cannot be written: costs of others can be gone by all the same.
    """
    from forerun.budget.stored import check_kept, load_study_path, profiles_folder

    folder, profile = profiles_folder(ready.calibration_cache), scheduled.core.schedule.scheduler.profile
    if folder is None or profile is None:
        return None
    try:
        check_kept(load_study_path(profile.key, folder))
    except OptionError as error:
        notes().print(f"not kept for the page of `forerun serve`: {error}", markup=False)
        return None
    return profile.key, folder


def _keep(result: Any, key: ProfileKey, folder: Path) -> None:
    from forerun.bench.load.plots import points_of
    from forerun.budget.stored import write_load_study

    made_with = {**result.made_with, "options": result.options}
    path = write_load_study(key, list(points_of(result.rows)), made_with, folder)
    notes().print(f"kept in {path}")


def _report(result: Any, destination: Output, run: LoadFlags, json_: bool) -> int:
    from forerun.bench.load.report import failed, show

    document = result.as_dict(run.bar)
    if json_:
        destination.write(as_json(document))
    elif destination.path is not None:
        destination.write(text_of(lambda console: show(result, console, run.bar)))
    else:
        show(result, screen(), run.bar)
    if run.plots is not None:
        from forerun.bench.load.plots import draw

        for path in draw(result.rows, Path(run.plots), typed()):
            notes().print(f"wrote {path}")
    return FAILED if failed(document) else 0
