"""`forerun calibrate`: a drafter's confidences against what verification decides, and the scaling that mends them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.screen import fitted, text_of
from forerun.cli.console import Output, as_json, notes, progress, screen
from forerun.cli.load import with_drafters
from forerun.cli.measuring import TargetArgument, check_plots, check_rows, load_fixed, measurable, typed
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, flags
from forerun.cli.prompts import named_prompts, prompt_ids
from forerun.errors import OptionError
from forerun.folders import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.bench.calibrating.assessment import Assessment
    from forerun.bench.calibrating.recorder import Recorder, Recording
    from forerun.engine import Engine
    from forerun.engine.propose import LoadedDrafter

PROMPTS = 40
"""Of the package's own, where none are named: all there are."""
OWN_PROMPTS = "prompts of the package"


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags:
    """What is recorded, and how it is split."""

    temperature: Annotated[str, typer.Option(metavar="LIST", help="Temperatures: 0,0.8. A table for each.")] = "0,1"
    top_k: Annotated[int | None, typer.Option(help="Of all requests; a table holds for its filters only.")] = None
    top_p: Annotated[float | None, typer.Option(help="Of all requests.")] = None
    min_p: Annotated[float | None, typer.Option(help="Of all requests.")] = None
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128
    rounds: Annotated[int | None, typer.Option(help="Enough rounds for one table. Default: all prompts.")] = None
    batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 8
    held_out: Annotated[float, typer.Option(help="Share of the prompts that are judged on and not fitted on.")] = 0.5
    seed: Annotated[int, typer.Option(help="Of sampling and of the split.")] = 0
    rows: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep recorded rounds here; run again to go on after an interruption."),
    ] = None
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write calibration.json here, not into the drafter's folder.")
    ] = None
    export_sglang: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Also write each table as a file for SGLang, named after its conditions."),
    ] = None
    plots: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write reliability diagrams, their data and one HTML page here.")
    ] = None

    def check(self) -> None:
        """OptionError names what cannot be used."""
        for name, least in (("max_tokens", 2), ("batch", 1), ("rounds", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(name, f"must be at least {least}, got {value}")
        if not 0 < self.held_out < 1:
            raise OptionError("held_out", f"must be between 0 and 1, got {self.held_out:g}")
        check_rows(self.rows)
        for option, folder in (("--out", self.out), ("--export-sglang", self.export_sglang)):
            if folder is not None:
                check_writable(option, folder)
        check_plots(self.plots)

    def temperatures(self) -> list[float]:
        """One per bucket: a second one in the same bucket would replace the table of the first."""
        from forerun.budget.calibration import temperature_bucket

        try:
            values = list(dict.fromkeys(float(item) for item in self.temperature.split(",")))
        except ValueError:
            raise OptionError("--temperature", f"must be numbers like 0,0.8; got {self.temperature!r}") from None
        if any(not 0 <= value < math.inf for value in values):
            raise OptionError("--temperature", f"must all be at least 0, got {self.temperature!r}")
        buckets = [temperature_bucket(value) for value in values]
        if len(set(buckets)) < len(buckets):
            raise OptionError("--temperature", f"two of {self.temperature} share a table ({', '.join(buckets)})")
        return values

    def recording(self, prompts: Sequence[Sequence[int]]) -> Recording:
        from forerun.bench.calibrating.recorder import Recording
        from forerun.sampling import Sampling

        filters = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
        given = {name: value for name, value in filters.items() if value is not None}
        sampling = Sampling(temperature=1.0, max_tokens=self.max_tokens, **given)
        return Recording(prompts, sampling, self.temperatures(), self.batch, self.rounds, self.seed)


@flags
def calibrate(
    engine: EngineFlags,
    prompts: PromptFlags,
    run: CalibrateFlags,
    model: TargetArgument = None,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> None:
    """Record what drafters are confident of and what is accepted, fit a scaling position by position, and judge it on
    prompts that were held out. calibration.json goes into the drafter's folder, of a drafter without one beside the
    profiles.

    forerun calibrate embedded --drafter small --plots plots
    """
    destination = Output(output)
    run.check()
    run.recording([])
    ready = with_drafters(measurable(engine, model), "calibrating")
    if run.out is not None and len(ready.drafters()) > 1:
        raise OptionError("--out", "one calibration.json is for one drafter; name one")
    if run.export_sglang is not None and any(one.labelled(one.name) != "dspark" for one in ready.drafters()):
        raise OptionError("--export-sglang", "SGLang scales the confidences of dspark alone; name --drafter dspark")
    named = named_prompts(prompts)
    dataset = OWN_PROMPTS if named is None else Path(prompts.prompts or "--prompt").name
    from forerun.bench.provenance import provenance

    with load_fixed(ready) as loaded:
        _check_files(loaded, ready, run)
        ids = prompt_ids(named, loaded.target.tokenizer, prompts.limit or PROMPTS)
        made = _assessed(loaded, run, ids, dataset)
        files = _kept(loaded, ready, run, made)
        made_with = provenance(loaded)
    _report(made, files, made_with, destination, json_)
    if run.export_sglang is not None:
        _export(made, Path(run.export_sglang))
    if run.plots is not None:
        from forerun.bench.calibrating.report import draw_calibrations

        for path in draw_calibrations(made, Path(run.plots), typed(), made_with):
            notes().print(f"wrote {path}")


def _assessed(engine: Engine, run: CalibrateFlags, prompts: Sequence[Sequence[int]], dataset: str) -> list[Assessment]:
    """Rounds of every drafter at every temperature, recorded or read; then the fits."""
    from forerun.bench.calibrating.assessment import assess

    recorder, note = _recorder(engine, run, prompts)
    if note:
        notes().print(note)
    made = []
    with progress("recording", recorder.total) as advance:
        recorded = [(one, recorder.record(one, advance)) for one in recorder.conditions()]
    if not recorded:
        raise OptionError("--drafter", "vanilla drafts nothing: there is nothing to calibrate")
    for conditions, rounds in recorded:
        made.append(assess(conditions.key, rounds, dataset, run.held_out, run.seed))
    return made


def _recorder(engine: Engine, run: CalibrateFlags, prompts: Sequence[Sequence[int]]) -> tuple[Recorder, str | None]:
    from forerun.bench.calibrating.recorder import Recorder
    from forerun.bench.calibrating.rounds_file import RoundsFile
    from forerun.bench.provenance import provenance
    from forerun.bench.rows import key_of

    recording = run.recording(prompts)
    key = key_of(provenance(engine), prompts, recording.options() | {"verify_mode": engine.options.verify_mode})
    file = RoundsFile(None if run.rows is None else Path(run.rows), key)
    return Recorder(engine, recording, file), file.note


def _kept(engine: Engine, ready: EngineFlags, run: CalibrateFlags, made: Sequence[Assessment]) -> dict[str, Path]:
    """Writes the tables of each drafter that hold; the file of each."""
    from forerun.budget.stored import write_calibration

    files: dict[str, Path] = {}
    for entry in engine.core.loaded:
        tables = [one.table for one in made if one.drafter == entry.name and one.holds]
        path, option = _file(engine, entry, ready, run)
        if tables and path is not None:
            write_calibration(path, tables, option)
            files[entry.name] = path
    return files


def _check_files(engine: Engine, ready: EngineFlags, run: CalibrateFlags) -> None:
    """OptionError if a drafter's tables could not be written, before any round of it is recorded."""
    from forerun.budget.stored import ELSEWHERE, OPTION, check_kept

    for entry in engine.core.loaded:
        path, option = _file(engine, entry, ready, run)
        if path is not None and entry.name != "vanilla":
            check_kept(path, option, ELSEWHERE if option == OPTION else f"name another one, and {entry.label} alone")


def _file(engine: Engine, entry: LoadedDrafter, ready: EngineFlags, run: CalibrateFlags) -> tuple[Path | None, str]:
    """Where decoding looks for it, and the option to change that. None: nowhere, with `--calibration-cache off`."""
    from forerun.bench.calibrating.place import calibration_file
    from forerun.budget.stored import OPTION, profiles_folder

    if run.out is not None:
        return Path(run.out) / entry.config.calibration_name, "--out"
    folder = profiles_folder(ready.calibration_cache)
    path = calibration_file(engine.target, entry, folder)
    return path, OPTION if path is None or path.parent == folder else "--out"  # of a drafter's own folder


def _export(made: Sequence[Assessment], folder: Path) -> None:
    """One file for `--speculative-dspark-confidence-sts-path` of SGLang per fit of temperatures that holds. It has no
    place for the conditions of its table: its name says them."""
    for one in made:
        if one.temperatures_hold:
            key = one.table.key
            words = (one.drafter, key.verify_mode, key.draft_sample_method, key.temperature, key.filters)
            path = folder / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', '-'.join(words))}.sglang.json"
            Output(str(path), "--export-sglang").write(as_json(one.sglang()))
            notes().print(f"wrote {path}: {key}")


# ------------------------------------------------------------------------------------------------------------- showing


def _report(
    made: Sequence[Assessment],
    files: dict[str, Path],
    made_with: dict[str, Any],
    destination: Output,
    json_: bool,
) -> None:
    if json_:
        paths = {name: str(path) for name, path in files.items()}
        destination.write(as_json({"calibrations": [one.as_dict() for one in made], "files": paths, **made_with}))
    elif destination.path is not None:
        destination.write(text_of(lambda console: _show(made, made_with, console)))
    else:
        _show(made, made_with, fitted(screen()))
    for one in made:
        notes().print(f"{one.drafter}, temperature {one.table.key.temperature}: {_where(one, files)}")


def _where(one: Assessment, files: dict[str, Path]) -> str:
    if not one.holds:
        return "not kept, as it makes the error on held-out prompts larger; record more rounds"
    return f"kept in {files[one.drafter]}" if one.drafter in files else "not kept: --calibration-cache off"


def _show(made: Sequence[Assessment], made_with: dict[str, Any], console: Console) -> None:
    from forerun.bench.calibrating.report import DEFINITIONS, counts, setting, table, title

    for one in made:
        console.print(f"[bold]{title(one)}[/]")
        console.print(table(one))
        console.print(counts(one), style="dim", markup=False)
        console.print()
    console.print(setting(made_with), style="dim", markup=False)
    for name, meaning in DEFINITIONS.items():
        console.print(f"{name}: {meaning}", style="dim", markup=False)
