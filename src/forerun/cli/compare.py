"""`forerun compare`: which drafter is best here? All of them on the same prompts, beside plain decoding."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench.screen import text_of
from forerun.cli.bench_load import LoadFlags
from forerun.cli.console import Output, as_json, notes, progress, screen, waiting, write_whole
from forerun.cli.lineup import Lineup
from forerun.cli.measuring import (
    IgnoreEosFlag,
    PairsFlag,
    RequestsFlag,
    SeedFlag,
    TemperatureFlag,
    TokensFlag,
    typed,
)
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, flags
from forerun.cli.prompts import check_prompts, named_prompts, prompt_ids
from forerun.errors import OptionError
from forerun.folders import check_file, check_folder
from forerun.sampling import Sampling

if TYPE_CHECKING:
    from forerun.bench.comparing.sections import Findings
    from forerun.bench.comparing.study import Contender, Result, Study
    from forerun.engine import Engine

FAILED = 1
"""Exit code where an output is not plain decoding's and rounding does not explain it."""
PROMPTS = 8
"""Of the package's own, where none are named."""
PAIRS = 5
ASKED_TOGETHER = 8
"""Requests decoded together to hear confidences, at most."""
ROWS = "rows.jsonl"
REPORTS = ("compare.md", "compare.html", "compare.json")


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """What is decoded, how often, and where the report goes."""

    concurrency: Annotated[str, typer.Option(metavar="LIST", help="Requests decoded together: 1,4,16.")] = "1,4"
    pairs: PairsFlag = PAIRS
    requests: RequestsFlag = None
    max_tokens: TokensFlag = "64"
    temperature: TemperatureFlag = 0.0
    seed: SeedFlag = 0
    ignore_eos: IgnoreEosFlag = False
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write compare.md, compare.html and compare.json there; finished rows are kept there too: run again "
            "to go on after an interruption.",
        ),
    ] = None

    def load(self) -> LoadFlags:
        """What is the same in `forerun bench load`, checked. OptionError names what cannot be measured."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "out"}
        made = LoadFlags(**shared)
        made.check()
        if self.pairs < 2:
            raise OptionError("--pairs", f"must be at least 2, got {self.pairs}: a single pair shows no spread")
        return made

    def check_out(self) -> None:
        """OptionError: the folder, or a file in it, could not be made or written. Nothing is made yet."""
        if self.out is None:
            return
        check_folder("--out", self.out)
        if os.path.isdir(self.out):
            for name in (ROWS, *REPORTS):
                check_file("--out", Path(self.out, name), grows=name == ROWS, otherwise="name another folder")

    def folder(self) -> Path | None:
        """Made if it is not there. OptionError: it cannot be."""
        if self.out is None:
            return None
        try:
            Path(self.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError("--out", f"cannot make {self.out}: {error.strerror or error}") from None
        return Path(self.out)


@flags
def compare(
    engine: EngineFlags,
    prompts: PromptFlags,
    run: CompareFlags,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> int:
    """Compare drafters on the same prompts: passes, memory, speed beside plain decoding for one request and under load,
    acceptance by position, confidence; where each is the best choice, and why.

    Drafters are named as everywhere: ngram, a model, the folder of a trained one. Exit code 1 if a text is not plain
    decoding's.

    forerun compare --target TARGET --drafter ngram --drafter runs/dspark/best --concurrency 1,4,16 --out compared
    """
    destination, load = Output(output), run.load()
    lineup = Lineup(engine, load)
    records = named_prompts(prompts)
    run.check_out()
    with waiting("loading"):
        contenders, plain = lineup.contenders(), lineup.plain()
    with plain:
        ids = prompt_ids(records, plain.target.tokenizer, prompts.limit or PROMPTS)
        check_prompts(plain, ids, records, Sampling(max_tokens=load.tokens[1]))
        folder = run.folder()
        study = _study(plain, contenders, load, ids, lineup, None if folder is None else folder / ROWS)
        if study.note:
            notes().print(study.note)
        with progress("measuring", study.total) as advance:
            result = study.run(advance)
    return _report(dataclasses.replace(result, absent=lineup.absent(result)), destination, folder, json_)


def _study(
    plain: Engine, contenders: Sequence[Contender], load: LoadFlags, ids: list[list[int]], lineup: Lineup,
    path: Path | None,
) -> Study:  # fmt: skip
    from forerun.bench.comparing.confidence import Questions
    from forerun.bench.comparing.study import Study
    from forerun.bench.load.drive import WallClock
    from forerun.bench.load.trial import Traffic
    from forerun.budget.stored import profiles_folder

    tokens = load.tokens
    traffic = Traffic(
        ids, (), tokens, load.requests, load.pairs, load.temperature, ignore_eos=load.ignore_eos, seed=load.seed
    )
    asked = Sampling(temperature=load.temperature, max_tokens=tokens[1], ignore_eos=load.ignore_eos, seed=load.seed)
    batch = min(ASKED_TOGETHER, plain.options.max_num_seqs)
    questions = Questions(ids, asked, batch, profiles_folder(lineup.flags.calibration_cache))
    return Study(plain, contenders, load.loads, traffic, questions, WallClock(), path)


# --------------------------------------------------------------------------------------------------------------- report


def _report(result: Result, destination: Output, folder: Path | None, json_: bool) -> int:
    from forerun.bench.comparing.report import show
    from forerun.bench.comparing.sections import Findings

    findings = Findings.of(result)
    if folder is not None:
        _write(findings, folder)
    if json_:
        destination.write(as_json(findings.as_dict()))
    elif destination.path is not None:
        destination.write(text_of(lambda console: show(findings, console)))
    else:
        show(findings, screen())
    return FAILED if result.lossless is False else 0


def _write(findings: Findings, folder: Path) -> None:
    from forerun.bench.comparing.markdown import markdown
    from forerun.bench.comparing.page import page

    texts = (markdown(findings, typed()), page(findings, typed()), as_json(findings.as_dict()) + "\n")
    for name, text in zip(REPORTS, texts, strict=True):
        try:
            write_whole(folder / name, text)
        except OSError as error:
            raise OptionError("--out", f"cannot write {folder / name}: {error.strerror or error}") from None
        notes().print(f"wrote {folder / name}")
