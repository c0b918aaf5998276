"""From a configuration to everything a run needs: devices, target, data, drafter, and the values left open."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from forerun.drafters.checkpoint import fingerprint_of
from forerun.drafters.learned import DesignPlan, Learner, Material, TrainingBatch
from forerun.errors import DoesNotFit, ModelError, OptionError
from forerun.target.allocator import keep_freed_memory
from forerun.target.base import Target
from forerun.target.dtypes import dtype_name
from forerun.target.fingerprint import template_hash
from forerun.target.threads import use_threads
from forerun.training.config import Chosen, TrainingConfig
from forerun.training.folder import TRACKERS, identity
from forerun.training.inputs import Inputs, View, open_inputs
from forerun.training.order import Order, micro_batches
from forerun.training.stops import fitting, reading

if TYPE_CHECKING:
    from accelerate import Accelerator

    from forerun.training.features import FeatureSource

EPOCHS = 6
"""As in the DFlash paper, by second-hand reports."""
PASS_TOKENS = {"cpu": 4096, "cuda": 16_384, "mps": 4096}
"""Of a micro-batch where none is given: assumed, enough rows to keep the device busy."""
EVALUATIONS = 10


@dataclass(frozen=True)
class Job:
    """A run that can begin."""

    chosen: Chosen
    """Complete."""
    accelerator: Accelerator
    target: Target
    inputs: Inputs
    order: Order
    drafter: Learner
    source: FeatureSource
    identity: dict[str, Any]
    """What must be the same when it is resumed."""
    notes: tuple[str, ...] = ()
    """What the user should know."""

    @property
    def config(self) -> TrainingConfig:
        return self.chosen.config

    def material(self, say: Callable[[str], None]) -> Material:
        """What the drafter's start may be fitted to: one epoch, in the order in which it is then taught. Passes are of
        one size everywhere, so that the start depends neither on the device nor on --micro-batch-tokens."""
        train = self.inputs.train

        def batches() -> Iterator[TrainingBatch]:
            place = 0
            while place < len(train):
                indices, place = self.order.step(place)
                for group in micro_batches([int(self.order.lengths[i]) for i in indices], PASS_TOKENS["cpu"]):
                    yield self.source.batch([train[indices[i]] for i in group])

        return Material(train, batches(), self.config.seed, say)

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks."""
        return bool(self.accelerator.is_main_process)


# ------------------------------------------------------------------------------------------------------------- devices


