"""From adjusted logits to a law: the only place where a softmax meets a temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from forerun.sampling.adjust import Row, adjust_block

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.sampling.options import Sampling

HEAD = 63
"""Ids looked at first when a nucleus is searched; most fit, and `topk` is several times slower beyond (measured)."""


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The law of the next token at each row.

    A row's law does not depend on the other rows: the same logits and place give the same bits alone, in a verify block
    and in a mixed batch.

    Args:
        logits: [N, V] of any floating dtype; half precision is widened to float32, float64 stays float64.
        rows: N places, one for each row of logits.

    Returns:
        Probabilities [N, V]. A greedy row is one-hot at the lowest id among the largest logits. A row whose logits are
        not finite, or of which masks leave nothing, holds NaN; `draw` answers `NOTHING` there.

    Order (vLLM's): allowed ids, bad words, user processors, min_tokens, logit_bias, penalties, temperature, min_p,
    top_k, top_p; one normalisation at the end.
    """
    import torch

    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    wide = _widened(logits)
    if any(row.adjusted for row in rows):
        wide = wide.clone() if wide is logits else wide
        for start, end in _runs(rows, lambda row: row.block if row.adjusted else None):
            if rows[start].adjusted:
                adjust_block(wide[start:end], rows[start:end])
    parts = [_shape(wide[start:end], rows[start].sampling) for start, end in _runs(rows, lambda r: r.sampling.shaping)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def try_distribution(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, dict[int, Exception]]:
    """`distribution`, where what a request's own options raise (a logits processor) costs no other row its law.

    Returns:
        Probabilities [N, V], NaN at a row that raised; and by row what it raised.
    """
    import torch

    try:
        return distribution(logits, rows), {}
    except Exception:  # whose it is shows below: each row alone has the bits it has among others
        pass
    laws, errors = [], {}
    for r, row in enumerate(rows):
        own = logits[r : r + 1]
        try:
            laws.append(distribution(own, [row]))
        except Exception as error:
            errors[r] = error
            laws.append(torch.full_like(_widened(own), math.nan))
    return torch.cat(laws), errors


def _widened(logits: Tensor) -> Tensor:
    """Half precision as float32; the tensor itself where it is wide enough."""
    import torch

    return logits if logits.dtype == torch.float64 else logits.float()


def _runs(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of neighbours with the same key."""
    start = 0
    for _, group in groupby(rows, key):
        end = start + sum(1 for _ in group)
        yield start, end
        start = end


def _shape(logits: Tensor, s: Sampling) -> Tensor:
    """Temperature and filters on rows [N, V]; probabilities."""
    import torch

    if s.greedy:
        top = logits.max(-1)
        # 0 where finite, NaN where not: a broken row must not pass for a certain one.
        return one_hot(top.indices, logits, 1 + (top.values - top.values))
    if 0 < s.top_k < logits.shape[-1]:
        return _top_k(logits, s)
    plain = s.temperature == 1 and s.min_p == 0
    scores = logits if plain else _scores(logits, logits.amax(-1, keepdim=True), s)
    probs = torch.softmax(scores, -1)
    return probs if s.top_p == 1 else _top_p(scores, probs, s.top_p, HEAD)


def _scores(logits: Tensor, top: Tensor, s: Sampling) -> Tensor:
    """Logits [N, n] over the temperature, 0 at the largest [N, 1], without those below `min_p`."""
    # Subtract before dividing: a low temperature would blow the rounding of the largest logits up (NU-2).
    scores = (logits - top).div_(s.temperature)
    return scores.where(scores >= math.log(s.min_p), -math.inf) if s.min_p > 0 else scores


def _top_k(logits: Tensor, s: Sampling) -> Tensor:
    """The law [N, V] over the k largest logits, and of those the shortest run whose share reaches `top_p`.

    `min_p` comes before `top_k` in name, but both keep a run of the largest, so either order keeps the same ids.
    """
    import torch

    values, ids = best(logits, s.top_k)
    scores = _scores(values, values[:, :1], s)
    probs = torch.softmax(scores, -1)
    if s.top_p < 1:
        probs = torch.softmax(_cut(scores, _run_length(probs, s.top_p)), -1)
    return torch.zeros_like(logits).scatter_(-1, ids, probs)


def _top_p(scores: Tensor, probs: Tensor, p: float, width: int) -> Tensor:
    """The law [N, V] of the shortest descending run of ids whose mass reaches p.

    Sorting a vocabulary of 150,000 takes longer than a small model's pass, so only the `width` largest are looked at
    first; rows whose run is longer go on to a wider head.
    """
    import torch

    width = min(width, scores.shape[-1])
    values, ids = best(scores, width)
    size = _run_length(probs.gather(-1, ids), p)
    law = torch.zeros_like(scores).scatter_(-1, ids, torch.softmax(_cut(values, size), -1))
    longer = size[:, 0] == width
    if width < scores.shape[-1] and bool(longer.any()):
        law[longer] = _top_p(scores[longer], probs[longer], p, width * 16)
    return law


def _run_length(probs: Tensor, p: float) -> Tensor:
    """[N, 1] how many of these descending probabilities it takes to reach p; at least one."""
    import torch

    before = probs.cumsum(-1, dtype=torch.float64) - probs
    return (before < p).sum(-1, keepdim=True).clamp_min(1)


def _cut(values: Tensor, size: Tensor) -> Tensor:
    """Only the first `size` [N, 1] of each row of values [N, k]."""
    import torch

    return values.where(torch.arange(values.shape[-1], device=values.device) < size, -math.inf)


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [N, V]: values and ids, both [N, k], by (-value, id): ties go to the lowest ids."""
    import torch

    head = scores.topk(min(k + 1, scores.shape[-1]), -1)
    ids = head.indices[:, :k]
    least = head.values[:, k - 1]
    # topk picks any of those level with the last one (frequent: bfloat16 logits are coarse), and none stands for -inf.
    crowded = (head.values[:, -1] == least) & (least > -math.inf) if k < scores.shape[-1] else least != least
    for r in crowded.nonzero()[:, 0].tolist():
        level = (scores[r] == least[r]).nonzero()[:, 0]
        above = ids[r][head.values[r, :k] > least[r]]
        ids[r, : len(above)] = above
        ids[r, len(above) :] = level[: k - len(above)]
    ids = ids.sort(-1).values
    values, order = torch.sort(scores.gather(-1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def one_hot(ids: Tensor, like: Tensor, mass: Tensor | None = None) -> Tensor:
    """Point masses [N, V] at ids [N], in the dtype and on the device of `like` [N, V]; `mass` [N] instead of 1."""
    import torch

    law = torch.zeros_like(like)
    return law.scatter_(-1, ids[:, None], 1.0 if mass is None else mass[:, None])
