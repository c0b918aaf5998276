"""`--speculative-config`: one schema for JSON, YAML, flags and Python, with vLLM's key names."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from forerun.budget.policy import Policy
from forerun.budget.stored import CALIBRATION, CALIBRATION_OF_COPIES
from forerun.drafters import DRAFTERS, canonical, drafter_class
from forerun.drafters.base import Drafter, LoadContext
from forerun.drafters.lookup import USUAL
from forerun.errors import ModelError, OptionError, nearest
from forerun.parsing import json_of, yaml_of
from forerun.sampling import VerifyMode

CLASS = re.compile(r"\w+(\.\w+)*:\w+")
"""`module:Class`, a drafter of one's own."""
WITH_LOOKUP = "+lookup"
"""Behind a method or model on the command line: prompt lookup is mixed into its laws."""
LARGEST_CONFIG = 16 << 20
"""Bytes of a model's `config.json`: what is larger is none, and is not read."""

NOT_BUILT = {
    "suffix": "suffix-tree decoding is not built; use 'ngram'",
    "custom_class": "name the class itself as the method, 'module:Class'",
    **dict.fromkeys(
        ("mtp", "nextn", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp"),
        "prediction layers of the target (MTP) are not used",
    ),
    **dict.fromkeys(("medusa", "hydra", "mlp_speculator", "peagle"), "this kind of drafter is not supported"),
}
"""Methods users of other engines ask for by name, and why they are refused."""

FOREIGN = {
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_draft_model": "model",
    "speculative_model": "model",
    "draft_model": "model",
    "assistant_model": "model",
    "draft_max": "num_speculative_tokens",
    "spec_draft_n_max": "num_speculative_tokens",
    "max_draft_len": "num_speculative_tokens",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "speculative_num_draft_tokens": "num_speculative_tokens (one less: SGLang counts the anchor)",
    "max_matching_ngram_size": "prompt_lookup_max",
    "draft_min": "min_draft",
    "spec_draft_n_min": "min_draft",
    "decoding_type": "method",
    "draft_len_schedule": "num_speculative_tokens_per_batch_size",
    "max_concurrency": "num_speculative_tokens_per_batch_size (K 0 from there on)",
    "draft_p_min": "confidence_threshold (compared with c_k, known before token k is drawn)",
    "spec_draft_p_min": "confidence_threshold (compared with c_k, known before token k is drawn)",
    "assistant_confidence_threshold": "confidence_threshold (compared with c_k, known before token k is drawn)",
    "speculative_dspark_confidence_threshold": "confidence_threshold",
    "speculative_dspark_sps_table_path": "confidence_cost_table_path (a file of `forerun profile`)",
    "speculative_dspark_confidence_sts_path": "confidence_calibration_path (a file of `forerun calibrate`)",
    "confidence_min_predicted_gain": "min_predicted_gain",
    "acceptance_rate_threshold": "min_predicted_gain (a gain is predicted from acceptance and measured costs)",
    "acceptance_rate_window_size": "min_predicted_gain (a gain is predicted from acceptance and measured costs)",
    "num_assistant_tokens_schedule": "policy (constant: fixed)",
    "enable_adaptive_verification": "policy (false: fixed)",
    "disable_by_batch_size": "num_speculative_tokens_per_batch_size (K 0 from there on)",
}
"""Spellings of other engines -> ours, for the error message."""

_INSIDE = "it is about the inside of vLLM"
_LOSSY = "it would change the output, and verification here is exact"
_SUFFIX = "it belongs to the method suffix, which is not built"

WITHOUT = {
    "draft_tensor_parallel_size": "a drafter runs on the one device of its target",
    "quantization": "a drafter is used in the dtype of its target",
    "kv_cache_dtype": "keys and values are kept in the dtype of the target",
    "parallel_drafting": "the method says it; dflash and dspark draft all tokens in one pass",
    "use_heterogeneous_vocab": "a drafter needs the vocabulary of its target",
    "speculative_token_tree": "drafts are chains here, of num_speculative_tokens",
    "enforce_eager": _INSIDE,
    "attention_backend": _INSIDE,
    "use_local_argmax_reduction": _INSIDE,
    "disable_padded_drafter_batch": _INSIDE,
    "disable_eagle_block_drop": _INSIDE,
    "acceptance_method": _LOSSY,
    "posterior_threshold": _LOSSY,
    "posterior_alpha": _LOSSY,
    "synthetic_acceptance_rates": _LOSSY,
    "synthetic_acceptance_length": _LOSSY,
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
}
"""Keys of vLLM that nothing here stands for, and why."""


class SpeculativeConfig(BaseModel):
    """One drafter and how it is used. Unknown keys, and keys the chosen drafter does not read, are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    method: str | None = None
    """A name of the drafter table or `module:Class`; absent: what the folder `model` says, else `small`."""
    model: str | None = None
    """The drafter's model: directory, .gguf file, hub id or embedded name."""
    revision: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=0)
    """K, the most tokens drafted per round; 0 is plain decoding."""
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    """[[from, to, K], ...], inclusive; gaps take the K before them."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """greedy: the draft law is one-hot at any temperature."""
    rejection_sample_method: Literal["standard"] = "standard"
    verify_mode: VerifyMode | None = None
    policy: Policy | None = None
    """How much is drafted and verified, for all drafters of an engine; None: `delayed` where costs were measured."""
    min_draft: int = Field(default=0, ge=0)
    """A planned K below this becomes 0 before anything is drafted."""
    min_predicted_gain: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Predicted gain below which a request is not drafted for; of all drafters of an engine."""
    confidence_threshold: float | None = Field(default=None, ge=0, le=1)
    """Neither draft nor verify from the first c_k below it on, c_k being known before token k is drawn; of all drafters
    of an engine. 0 is off."""
    confidence_cost_table_path: str | None = None
    """A file that `forerun profile` wrote, instead of the one found for this machine; of all drafters of an engine."""
    confidence_calibration_path: str | None = None
    """A file that `forerun calibrate` wrote, instead of `calibration.json` in the drafter's folder."""
    prompt_lookup_max: int | None = Field(default=None, ge=1)
    prompt_lookup_min: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    """The drafter's own context limit; K shrinks near it."""
    allow_target_mismatch: bool | None = None
    """Use a trained drafter with another target than it was trained for."""

    @field_validator("method")
    @classmethod
    def _method(cls, value: str | None) -> str | None:
        return value if value is None or ":" in value else canonical(value)

    @field_validator("num_speculative_tokens_per_batch_size", mode="before")
    @classmethod
    def _table(cls, value: Any) -> Any:
        """Accepts the map form {"1-16": 3} too."""
        if isinstance(value, Mapping):
            ends = [(str(key).partition("-"), k) for key, k in value.items()]
            return [[int(low), int(high or low), k] for (low, _, high), k in ends]
        return value

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _ranges(cls, value: list[tuple[int, int, int]] | None) -> list[tuple[int, int, int]] | None:
        """In the order of batch sizes, from 1 up, none in two ranges."""
        if value is None:
            return None
        rows, end = sorted(value), 0
        for low, high, k in rows:
            if not end < low <= high or k < 0:
                raise ValueError("ranges need 1 <= from <= to and K >= 0, and must not overlap")
            end = high
        if not rows:
            raise ValueError("needs at least one range")
        return rows

    @model_validator(mode="after")
    def _min_draft_is_possible(self) -> SpeculativeConfig:
        most = self.num_speculative_tokens
        if most is not None and 0 < most < self.min_draft:
            raise OptionError("min_draft", f"{self.min_draft} is more than num_speculative_tokens ({most}): no draft")
        return self

    @property
    def name(self) -> str:
        if self.method is not None:
            return self.method
        return "vanilla" if self.model is None else _kind_of(self.model)

    @property
    def copies(self) -> bool:
        """Whether prompt lookup is mixed into the drafter's laws."""
        return (self.prompt_lookup_max or self.prompt_lookup_min) is not None and self.name != "ngram"

    def labelled(self, name: str) -> str:
        """What reports call a drafter of this name: one that copies is another drafter."""
        return f"{name}{WITH_LOOKUP}" if self.copies else name

    @property
    def calibration_name(self) -> str:
        """Of the file in a drafter's own folder: a drafter that copies is sure of other tokens than it is without."""
        return CALIBRATION_OF_COPIES if self.copies else CALIBRATION

    def draft_length(self, default: int, batch_size: int) -> int:
        """K before any limit of request, window or drafter, for a batch of that many requests."""
        most = self.num_speculative_tokens
        k = default if most is None else most
        for low, _, planned in self.num_speculative_tokens_per_batch_size or ():
            if batch_size >= low:
                k = planned if most is None else min(planned, most)
        return k

    def with_draft_length(self, k: int) -> SpeculativeConfig:
        """The same with another K, checked like any other; `vanilla` has none to set."""
        if self.name == "vanilla":
            return self
        return parse_config({**self.model_dump(exclude_unset=True), "num_speculative_tokens": k})

    def build(self, context: LoadContext) -> Drafter:
        """Loads the drafter. OptionError for a key it does not read; ModelError: it cannot be loaded."""
        _refuse_run(self.model)
        if self.name in NOT_BUILT:
            raise OptionError("method", f"{self.name!r}: {NOT_BUILT[self.name]}; known: {', '.join(DRAFTERS)}")
        kind = drafter_class(self.name)
        given = self.model_dump(exclude_none=True, exclude_unset=True)
        options = {key: value for key, value in given.items() if key not in _SHARED}
        for key in options:
            if key not in kind.config_keys:
                raise OptionError(key, f"the drafter {kind.name!r} does not use it; {nearest(key, kind.config_keys)}")
        if self.model is not None and self.name in DRAFTERS:  # a class of one's own reads what it likes
            from forerun.drafters.foreign import refuse_foreign

            refuse_foreign(self.model, self.revision, context.trust_remote_code)
        drafter = kind.load(options, context)
        self.check_length(drafter)
        return drafter

    def check_length(self, drafter: Drafter) -> None:
        """OptionError if a K asked for is more than the drafter can make."""
        key, k = "num_speculative_tokens", self.num_speculative_tokens
        if k is None:
            rows = self.num_speculative_tokens_per_batch_size or ()
            key, k = "num_speculative_tokens_per_batch_size", max((k for _, _, k in rows), default=0)
        if drafter.max_draft is not None and k > drafter.max_draft:
            raise OptionError(key, f"{k} is more than {drafter.name!r} can draft ({drafter.max_draft})")


