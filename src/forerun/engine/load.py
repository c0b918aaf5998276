"""Options of an engine, and loading what it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from forerun.budget.policy import Policy, check_policy
from forerun.drafters.base import Drafter, LoadContext
from forerun.drafters.config import SpeculativeConfig, parse_configs
from forerun.engine.admission import Limits
from forerun.engine.propose import LoadedDrafter
from forerun.errors import OptionError, nearest
from forerun.sampling import VerifyMode
from forerun.sampling.options import check_whole, is_finite
from forerun.target.base import Target
from forerun.target.dtypes import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from forerun.target.load import Device, Dtype


RENAMED = {"speculative_config": "drafter"}
"""What other engines call an argument of `Engine.load`, where its name here is too far to be guessed from it."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `Engine.load` beside the models themselves."""

    dtype: Dtype = "auto"
    """auto (the checkpoint's), float32, bfloat16, float16 or float64; of target and drafter."""
    device: Device = "auto"
    """auto, cpu, cuda or mps."""
    threads: int | None = None
    """CPU threads of torch; None leaves its default."""
    verify_mode: VerifyMode = "rejection"
    """rejection: the target's law. coupled: the same seed gives identical tokens with any drafter and without one."""
    num_speculative_tokens: int | None = None
    """K of every drafter that does not set its own."""
    policy: Policy | None = None
    """How much is drafted and verified: fixed, threshold, prefix, delayed or global. None: `delayed` where the costs of
    target and drafters have been measured on this machine, else `fixed`."""
    min_predicted_gain: float | None = None
    """Predicted gain below which a request is not drafted for; None: 0.005."""
    calibration_cache: str | None = None
    """Folder of measured costs and calibrations, or `off`; None: under FORERUN_CACHE."""
    max_model_len: int | None = None
    """Window, if shorter than the model's."""
    revision: str | None = None
    trust_remote_code: bool = False
    max_num_seqs: int = Limits().max_num_seqs
    max_num_batched_tokens: int = Limits().max_num_batched_tokens
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    """Keep the KV blocks of finished requests, as long as nobody needs the memory, for prompts that begin alike."""

    def __post_init__(self) -> None:
        if self.verify_mode not in ("rejection", "coupled"):
            raise OptionError("verify_mode", f"must be 'rejection' or 'coupled', got {self.verify_mode!r}")
        for name in ("threads", "num_speculative_tokens", "max_model_len"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise OptionError("num_speculative_tokens", f"must be >= 0, got {self.num_speculative_tokens}")
        if self.policy is not None:
            check_policy(self.policy)
        if not isinstance(self.enable_prefix_caching, bool):
            raise OptionError("enable_prefix_caching", f"must be True or False, got {self.enable_prefix_caching!r}")
        gain = self.min_predicted_gain
        if gain is not None and not (is_finite(gain) and gain >= 0):
            raise OptionError("min_predicted_gain", f"must be a number of at least 0, got {gain!r}")
        if self.calibration_cache == "":  # as a path it is the working folder
            raise OptionError("calibration_cache", "is empty; name a folder, or 'off'")
        if self.revision is not None and not isinstance(self.revision, str):
            raise OptionError("revision", f"must be the name of a branch, tag or commit, got {self.revision!r}")

    @property
    def limits(self) -> Limits:
        return Limits(self.max_num_seqs, self.max_num_batched_tokens, self.kv_cache_memory_bytes)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineOptions:
        """OptionError with the nearest name for an unknown option."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                meant = f"did you mean {RENAMED[name]!r}?" if name in RENAMED else nearest(name, known)
                raise OptionError(name, f"unknown option of Engine.load; {meant}")
        return cls(**options)


def ready_target(target: str | Target | PreTrainedModel, tokenizer: Any, options: EngineOptions) -> Target:
    """The target of an engine: loaded, or taken as it is.

    Raises:
        OptionError: an option that a target which is ready cannot follow. ModelError: as `load_target`.
    """
    from forerun.target.load import load_target
    from forerun.target.threads import use_threads

    if not isinstance(target, Target):
        return load_target(
            target,
            tokenizer=tokenizer,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            max_model_len=options.max_model_len,
        )
    if tokenizer is not None:
        raise OptionError("tokenizer", "belongs to a loaded model; a Target brings its own")
    check_ready(target, options)
    if options.revision is not None:
        raise OptionError("revision", "has no effect on a Target; leave it out")
    use_threads(options.threads)
    return target


def check_ready(target: Target, options: EngineOptions) -> None:
    """OptionError: an option of loading that asks for something else than the target has, so that it would be ignored.
    A revision is not looked at: no target remembers its own."""
    from forerun.target.load import check_agrees

    check_agrees(target, options.dtype, options.device)
    if options.max_model_len not in (None, target.window):
        why = f"{options.max_model_len} has no effect on a Target, which has {target.window}; leave it out"
        raise OptionError("max_model_len", why)


def load_drafters(given: Any, target: Target, options: EngineOptions) -> list[LoadedDrafter]:
    """Drafters from what `--speculative-config` takes, from `Drafter`s, or from a list of both, in that order.

    K of `options` is the default of every drafter that does not set its own.
    """
    loaded: list[LoadedDrafter] = []
    for item in given if isinstance(given, (list, tuple)) else [given]:
        made = isinstance(item, Drafter)
        for config in [SpeculativeConfig(method=item.name)] if made else parse_configs(item):
            if config.num_speculative_tokens is None and options.num_speculative_tokens is not None:
                config = config.with_draft_length(options.num_speculative_tokens)
            if made:
                config.check_length(item)
            loaded.append(LoadedDrafter(item if made else config.build(_context(target, options)), config))
    names = [entry.name for entry in loaded]
    if len(set(names)) < len(names):
        raise OptionError("--drafter", f"each kind can be loaded once, got {', '.join(names)}")
    modes = {entry.config.verify_mode for entry in loaded} - {None}
    if len(modes) > 1:
        raise OptionError("verify_mode", "drafters of one engine need the same one; a request may choose another")
    return loaded


def drafting_up_to(loaded: Sequence[LoadedDrafter], k: int) -> list[LoadedDrafter]:
    """The same drafters, those that set no K of their own with this one or the most they can make."""
    return [
        entry
        if entry.config.num_speculative_tokens is not None
        else LoadedDrafter(entry.drafter, entry.config.with_draft_length(min(k, entry.drafter.max_draft or k)))
        for entry in loaded
    ]


def _context(target: Target, options: EngineOptions) -> LoadContext:
    dtype = cast("Dtype", dtype_name(target.dtype))
    return LoadContext(target, dtype, cast("Device", target.device.type), options.trust_remote_code)
