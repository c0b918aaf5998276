"""`forerun verify`: a certificate that a target and its drafters decode losslessly here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.bench.verdicts import LOSSLESS, NOT_LOSSLESS, NOT_PROVEN
from forerun.cli.console import Output, as_json, progress, screen, waiting
from forerun.cli.load import with_drafters
from forerun.cli.measuring import check_seed
from forerun.cli.options import EngineFlags, JsonFlag, PromptFlags, flags
from forerun.cli.prompts import check_prompts, named_prompts, prompt_ids
from forerun.errors import OptionError
from forerun.sampling import GREEDY_BELOW, Sampling

if TYPE_CHECKING:
    from forerun.bench.certificate import Certificate, CertificateOptions

EXIT_CODES = {LOSSLESS: 0, NOT_LOSSLESS: 1, NOT_PROVEN: 3}
"""By verdict."""

MOST_DRAFTED = 8
"""K up to which every length is tried, where the drafter can make as many."""

PROMPTS = 3
"""Of the package's own, where none are named."""


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """How much is tried. Defaults are those of `CertificateOptions`."""

    max_tokens: Annotated[int | None, typer.Option(help="Tokens of each greedy and coupled output.")] = None
    samples: Annotated[
        int | None, typer.Option(help="Samples per drafter of the chi-square part; default: from its stated power.")
    ] = None
    temperature: Annotated[float | None, typer.Option(help="Of the coupled part.")] = None
    seed: Annotated[int | None, typer.Option(help="Of the coupled and sampled parts.")] = None
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="NAME", help="Also write the page NAME.md and the report NAME.json."),
    ] = None

    def options(self, max_draft: int) -> CertificateOptions:
        from forerun.bench.certificate import CertificateOptions

        names = ("max_tokens", "samples", "temperature", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return CertificateOptions(max_draft=max_draft, **given)


@flags
def verify(engine: EngineFlags, prompts: PromptFlags, amount: VerifyFlags, json_: JsonFlag = False) -> int:
    """Check that speculative decoding is lossless here: exit code 0 only if every check holds, 1 if one fails, 3 if
    nothing is proven, as nothing was drafted.

    --drafter may name several; K runs from 1 to --num-speculative-tokens (8). A minute or two on the embedded models,
    tens of minutes on a 1.5B pair on a CPU.
    """
    files = _files(amount.output)
    ready = _checked(engine, amount)
    records = named_prompts(prompts)
    longest = ready.num_speculative_tokens or MOST_DRAFTED
    with ready.load(longest) as loaded:
        from forerun.bench.certificate import Certifier

        ids = prompt_ids(records, loaded.target.tokenizer, prompts.limit or PROMPTS)
        options = amount.options(longest)
        # A prompt that is too long says nothing of losslessness.
        check_prompts(loaded, ids, records, Sampling(max_tokens=options.max_tokens))
        with waiting("warming up"):
            certifier = Certifier(loaded, ids, options)
        with progress("verifying", certifier.total) as advance:
            certificate = certifier.run(advance)
    _report(certificate, files, json_)
    return EXIT_CODES[certificate.verdict]


def _checked(engine: EngineFlags, amount: VerifyFlags) -> EngineFlags:
    """The flags with what they leave open filled in; OptionError before anything is loaded."""
    if engine.verify_mode is not None:
        raise OptionError("--verify-mode", "both modes are checked; leave it out")
    for name, least in (("max_tokens", 4), ("samples", 100)):
        value = getattr(amount, name)
        if value is not None and value < least:
            raise OptionError(name, f"must be at least {least}, got {value}")
    check_seed(amount.seed)
    if amount.temperature is not None and not GREEDY_BELOW <= amount.temperature < math.inf:
        raise OptionError("temperature", f"must be finite and at least {GREEDY_BELOW:g}, got {amount.temperature}")
    if engine.num_speculative_tokens is not None and engine.num_speculative_tokens < 1:
        raise OptionError("--num-speculative-tokens", f"must be at least 1, got {engine.num_speculative_tokens}")
    ready = with_drafters(engine, "verifying")
    if all(config.name == "vanilla" for config in ready.drafters()):
        raise OptionError("--drafter", "vanilla drafts nothing: there is nothing to verify")
    return ready


def _files(output: str | None) -> tuple[Output, Output] | None:
    """Page and report; OptionError if they could not be written."""
    if output is None:
        return None
    base = Path(output)
    base = base.with_suffix("") if base.suffix in (".md", ".json") else base
    if not base.name:
        raise OptionError("--output", f"{output} names no file")
    return Output(str(base.with_name(f"{base.name}.md"))), Output(str(base.with_name(f"{base.name}.json")))


def _report(certificate: Certificate, files: tuple[Output, Output] | None, json_: bool) -> None:
    from forerun.bench.certificate_page import markdown

    if files is not None:
        page, report = files
        page.write(markdown(certificate))
        report.write(as_json(certificate.as_dict()))
    if json_:
        print(as_json(certificate.as_dict()))  # noqa: T201 - a result, on stdout
    else:
        _show(certificate)


def _show(certificate: Certificate) -> None:
    from rich.table import Table

    table = Table("", "check", "result", box=None, pad_edge=False)
    for check in certificate.checks:
        result = "[green]pass[/]" if check.passed else "[yellow]void[/]" if check.void else "[bold red]FAIL[/]"
        table.add_row(result, check.name, check.detail)
    console = screen()
    console.print(table)
    failed = [check.name for check in certificate.checks if not (check.passed or check.void)]
    void = [check.name for check in certificate.checks if check.void]
    if failed:
        console.print(f"[bold red]{NOT_LOSSLESS}[/]: {len(failed)} checks failed: {', '.join(failed)}")
    elif void:
        console.print(f"[bold yellow]{NOT_PROVEN}[/]: {len(void)} checks had nothing to check: {', '.join(void)}")
    else:
        console.print(f"[bold green]{LOSSLESS}[/]: all {len(certificate.checks)} checks passed")