def _kind_of(model: str) -> str:
    """The method of a drafter that `forerun train` wrote, by its config; any other model is a `small` one.

    Raises:
        ModelError: the config is there and cannot be read, or names no method.
    """
    file = Path(model) / "config.json"
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_CONFIG + 1)
    except (OSError, ValueError):  # ValueError: what no path can be
        return "small"  # no folder of ours; loading it will say what is wrong with it
    if len(content) > LARGEST_CONFIG:
        raise ModelError(f"--drafter: {file} is no config of a model: it has over {LARGEST_CONFIG:,} bytes")
    try:
        config = json_of(content.decode())
    except ValueError as error:
        raise ModelError(f"--drafter: {file} cannot be read: {error}") from error
    if not isinstance(config, dict) or "forerun_format" not in config:
        return "small"
    if "method" not in config:
        raise ModelError(f"--drafter: {file}: method: field required")
    method = config["method"]
    if not isinstance(method, str) or not (method in DRAFTERS or CLASS.fullmatch(method)):
        known = ", ".join(DRAFTERS)
        raise ModelError(f"--drafter: {file}: method: {reprlib.repr(method)} is none of {known} or module:Class")
    return method


def _refuse_run(model: str | None) -> None:
    """ModelError for the --out folder of `forerun train`, which holds drafters and is none."""
    if model is None or (Path(model) / "config.json").exists():
        return
    best = Path(model) / "best"
    if (best / "config.json").is_file():
        raise ModelError(f"--drafter: {model} is the folder of a training run; its drafter is {best}")


