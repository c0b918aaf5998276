"""`forerun train KIND`: a drafter for your own model. Its flags are the fields of `TrainingConfig`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from forerun.cli.console import as_json, notes, screen, waiting
from forerun.cli.options import DRAFT, JsonFlag
from forerun.drafters import DRAFTERS
from forerun.errors import OptionError, TrainingFailed
from forerun.training.config import TrainingConfig

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from forerun.training.config import Chosen

FAILED = 1
"""Exit code where a run that had begun cannot go on."""
SIGNALLED = 128
"""Plus the signal's number: exit code of a run that was stopped, and goes on when it is started again."""
OWN = "draft__"
"""Before the names of parameters that stand for settings of the kind."""
OTHER_NAMES = {"target": ("--model",)}
"""Flags that say the same, as every other command takes them."""
SETTINGS = {name: field for name, field in TrainingConfig.model_fields.items() if name not in ("kind", "draft")}


def _control(text: str, name: str, **more: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel="Control", **more)


def train(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="The drafter; `forerun train KIND --help` shows its own settings."),
    ] = None,
    config: Annotated[
        str | None, _control("YAML of these settings, the kind's own under `draft`.", "--config", metavar="FILE")
    ] = None,
    plan: Annotated[bool, _control("Print memory, disk and time; train and write nothing.", "--plan")] = False,
    plan_measure: Annotated[bool, _control("The same, with a few passes timed.", "--plan-measure")] = False,
    restart: Annotated[bool, _control("Begin anew where --out holds a run; it is lost.", "--restart")] = False,
    json_: JsonFlag = False,
    **given: Any,
) -> int:
    """Train a drafter for a model, on samples made by `forerun data prepare`.

    Run the same command again to go on after a stop. A flag goes before --config, that before what is derived from data
    and machine, that before the default; all are printed with where they are from.
    """
    from forerun.training.config import choose, value_of

    own = {name.removeprefix(OWN): given.pop(name) for name in list(given) if name.startswith(OWN)}
    draft = {name: value_of(said(texts)) for name, texts in own.items() if texts}
    settings = {name: said(value) for name, value in given.items() if value not in (None, False, [])}
    chosen = choose(kind, settings, draft, None if config is None else Path(config))
    if plan or plan_measure:
        return _plan(chosen, plan_measure, json_)
    if json_:
        raise OptionError("--json", "is for --plan; what a run measures is in its metrics.jsonl")
    return _train(chosen, restart)


def said(value: Any) -> Any:
    """A list that was given flag by flag, as if once with commas. The kind's settings all come so: what is no list is
    then refused by name, for which of them are lists is not known before the kind is."""
    return ",".join(value) if isinstance(value, (list, tuple)) else value


def _train(chosen: Chosen, restart: bool) -> int:
    from forerun.cli.train_screen import TrainScreen
    from forerun.training.run import train as run

    try:
        signal = run(chosen, TrainScreen(), restart=restart)
    except TrainingFailed as error:
        notes().print(f"error: {' '.join(str(error).split())}", markup=False)
        return FAILED
    return SIGNALLED + signal if signal else 0


def _plan(chosen: Chosen, measured: bool, json_: bool) -> int:
    from forerun.cli.train_screen import show_plan, show_settings
    from forerun.training.run import plan_run

    with waiting("planning"):
        complete, plan = plan_run(chosen, measured)
    if json_:
        print(as_json(plan.as_dict()))  # noqa: T201 - a result, on stdout
    else:
        show_settings(complete)
        show_plan(plan, screen())
    return 0


# --------------------------------------------------------------------------------------------------------------- flags


def for_arguments(args: Sequence[str]) -> Callable[..., int]:
    """The command with a flag for every setting, and for every setting of the kind that the arguments name.

    `--draft.NAME` is a flag whatever NAME is: which ones there are depends on the kind, which a file may say.
    """
    named = inspect.Parameter.KEYWORD_ONLY
    own = [p for p in inspect.signature(train, eval_str=True).parameters.values() if p.name != "given"]
    schema = [inspect.Parameter(n, named, default=_off(f), annotation=_flag(n, f)) for n, f in SETTINGS.items()]
    draft = [
        inspect.Parameter(f"{OWN}{name}", named, default=None, annotation=annotation)
        for name, annotation in _draft_flags(args).items()
    ]

    def command(**given: Any) -> int:
        return train(**given)

    command.__doc__ = train.__doc__
    parameters = [own[0], *(p.replace(kind=named) for p in [*own[1:], *schema, *draft])]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


train.for_arguments = for_arguments  # type: ignore[attr-defined]


def _flag(name: str, field: FieldInfo) -> Any:
    """What typer needs to know of a setting. Values are text: the schema itself reads them, and says what is wrong."""
    extra = field.json_schema_extra
    panel = str(extra["panel"]) if isinstance(extra, dict) else None
    shape = None if field.annotation is bool else _metavar(field.annotation)
    kind: Any = bool if shape is None else list[str] | None if shape == "LIST" else str | None
    names = [_option(name), *OTHER_NAMES.get(name, ())]
    return Annotated[kind, typer.Option(*names, help=_help(field), rich_help_panel=panel, metavar=shape)]


def _draft_flags(args: Sequence[str]) -> dict[str, Any]:
    """name -> annotation, of the kind's own settings and of others that were typed."""
    typed = [arg.partition("=")[0].removeprefix(DRAFT) for arg in args if arg.startswith(DRAFT)]
    flags = {
        name.replace("-", "_"): Annotated[list[str] | None, typer.Option(f"{DRAFT}{name}", hidden=True)]
        for name in typed
    }
    kind = next((arg for arg in args if arg in DRAFTERS or re.fullmatch(r"[\w.]+:\w+", arg)), None)
    return flags | ({} if kind is None else _settings_of(kind))


def _settings_of(kind: str) -> dict[str, Any]:
    """Flags for the settings of a kind; none for one that is not trained, which is refused when the command runs."""
    from forerun.training.config import learned_kind

    try:
        settings = learned_kind(kind).settings_class
    except OptionError:
        return {}
    return {
        name: Annotated[
            list[str] | None,
            typer.Option(
                f"{DRAFT}{name.replace('_', '-')}",
                help=_help(field),
                rich_help_panel=f"Settings of {kind}",
                metavar=_metavar(field.annotation),
            ),
        ]
        for name, field in settings.model_fields.items()
    }


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _off(field: FieldInfo) -> Any:
    return False if field.annotation is bool else None


def _help(field: FieldInfo) -> str:
    """The description with the default; of what is derived it says itself how."""
    text, value = field.description or "", field.default
    if field.is_required() or value is None or value == () or value is False:
        return text
    shown = ",".join(f"{item:g}" for item in value) if isinstance(value, tuple) else str(value)
    return f"{text} Default: {shown}."


def _metavar(annotation: Any) -> str:
    """In the help: choices, INTEGER, NUMBER, LIST or TEXT."""
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return _metavar(next(part for part in get_args(annotation) if part is not type(None)))
    if get_origin(annotation) in (tuple, list):
        return "LIST"
    return {int: "INTEGER", float: "NUMBER", bool: "BOOLEAN"}.get(annotation, "TEXT")
