"""What a training run is asked to do: one schema for YAML, flags and Python, and where every value came from.

A flag goes before the file, the file before what is derived from data, target and machine, that before the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from forerun.drafters import DRAFTERS, drafter_class
from forerun.drafters.learned import Learner, LearnerSettings
from forerun.errors import OptionError, nearest
from forerun.parsing import json_of, yaml_of
from forerun.target.threads import MOST_THREADS

DATA, LENGTH, OPTIMISER, EVALUATION, FILES, MACHINE = (
    "Data", "Length of the run", "Optimiser", "Evaluation", "Checkpoints and records", "Target and machine",
)  # fmt: skip
"""Panels of the help."""

FLAG, DEFAULT = "flag", "default"
"""Origins of values, beside the name of a file and the reason for a derived one."""


def _setting(default: Any, text: str, panel: str, *, free: bool = False, **limits: Any) -> Any:
    """A field; `free` ones may change when a run is resumed: they do not change the weights it ends with, or what they
    name is compared itself (data, target, steps)."""
    return Field(default=default, description=text, json_schema_extra={"panel": panel, "free": free}, **limits)


class TrainingConfig(BaseModel):
    """Settings of `forerun train`. None stands for a value that is derived; `draft` are the settings of the kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    kind: str
    draft: dict[str, Any] = Field(default_factory=dict)
    # What is learned from.
    target: str = _setting(
        "embedded", "The model to draft for: directory, .gguf file, hub id, or 'embedded'.", DATA, free=True
    )
    data: str = _setting(..., "Folder of `forerun data prepare`, or a file it would take.", DATA, free=True)
    held_out: float | str | None = _setting(
        None, "Never trained on: a prepared folder, or a share of --data. Default: its held_out part, else 0.05.", DATA,
        free=True,
    )  # fmt: skip
    max_length: int | None = _setting(None, "Cut samples to so many tokens. Default: none is cut.", DATA, ge=2)
    seed: int = _setting(0, "Of starting weights, order of the data and what is drawn in a step.", DATA, ge=0, lt=2**64)
    # How long.
    steps: int | None = _setting(None, "Optimiser steps. Default: what --epochs come to.", LENGTH, ge=1)
    epochs: float | None = _setting(
        None, "Passes over the data. Default: 6, if --steps is not given.", LENGTH, free=True, gt=0
    )
    cpu_seconds: float | None = _setting(
        None,
        "End with the step that uses them up: processor time of all threads and processes, evaluations but the last "
        "included. The learning rate goes by --steps all the same.",
        LENGTH, free=True, gt=0,
    )  # fmt: skip
    tokens_per_step: int = _setting(16_384, "Tokens of an optimiser step, at most, on all devices.", LENGTH, ge=1)
    micro_batch_tokens: int | None = _setting(
        None,
        "Tokens of one forward pass; gradients add up to a step. Changes memory and speed, the result up to rounding.",
        LENGTH, free=True, ge=1,
    )  # fmt: skip
    # Optimiser.
    optimizer: Literal["adamw", "muon"] = _setting(
        "adamw", "muon: for the matrices, AdamW for the rest; learns more from few steps.", OPTIMISER
    )
    learning_rate: float = _setting(6e-4, "Its peak.", OPTIMISER, gt=0)
    warmup_share: float = _setting(0.04, "Share of the steps in which it rises.", OPTIMISER, ge=0, le=1)
    schedule: Literal["cosine", "linear", "constant"] = _setting("cosine", "How it falls afterwards.", OPTIMISER)
    min_lr_share: float = _setting(0.0, "Share of the peak it ends at.", OPTIMISER, ge=0, le=1)
    betas: tuple[float, float] = _setting((0.9, 0.95), "Of AdamW.", OPTIMISER)
    weight_decay: float = _setting(0.0, "Decoupled; not of norms, biases and embeddings.", OPTIMISER, ge=0)
    clip: float = _setting(1.0, "Largest norm of the gradient; 0: no limit.", OPTIMISER, ge=0)
    ema: float | None = _setting(
        None, "Decay of an average of the weights, which is then evaluated and saved: 0.999, or off.", OPTIMISER,
        gt=0, lt=1,
    )  # fmt: skip
    mixed_precision: Literal["no", "bf16", "fp16"] | None = _setting(
        None, "Of the drafter's passes; its weights are float32. Default: bf16 on a GPU that has it, else no.",
        OPTIMISER,
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = _setting(
        None, "Of the saved weights. Default: the target's.", OPTIMISER
    )
    # Evaluation.
    eval_every: int | None = _setting(
        None, "Evaluate after so many steps, and at the end. Default: ten times in a run.", EVALUATION, free=True, ge=1
    )
    eval_prompts: int = _setting(16, "Held-out samples that are evaluated; 0: none.", EVALUATION, free=True, ge=0)
    eval_tokens: int = _setting(64, "Tokens decoded for each.", EVALUATION, free=True, ge=3)
    eval_temperature: tuple[float, ...] = _setting((0.0, 1.0), "Temperatures of decoding.", EVALUATION, free=True)
    # What is kept.
    out: str = _setting(
        ..., "Folder of the run: best/ and last/ drafter, checkpoints, metrics.jsonl.", FILES, free=True
    )
    save_every: int | None = _setting(
        None, "Steps between checkpoints; one is also written on SIGTERM and Ctrl-C. Default: as --eval-every.", FILES,
        free=True, ge=1,
    )  # fmt: skip
    keep: int = _setting(2, "Checkpoints to keep.", FILES, free=True, ge=1)
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = _setting(
        (), "Also send metrics to tensorboard, wandb or trackio; several with commas.", FILES, free=True
    )
    feature_store: str | None = _setting(
        None, "Keep target features here, for all epochs and runs. Default: compute them every time.", FILES, free=True
    )
    store_gb: float | None = _setting(None, "Its largest size, in 10^9 bytes.", FILES, free=True, gt=0, le=1e9)
    store_dtype: Literal["bfloat16", "fp8"] = _setting("bfloat16", "Of stored features; fp8 halves them.", FILES)
    allow_target_mismatch: bool = _setting(False, "Read the feature store of another target of this shape.", FILES)
    # Where it runs.
    device: Literal["auto", "cpu", "cuda", "mps"] = _setting("auto", "auto: a GPU if there is one.", MACHINE, free=True)
    threads: int | None = _setting(
        None, "CPU threads. Default: torch's own choice.", MACHINE, free=True, ge=1, le=MOST_THREADS
    )
    target_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = _setting(
        "auto", "Of the target's weights, hence of its features.", MACHINE, free=True
    )
    revision: str | None = _setting(None, "Branch, tag or commit of a target on the hub.", MACHINE, free=True)
    trust_remote_code: bool = _setting(False, "Run Python that comes with the target.", MACHINE, free=True)

    @field_validator("eval_temperature", "trackers", "betas", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: Any) -> Any:
        items = as_list(value)
        if info.field_name == "betas" and isinstance(items, (list, tuple)) and len(items) != 2:
            raise ValueError("needs two numbers, such as 0.9,0.95")
        return items

    @field_validator("ema", "mixed_precision", mode="before")
    @classmethod
    def _switched_off(cls, value: Any, info: Any) -> Any:
        """YAML reads a bare `off` and `no` as false."""
        off = value is False or str(value).lower() in ("off", "no")
        return (None if info.field_name == "ema" else "no") if off else value

    @field_validator("held_out", mode="before")
    @classmethod
    def _share_or_folder(cls, value: Any) -> Any:
        try:
            share = float(value)
        except (TypeError, ValueError):
            return value
        if not 0 <= share < 1:
            raise ValueError("a share must be in [0, 1)")
        return share

    @field_validator("eval_temperature")
    @classmethod
    def _temperatures(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or min(value) < 0:
            raise ValueError("needs temperatures of at least 0")
        return tuple(dict.fromkeys(value))

    @field_validator("out")
    @classmethod
    def _named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a folder")
        return value

    @field_validator("betas")
    @classmethod
    def _decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must both be in [0, 1)")
        return value


def as_list(value: Any) -> Any:
    """What a flag says of a list: `0,1` as its items; a single value as a list of one."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def is_free(name: str) -> bool:
    """Whether a setting may change between the parts of a run."""
    extra = TrainingConfig.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("free"))


# ------------------------------------------------------------------------------------------------------------- the kind


def learned_kind(name: str) -> type[Learner]:
    """What is trained to make a drafter of that name. OptionError lists the names there are."""
    try:
        kind = drafter_class(name).learner()
    except OptionError:
        raise OptionError("KIND", f"no drafter is called {name!r}; {nearest(name, learned_kinds())}") from None
    if kind is None:
        raise OptionError("KIND", f"{name!r} is not trained; these are: {', '.join(learned_kinds()) or 'none yet'}")
    return kind


def learned_kinds() -> list[str]:
    """Names of the drafters that can be trained; imports all drafters."""
    return [name for name in DRAFTERS if drafter_class(name).learner() is not None]


# -------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Chosen:
    """A configuration, and for every value why it is what it is."""

    config: TrainingConfig
    settings: LearnerSettings
    """`config.draft`, of the kind's own class."""
    kind: type[Learner]
    origins: Mapping[str, str]
    """name, or `draft.NAME` -> `flag`, a file, the reason for a derived value, or `default`."""

    def derive(self, name: str, value: Any, reason: str) -> Chosen:
        """The same with a value for what was left open; what was given stays."""
        if getattr(self.config, name) is not None:
            return self
        config = self.config.model_copy(update={name: value})
        return replace(self, config=config, origins={**self.origins, name: reason})

    def rows(self) -> list[tuple[str, Any, str]]:
        """(name, value, origin) of everything, the kind's own last."""
        own = self.config.model_dump(mode="json", exclude={"draft"})
        values = own | {f"draft.{name}": value for name, value in self.config.draft.items()}
        return [(name, value, self.origins.get(name, DEFAULT)) for name, value in values.items()]


def choose(
    kind: str | None, flags: Mapping[str, Any], draft_flags: Mapping[str, Any], file: Path | None = None
) -> Chosen:
    """The configuration that flags and a YAML file make together.

    Args:
        kind: the drafter; None: the file says it.
        flags: fields of `TrainingConfig` that were given.
        draft_flags: settings of the kind that were given.
        file: YAML of the same fields, the kind's own under `draft`.

    Raises:
        OptionError: unknown names (the nearest is suggested), values that cannot be used.
    """
    written = _read(file) if file is not None else {}
    inner = written.pop("draft", None) or {}
    if not isinstance(inner, Mapping):
        raise OptionError("--config", f"{file}: `draft` must be names and values, got {inner!r}")
    name = kind or written.get("kind")
    if not isinstance(name, str):
        raise OptionError("KIND", f"which drafter is to be trained? {', '.join(learned_kinds())}")
    found = learned_kind(name)
    origins = {key: str(file) for key in written} | dict.fromkeys(flags, FLAG)
    origins |= {f"draft.{key}": str(file) for key in inner} | {f"draft.{key}": FLAG for key in draft_flags}
    origins["kind"] = FLAG if kind else str(file)
    settings = _settings(found, {**inner, **draft_flags}, origins)
    values = {**written, **flags, "kind": name, "draft": settings.model_dump(mode="json")}
    config = _checked(TrainingConfig, values, origins, "")
    if config.steps is not None and config.epochs is not None:
        raise OptionError("--steps", f"give either this ({config.steps}) or --epochs ({config.epochs:g})")
    if config.store_gb is not None and config.feature_store is None:
        raise OptionError("--store-gb", "needs --feature-store, the folder it bounds")
    if config.feature_store is not None and config.store_gb is None:
        raise OptionError("--store-gb", "is required with --feature-store: how large may it become?")
    return Chosen(config, settings, found, origins)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml_of(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--config", f"cannot read {file}: {error}") from None
    except ValueError as error:
        raise OptionError("--config", f"{file} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise OptionError("--config", f"{file} must hold names and values, got {content!r:.60}")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _settings(kind: type[Learner], given: Mapping[str, Any], origins: dict[str, str]) -> LearnerSettings:
    """The kind's own settings; lists may be written with commas."""
    fields = kind.settings_class.model_fields
    values = {
        name: as_list(value) if name in fields and wants_list(fields[name].annotation) else value
        for name, value in given.items()
    }
    settings: LearnerSettings = _checked(kind.settings_class, values, origins, "draft.")
    return settings


def wants_list(annotation: Any) -> bool:
    """Whether a field holds several values."""
    if get_origin(annotation) in (Union, UnionType):
        return any(wants_list(part) for part in get_args(annotation))
    return get_origin(annotation) in (tuple, list) or annotation in (tuple, list)


def value_of(text: str) -> Any:
    """What a flag says: JSON where it is JSON (8, true, null, [1, 2]), else the text."""
    try:
        return json_of(text)
    except ValueError:
        return text


def _checked(schema: type[Any], values: Mapping[str, Any], origins: Mapping[str, str], prefix: str) -> Any:
    """An instance of the schema. OptionError names flag or file, and the nearest name for an unknown one."""
    try:
        return schema(**values)
    except ValidationError as error:
        first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, OptionError):  # settings that do not go together
        flag = f"--{prefix}{cause.option.replace('_', '-')}"
        raise OptionError(flag, str(cause).removeprefix(f"{cause.option}: "))
    key = str(first["loc"][0])
    flag = f"--{prefix}{key.replace('_', '-')}"
    origin = origins.get(f"{prefix}{key}", FLAG)
    where = "" if origin == FLAG else f" ({origin})"
    if first["type"] == "extra_forbidden":
        hint = nearest(key, [name for name in schema.model_fields if name != "draft"])
        raise OptionError(flag, f"no such setting{where}; {hint}")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        raise OptionError(flag, "is required")
    message = first["msg"].removeprefix("Value error, ").lower()
    raise OptionError(flag, f"{message}, got {shortened(first['input'])}{where}")


def shortened(value: Any, most: int = 80) -> str:
    """A value as it is told of in a message."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


# -------------------------------------------------------------------------------------------------------------- writing


def as_yaml(chosen: Chosen) -> str:
    """A file that `--config` takes, every value with its origin as a comment."""
    lines = [f"{name}: {_plain(value)}  # {origin}" for name, value, origin in chosen.rows() if "." not in name]
    own = [(n.removeprefix("draft."), v, o) for n, v, o in chosen.rows() if n.startswith("draft.")]
    inner = [f"  {name}: {_plain(value)}  # {origin}" for name, value, origin in own]
    return "\n".join([*lines, "draft:" if inner else "draft: {}", *inner]) + "\n"


def _plain(value: Any) -> str:
    """JSON is YAML, on one line."""
    return json.dumps(value, ensure_ascii=False)
