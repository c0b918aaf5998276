"""`forerun demo`: every drafter against plain decoding, side by side: the same tokens, and how much sooner."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import Output, as_json, progress, screen, waiting
from forerun.cli.measuring import check_seed, labels_of
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, flags
from forerun.cli.prompts import check_prompts, named_prompts, prompt_ids
from forerun.errors import ForerunError, OptionError

if TYPE_CHECKING:
    from forerun.bench.race import Course
    from forerun.cli.race_report import Report
    from forerun.engine import Engine

TOKENS_DIFFER = 1
"""Exit code if any token differs."""


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """What is run."""

    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="One prompt, as for generate.")] = None
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts as for generate; default: the package's own.")
    ] = None
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Put each raw prompt as a user's message.")
    ] = False
    limit: Annotated[int, typer.Option(help="Prompts to run.")] = 10
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64
    temperature: Annotated[float, typer.Option(help="Of the sampled runs.")] = 0.8
    seed: Annotated[int, typer.Option(help="Of the sampled runs.")] = 0
    time_limit: Annotated[float, typer.Option(help="Seconds to race; at least one prompt is run.")] = 100.0


@flags
def demo(engine: EngineFlags, run: DemoFlags, json_: JsonFlag = False, output: OutputFlag = None) -> int:
    """Each drafter against plain decoding: speed, accepted length, and whether the tokens are the same.

    The embedded model in float32, greedy and sampled (coupled: one seed, one text), one request at a time. Exit code
    1 if any token differs.
    """
    destination = Output(output)
    _check(engine, run)
    started = time.perf_counter()
    report = _race(engine, run)
    report.seconds = time.perf_counter() - started
    if json_:
        destination.write(as_json(report.document()))
    elif output is not None:
        destination.write(report.text())
    else:
        report.show(screen())
    return 0 if report.same else TOKENS_DIFFER


def _check(engine: EngineFlags, run: DemoFlags) -> None:
    if engine.verify_mode is not None:
        raise OptionError("--verify-mode", "the demo runs greedy and coupled decoding; `forerun verify` does the rest")
    for name, least in (("limit", 1), ("max_tokens", 1), ("time_limit", 0)):
        if not getattr(run, name) >= least:  # NaN is not
            raise OptionError(name, f"must be at least {least}, got {getattr(run, name)}")
    check_seed(run.seed)
    engine.drafters()


def _race(engine: EngineFlags, run: DemoFlags) -> Report:
    """Loads every engine, runs the course and returns what came out of it."""
    with waiting("loading"):
        from forerun.bench.race import race
        from forerun.cli.race_report import Report

        course_of = _course(run)  # the options, before a model is loaded
        plain, rivals, absent = _engines(engine)
        course = course_of(plain)
    report = Report(plain.target, course, absent)
    with progress("racing", len(course.prompts) * len(course.modes) * (1 + len(rivals))) as advance:
        report.standings = race(plain, rivals, course, advance)
    return report


def _course(run: DemoFlags) -> Any:
    from forerun.bench.race import Course
    from forerun.cli.options import PromptFlags
    from forerun.sampling import Sampling

    greedy = Sampling(temperature=0, max_tokens=run.max_tokens, ignore_eos=True)
    modes = {"greedy": greedy, "sampled": dataclasses.replace(greedy, temperature=run.temperature, seed=run.seed)}
    named = PromptFlags(prompt=run.prompt, prompts=run.prompts, apply_chat_template=run.apply_chat_template)
    given = named_prompts(named)

    def course(plain: Engine) -> Course:
        ids = prompt_ids(given, plain.target.tokenizer, run.limit)[: run.limit]
        check_prompts(plain, ids, given, greedy)
        return Course(ids, modes, run.time_limit)

    return course


def _engines(flags: EngineFlags) -> tuple[Engine, dict[str, Engine], dict[str, str]]:
    """Plain decoding, one engine per drafter, and why others are missing.

    Each engine has a copy of the target of its own, so that plain decoding pays for no drafter.
    """
    from forerun.cli.load import load_with
    from forerun.drafters import DRAFTERS
    from forerun.drafters.config import parse_config

    # A model this small gains nothing from a second thread, and loses a lot where other work runs beside it.
    threads = 1 if flags.threads is None and flags.embedded else flags.threads
    own = dataclasses.replace(flags, dtype=flags.dtype or "float32", threads=threads, max_num_seqs=1)
    asked = flags.drafters()
    configs = asked or [parse_config(name) for name in DRAFTERS]
    labels = labels_of(configs)
    plain, rivals, absent = load_with(own, []), {}, {}
    for config, label in zip(configs, labels, strict=True):
        try:
            rivals[label] = load_with(own, [config])
        except ForerunError as error:
            if asked:
                raise
            absent[label] = str(error)
    return plain, rivals, absent
