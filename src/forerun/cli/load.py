"""Loading for a command: target first, then drafters, so that an error names the flag of the model it is about."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from forerun.cli.console import notes, waiting
from forerun.errors import ModelError, OptionError

if TYPE_CHECKING:
    from forerun.cli.options import EngineFlags
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine
    from forerun.engine.propose import LoadedDrafter
    from forerun.target.hf import HFTarget


def load_engine(flags: EngineFlags, up_to: int | None = None) -> Engine:
    """The engine that the flags ask for.

    Args:
        flags: of the engine.
        up_to: K of drafters that set none, or the most they can make.

    Raises:
        ForerunError: with the flag to change.
    """
    configs = chosen_drafters(flags)  # what is wrong there is told before anything is loaded
    with waiting("loading"):
        return load_with(flags, configs, up_to)


def chosen_drafters(flags: EngineFlags) -> list[SpeculativeConfig]:
    """The drafters asked for, of a command that decodes plainly without one.

    Raises:
        OptionError: as `EngineFlags.drafters`; or there is none, and a number of tokens to draft.
    """
    configs = flags.drafters()
    if flags.num_speculative_tokens and all(config.name == "vanilla" for config in configs):
        raise OptionError("--num-speculative-tokens", "nothing drafts; name a --drafter, or leave it out")
    return configs


def with_drafters(flags: EngineFlags, doing: str, embedded: str | None = None) -> EngineFlags:
    """The flags with a choice of drafters where they name none, and a note that says so.

    Args:
        flags: of the engine.
        doing: for the note.
        embedded: drafters of the embedded target. Default: all.
    """
    if flags.drafters():
        return flags
    drafter = embedded if embedded and flags.embedded else ",".join(usual_drafters(flags))
    notes().print(f"--drafter was not given: {doing} {drafter}")
    return dataclasses.replace(flags, drafter=[drafter])


def usual_drafters(flags: EngineFlags) -> list[str]:
    """Methods where none are named: all that come with the embedded target; of any other what needs no model."""
    from forerun.drafters import DRAFTERS

    return [name for name in DRAFTERS if name != "vanilla"] if flags.embedded else ["ngram"]


def load_with(
    flags: EngineFlags, configs: Sequence[SpeculativeConfig], up_to: int | None = None, **more: Any
) -> Engine:
    """An engine over a target of its own, with these drafters instead of those of the flags.

    Where K is given by `up_to`, it is what is wanted: nothing adapts unless a policy was asked for. `more` are options
    of the engine that have no flag among these.
    """
    from forerun.engine import Engine, EngineOptions
    from forerun.engine.load import drafting_up_to
    from forerun.engine.tuning import scheduling_of

    options, target = EngineOptions.of({**flags.options(), **more}), load_target_of(flags)
    loaded = load_drafters_of(flags, target, configs)
    if up_to is not None:
        loaded = drafting_up_to(loaded, up_to)
    return Engine(target, loaded, options, scheduling=scheduling_of(target, loaded, options, look_up=up_to is None))


def load_target_of(flags: EngineFlags) -> HFTarget:
    """The target alone. ModelError names --target; OptionError: another flag about it."""
    from forerun.engine import EngineOptions
    from forerun.target.load import load_target

    options = EngineOptions.of(flags.options())
    check_revision(flags.source, flags.revision)
    _check_cache(flags.calibration_cache)
    try:
        return load_target(
            flags.source,
            dtype=cast(Any, options.dtype),  # a wrong one is refused there
            device=cast(Any, options.device),
            threads=options.threads,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            max_model_len=options.max_model_len,
        )
    except ModelError as error:
        raise _no_target(flags.source, error) from error


def _no_target(source: str, error: ModelError) -> ModelError:
    """Why it cannot be loaded; of a drafter's folder, that it is one."""
    from forerun.drafters.foreign import drafter_in

    drafter = drafter_in(source)
    if drafter is None:
        return _about("--target", error)
    return ModelError(f"--target: {source} holds {drafter}; the target is the model that it drafts for")


def check_revision(target: str, revision: str | None) -> None:
    """OptionError: a revision of what is on this machine, which has none."""
    from forerun.target.load import EMBEDDED

    if revision is not None and (target in EMBEDDED or os.path.exists(target)):
        raise OptionError("--revision", f"{target} is no model of the hub; leave it out")


def _check_cache(choice: str | None) -> None:
    """OptionError: a file where the folder of measured costs is meant."""
    if choice is not None and os.path.exists(choice) and not os.path.isdir(choice):
        raise OptionError("--calibration-cache", f"{choice} is a file; name a folder, or off")


def load_drafters_of(flags: EngineFlags, target: HFTarget, configs: Sequence[SpeculativeConfig]) -> list[LoadedDrafter]:
    """Drafters for a loaded target. ModelError names --drafter."""
    from forerun.engine import EngineOptions
    from forerun.engine.load import load_drafters

    try:
        return load_drafters(list(configs), target, EngineOptions.of(flags.options()))
    except ModelError as error:
        raise _about("--drafter", error) from error


def _about(flag: str, error: ModelError) -> ModelError:
    """The same kind of error, naming the flag: a drafter's model is loaded by what also loads targets."""
    message = str(error).removeprefix("--target: ")
    return type(error)(message if message.startswith("--") else f"{flag}: {message}")
