"""`forerun data regenerate`: prompts answered by the target itself, to be learned from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import Output, as_json, notes, progress, waiting
from forerun.cli.options import EngineFlags, JsonFlag, SamplingFlags, flags
from forerun.cli.template import TemplateFlags
from forerun.errors import OptionError
from forerun.folders import check_file

if TYPE_CHECKING:
    from forerun.training.data.jobs import Answerer, Job
    from forerun.training.data.regenerate import Regeneration

MAX_TOKENS = 2048
"""Tokens of an answer where `--max-tokens` is not given."""
FAILED = 1
"""Exit code where a prompt has no answer."""


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Answers by servers instead of our engine."""

    url: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An OpenAI-compatible server that answers; may be repeated.")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            show_default=False,
            help="Of the servers; the variable is not seen in lists of processes.",
        ),
    ] = None
    concurrency: Annotated[int, typer.Option(help="Requests at a time, per server.")] = 16
    retries: Annotated[int, typer.Option(help="How often a request that got no answer is made again.")] = 6
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 600.0
    return_token_ids: Annotated[
        bool, typer.Option("--return-token-ids", help="Ask servers for the ids they emitted (vLLM and forerun do).")
    ] = False

    def check(self) -> None:
        """OptionError names a value that cannot be used, or that has nothing to act on."""
        for name, least in (("concurrency", 1), ("retries", 0), ("timeout", 0.001)):
            if not least <= getattr(self, name) < float("inf"):
                raise OptionError(f"--{name}", f"must be at least {least}, got {getattr(self, name)}")
        if self.return_token_ids and not self.url:
            raise OptionError("--return-token-ids", "belongs to --url; the ids our engine emits are always kept")


@flags
def regenerate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPTS", help="As DATA of `forerun data prepare`.")],
    engine: EngineFlags,
    sampling: SamplingFlags,
    template: TemplateFlags,
    servers: ServerFlags,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="JSONL to write, or to go on with.")],
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.")] = None,
    json_: JsonFlag = False,
) -> int:
    """Have prompts answered by the target itself, as it will be served. Interrupted, it goes on when run again.

    forerun data regenerate prompts.jsonl --target MODEL --temperature 0.7 --out answers.jsonl
    """
    servers.check()
    if limit is not None and limit < 1:
        raise OptionError("--limit", f"must be at least 1, got {limit}")
    path = Path(out)
    check_file("--out", out, grows=True)
    given = sampling.given(max_tokens=MAX_TOKENS)
    if given["max_tokens"] < 1:
        raise OptionError("--max-tokens", "must be at least 1, got 0: an answer of no token teaches nothing")
    if "logprobs" in given:
        raise OptionError("--logprobs", "are not kept with answers; leave it away")
    run = _regeneration(prompts, given.pop("n", 1), template, limit)
    total = _look(run)
    started = time.perf_counter()
    with (_servers if servers.url else _engine)(engine, given, template, servers) as answerer:
        _answer(run, answerer, path, total)
    _account(run, path, time.perf_counter() - started, json_)
    return FAILED if run.failed.total else 0


def _regeneration(prompts: list[str], samples: int, template: TemplateFlags, limit: int | None) -> Regeneration:
    from forerun.training.data.regenerate import Regeneration
    from forerun.training.data.sources import Sources

    template.options()
    return Regeneration(Sources(prompts, "PROMPTS"), samples, template.apply_chat_template, limit)


def _look(run: Regeneration) -> int:
    """Reads all prompts once, so that what is wrong with the last one is told before the first is answered."""
    with waiting("reading the prompts"):
        total = sum(1 for _ in run.jobs(set(), run.left_out))
    if not total:
        reasons = "; ".join(line.strip() for line in run.left_out.lines())
        raise OptionError("PROMPTS", f"there is nothing to answer{f': {reasons}' if reasons else ''}")
    return total


def _answer(run: Regeneration, answerer: Answerer, path: Path, total: int) -> None:
    from forerun.training.data.regenerate import AnswerFile

    with AnswerFile(path, answerer.model, answerer.sampling) as file:
        left = sum(1 for _ in run.jobs(file.done))
        if left < total:
            notes().print(f"{path} has {total - left:,} of {total:,} answers; {left:,} are left")
        began = time.perf_counter()
        with progress("answering", left) as advance:

            def tell(_: Job) -> None:
                advance(1, f"{run.tokens / (time.perf_counter() - began):,.0f} tokens/s")

            run.run(answerer, file, tell)


@contextmanager
def _engine(
    flags: EngineFlags, given: Mapping[str, Any], template: TemplateFlags, _: ServerFlags
) -> Iterator[Answerer]:
    text = template.text()
    with flags.load() as engine:
        from forerun.target.tokenizer import HFTokenizer
        from forerun.training.data.engine_answers import EngineAnswers

        tokenizer = engine.target.tokenizer
        if text is not None:
            assert isinstance(tokenizer, HFTokenizer)
            tokenizer = HFTokenizer(tokenizer.inner, text)
        rendering = template.rendering(tokenizer, engine.target.eos_token_ids)
        yield EngineAnswers(engine, rendering, engine.default_sampling(**given))


@contextmanager
def _servers(
    engine: EngineFlags, given: Mapping[str, Any], template: TemplateFlags, flags: ServerFlags
) -> Iterator[Answerer]:
    from forerun.training.data.server import Server
    from forerun.training.data.server_answers import ServerAnswers, the_model

    for f in fields(engine):
        if f.name != "target" and getattr(engine, f.name) != f.default:
            raise OptionError(f.name, "belongs to decoding here; with --url the servers decode")
    if template.chat_template is not None:
        raise OptionError(
            "--chat-template", "belongs to decoding here; servers use the template they were started with"
        )
    servers = [Server(url, flags.api_key, flags.timeout) for url in flags.url or ()]
    yield ServerAnswers(
        servers,
        the_model(servers, engine.target),
        given,
        template_options=template.options(),
        concurrency=flags.concurrency,
        retries=flags.retries,
        token_ids=flags.return_token_ids,
    )


def _account(run: Regeneration, path: Path, seconds: float, json_: bool) -> None:
    """What was answered and what was not, on stderr, or as JSON on stdout."""
    groups = {"left_out": run.left_out, "failed": run.failed, "cut_short": run.cut}
    if json_:
        counts = {"answered": run.answered, "tokens": run.tokens, "seconds": round(seconds, 3)}
        Output().write(
            as_json({"out": str(path), **counts, **{name: tally.as_dict() for name, tally in groups.items()}})
        )
        return
    rate = f"{run.tokens:,} tokens in {seconds:.1f} s ({run.tokens / seconds:,.1f} tokens/s)"
    notes().print(f"{path}: {run.answered:,} answers, {rate}")
    told = {"left_out": "ask nothing", "failed": "without an answer; run again to try them", "cut_short": "cut short"}
    for name, tally in groups.items():
        if tally.total:
            notes().print(f"{told[name]}:", *tally.lines(), sep="\n")
