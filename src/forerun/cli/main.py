"""`forerun`: the table of commands, and how an error of any of them becomes one line."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from forerun.cli.foreign import translate
from forerun.cli.options import DOTTED, fold_dotted
from forerun.errors import ForerunError, OptionError, nearest

COMMANDS = {
    "generate": ("forerun.cli.generate:generate", "Complete prompts, or chat."),
    "serve": ("forerun.cli.serve:serve", "Serve a model behind the OpenAI API."),
    "doctor": ("forerun.cli.doctor:doctor", "What is here, and will this target and drafter work together?"),
    "train": ("forerun.cli.train:train", "Train a drafter for your own model."),
    "verify": ("forerun.cli.verify:verify", "Is speculative decoding lossless here? A certificate."),
    "bench": ("forerun.cli.bench:bench", "Measure drafters against plain decoding; `bench load`: many requests."),
    "compare": ("forerun.cli.compare:compare", "Which drafter is best here? All of them on the same prompts."),
    "simulate": ("forerun.cli.simulate:simulate", "Loads, drafters and policies on hardware that is not here."),
    "recommend": ("forerun.cli.recommend:recommend", "What to run here: the speed-up to expect, and the best K."),
    "profile": ("forerun.cli.profile:profile", "Measure what a step costs on this machine; scheduling goes by it."),
    "calibrate": ("forerun.cli.calibrate:calibrate", "Fit a drafter's confidences to what is really accepted."),
    "data": ("forerun.cli.data:data", "Prepare training data; have prompts answered by the target."),
    "demo": ("forerun.cli.demo:demo", "Every drafter against plain decoding on the embedded model."),
}
"""name -> ("module:function", summary). A module is imported when its command runs, so that help stays quick."""

FAILED, WRONG_USAGE, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
"""Exit codes: a claim or a model failed; the user's input cannot be used; Ctrl-C; the reader of a pipe went away."""

UsageError: Any = typer.BadParameter.__mro__[1]
"""Base of what typer raises for a wrong command line; typer itself does not export it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. A traceback is always a bug of ours."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _closed_pipe()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED


def _run(args: list[str]) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    command: Any = typer.main.get_command(_app(args))
    known = _known_options(command, args)
    try:
        code = command.main(args=fold_dotted(args) or ["--help"], prog_name="forerun", standalone_mode=False)
    except UsageError as error:
        return _complain(_usage_line(error, args, known))
    except typer.Abort:
        return INTERRUPTED
    except OptionError as error:
        option = flag_of(error.option, args, known)
        return _complain(f"{option}: {str(error).removeprefix(f'{error.option}: ')}")
    except ForerunError as error:
        return _complain(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that fills up, a file that goes away: wherever it happens
        return _complain(_system_line(error))
    return code if isinstance(code, int) else 0


def _app(args: Sequence[str]) -> typer.Typer:
    """All commands by name, of which only the one that is asked for is imported."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.callback(help=_ABOUT)(_root)
    for name, (path, summary) in COMMANDS.items():
        found = _load(path, args[1:]) if args and name == args[0] else _stub
        if isinstance(found, Mapping):
            app.add_typer(_group(found, summary), name=name)
        else:
            app.command(name, short_help=summary)(found)
    return app


def _group(commands: Mapping[str, Callable[..., Any]], summary: str) -> typer.Typer:
    """Commands with a word in common: `forerun data prepare`."""
    group = typer.Typer(help=summary, rich_markup_mode="rich")
    for name, function in commands.items():
        group.command(name)(function)
    return group


_ABOUT = """Lossless speculative decoding: the same text, sooner."""


def _print_version(asked: bool) -> None:
    if asked:
        from forerun import __version__

        print(f"forerun {__version__}")  # noqa: T201 - it is the result
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def _root(version: _Version = False) -> None:
    """Nothing: the options of `forerun` itself act by their callbacks."""


def _stub() -> None:
    raise AssertionError("only a command that is named in the arguments runs")


def _load(path: str, args: Sequence[str]) -> Callable[..., Any] | dict[str, Callable[..., Any]]:
    """A command, or several that have a word in common."""
    module, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if hasattr(found, "for_arguments"):  # its options, or which of several commands it is, depend on them
        found = found.for_arguments(args)
    if isinstance(found, Mapping):
        return {name: _quiet(function) for name, function in found.items()}
    return _quiet(found)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(**given: Any) -> Any:
        try:
            return function(**given)
        except BrokenPipeError:  # typer would make it exit code 1, which says that something failed
            return _closed_pipe()

    return command


