"""Who takes part in `forerun compare`: drafters loaded beside a target, and engines over them one at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from forerun.cli.load import load_drafters_of, load_target_of, usual_drafters
from forerun.cli.measuring import fixed, labels_of
from forerun.cli.recommend import loading_flags
from forerun.errors import ForerunError, OptionError

if TYPE_CHECKING:
    from forerun.bench.comparing.study import Contender, Result
    from forerun.bench.load.trial import Way
    from forerun.cli.bench_load import LoadFlags
    from forerun.cli.options import EngineFlags
    from forerun.drafters.config import SpeculativeConfig
    from forerun.engine import Engine
    from forerun.engine.propose import LoadedDrafter
    from forerun.engine.schedule import Scheduling
    from forerun.target.hf import HFTarget


class Lineup:
    """Who is compared: the drafters that were asked for, or those that come with the target.

    Args:
        flags: of models and engine.
        load: the loads, for the engine's limits.

    Raises:
        OptionError: what was asked for cannot be compared.
    """

    def __init__(self, flags: EngineFlags, load: LoadFlags):
        self._asked = bool(flags.drafters())
        self.configs = _configs(flags)
        self.flags = _sized(flags, load, self.configs)
        self._labels = labels_of(self.configs)
        self._missing: dict[str, str] = {}

    def plain(self) -> Engine:
        """Decodes without drafts and pays for no drafter."""
        from forerun.engine import Engine, EngineOptions

        flags = dataclasses.replace(self.flags, policy=None, min_predicted_gain=None)
        return Engine(load_target_of(flags), [], EngineOptions.of(flags.options()))

    def contenders(self) -> list[Contender]:
        """Everybody, loaded. One that comes with the target, but not with this package, is missing instead.

        Raises:
            ForerunError: one that was asked for cannot be loaded.
        """
        corner = Corner(self.flags)
        found = []
        for config, label in zip(self.configs, self._labels, strict=True):
            try:
                found.append(corner.contender(config, label))
            except ForerunError as error:
                if self._asked:
                    raise
                self._missing[config.name] = str(error).removeprefix("--drafter: ").removesuffix("; name another one")
        return found

    def absent(self, result: Result) -> dict[str, str]:
        """What is not in the report, and the command that makes it."""
        from forerun.drafters import DRAFTERS

        target = shlex.quote(self.flags.source)
        there = {one.facts.kind for one in result.contenders}
        lines = {kind: self._how(kind, target) for kind in DRAFTERS if kind not in there and kind != "vanilla"}
        for one in result.contenders:
            drafter = one.command
            if len(one.ways) == 1 and self.flags.policy != "fixed":
                lines[f"scheduling of {one.label}"] = f"its costs were not measured here: `forerun profile {drafter}`"
            if not result.confidence(one.label)["calibrated"]:
                lines[f"calibration of {one.label}"] = f"none for these conditions: `forerun calibrate {drafter}`"
        return lines

    def _how(self, kind: str, target: str) -> str:
        reason = self._missing.get(kind, "not asked for")
        if kind == "ngram":
            return f"{reason}: `--drafter ngram`"
        train = f"`forerun train {kind} --target {target} --data DATA --out runs/{kind}`"
        model = "a smaller model with the same vocabulary: `--drafter MODEL`; or " if kind == "small" else ""
        return f"{reason}; {model}train one: {train}, then `--drafter runs/{kind}/best`"


def _configs(flags: EngineFlags) -> list[SpeculativeConfig]:
    from forerun.drafters.config import parse_config

    asked = flags.drafters()
    configs = [config for config in asked if config.name != "vanilla"]
    if asked and not configs:
        raise OptionError("--drafter", "vanilla is what every drafter is measured against; name another one")
    if asked:
        return configs
    return [parse_config(name) for name in usual_drafters(flags)]


def _sized(flags: EngineFlags, load: LoadFlags, configs: Sequence[SpeculativeConfig]) -> EngineFlags:
    """The flags with limits for the largest load, and for larger ones that may be added to a file of rows later."""
    from forerun.engine.admission import Limits

    seqs = max(one.concurrency or 1 for one in load.loads)
    if flags.max_num_seqs is not None and seqs > flags.max_num_seqs:
        raise OptionError("--concurrency", f"{seqs} is more than --max-num-seqs ({flags.max_num_seqs})")
    ready = dataclasses.replace(flags, max_num_seqs=flags.max_num_seqs or max(seqs, Limits().max_num_seqs))
    if seqs > 32 and flags.max_num_batched_tokens is None:
        # Rows enough for every draft of the batch, also while a quarter of the step is kept for prefill.
        longest = max(16, *(config.num_speculative_tokens or 0 for config in configs))
        ready = dataclasses.replace(ready, max_num_batched_tokens=2 * seqs * (longest + 1))
    return ready


class Corner:
    """Loads drafters beside two copies of the target: one where every draft is made and verified whole, and one, only
    where somebody's costs are known, where the scheduler decides. Engines are made over them one drafter at a time."""

    def __init__(self, flags: EngineFlags):
        self._flags = flags
        self._bare = dataclasses.replace(flags, policy="fixed", min_predicted_gain=None)
        self._target = load_target_of(flags)
        self._scheduled_target: HFTarget | None = None

    def contender(self, config: SpeculativeConfig, label: str) -> Contender:
        """A drafter with what is to be known of it before it decodes."""
        from forerun.bench.comparing.facts import facts_of, origin
        from forerun.bench.comparing.study import Contender

        [entry] = load_drafters_of(self._bare, self._target, [fixed(config)])
        facts, scheduling = facts_of(entry), self._scheduling(config, entry)
        if facts.draft_tokens == 0:
            raise OptionError("--drafter", f"{label} would draft nothing: K is 0")
        calibration = self._calibration(entry)
        ways, made_with = [f"fixed:{facts.draft_tokens}"], {**origin(entry), "draft_tokens": facts.draft_tokens}
        if scheduling is not None:
            ways.append(scheduling.scheduler.options.policy)
            made_with |= {"costs": _digest(scheduling, entry.name), "calibration": calibration}
        enter = partial(self._engines, entry, None if scheduling is None else config, ways)
        return Contender(label, loading_flags(self._flags, config), facts, made_with, ways, enter, calibration)

    def _calibration(self, entry: LoadedDrafter) -> str | None:
        """Hash of the file that decoding would read, if it is there."""
        from forerun.bench.comparing.confidence import calibration_path_of
        from forerun.budget.stored import profiles_folder

        path = calibration_path_of(self._target, entry, profiles_folder(self._flags.calibration_cache))
        if path is None or not path.is_file():
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

    def _scheduling(self, config: SpeculativeConfig, entry: LoadedDrafter) -> Scheduling | None:
        """What this drafter would be scheduled by; None: its costs are not known, or nobody wants it.

        Raises:
            OptionError: a policy was asked for that needs costs.
        """
        from forerun.engine import EngineOptions
        from forerun.engine.propose import LoadedDrafter
        from forerun.engine.tuning import scheduling_of

        if self._flags.policy == "fixed":
            return None
        options = EngineOptions.of(self._flags.options())
        made = scheduling_of(self._target, [LoadedDrafter(entry.drafter, config)], options, look_up=True)
        if made.scheduler.adapts:
            return made
        if self._flags.policy is not None:
            raise OptionError(
                "--policy", f"no costs of {entry.name} have been measured here; run `forerun profile` first"
            )
        return None

    @contextmanager
    def _engines(
        self, entry: LoadedDrafter, scheduled: SpeculativeConfig | None, ways: Sequence[str]
    ) -> Iterator[Sequence[Way]]:
        from forerun.bench.load.trial import Way
        from forerun.engine import Engine, EngineOptions

        k = int(ways[0].partition(":")[2])
        with Engine(self._target, [entry], EngineOptions.of(self._bare.options())) as engine:
            asked = {"method": entry.name}
            own = [Way(ways[0], engine, {**asked, "max_draft": k}, k)]
            if scheduled is None:
                yield own
                return
            with self._scheduled(scheduled) as other:
                yield [*own, Way(ways[1], other, asked, k)]

    def _scheduled(self, config: SpeculativeConfig) -> Engine:
        """As it would decode by default on this machine."""
        from forerun.engine import Engine, EngineOptions
        from forerun.engine.tuning import scheduling_of

        if self._scheduled_target is None:
            self._scheduled_target = load_target_of(self._flags)
        target, options = self._scheduled_target, EngineOptions.of(self._flags.options())
        loaded = load_drafters_of(self._flags, target, [config])
        return Engine(target, loaded, options, scheduling=scheduling_of(target, loaded, options, look_up=True))


def _digest(scheduling: Scheduling, drafter: str) -> str:
    """Of the costs that decide: other costs make another row."""
    profile = scheduling.scheduler.profile
    assert profile is not None
    own = dataclasses.replace(profile, drafts={drafter: profile.drafts[drafter]}, models={})
    return hashlib.sha256(own.dumps().encode()).hexdigest()[:16]


__all__ = ["Lineup"]
