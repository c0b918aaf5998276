"""AdamW and Muon, their schedule, clipping, the average of the weights and the scale of float16 losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forerun.drafters.layers import Head
from forerun.training.config import TrainingConfig


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are learned, by name."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def optimizers(network: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """What moves the weights: AdamW for all of them, or Muon for the matrices and AdamW for the rest.

    AdamW has decoupled weight decay (Loshchilov & Hutter 2019), which norms, biases and embeddings are spared. Muon
    (Jordan et al. 2024) gives every matrix inside the network an update of orthogonal directions, scaled so that it is
    as large as AdamW's (Liu et al. 2025): one learning rate serves both. Heads are not inside: all rows would be moved
    alike, those of tokens that hardly occur as well.
    """
    parameters = trained(network)
    inner, rest, spared = _divided(network, config)
    groups = [{"params": rest, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    out: list[torch.optim.Optimizer] = []
    if inner:
        out.append(
            torch.optim.Muon(
                inner, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if groups:
        fused = next(iter(parameters.values())).device.type in ("cpu", "cuda")
        out.append(torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused))
    return out


def _divided(
    network: nn.Module, config: TrainingConfig
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(moved by Muon, moved by AdamW, the same without weight decay)."""
    embedded = {
        f"{name}.{own}" if name else own
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding)
        for own, _ in module.named_parameters(recurse=False)
    }
    parameters, heads = trained(network), {id(weight) for weight in _head_weights(network)}
    spared = [p for name, p in parameters.items() if p.ndim < 2 or name in embedded]
    matrices = [p for name, p in parameters.items() if p.ndim >= 2 and name not in embedded]
    inside = [p for p in matrices if p.ndim == 2 and min(p.shape) > 1 and id(p) not in heads]
    inner = inside if config.optimizer == "muon" else []
    rest = [p for p in matrices if all(p is not other for other in inner)]
    return inner, rest, spared


def _head_weights(network: nn.Module) -> Iterator[nn.Parameter]:
    """Of layers that give logits: a drafter's own, and those of models of the transformers library."""
    for module in network.modules():
        named: Any = module
        head = named.get_output_embeddings() if hasattr(named, "get_output_embeddings") else None
        if isinstance(module, Head) or isinstance(head, nn.Linear):
            yield (named if head is None else head).weight


def moments(network: nn.Module, config: TrainingConfig) -> int:
    """Numbers that the optimisers will keep: two of AdamW for a weight, one of Muon."""
    inner, rest, spared = _divided(network, config)
    return sum(p.numel() for p in inner) + 2 * sum(p.numel() for p in [*rest, *spared])


def learning_rate(step: int, steps: int, config: TrainingConfig) -> float:
    """Of step 0 .. steps - 1: a linear rise to the peak, then the schedule down to `min_lr_share` of it."""
    warm = math.ceil(config.warmup_share * steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    fall = {"cosine": (1 - math.cos(math.pi * done)) / 2, "linear": done, "constant": 0.0}[config.schedule]
    return config.learning_rate * (1 - (1 - config.min_lr_share) * fall)


def gradient_norm(parameters: Mapping[str, nn.Parameter]) -> float:
    """Of all gradients together."""
    return float(nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]))


def weights_finite(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether the norm of all weights together is finite: one number for all of them. False as well beyond 1e19, where
    float32 squares overflow: no weight that is of use is near that."""
    with torch.no_grad():
        return math.isfinite(float(nn.utils.get_total_norm([p.detach() for p in parameters.values()])))


def unsavable(network: nn.Module, dtype: torch.dtype) -> str | None:
    """Name of the first weight that is not finite in the dtype it is saved in."""
    with torch.no_grad():
        return next((name for name, p in network.named_parameters() if not p.to(dtype).isfinite().all()), None)


def clip(parameters: Mapping[str, nn.Parameter], norm: float, most: float) -> None:
    """Scales gradients of that norm down to the norm `most`, if it is larger and `most` is not 0."""
    if 0 < most < norm:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad *= most / norm


class Average:
    """Exponential moving average of the weights: average = decay * average + (1 - decay) * weights after each step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.decay = decay
        self._parameters = parameters
        self.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """From the weights as they are now."""
        for name, weight in self.weights.items():
            weight.copy_(self._parameters[name].detach())

    @torch.no_grad()
    def update(self) -> None:
        for name, weight in self.weights.items():
            weight.lerp_(self._parameters[name].detach(), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the network has the average for its weights."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.data = self.weights[name]
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]


class LossScale:
    """What float16 losses are multiplied with before the backward pass, so that small gradients do not vanish.

    It halves when a gradient overflows, and the step is computed again: none is left out. It doubles after `patience`
    steps without that. Other precisions need none: it stays 1.
    """

    LARGEST = 2.0**24

    def __init__(self, needed: bool, start: float = 2.0**16, patience: int = 2000):
        self.needed = needed
        self.value = start if needed else 1.0
        self.patience = patience
        self.calm = 0

    def lower(self) -> bool:
        """After an overflow: whether there is a smaller scale to try the same step with."""
        if not self.needed or self.value <= 1:
            return False
        self.value, self.calm = self.value / 2, 0
        return True

    def passed(self) -> None:
        """After a step that was finite."""
        self.calm += 1
        if self.needed and self.calm >= self.patience:
            self.value, self.calm = min(2 * self.value, self.LARGEST), 0


# ----------------------------------------------------------------------------------------------------- as named tensors

MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")


def optimizer_tensors(
    moved_by: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimisers' state as `MOMENT.PARAMETER`; nothing before their first step."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        for optimizer in moved_by
        if parameter in optimizer.state
        for moment in MOMENTS
        if moment in optimizer.state[parameter]
    }


def restore_optimizer(
    moved_by: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Gives optimisers the state that `optimizer_tensors` took."""
    owners = {id(p): optimizer for optimizer in moved_by for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        optimizer, state = owners[id(parameter)], dict[str, Any]()
        for moment in MOMENTS:
            saved = tensors.get(f"{moment}.{name}")
            if saved is not None:
                # A fused optimiser keeps its step counts beside the weights, the plain one on the CPU.
                device = parameter.device if moment != "step" or optimizer.defaults.get("fused") else saved.device
                state[moment] = saved.to(device)
        if state:
            optimizer.state[parameter] = state
