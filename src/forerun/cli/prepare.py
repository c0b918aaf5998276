"""`forerun data prepare`: conversations and texts as token ids, with a mask over what the target wrote."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import Output, as_json, notes, progress, waiting
from forerun.cli.options import JsonFlag, flags
from forerun.cli.template import TemplateFlags
from forerun.errors import OptionError

if TYPE_CHECKING:
    from forerun.target.outline import Outline
    from forerun.training.data.prepare import Preparation
    from forerun.training.data.samples import Choice


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Whose tokenizer and template; no weights are loaded."""

    target: Annotated[
        str, typer.Option("--target", "--model", help="Directory, .gguf file, hub id, or 'embedded' (the default).")
    ] = "embedded"
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python that comes with a model.")
    ] = False

    def outline(self, chat_template: str | None) -> Outline:
        with waiting("reading the tokenizer"):
            from forerun.cli.load import check_revision
            from forerun.target.outline import outline

            check_revision(self.target, self.revision)
            code = self.trust_remote_code
            return outline(self.target, revision=self.revision, trust_remote_code=code, chat_template=chat_template)


@dataclass(frozen=True, kw_only=True)
class SampleFlags:
    """What is kept of a record."""

    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a sample at most. Default: 4096, or the window if shorter.")
    ] = None
    overlong: Annotated[str | None, typer.Option(help="skip (default) longer samples, or truncate them.")] = None
    turns: Annotated[
        str | None,
        typer.Option(help="all answers of a chat in one sample (default); split: a sample each; last: only it."),
    ] = None
    unfinished: Annotated[
        str | None, typer.Option(help="keep (default) or drop answers that their length limit ended.")
    ] = None
    retokenize: Annotated[
        bool, typer.Option("--retokenize", help="Learn the answers' text, not the ids that were emitted.")
    ] = False

    def choice(self, window: int) -> Choice:
        from forerun.training.data.samples import MAX_LENGTH, Choice

        most = min(MAX_LENGTH, window) if self.max_length is None else self.max_length
        if not 2 <= most <= window:
            raise OptionError("--max-length", f"must be in 2 .. {window}, the target's window, got {most}")
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "max_length"}
        given: Any = {name: value for name, value in rest.items() if value is not None}
        return Choice(max_length=most, **given)


@dataclass(frozen=True, kw_only=True)
class OutFlags:
    """Where samples go: to a folder, to the screen, or both."""

    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder to write.")] = None
    held_out: Annotated[float, typer.Option(help="Share to hold out, by a hash of the id.")] = 0.0
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset that is there.")] = False
    show: Annotated[
        int | None, typer.Option(help="Print so many samples, learned tokens marked. Without --out: only that.")
    ] = None

    def check(self, json_: bool) -> None:
        """OptionError: options that contradict each other or cannot be used. Nothing has been read yet."""
        if self.out is None and self.show is None:
            raise OptionError("--out", "is required (or --show, to look at samples only)")
        if self.show is not None and self.show < 1:
            raise OptionError("--show", f"must be at least 1, got {self.show}")
        if json_ and (self.show is not None or self.out is None):
            raise OptionError("--json", "prints the manifest of what is written; leave --show away")
        if not 0 <= self.held_out < 1:
            raise OptionError("--held-out", f"must be a share in [0, 1), got {self.held_out}")
        if self.out is not None:
            from forerun.training.data.writer import check_place

            check_place(Path(self.out), self.overwrite)


@flags
def prepare(
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="JSONL, JSON, Parquet or text files, folders, hf:NAME:SPLIT, -."),
    ],
    target: TargetFlags,
    template: TemplateFlags,
    keep: SampleFlags,
    to: OutFlags,
    json_: JsonFlag = False,
) -> None:
    """Turn conversations and texts into token ids with a mask over what the target wrote, by its own chat template.

    forerun data prepare answers.jsonl --target MODEL --out data --held-out 0.05
    """
    to.check(json_)
    template.options()
    found = target.outline(template.text())
    preparation = _preparation(data, found, template, keep.choice(found.window))
    if to.show is not None:
        _show(preparation, to.show)
    if to.out is not None:
        _write(preparation, Path(to.out), to, json_)


def _preparation(data: list[str], found: Outline, template: TemplateFlags, choice: Choice) -> Preparation:
    from forerun.training.data.prepare import Preparation
    from forerun.training.data.sources import Sources

    rendering = template.rendering(found.tokenizer, found.eos_token_ids)
    return Preparation(Sources(data, "DATA"), found, rendering, choice, template.apply_chat_template)


def _show(preparation: Preparation, count: int) -> None:
    from forerun.cli.learned import show_sample

    tokenizer, shown, number = preparation.target.tokenizer, preparation.again(), 0
    for number, (sample, _) in enumerate(shown.samples(), start=1):
        show_sample(sample, tokenizer)
        if number == count:
            return
    if number == 0:
        reasons = "; ".join(line.strip() for line in shown.dropped.lines())
        raise OptionError(shown.sources.option, f"no sample to show: {reasons or 'it is empty'}")


def _write(preparation: Preparation, out: Path, to: OutFlags, json_: bool) -> None:
    from forerun.training.data.prepare import write

    with progress("preparing", preparation.sources.count()) as advance:
        manifest = write(preparation, out, to.held_out, to.overwrite, advance)
    if preparation.of_others:
        notes().print(
            f"{preparation.of_others:,} samples are not answers of `forerun data regenerate`: a drafter learns most "
            f"from what {preparation.target.name} itself writes",
            markup=False,
        )
    if json_:
        Output().write(as_json(manifest))
        return
    parts = manifest["splits"] if to.held_out else {"": manifest}
    for name, part in parts.items():
        n = part["counts"]
        size = f"{n['samples']:,} samples, {n['tokens']:,} tokens ({n['learned']:,} learned), longest {n['longest']:,}"
        Output().write(f"{out / name}: {size}")
    if preparation.dropped.total:
        Output().write(f"left out of {preparation.records:,} records:")
        Output().write("\n".join(preparation.dropped.lines()))
