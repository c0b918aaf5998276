"""Linear layers whose bfloat16 weights lie in the order the CPU's kernel reads them.

One row at a time, a linear layer is a read of its weights. oneDNN reads its own blocked layout faster than torch's
plain one: 1.2 to 1.8 times the bandwidth on the shapes of Qwen2.5 1.5B (measured, torch 2.13, two Zen 4 cores), with
the same kernel and bit-equal rows. torch offers the layout through operators meant for its compiler, so whether
they are there and give `linear`'s very numbers is checked on the model's own layers; where not, nothing is packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

LEAST_ROWS = 4
"""Fewer rows are padded up to this many. The kernel takes longer for one row than for four, and four or more give each
row the same bits whatever stands beside it, so that plain decoding and verification see the same numbers (measured)."""

CHECKED_ROWS = (2, 3, 5)


class PackedLinear(nn.Module):
    """`nn.Linear` without gradients for its weight; the plain weight is not kept."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    @property
    def weight(self) -> Tensor:
        """[out, in] in the plain layout: a copy, made for each call."""
        plain: Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():  # the packed operator has no backward
            return functional.linear(x, self.weight, self.bias)
        rows = x.shape[-2]
        if rows < LEAST_ROWS:
            x = functional.pad(x, (0, 0, 0, LEAST_ROWS - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out[..., :rows, :]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


class Weights(NamedTuple):
    """What a network's weights are and take."""

    parameters: int
    """Numbers, each counted once."""
    copied: int
    """Of these, how many are held twice: in a tied embedding, and packed as the head."""
    size: int
    """Bytes in memory, copies included."""


def weights_of(network: nn.Module) -> Weights:
    """Counts a network's weights. A packed layer's is none of torch's parameters; one that is a second copy of a tied
    embedding takes memory and is no further parameter."""
    plain, head = list(network.parameters()), _tied_head(network)
    parameters, copied = sum(p.numel() for p in plain), 0
    size = sum(p.numel() * p.element_size() for p in plain)
    for layer in (module for module in network.modules() if isinstance(module, PackedLinear)):
        numbers = layer.in_features * layer.out_features
        size += numbers * torch.bfloat16.itemsize
        if layer is head:
            copied += numbers
        else:
            parameters += numbers
    return Weights(parameters, copied, size)


def _tied_head(network: nn.Module) -> nn.Module | None:
    """The head of a model whose head is its embedding, if it was packed apart from that."""
    config, head = getattr(network, "config", None), getattr(network, "get_output_embeddings", None)
    if head is None or not getattr(config, "tie_word_embeddings", False):
        return None
    found: nn.Module | None = head()
    return found


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether layers of this kind may be packed here; `pack_linears` still looks at the numbers they give."""
    return dtype == torch.bfloat16 and device.type == "cpu" and _can_pack()


def pack_linears(model: nn.Module) -> str:
    """Packs every bfloat16 linear layer on the CPU, in place; says what was done and why.

    A head that shares its weight with the embedding gets a packed copy, which costs its bytes once more.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu"
    }
    if not layers:
        return "plain linear layers: packing is for bfloat16 on a CPU"
    if not _can_pack():
        return f"plain linear layers: torch {torch.__version__} on this CPU has no bfloat16 packing"
    if not all(_same(layer) for layer in _one_per_shape(layers.values())):
        return "plain linear layers: packed ones would not give the same numbers here"
    names = list(layers)
    with torch.no_grad():
        for name in names:  # popped, so that a plain weight is freed before the next one is packed
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(layers.pop(name)))
    return f"{len(names)} linear layers packed: the same bits for any number of rows, fewer cycles per byte read"


def _can_pack() -> bool:
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    namespace = torch.ops.mkldnn
    return all(hasattr(namespace, name) for name in operators) and bool(namespace._is_mkldnn_bf16_supported())


def _one_per_shape(layers: Iterable[nn.Linear]) -> list[nn.Linear]:
    shapes: dict[tuple[int, int, bool], nn.Linear] = {}
    for layer in layers:
        shapes.setdefault((layer.out_features, layer.in_features, layer.bias is None), layer)
    return list(shapes.values())


@torch.inference_mode()
def _same(layer: nn.Linear) -> bool:
    """Whether each row has the bits that the plain layer gives it in a pass of several rows, also when it is alone."""
    packed = PackedLinear(layer)
    generator = torch.Generator().manual_seed(0)
    for rows in CHECKED_ROWS:
        x = torch.randn(1, rows, layer.in_features, generator=generator).bfloat16()
        expected = layer(x)
        if not (torch.equal(packed(x), expected) and torch.equal(packed(x[:, -1:]), expected[:, -1:])):
            return False
    return True
