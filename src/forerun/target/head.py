"""A model's own head, applied to vectors that are normed already: the code behind its decoder, whatever that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from forerun.target.packed import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Nothing:
    """A decoder's output that is only a hidden state: whatever else is asked for is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _PassThrough(nn.Module):
    """Stands where the decoder is: what comes in as embeddings goes out as the normed hidden state."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Nothing:
        return _Nothing(inputs_embeds)


def head_of(model: PreTrainedModel, decoder: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model's own code behind its decoder: the head, and whatever scales or caps its logits.

    It runs on a twin of the model that shares everything but the decoder, whose place is taken by a module that hands
    its input through. So no formula is repeated here, and the model itself stays as it was. The twin is made for each
    call (microseconds): a module that is replaced in the model later is replaced here as well.
    """
    path = _path(model, decoder)

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = _graft(model, {path: _PassThrough()})(inputs_embeds=hidden, use_cache=False).logits
        return logits

    return head


def partial_head_of(model: PreTrainedModel, decoder: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """`head_of` with a head of some rows of its weight only."""
    full: nn.Linear = cast(Any, model).get_output_embeddings()
    cut = nn.Linear(full.in_features, len(ids), bias=full.bias is not None, device="meta")
    cut.weight = nn.Parameter(full.weight.detach()[ids.to(full.weight.device)], requires_grad=False)
    if full.bias is not None:
        cut.bias = nn.Parameter(full.bias.detach()[ids.to(full.bias.device)], requires_grad=False)
    small = PackedLinear(cut) if isinstance(full, PackedLinear) else cut
    twin = {_path(model, decoder): _PassThrough(), _path(model, full): small}

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = _graft(model, twin)(inputs_embeds=hidden, use_cache=False).logits
        return logits

    return head


def _path(model: nn.Module, module: nn.Module) -> tuple[str, ...]:
    return tuple(next(name for name, found in model.named_modules() if found is module).split("."))


def _graft(module: nn.Module, grafts: Mapping[tuple[str, ...], nn.Module]) -> nn.Module:
    """A twin of a module that shares everything with it but the modules at these paths."""
    if () in grafts:
        return grafts[()]
    twin: nn.Module = object.__new__(type(module))
    children = dict(module._modules)
    for name in {path[0] for path in grafts}:
        inner = {path[1:]: graft for path, graft in grafts.items() if path[0] == name}
        children[name] = _graft(module.get_submodule(name), inner)
    twin.__dict__ = {**module.__dict__, "_modules": children}
    return twin