def start(chosen: Chosen) -> tuple[Chosen, Accelerator]:
    """Joins the other processes of the run, if `accelerate launch` or torchrun started several.

    Raises:
        OptionError: a device, precision or tracker that is not there. ModelError: accelerate is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("forerun train needs accelerate: pip install 'forerun[train]'")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from forerun.target.load import choose_device

    config = chosen.config
    device = choose_device(config.device).type
    half = device == "cuda" and torch.cuda.is_bf16_supported()
    chosen = chosen.derive("mixed_precision", "bf16" if half else "no", f"derived: the device is {device}")
    precision = chosen.config.mixed_precision
    if precision == "fp16" and device != "cuda":
        raise OptionError("--mixed-precision", f"fp16 needs a GPU, the device is {device}; use no or bf16")
    for tracker in config.trackers:
        if importlib.util.find_spec(tracker) is None:
            raise OptionError("--trackers", f"{tracker} is not installed: pip install {tracker}")
    use_threads(config.threads)
    if device == "cpu":
        keep_freed_memory()
    # It keeps the precision of the first accelerator of a process for all later ones.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision=precision,
        log_with=list(config.trackers) or None,
        project_dir=str(Path(config.out) / TRACKERS) if config.trackers else None,
    )
    return chosen, accelerator


def open_target(config: TrainingConfig) -> Target:
    """The target as configured. ModelError names --target."""
    from forerun.target.load import load_target

    try:
        return load_target(
            config.target,
            dtype=config.target_dtype,
            device=config.device,
            threads=config.threads,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    except ModelError as error:
        message = str(error)
        raise type(error)(message if message.startswith("--") else f"--target: {message}") from error


# ------------------------------------------------------------------------------------------------------------- the job


def assemble(chosen: Chosen, accelerator: Accelerator, target: Target, data: Path, *, dry: bool = False) -> Job:
    """Everything a run needs, and the values that were left open.

    Args:
        chosen: the configuration.
        accelerator: from `start`.
        target: from `open_target`.
        data: prepared samples.
        dry: open no feature store, which would write to it.

    Raises:
        OptionError: data, taps or sizes that do not fit the target.
    """
    config = chosen.config
    with reading("--data"):
        inputs = open_inputs(data, config.held_out, target)
    chosen = chosen.derive("held_out", inputs.kept_by, inputs.reason)
    chosen, inputs, notes = _cut(chosen, inputs, target)
    lengths = inputs.train.lengths
    order = Order(lengths, config.tokens_per_step, config.seed)
    chosen = _complete(chosen, order, accelerator.num_processes, target)
    drafter = _design(chosen, target, inputs.train)
    store = None if dry or config.feature_store is None else Path(config.feature_store)
    source = _source(chosen.config, target, drafter, store)
    parts = {"target": fingerprint_of(target), "data": inputs.train.digest()}
    return Job(
        chosen, accelerator, target, inputs, order, drafter, source, identity(chosen, parts),
        (*notes, *drafter.notes, *_notes(chosen, inputs, lengths, source), *_of_template(inputs, target)),
    )  # fmt: skip


def _cut(chosen: Chosen, inputs: Inputs, target: Target) -> tuple[Chosen, Inputs, tuple[str, ...]]:
    """Samples no longer than max_length, which no window is shorter than."""
    held_out = inputs.held_out
    longest = max(2, *(int(view.lengths.max()) for view in (inputs.train, held_out) if view is not None))
    if chosen.config.max_length is not None and chosen.config.max_length > target.window:
        raise OptionError("--max-length", f"{target.name} takes at most {target.window} tokens")
    chosen = chosen.derive("max_length", min(longest, target.window), "derived: the longest sample")
    most = chosen.config.max_length
    assert most is not None
    train, cut, dropped = inputs.train.cut(most)
    if not len(train):
        raise OptionError("--max-length", f"at {most} tokens no sample has anything left to learn")
    inputs = replace(inputs, train=train, held_out=None if held_out is None else held_out.cut(most)[0])
    left = f", {dropped} of them left out because nothing they teach is left" if dropped else ""
    return chosen, inputs, (f"{cut} samples are longer than {most} tokens and were cut{left}",) if cut else ()


def _complete(chosen: Chosen, order: Order, ranks: int, target: Target) -> Chosen:
    """Values that follow from data, target and machine."""
    config = chosen.config
    if config.steps is None:
        chosen = chosen.derive("epochs", float(EPOCHS), "default")
        epochs = chosen.config.epochs
        assert epochs is not None
        chosen = chosen.derive("steps", order.steps_of(epochs), f"derived: {epochs:g} x {len(order.lengths):,} samples")
    steps = chosen.config.steps
    assert steps is not None
    share = math.ceil(config.tokens_per_step / ranks)
    most = max(PASS_TOKENS[target.device.type], int(order.lengths.max()))
    reason = f"derived: a step on {ranks} x {target.device.type}, at most {most:,} tokens a pass"
    chosen = chosen.derive("micro_batch_tokens", min(share, most), reason)
    every = math.ceil(steps / EVALUATIONS)
    chosen = chosen.derive("eval_every", every, f"derived: {EVALUATIONS} times in {steps:,} steps")
    chosen = chosen.derive("save_every", chosen.config.eval_every, "derived: as eval_every")
    return chosen.derive("dtype", dtype_name(target.dtype), "derived: the target's")


def _design(chosen: Chosen, target: Target, train: View) -> Learner:
    """The drafter with its starting weights. OptionError names the setting that does not fit."""
    config = chosen.config
    assert config.max_length is not None
    plan = DesignPlan(
        training_length=config.max_length,
        token_counts=train.token_counts(target.vocab_size),
        dtype=cast(Any, config.dtype),
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        chat_template=train.dataset.chat_template,
    )
    try:
        with fitting("the drafter", "lower the sizes under --draft", DoesNotFit):
            drafter = chosen.kind.design(target, chosen.settings, plan)
            drafter.network.to(target.device)
    except OptionError as error:
        if error.option not in type(chosen.settings).model_fields:
            raise
        flag = f"--draft.{error.option.replace('_', '-')}"
        raise OptionError(flag, error.reason) from error
    return drafter


def _source(config: TrainingConfig, target: Target, drafter: Learner, store: Path | None) -> FeatureSource:
    from forerun.training.features import open_source

    return open_source(
        target,
        drafter.taps,
        store=store,
        gb=config.store_gb if store is not None else None,
        dtype=config.store_dtype,
        normalizer=drafter.needs_normalizer,
        allow_target_mismatch=config.allow_target_mismatch,
    )


def same_everywhere(drafter: Learner) -> None:
    """The first process's weights in all of them: they are drawn from one seed, but by different processors."""
    from accelerate.utils import broadcast

    with torch.no_grad():
        for tensor in drafter.network.state_dict().values():
            tensor.copy_(broadcast(tensor))


def _of_template(inputs: Inputs, target: Target) -> list[str]:
    """Said at the start where the drafter will learn another chat format than its target has (bugs, TS-9)."""
    learned, own = inputs.train.dataset.chat_template, template_hash(target.tokenizer)
    if learned in (None, own):
        return []
    return [
        f"warning: --data was rendered with another chat template ({str(learned)[:8]}) than {target.name}'s own "
        f"({own[:8]}): in its own format the drafter will accept less, and loading it there says so; prepare the data "
        "with the template that will be served"
    ]


def _left_out(manifest: Mapping[str, Any]) -> list[str]:
    """What preparing counted: records that a run prepares itself are accounted for nowhere else on the screen."""
    dropped = manifest.get("dropped")
    if not dropped:
        return []
    counts = ", ".join(f"{one['count']:,} {reason} (as {one['example']})" for reason, one in dropped.items())
    return [f"left out of the {manifest['records']:,} records of --data: {counts}"]


def _notes(chosen: Chosen, inputs: Inputs, lengths: Any, source: FeatureSource) -> list[str]:
    """What is about to happen, in words."""
    from forerun.training.features import estimate

    config, tokens = chosen.config, int(lengths.sum())
    size = estimate(
        tokens, source.target.hidden_size, source.taps, config.store_dtype, source.normalizer,
        num_layers=source.target.num_layers,
    )  # fmt: skip
    notes = [
        f"{len(lengths):,} samples of {tokens:,} tokens to train on, {inputs.held_out_count:,} held out",
        *_left_out(inputs.manifest),
        size.sentence(config.store_gb),
    ]
    if not inputs.held_out_count:
        notes.append("nothing is held out: the drafter is not evaluated, and best/ is the last checkpoint")
    return notes