_SHARED = frozenset(
    {
        "method",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "draft_sample_method",
        "rejection_sample_method",
        "verify_mode",
        "policy",
        "min_draft",
        "min_predicted_gain",
        "confidence_threshold",
        "confidence_cost_table_path",
        "confidence_calibration_path",
    }
)
"""Keys the engine reads itself."""


ENGINE_WIDE = ("policy", "min_predicted_gain", "confidence_threshold", "confidence_cost_table_path")
"""Keys of scheduling, which belongs to the engine: given once, or alike."""


def methods_of(label: str) -> list[str]:
    """Names of the drafters behind a label, several of which `+` parts."""
    return [part for part in label.split("+") if f"+{part}" != WITH_LOOKUP]


def parse_config(value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
    """A config from a mapping, a JSON or YAML text, a path to such a file, a bare method name or `module:Class`;
    `+lookup` behind a name or model mixes prompt lookup in."""
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, (str, Mapping)):
        raise OptionError("--drafter", f"expected a name, a model, keys and values or a Drafter object, got {value!r}")
    keys = value if isinstance(value, Mapping) else _read(value)
    try:
        return SpeculativeConfig(**{str(key).lstrip("-").replace("-", "_"): item for key, item in keys.items()})
    except ValidationError as error:
        raise _as_option_error(error) from None


