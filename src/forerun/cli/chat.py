"""`forerun generate --chat`: a conversation over kept KV rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from forerun.cli.answers import Brush
from forerun.cli.console import notes
from forerun.cli.show import OWN, put
from forerun.engine import Completion, Engine
from forerun.errors import OptionError, PromptError
from forerun.sampling import Sampling

EXIT, RESET = "/exit", "/reset"


def chat(
    engine: Engine,
    sampling: Sampling,
    system: str | None,
    new_brush: Callable[[], Brush],
    show: bool = True,
) -> Iterator[Completion]:
    """Answers each turn read from standard input, until it ends or says /exit.

    Raises:
        OptionError: the model has no chat template, or a turn does not fit its window any more.
    """
    tokenizer = engine.target.tokenizer
    if tokenizer.chat_template is None:
        raise OptionError("--chat", f"{engine.target.name} has no chat template; use --prompt")
    opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages, conversation = list(opening), engine.conversation()
    for turn in _turns():
        if turn == RESET:
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.encode(tokenizer.render_chat(messages), False)
        paint, completion = new_brush(), None
        for chunk in conversation.stream(prompt, sampling):
            if show:
                put(paint(chunk))
            completion = chunk.completion
        if show:
            put([("\n", OWN)])
        assert completion is not None
        messages.append({"role": "assistant", "content": completion.text})
        yield completion


def _turns() -> Iterator[str]:
    """What the user says: typed at a prompt, or one line each from a pipe."""
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401 - line editing and history for input()

        notes().print(f"{EXIT} or Ctrl-D ends, {RESET} starts over", style="dim")
    while True:
        try:
            line = _typed() if typed else _line()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise PromptError("--chat", f"standard input is not valid UTF-8 ({error.reason})") from None
        if line.strip() == EXIT:
            return
        if line.strip():
            yield line.strip()


def _typed() -> str:
    """One line with editing. The prompt stays off a standard output that goes elsewhere."""
    if sys.stdout.isatty():
        return input("> ")
    notes().print("> ", end="")
    return input()


def _line() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8")
