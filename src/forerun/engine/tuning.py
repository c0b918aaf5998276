"""Which scheduler an engine gets: its policy, the costs and the calibrations it goes by, and what is said about them.

Scheduling belongs to the engine, not to one drafter: where several drafters are configured their values must agree, or
be given once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.budget.bypass import MIN_PREDICTED_GAIN
from forerun.budget.calibration import Calibration, DraftSampleMethod
from forerun.budget.planner import SchedulerOptions
from forerun.budget.policy import Policy
from forerun.budget.profile import Profile
from forerun.budget.scheduler import Scheduler
from forerun.budget.stored import OFF, calibration_path, profiles_folder, read_calibration, read_profile
from forerun.drafters.config import agreed
from forerun.engine.intake import default_mode
from forerun.engine.load import EngineOptions
from forerun.engine.profile_key import calibrated_as, engine_key, model_of
from forerun.engine.propose import LoadedDrafter
from forerun.engine.schedule import Scheduling
from forerun.errors import OptionError
from forerun.target.base import Target

logger = logging.getLogger("forerun")

_AS_CONFIGURED = ", so drafts are made as configured; `forerun profile` measures them"


def scheduling_of(
    target: Target, loaded: Sequence[LoadedDrafter], options: EngineOptions, *, look_up: bool
) -> Scheduling:
    """The scheduling that options and configurations ask for.

    Args:
        target: whose costs are looked for.
        loaded: drafters with their configurations.
        options: of the engine.
        look_up: whether costs measured on this machine are used where no policy is given.

    Raises:
        OptionError: values that contradict each other or cannot be honoured, named.
    """
    configs = [entry.config for entry in loaded]
    policy = agreed("policy", configs, options.policy)
    table = agreed("confidence_cost_table_path", configs)
    gain = agreed("min_predicted_gain", configs, options.min_predicted_gain)
    threshold = agreed("confidence_threshold", configs)
    _check(policy, threshold, {"confidence_cost_table_path": table, "min_predicted_gain": gain})
    drafting = [entry for entry in loaded if entry.drafter.max_draft != 0]
    profile = None
    asked_for = any(value is not None for value in (policy, table, gain))
    if drafting and policy != "fixed" and (look_up or asked_for):
        level = logging.WARNING if asked_for else logging.INFO
        profile = _profile(target, drafting, options, table, policy, level)
    chosen: Policy = policy or ("delayed" if profile is not None else "fixed")
    exposed = _exposed(chosen, drafting, options)
    minimum = MIN_PREDICTED_GAIN if gain is None else gain
    method, calibrations = _calibrations(target, drafting, options, cached=profile is not None)
    scheduler = Scheduler(profile, SchedulerOptions(chosen, minimum), calibrations)
    return Scheduling(scheduler, threshold or 0.0, method, exposed)


def _check(policy: Policy | None, threshold: float | None, needs_costs: Mapping[str, Any]) -> None:
    """Options that would have no effect."""
    if policy == "threshold" and threshold is None:
        raise OptionError("confidence_threshold", "policy 'threshold' needs one, such as 0.4")
    for key, value in needs_costs.items():
        if policy == "fixed" and value is not None:
            raise OptionError(key, "policy 'fixed' does not look at costs; leave it away or choose another policy")


# ------------------------------------------------------------------------------------------------------ measured costs


def _profile(
    target: Target,
    drafting: Sequence[LoadedDrafter],
    options: EngineOptions,
    table: str | None,
    policy: Policy | None,
    level: int,
) -> Profile | None:
    """Costs of the target and all these drafters; None, and a line of this level that says so, where there are none."""
    if table is not None:
        profile = _from_file(table, target)
        for entry in drafting:
            if entry.name not in profile.drafts:
                raise OptionError("confidence_cost_table_path", f"{table} has no costs of the drafter {entry.name!r}")
        return profile
    if options.calibration_cache == OFF:
        logger.log(level, "calibration_cache is %r, so no costs are known and drafts are made as configured", OFF)
        return None
    try:
        found = _from_cache(target, options)
    except OptionError as error:
        if policy is not None:
            raise
        logger.warning("measured costs cannot be used, so drafts are made as configured: %s", error)
        return None
    if found is None:
        logger.log(level, "no costs of %s have been measured on this machine%s", target.name, _AS_CONFIGURED)
        return None
    missing = [entry.name for entry in drafting if not _measured(entry, found)]
    if missing:
        logger.log(level, "the measured costs of %s lack %s%s", target.name, ", ".join(missing), _AS_CONFIGURED)
        return None
    return found


def _from_cache(target: Target, options: EngineOptions) -> Profile | None:
    folder = profiles_folder(options.calibration_cache)
    if folder is None or not folder.is_dir():
        return None  # asked first: the key of a packed target takes a read of its weights
    return read_profile(engine_key(target), folder)


def _from_file(path: str, target: Target) -> Profile:
    try:
        return Profile.loads(Path(path).read_text(encoding="utf-8"), engine_key(target))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("confidence_cost_table_path", f"cannot read {path}: {error}") from None
    except OptionError as error:
        raise OptionError("confidence_cost_table_path", f"{path} {error.reason}") from None


def _measured(entry: LoadedDrafter, profile: Profile) -> bool:
    """Whether it was measured, with the model it has now: one of another size under the same name costs otherwise."""
    return entry.name in profile.drafts and profile.models.get(entry.name, "") == model_of(entry.config)


# -------------------------------------------------------------------------------------------------------- calibrations


def _calibrations(
    target: Target, drafting: Sequence[LoadedDrafter], options: EngineOptions, *, cached: bool
) -> tuple[DraftSampleMethod | None, dict[str, Calibration]]:
    """The calibration of every drafter that has one, under one draft method, and that method.

    A request has one key for all its drafters, while each draws as it is configured: tables of drafters that draw in
    the other way are filed under the common one.
    """
    folder = profiles_folder(options.calibration_cache) if cached else None
    found = {entry.name: one for entry in drafting if (one := _calibration(target, entry, folder)) is not None}
    if not found:
        return None, {}
    methods = {entry.name: entry.config.draft_sample_method for entry in drafting}
    common = methods[next(iter(found))]
    return common, {name: _filed_under(common, methods[name], one) for name, one in found.items()}


def _filed_under(common: DraftSampleMethod, own: DraftSampleMethod, calibration: Calibration) -> Calibration:
    if common == own:
        return calibration
    tables = [t for key in calibration.keys if key.draft_sample_method == own and (t := calibration.table(key))]
    return Calibration([replace(t, key=replace(t.key, draft_sample_method=common)) for t in tables])


def _calibration(target: Target, entry: LoadedDrafter, folder: Path | None) -> Calibration | None:
    """The file that was named; else what lies in the drafter's own folder, or in that of the profiles."""
    named = entry.config.confidence_calibration_path
    if named is not None:
        found = read_calibration(Path(named), "confidence_calibration_path")
        if found is None:
            raise OptionError("confidence_calibration_path", f"{named} does not exist")
        return found
    own = None if entry.config.model is None else Path(entry.config.model) / entry.config.calibration_name
    if own is not None and own.is_file():
        return usable_calibration(own)
    if folder is None:
        return None
    return usable_calibration(calibration_path(engine_key(target), calibrated_as(entry), folder))


def usable_calibration(path: Path) -> Calibration | None:
    """The tables of a file that nobody named; None: there is none, or a warning says why it is done without."""
    try:
        return read_calibration(path, "calibration")
    except OptionError as error:
        logger.warning("confidences are taken as they come: %s", error.reason)
        return None


# ------------------------------------------------------------------------------------------------------- what is exact


def _exposed(policy: Policy, drafting: Sequence[LoadedDrafter], options: EngineOptions) -> frozenset[str]:
    """Drafters that `global` would bias in rejection mode. OptionError if that is the engine's own mode."""
    if policy != "global":
        return frozenset()
    exposed = [entry.name for entry in drafting if entry.exposed]
    if exposed and default_mode(drafting, options.verify_mode) == "rejection":
        raise OptionError(
            "policy",
            f"'global' would change the output of {', '.join(exposed)}: in verify_mode 'rejection' it looks at "
            "confidences that know the tokens they decide about; use policy 'delayed', verify_mode 'coupled' or "
            "draft_sample_method 'greedy'",
        )
    return frozenset(exposed)


__all__ = ["scheduling_of", "usable_calibration"]