def _closed_pipe() -> int:
    """Whoever read our output has seen enough. What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


# ------------------------------------------------------------------------------------------------------ error lines


def _complain(line: str) -> int:
    """One line on stderr, whatever the message was made of."""
    sys.stderr.write(f"error: {' '.join(line.split())}\n")
    return WRONG_USAGE


def _known_options(group: Any, args: Sequence[str]) -> list[str]:
    command = _named(group, args)
    params = command.params
    return ["--help", *(name for param in params if param.param_type_name == "option" for name in param.opts)]


def _named(group: Any, args: Sequence[str]) -> Any:
    """The command, or group of commands, that the arguments begin with."""
    inner = group.commands.get(args[0]) if args and hasattr(group, "commands") else None
    return group if inner is None else _named(inner, args[1:])


def _system_line(error: OSError) -> str:
    """What the operating system refused, and which file it was about."""
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{files}: {error.strerror or error}" if files else str(error.strerror or error)


def _usage_line(error: Any, args: Sequence[str], known: Sequence[str]) -> str:
    option: str = getattr(error, "option_name", None) or ""
    if type(error).__name__ == "NoSuchOption":
        return _unknown_option(option, args, known)
    parameter = getattr(error, "param", None)
    if parameter is not None:
        option = next((o for o in parameter.opts if o.startswith("--")), str(parameter.name).upper())
    message = str(getattr(error, "message", error)).strip()
    if type(error).__name__ == "MissingParameter":
        message = "is required"
    if message.startswith("Got unexpected extra argument"):
        return _extra(message, error.ctx)
    if not option and args and args[0] not in COMMANDS and not args[0].startswith("-"):
        return f"no command is called {args[0]!r}; {nearest(args[0], COMMANDS)}"
    if not option and hasattr(getattr(getattr(error, "ctx", None), "command", None), "commands"):
        return _unnamed(args, error.ctx.command.commands)
    return f"{option}: {message}" if option else message


def _extra(message: str, context: Any) -> str:
    """Words that belong to no option; most often a value was meant, whose blanks part it."""
    words = message.partition(" (")[2].removesuffix(")")
    arguments = [param for param in context.command.params if param.param_type_name == "argument"]
    places = [param.metavar or param.name.upper() for param in arguments]
    takes = f"{' '.join(places)} and options" if places else "options only"
    command = context.command_path.removeprefix("forerun ")
    return f"unexpected extra '{words}': {command} takes {takes}; quote a value that has blanks"


def _unnamed(args: Sequence[str], inner: Sequence[str]) -> str:
    """The first word of several commands without a second one, or with one that is unknown."""
    typed = next((arg for arg in args[1:] if not arg.startswith("-")), None)
    if typed is None:
        return f"{args[0]}: name one of {', '.join(inner)}"
    return f"no command is called {args[0]} {typed!r}; {nearest(typed, inner)}"


def _unknown_option(name: str, args: Sequence[str], known: Sequence[str]) -> str:
    """Typed as another engine spells it, or mistyped. Typer reports `-m` for `-md`, so look at what was typed."""
    typed = [arg.partition("=")[0] for arg in args]
    for word in [name, *(word for word in typed if word.startswith(name))]:
        answer = translate(word, args[0])
        if answer is not None:
            return f"{word}: {answer}"
    dashed = name.replace("_", "-")
    return f"{name}: unknown option; {f'did you mean {dashed!r}?' if dashed in known else nearest(name, known)}"


def flag_of(option: str, args: Sequence[str], known: Sequence[str]) -> str:
    """The flag a user typed for an option the library names: `top_p` is `--top-p`."""
    typed = {arg.partition("=")[0] for arg in args}
    if option.startswith("-") or option.isupper():  # an argument's name is in capitals
        return option
    if option in ("prompt", "messages"):
        return "--prompts" if "--prompts" in typed else "--chat" if "--chat" in typed else "--prompt"
    if option in ("method", "model") and "--drafter" in typed:
        return "--drafter"
    flag = f"--{option.replace('_', '-')}"
    if flag in known:
        return flag
    return DOTTED.replace("KEY", option) if DOTTED in known else option
