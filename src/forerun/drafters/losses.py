"""Losses between a drafter's law and its target's, row by row: pure functions, memory bounded by chunks of rows.

`compare` sees whole rows [n, D] of logits; `in_chunks` has it called for some rows at a time and takes each chunk's
gradient at once, so that no more than one chunk of logits exists. Values and gradients are those of the dense form
(tested).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class RowLosses(NamedTuple):
    """What each row [n] lost; float32."""

    ce: Tensor
    """Cross entropy against the label; 0 where the label is not in the draft vocabulary."""
    soft_ce: Tensor
    """Cross entropy against the target's law: -sum_v p(v) log q(v) over the draft vocabulary, p not renormalised."""
    l1: Tensor
    """sum_v |q(v) - p(v)| over the whole vocabulary, not halved (DSpark eq. 10 as DeepSpec writes it): 2 TV."""
    acceptance: Tensor
    """sum_v min(p(v), q(v)) = 1 - TV, the chance that a token drawn from the draft law is accepted. No gradient."""


def compare(draft_logits: Tensor, target_probs: Tensor, labels: Tensor, top: int | None = None) -> RowLosses:
    """All row losses of a draft law against a target law.

    Args:
        draft_logits: [n, D].
        target_probs: [n, D], the target's law at the ids of the draft vocabulary, not renormalised: what is missing to
            a sum of 1 is the mass of the ids the drafter cannot propose.
        labels: [n] draft ids, -1 where the next token is not in the draft vocabulary.
        top: compare only the target's `top` best ids one by one and the rest as one lump (a teacher that was stored as
            its best ids and a rest mass); None: every id.
    """
    log_draft = functional.log_softmax(draft_logits.float(), -1)
    target = target_probs.float()
    ce = -log_draft.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    ce = ce.where(labels >= 0, torch.zeros_like(ce))
    mass = target.sum(-1)
    lost = (1 - mass).clamp(min=0)  # mass of the ids that are not kept, where the draft law has none
    whole = None
    if top is not None and top < target.shape[-1]:
        with torch.no_grad():
            whole = _distance(log_draft, target) + lost
        target, log_draft = _lumped(target, log_draft, top)
    # 0 log 0 = 0: padded ids of a head at -inf. A bound costs a third of looking for the zeros.
    soft_ce = -(target * log_draft.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    l1 = _distance(log_draft, target) + lost
    # |q - p| = q + p - 2 min(p, q), of laws that sum to 1 and to `mass`.
    acceptance = (1 + mass + lost - (l1 if whole is None else whole)).detach().clamp(min=0) / 2
    return RowLosses(ce, soft_ce, l1, acceptance)


def _distance(log_draft: Tensor, target: Tensor) -> Tensor:
    """[n] sum_v |q(v) - p(v)|."""
    return (log_draft.exp() - target).abs().sum(-1)


def _lumped(target: Tensor, log_draft: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Both laws over the target's best ids and, in a last column, all the others together: [n, top + 1]."""
    best = target.topk(top, -1)
    log_best = log_draft.gather(-1, best.indices)
    rest = (target.sum(-1, keepdim=True) - best.values.sum(-1, keepdim=True)).clamp(min=0)
    # log(1 - sum q) without cancellation where the best ids hold nearly everything.
    held = torch.logsumexp(log_best, -1, keepdim=True).clamp(max=-torch.finfo(torch.float32).eps)
    return torch.cat([best.values, rest], -1), torch.cat([log_best, torch.log(-torch.expm1(held))], -1)


def weighed(losses: RowLosses, ce: Literal["hard", "soft"], ce_weight: float, l1_weight: float = 0.0) -> Tensor:
    """[n] the weighted sum of a cross entropy, against the text or against the target's law, and of l1."""
    entropy = ce_weight * (losses.ce if ce == "hard" else losses.soft_ce)
    return entropy + l1_weight * losses.l1 if l1_weight else entropy  # a weight of 0 would still cost its way back


def confidence_loss(confidence_logits: Tensor, acceptance: Tensor) -> Tensor:
    """[n] binary cross entropy of a predicted acceptance against the true one, a constant here (DSpark eq. 11)."""
    return functional.binary_cross_entropy_with_logits(
        confidence_logits.float(), acceptance.detach().float().clamp(0, 1), reduction="none"
    )


def decay_weights(length: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """[K] weights exp(-(k - 1) / gamma) of the positions k = 1 .. K (DFlash, DSpark eq. 9); gamma = inf: all 1."""
    return torch.exp(-torch.arange(length, dtype=torch.float32, device=device) / gamma)


Taught = tuple[Tensor, Sequence[Tensor]]
"""The sum that is taught over some rows, and what is to be known of each of them: tensors [n, ...]."""


def in_chunks(
    taught: Callable[..., Taught],
    size: int,
    tensors: Sequence[Tensor],
    shared: Sequence[Tensor] = (),
    parameters: Iterable[nn.Parameter] = (),
) -> tuple[Tensor, list[Tensor]]:
    """What is taught over all rows, `size` of them at a time.

    The gradient of a chunk is taken as soon as its sum is known, and kept in the place of the chunk: nothing is
    computed twice, as it would be if the backward pass made the chunks anew. (Liger Kernel, arXiv 2410.10989, has a
    cross entropy that does so.) With autocast to float16 the backward pass does make them anew: small gradients vanish
    and large ones overflow but for the scale of the loss, which is known only then.

    Args:
        taught: a function of the chunk's rows of every tensor, and then of `shared`. It may use other tensors and
            modules; no gradient reaches any of them but `parameters`.
        size: rows in a chunk.
        tensors: each [N, ...].
        shared: tensors with a graph behind them, whole for every chunk.
        parameters: that `taught` uses. A hook on one of them is given the gradient of each chunk, and then their sum.

    Returns:
        The sum over all rows, with a graph, and the columns over all rows, without one.
    """
    own = [*parameters]
    chunks = [[tensor[i : i + size] for tensor in tensors] for i in range(0, max(1, len(tensors[0])), size)]
    if not torch.is_grad_enabled():
        return _summed([taught(*chunk, *shared) for chunk in chunks])
    if _to_float16(tensors[0].device.type):
        total, joined = _summed([checkpoint(taught, *chunk, *shared, use_reentrant=False) for chunk in chunks])
        return total, [column.detach() for column in joined]
    common, parts, by_chunk = [*map(_leaf, shared)], [], []
    sums: list[Tensor | None] = [None] * (len(common) + len(own))
    for chunk in chunks:
        leaves = [*map(_leaf, chunk)]
        total, columns = taught(*leaves, *common)
        parts.append((total.detach(), [column.detach() for column in columns]))
        found = _gradients(total, [*leaves, *common, *own])
        by_chunk.append(found[: len(leaves)])
        _add(sums, found[len(leaves) :])
        del total, columns, found  # graph and gradients of a chunk go before the next one comes
    total, joined = _summed(parts)
    gradients = [_joined(each) for each in zip(*by_chunk, strict=True)] + sums
    result: Tensor = _Known.apply(total, gradients, *tensors, *shared, *own)  # type: ignore[no-untyped-call]
    return result, joined


class _Known(torch.autograd.Function):
    """A sum of which the gradient is known already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: Sequence[Tensor | None], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)  # on `ctx` itself they would live as long as the sum
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *(None if known is None else known * grads[0] for known in ctx.saved_tensors)


def _to_float16(device_type: str) -> bool:
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float16


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _summed(parts: Sequence[Taught]) -> tuple[Tensor, list[Tensor]]:
    totals, columns = zip(*parts, strict=True)
    return torch.stack(totals).sum(), [torch.cat(each) for each in zip(*columns, strict=True)]


def _gradients(total: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Of every input; None: the sum does not depend on it."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted or not total.requires_grad:
        return [None] * len(inputs)
    with torch.autocast(total.device.type, enabled=False):  # a backward pass has the precisions of its forward pass
        found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _add(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """One after the other, so that no third copy of them all comes to be; a tensor that was found may be a view."""
    for i, (one, other) in enumerate(zip(sums, found, strict=True)):
        sums[i] = one + other if one is not None and other is not None else one if other is None else other


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """[N, ...] of the gradients of all chunks, none of which, or each, depends on the tensor."""
    known = [part for part in parts if part is not None]
    assert len(known) in (0, len(parts))
    return torch.cat(known) if known else None


COPIES = 6
"""Float32 copies of [rows, D] that a chunk takes at the height of its backward pass: both laws, what `compare` keeps of
them, and gradients on their way (counted by torch's profiler, see the tests of plans)."""


def chunk_rows(vocab_size: int, budget_bytes: int = 384 << 20) -> int:
    """Rows of logits that a chunk may have: all copies of [rows, vocab_size] within the budget, but never under 16."""
    return max(16, math.floor(budget_bytes / (COPIES * 4 * vocab_size)))
