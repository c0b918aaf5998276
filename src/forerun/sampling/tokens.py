"""From a law to a token, and from a token to its log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.sampling.law import best

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = -1
"""Drawn where there is no law: the row is NaN or sums to 0. The engine ends that request with `undrawable`."""


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [N] by inversion of probs [N, V] at uniforms [N] in [0, 1). An id of probability 0 is never drawn.

    `probs` need not be normalised (a residual is passed as it is): the sum is divided out in float64. `NOTHING` where a
    row is empty or not finite.
    """
    import torch

    cumulative = probs.cumsum(-1, dtype=torch.float64)
    if probs.device.type != "cpu":
        cumulative = ascending(cumulative, probs)
    total = cumulative[:, -1:]
    # u < 1 keeps the level below the total, except for subnormal sums, which round up to themselves. The first index
    # above such a level has a positive probability.
    level = torch.minimum(uniforms.to(cumulative)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, level, right=True)[:, 0]
    return ids.where(total[:, 0] > 0, NOTHING)


def ascending(cumulative: Tensor, probs: Tensor) -> Tensor:
    """Repairs running sums [N, V] of a parallel scan, whose rounding may go down, or up where a probability is 0."""
    return cumulative.where(probs > 0, 0.0).cummax(-1).values


def draw_coupled(probs: Tensor, gumbel: Tensor) -> Tensor:
    """Tokens [N] = argmax(log probs + gumbel), both [N, V]; ties by the lowest id. Exact draws from `probs`.

    `NOTHING` where a row is empty or not finite.
    """
    best = (probs.double().log() + gumbel).max(-1)
    return best.indices.where(best.values > -math.inf, NOTHING)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities at one committed position, under the target."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(id, logprob) of the most probable ids, best first, ties by the lowest id; contains the token itself."""


def logprobs(scores: Tensor, tokens: Sequence[int], top: int = 0) -> list[TokenLogprob]:
    """Log-probabilities of the emitted tokens at their rows.

    Args:
        scores: [N, V]. Raw mode: the target's untouched logits. Processed mode: `distribution(...).log()`, the law the
            tokens were drawn from; its log-softmax is itself.
        tokens: [N] emitted ids.
        top: also list this many most probable ids, and the emitted one behind them if it is not among them. Ids of
            probability 0 are left out. 0: an empty list.
    """
    import torch

    wide = scores if scores.dtype == torch.float64 else scores.float()
    values = wide.log_softmax(-1)
    chosen = values[range(len(tokens)), list(tokens)].tolist()
    tops = _most_probable(values, min(top, values.shape[-1])) if top else [[] for _ in tokens]
    for token, value, ranked in zip(tokens, chosen, tops, strict=True):
        if top and all(i != token for i, _ in ranked):
            ranked.append((token, value))
    return [TokenLogprob(t, v, ranked) for t, v, ranked in zip(tokens, chosen, tops, strict=True)]


def _most_probable(values: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` largest of each row [N, V] as (id, value), those of probability 0 left out."""
    top, ids = best(values, count)
    pairs = [zip(i, v, strict=True) for i, v in zip(ids.tolist(), top.tolist(), strict=True)]
    return [[(i, v) for i, v in row if v > -math.inf] for row in pairs]
