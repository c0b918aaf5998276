"""One optimiser step: its samples in passes, over all devices, divided by what all of them weigh together.

What a step does depends on its samples, its number and the seed; not on how it is cut into passes, and not on how many
devices share them, further than the order of floating-point sums.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from forerun.drafters.learned import Exercise, Learner, TrainingBatch
from forerun.errors import OptionError, TrainingFailed
from forerun.training.config import TrainingConfig
from forerun.training.metrics import Sums
from forerun.training.optimizer import (
    Average,
    LossScale,
    clip,
    gradient_norm,
    learning_rate,
    optimizers,
    trained,
    weights_finite,
)
from forerun.training.order import micro_batches, shares

if TYPE_CHECKING:
    from accelerate import Accelerator

    from forerun.training.features import Sample


class Source(Protocol):
    """What makes batches of samples: `training.features.FeatureSource`."""

    def batch(self, samples: Sequence[Sample]) -> TrainingBatch: ...


@dataclass(frozen=True)
class StepReport:
    """What a step did, over all devices."""

    step: int
    """Steps done, this one included."""
    tokens: int
    sums: Sums
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    skipped: bool = False
    """Its samples teach nothing: the weights are as before."""

    def as_dict(self) -> dict[str, object]:
        return {
            "event": "step", "step": self.step, "tokens": self.tokens, **self.sums.as_dict(),
            "weight": self.sums.weight, "learning_rate": self.learning_rate, "grad_norm": self.grad_norm,
            **({"skipped": True} if self.skipped else {}),
        }  # fmt: skip


def seeded(seed: int, step: int, rank: int) -> torch.Generator:
    """The generator a step draws its exercises from, the same on every device. Sets the global ones of torch, numpy
    and python as well, for networks that draw for themselves (dropout). There is thus no state to be saved."""
    words = [int(word) >> 1 for word in np.random.Philox(key=np.array([seed, step], dtype=np.uint64)).random_raw(2)]
    torch.manual_seed(words[0] ^ rank)
    np.random.seed((words[0] ^ rank) % 2**32)
    random.seed(words[0] ^ rank)
    return torch.Generator().manual_seed(words[1])


def outline(drafter: Learner, samples: Sequence[Sample]) -> TrainingBatch:
    """A batch before the target has seen it: tokens and masks, and features of the right shape that take no memory."""
    target = drafter.target
    tokens = torch.from_numpy(np.concatenate([np.asarray(s.token_ids, np.int64) for s in samples]))
    mask = torch.from_numpy(np.concatenate([np.asarray(s.loss_mask, np.bool_) for s in samples]))
    nothing = torch.zeros((), dtype=target.dtype, device=target.device)
    rows, hidden = len(tokens), target.hidden_size
    return TrainingBatch(
        tokens.to(target.device),
        [len(s.token_ids) for s in samples],
        mask.to(target.device),
        nothing.expand(rows, len(drafter.taps) * hidden),
        nothing.expand(rows, hidden),
    )


class Stepper:
    """The network, its optimiser, and one step of them.

    Args:
        drafter: its network is trained, in place.
        source: of features.
        config: complete.
        accelerator: precision, and the other devices.
    """

    def __init__(self, drafter: Learner, source: Source, config: TrainingConfig, accelerator: Accelerator):
        assert config.steps is not None
        assert config.micro_batch_tokens is not None
        self.drafter, self.source, self.config, self.accelerator = drafter, source, config, accelerator
        self.steps, self.most = config.steps, config.micro_batch_tokens
        self.parameters: Mapping[str, nn.Parameter] = trained(drafter.network)
        self.optimizers = optimizers(drafter.network, config)
        self.average = None if config.ema is None else Average(self.parameters, config.ema)
        self.scale = LossScale(config.mixed_precision == "fp16")
        drafter.network.train()

    def step(self, number: int, samples: Sequence[Sample]) -> StepReport:
        """Step `number`, from 0. One whose samples teach nothing is taken without an update.

        Raises:
            TrainingFailed: a loss or gradient that is not finite (the weights are as before), or weights that are not
                finite after the update (they are of no use any more).
        """
        groups = [
            [samples[i] for i in group] for group in micro_batches([len(s.token_ids) for s in samples], self.most)
        ]
        tokens, rate = sum(len(s.token_ids) for s in samples), learning_rate(number, self.steps, self.config)
        while True:
            sums = self._gradients(number, groups)
            if not sums.weight > 0:
                return StepReport(number + 1, tokens, sums, rate, 0.0, skipped=True)
            self._sum_over_devices()
            norm = gradient_norm(self.parameters)
            if np.isfinite(norm):
                break
            if not self.scale.lower():
                self._refuse_gradient(number, norm)
        if norm == 0 and not any(weight > 0 for _, weight in sums.parts.values()):
            self._forget_gradients()  # a kind that weighs all its rows, and none of them is taught
            return StepReport(number + 1, tokens, sums, rate, 0.0, skipped=True)
        self.scale.passed()
        clip(self.parameters, norm, self.config.clip)
        self._update(number, rate)
        return StepReport(number + 1, tokens, sums, rate, norm)

    def _update(self, number: int, rate: float) -> None:
        """Moves the weights along their gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._forget_gradients()
        if not weights_finite(self.parameters):
            raise TrainingFailed(
                f"step {number + 1}: the weights are not finite after an update at the learning rate {rate:g}; lower "
                "--learning-rate"
            )
        if self.average is not None:
            self.average.update()

    def _gradients(self, number: int, groups: Sequence[Sequence[Sample]]) -> Sums:
        """Leaves the gradient of this device's share and returns the sums over all devices."""
        self._forget_gradients()
        sizes = [sum(len(s.token_ids) for s in group) for group in groups]
        mine = shares(sizes, self.accelerator.num_processes)[self.accelerator.process_index]
        weight, exercises = self._prepare(number, groups, mine)
        sums, bad = Sums(), ""
        if not weight > 0:  # as every device finds: each draws the whole step
            return sums
        for i in mine:
            batch = self.source.batch(groups[i])
            with self.accelerator.autocast():
                losses = self.drafter.losses(batch, exercises[i], number / self.steps)
            value = float(losses.total.detach())
            sums.add(value, exercises[i].weight, losses.metrics)
            if not np.isfinite(value):
                bad = bad or f"is {value} (samples {', '.join(s.id for s in groups[i][:3])}, ..)"
            (losses.total * (self.scale.value / weight)).backward()  # type: ignore[no-untyped-call]
        return self._together(number, sums, bad)

    def _prepare(
        self, number: int, groups: Sequence[Sequence[Sample]], mine: Sequence[int]
    ) -> tuple[float, dict[int, Exercise]]:
        """The weight of the whole step, and the exercises of this device's share.

        Every device draws the whole step, one group after the other from one generator. The target has not run yet.
        """
        generator = seeded(self.config.seed, number, self.accelerator.process_index)
        weight, kept = 0.0, {}
        for i, group in enumerate(groups):
            exercise = self.drafter.prepare(outline(self.drafter, group), generator)
            weight += exercise.weight
            if i in mine:
                kept[i] = exercise
        return weight, kept

    def _together(self, number: int, sums: Sums, bad: str) -> Sums:
        """Sums over all devices; every device stops if one found a loss that is not finite."""
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            found = gather_object([(sums, bad)])
            sums, bad = Sums.of(one for one, _ in found), next((b for _, b in found if b), "")
        if bad:
            raise TrainingFailed(f"step {number + 1}: the loss {bad}; lower --learning-rate or --clip")
        return sums

    def _forget_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _sum_over_devices(self) -> None:
        """Adds up the gradients and takes the loss scale out of them."""
        for parameter in self.parameters.values():
            if parameter.grad is None:  # this device had no share, or the loss does not reach it in this step
                parameter.grad = torch.zeros_like(parameter)
            if self.accelerator.num_processes > 1:
                parameter.grad = self.accelerator.reduce(parameter.grad, "sum")
            if self.scale.value != 1:
                parameter.grad /= self.scale.value

    def _refuse_gradient(self, number: int, norm: float) -> None:
        bad = [name for name, p in self.parameters.items() if p.grad is not None and not _finite(p.grad)]
        self._forget_gradients()
        where = f", first in {bad[0]}" if bad else ""
        raise TrainingFailed(
            f"step {number + 1}: the gradient is not finite (norm {norm}{where}); lower --learning-rate or --clip"
        )


def check_lesson(drafter: Learner, samples: Sequence[Sample]) -> None:
    """OptionError if no sample teaches the drafter anything; ends at the first that does.

    Args:
        drafter: of any kind.
        samples: of an epoch.
    """
    # What has features in it needs one row of them and a token after it before there is anything to predict.
    first = 2 if drafter.taps else 1
    if not any(np.asarray(sample.loss_mask)[first:].any() for sample in samples):
        longest = max(len(sample.token_ids) for sample in samples)
        raise OptionError(
            "--data",
            f"nothing can be learned: its samples are too short, the longest has {longest} tokens and this kind needs "
            f"{first + 1}"
            if longest <= first
            else f"nothing can be learned: the loss masks leave no token after the first {first} of a sample, which "
            f"{drafter.name} does not predict; look at them with `forerun data prepare --show`",
        )
    generator = torch.Generator().manual_seed(0)
    if any(drafter.prepare(outline(drafter, [sample]), generator).weight > 0 for sample in samples):
        return
    raise OptionError(
        "--data",
        f"nothing can be learned: the loss masks of its {len(samples):,} samples leave {drafter.name} no place to "
        "draft from; look at them with `forerun data prepare --show`",
    )


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
