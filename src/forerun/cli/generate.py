"""`forerun generate`: complete prompts while streaming, or chat."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.console import Output, as_json, notes, progress
from forerun.cli.options import EngineFlags, JsonFlag, OutputFlag, PromptFlags, SamplingFlags, flags
from forerun.cli.prompts import expand, read_prompts
from forerun.errors import OptionError

if TYPE_CHECKING:
    from forerun.cli.answers import Place, Task
    from forerun.engine import Completion, Engine
    from forerun.sampling import Sampling

MAX_TOKENS = 128
"""Where `--max-tokens` is not given. A chat answer may fill the window instead."""


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    """How prompts are put and what is shown of the answers."""

    chat: Annotated[bool, typer.Option("--chat", help="Talk to the model; /exit or Ctrl-D ends.")] = False
    system: Annotated[str | None, typer.Option(help="System message of --chat; @FILE reads a file.")] = None
    prediction: Annotated[
        str | None, typer.Option(help="Text expected in the answer, for ngram and +lookup; @FILE reads a file.")
    ] = None
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour accepted draft tokens.")] = False
    show_rejected: Annotated[
        bool, typer.Option("--show-rejected", help="Colour accepted draft tokens and strike out refused ones.")
    ] = False

    @property
    def colours(self) -> bool:
        return self.show_drafts or self.show_rejected


@flags
def generate(
    engine: EngineFlags,
    prompts: PromptFlags,
    sampling: SamplingFlags,
    show: ShowFlags,
    json_: JsonFlag = False,
    output: OutputFlag = None,
) -> None:
    """Complete prompts, streaming the text: the same text with any drafter and without one.

    forerun generate --drafter small --show-drafts --prompt "def area(shape):"
    """
    destination = Output(output)
    streams = not json_ and output is None
    _check(show, prompts, streams)
    chosen = sampling.given(**({} if show.chat else {"max_tokens": MAX_TOKENS}))
    records = [] if show.chat else read_prompts(prompts)
    prediction = None if show.prediction is None else expand("--prediction", show.prediction)
    with engine.load() as loaded:
        from forerun.cli.answers import Task, as_document, as_text

        ready = loaded.default_sampling(**({"max_tokens": None} | chosen))
        started = time.perf_counter()
        if show.chat:
            answers = _chat(loaded, ready, show, streams)
        else:
            task = Task(records, ready, prediction)
            answers = _stream(loaded, task, show) if streams else _collect(loaded, task)
    if not streams:
        destination.write(as_json(as_document(answers)) if json_ else as_text(answers))
    if not json_ and answers:
        _conclude([completion for _, completion in answers], time.perf_counter() - started, show)


def _check(show: ShowFlags, prompts: PromptFlags, streams: bool) -> None:
    """Options that contradict each other, before anything is read or loaded."""
    if show.colours and not streams:
        flag = "--show-rejected" if show.show_rejected else "--show-drafts"
        raise OptionError(flag, "colours text on the screen; leave --json and --output away")
    if show.system is not None and not show.chat:
        raise OptionError("--system", "belongs to --chat")
    if not show.chat:
        return
    clashes = {
        "--prompt": prompts.prompt, "--prompts": prompts.prompts, "--limit": prompts.limit,
        "--prediction": show.prediction, "--apply-chat-template": prompts.apply_chat_template or None,
    }  # fmt: skip
    for option, value in clashes.items():
        if value is not None:
            raise OptionError(option, "cannot be combined with --chat, which reads turns from standard input")


def _stream(engine: Engine, task: Task, show: ShowFlags) -> list[tuple[Place, Completion]]:
    """Answers on the screen while they come."""
    from forerun.cli.answers import Scroll, answer, brush

    done: list[tuple[Place, Completion]] = []
    scroll: Scroll | None = None  # its first heading waits until the prompts have been accepted
    for place, chunk in answer(engine, task):
        scroll = scroll or Scroll(task.places, lambda: brush(engine, show.colours, show.show_rejected))
        scroll.show(place, chunk)
        if chunk.completion is not None:
            done.append((place, chunk.completion))
    return sorted(done, key=lambda pair: task.places.index(pair[0]))


def _collect(engine: Engine, task: Task) -> list[tuple[Place, Completion]]:
    """Answers in the background, with a progress bar in tokens."""
    from forerun.cli.answers import answer

    most = engine.target.window if task.sampling.max_tokens is None else task.sampling.max_tokens
    done: list[tuple[Place, Completion]] = []
    with progress("generating", most * len(task.places)) as advance:
        for place, chunk in answer(engine, task):
            advance(len(chunk.token_ids))
            if chunk.completion is not None:
                done.append((place, chunk.completion))
                advance(most - len(chunk.completion.token_ids))
    return sorted(done, key=lambda pair: task.places.index(pair[0]))


def _chat(engine: Engine, sampling: Sampling, show: ShowFlags, streams: bool) -> list[tuple[Place, Completion]]:
    from forerun.cli.answers import Place, brush
    from forerun.cli.chat import chat

    system = None if show.system is None else expand("--system", show.system)
    turns = chat(engine, sampling, system, lambda: brush(engine, show.colours, show.show_rejected), streams)
    return [(Place(0, turn, 0), completion) for turn, completion in enumerate(turns)]


def _conclude(completions: list[Completion], seconds: float, show: ShowFlags) -> None:
    from forerun.cli.answers import summary

    if show.colours:
        from forerun.cli.show import legend

        notes().print(legend(show.show_rejected))
    notes().print(summary(completions, seconds), style="dim")
