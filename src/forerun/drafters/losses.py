"""Losses between a drafter's law and its target's, row by row: pure functions, memory bounded by chunks of rows.

`compare` sees whole rows [n, D] of logits; `in_chunks` calls it for some rows at a time and computes each chunk anew in
the backward pass, so that no more than one chunk of logits exists at once. Values and gradients are those of the dense
form (tested).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
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
    lost = (1 - target.sum(-1)).clamp(min=0)  # mass of the ids that are not kept, where the draft law has none
    with torch.no_grad():
        acceptance = torch.minimum(log_draft.exp(), target).sum(-1)
    if top is not None and top < target.shape[-1]:
        target, log_draft = _lumped(target, log_draft, top)
    soft_ce = -(target * log_draft).masked_fill(target == 0, 0).sum(-1)  # 0 log 0 = 0: padded ids of a head at -inf
    l1 = (log_draft.exp() - target).abs().sum(-1) + lost
    return RowLosses(ce, soft_ce, l1, acceptance)


def _lumped(target: Tensor, log_draft: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Both laws over the target's best ids and, in a last column, all the others together: [n, top + 1]."""
    best = target.topk(top, -1)
    log_best = log_draft.gather(-1, best.indices)
    rest = (target.sum(-1, keepdim=True) - best.values.sum(-1, keepdim=True)).clamp(min=0)
    # log(1 - sum q) without cancellation where the best ids hold nearly everything.
    held = torch.logsumexp(log_best, -1, keepdim=True).clamp(max=-torch.finfo(torch.float32).eps)
    return torch.cat([best.values, rest], -1), torch.cat([log_best, torch.log(-torch.expm1(held))], -1)


def confidence_loss(confidence_logits: Tensor, acceptance: Tensor) -> Tensor:
    """[n] binary cross entropy of a predicted acceptance against the true one, a constant here (DSpark eq. 11)."""
    return functional.binary_cross_entropy_with_logits(
        confidence_logits.float(), acceptance.detach().float().clamp(0, 1), reduction="none"
    )


def decay_weights(length: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """[K] weights exp(-(k - 1) / gamma) of the positions k = 1 .. K (DFlash, DSpark eq. 9); gamma = inf: all 1."""
    return torch.exp(-torch.arange(length, dtype=torch.float32, device=device) / gamma)


def in_chunks(rows: Callable[..., RowLosses], size: int, *tensors: Tensor) -> RowLosses:
    """`rows(*tensors)` computed for `size` rows at a time, and again in the backward pass.

    Args:
        rows: a function of the chunk's rows of every tensor, which may use other tensors (weights) as well.
        size: rows in a chunk.
        tensors: each [N, ...].
    """
    count = len(tensors[0])
    if count == 0:
        empty = tensors[0].flatten()[:0].float()  # still a part of the graph
        return RowLosses(empty, empty, empty, empty)
    parts = []
    for start in range(0, count, size):
        chunk = [tensor[start : start + size] for tensor in tensors]
        parts.append(checkpoint(rows, *chunk, use_reentrant=False) if torch.is_grad_enabled() else rows(*chunk))
    return RowLosses(*(torch.cat(column) for column in zip(*parts, strict=True)))


COPIES = 6
"""Float32 copies of [rows, D] that a chunk takes at the height of its backward pass: both laws, what `compare` keeps of
them, and gradients on their way (counted by torch's profiler, see the tests of plans)."""


def chunk_rows(vocab_size: int, budget_bytes: int = 384 << 20) -> int:
    """Rows of logits that a chunk may have: all copies of [rows, vocab_size] within the budget, but never under 16."""
    return max(16, math.floor(budget_bytes / (COPIES * 4 * vocab_size)))
