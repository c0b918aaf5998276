"""What the page shows of the loaded profile: costs, how far confidences can be believed, speeds under load."""

from __future__ import annotations

import logging
import shlex
from dataclasses import asdict
from typing import Any

from forerun.budget.profile import Profile
from forerun.budget.stored import profiles_folder, read_load_study
from forerun.drafters.config import SpeculativeConfig
from forerun.errors import OptionError
from forerun.serve.page_frontier import expected_frontier
from forerun.serve.service import Service

logger = logging.getLogger("forerun.serve")

DENSE = 512
"""Most rows of a step whose costs are listed one by one."""


async def profile_document(service: Service) -> dict[str, Any]:
    """The document of /forerun/profile.

    `flags` are the model and its drafters for a command; `profile` is null where costs are not known, `load` where
    nothing was measured under load; `expected` is what costs and acceptance let expect of it. Times are in seconds.
    """
    scheduler = service.engine.engine.core.schedule.scheduler
    # Costs follow what steps take, so they are looked at between two steps.
    profile, expected = await service.engine.call(lambda: _now(service))
    calibrations = {name: one for name, one in scheduler.calibrations.items() if one.keys}
    return {
        "model": service.target.name,
        "drafters": [entry.name for entry in service.loaded],
        "flags": drafter_flags(service.target.name, [entry.config for entry in service.loaded]),
        "scheduling": {
            "policy": scheduler.options.policy,
            "adapts": scheduler.adapts,
            "min_predicted_gain": scheduler.options.min_predicted_gain,
        },
        "profile": None if profile is None else _costs(profile),
        "calibrations": [
            {"drafter": name, "tables": [asdict(table) for key in one.keys if (table := one.table(key))]}
            for name, one in sorted(calibrations.items())
        ],
        "reliability": service.reliability.as_list(),
        "expected": expected,
        "load": None if profile is None else await service.lanes.text(0, _load, service, profile),
    }


def drafter_flags(model: str, configs: list[SpeculativeConfig]) -> str:
    """The target and its drafters as a shell takes them: what a command measures must be what is served."""
    drafters = [one.labelled(one.model or one.name) for one in configs if one.name != "vanilla"]
    return shlex.join([model, *(["--drafter", ",".join(drafters)] if drafters else [])])


def _now(service: Service) -> tuple[Profile | None, list[dict[str, Any]]]:
    core = service.engine.engine.core
    scheduler, requests = core.schedule.scheduler, service.engine.engine.options.max_num_seqs
    profile = scheduler.profile
    if profile is None:
        return None, []
    longest = {entry.name: entry.longest(1) for entry in service.loaded}
    return profile, expected_frontier(scheduler, profile, longest, requests)


def _costs(profile: Profile) -> dict[str, Any]:
    curve = profile.verify.tokens
    last = min(curve.counts[-1], DENSE)
    return {
        "key": asdict(profile.key),
        "target": {
            "measured": {"rows": list(curve.counts), "seconds": list(curve.seconds)},
            "planned": {"rows": list(range(1, last + 1)), "seconds": curve.over(1, last).tolist()},
        },
        "drafters": [
            {
                "drafter": name,
                "lengths": [
                    {"k": k, "requests": list(one.counts), "seconds": list(one.seconds)}
                    for k, one in zip(cost.lengths, cost.curves, strict=True)
                ],
            }
            for name, cost in sorted(profile.drafts.items())
        ],
    }


def _load(service: Service, profile: Profile) -> dict[str, Any] | None:
    """What `forerun bench load` kept beside this profile."""
    folder = profiles_folder(service.engine.engine.options.calibration_cache)
    if folder is None:
        return None
    try:
        return read_load_study(profile.key, folder)
    except OptionError as error:
        logger.warning("what was measured under load cannot be shown: %s", error)
        return None


__all__ = ["drafter_flags", "profile_document"]