def _read(text: str) -> Mapping[str, Any]:
    if text.endswith(WITH_LOOKUP) and not Path(text).exists():
        return _copying(text.removesuffix(WITH_LOOKUP))
    if canonical(text) in {*DRAFTERS, *NOT_BUILT}:
        return {"method": text}
    if CLASS.fullmatch(text):  # module:Class; in YAML a blank follows the colon
        return {"method": text}
    place = ""
    if text.endswith((".json", ".yaml", ".yml")):
        place = f"{text} is "
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError("--speculative-config", f"cannot read {text}: {error}") from None
    elif not text.lstrip().startswith("{") and ":" not in text:
        _refuse_misspelt(text)
        return {"model": text}
    try:
        parsed = json_of(text) if text.lstrip().startswith("{") else yaml_of(text)
    except ValueError as error:
        raise OptionError("--speculative-config", f"{place}neither JSON nor YAML: {error}") from None
    if not isinstance(parsed, Mapping):
        raise OptionError("--speculative-config", f"expected keys and values, got {parsed!r}")
    return parsed


def _copying(text: str) -> Mapping[str, Any]:
    keys = _read(text)
    if (name := canonical(str(keys.get("method", "")))) in ("ngram", "vanilla"):
        raise OptionError("--drafter", f"{WITH_LOOKUP!r} needs a drafter with laws of its own, which {name!r} has not")
    return {**keys, **USUAL}


def _refuse_misspelt(text: str) -> None:
    """A bare word that is nearly a method's name is that name misspelt, not a model of the hub."""
    close = difflib.get_close_matches(text.lower(), DRAFTERS, n=1, cutoff=0.75)
    if close and not Path(text).exists():
        raise OptionError("--drafter", f"no drafter is called {text!r}; did you mean {close[0]!r}?")


def _as_option_error(error: ValidationError) -> OptionError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, OptionError):
        return cause
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return OptionError(key, f"unknown key of --speculative-config; {_instead_of(key)}")
    return OptionError(key, f"{first['msg'].lower()}, got {first['input']!r}")


def _instead_of(key: str) -> str:
    if key in FOREIGN:
        return f"use {FOREIGN[key]!r}"
    if key in WITHOUT:
        return f"leave it out: {WITHOUT[key]}"
    return nearest(key, SpeculativeConfig.model_fields)


def parse_configs(
    value: str | Mapping[str, Any] | SpeculativeConfig | Sequence[Any] | None,
) -> list[SpeculativeConfig]:
    """One config per drafter; a list of configs is allowed, and text like `ngram,./small-model` is one too."""
    if value is None:
        return []
    if isinstance(value, str) and _is_list(value):
        value = value.split(",")
    if isinstance(value, Sequence) and not isinstance(value, str):
        configs = [parse_config(item) for item in value]
        for key in ENGINE_WIDE:
            agreed(key, configs)
        return configs
    return [parse_config(value)]


def _is_list(text: str) -> bool:
    """Whether commas part drafters: one of them is a method's name, or each a path. A path may have commas of its own,
    JSON has."""
    parts = [part.removesuffix(WITH_LOOKUP) for part in text.split(",")]
    named = any(canonical(part) in {*DRAFTERS, *NOT_BUILT} for part in parts)
    return (named or (len(parts) > 1 and all(map(os.path.exists, parts)))) and not os.path.exists(text)


def agreed(key: str, configs: Sequence[SpeculativeConfig], own: Any = None) -> Any:
    """The value of a key that all drafters of an engine share, `own` being the engine's; None if nobody gives one.

    Raises:
        OptionError: they contradict each other.
    """
    given = [own, *(getattr(config, key) for config in configs)]
    values = list(dict.fromkeys(value for value in given if value is not None))
    if len(values) > 1:
        said = ", ".join(repr(value) for value in values)
        raise OptionError(key, f"drafters of one engine need the same one, got {said}; give it once")
    return values[0] if values else None
