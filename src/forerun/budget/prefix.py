"""How many draft tokens of a batch to verify: candidates in the order of their survival, and where to stop.

Candidates are (request, position) with survival a = c_1 * .. * c_position. In descending order of a every candidate
comes after those before it in its own row, so a cut of the order is a prefix of every row, and to examine one needs
only confidences known before its token was drawn (methods, 8.2 and 8.3; Algorithm 1 of arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.budget.curve import FloatArray, free_up_to, lower_envelope


class Ranking(NamedTuple):
    """All candidates with a > 0, best first."""

    rows: NDArray[np.intp]
    """[n] row of each candidate."""
    survival: FloatArray
    """[n] descending."""


def survivals(confidence: Sequence[Sequence[float]]) -> FloatArray:
    """[R, K] of rows of confidences of different lengths; 0 beyond a row's end, NaN from a NaN on: no candidates."""
    width = max(map(len, confidence), default=0)
    padded = np.array([[*row, *[0.0] * (width - len(row))] for row in confidence], dtype=np.float64)
    return np.multiply.accumulate(padded.reshape(len(confidence), width), axis=1)


def rank(survival: FloatArray, ids: Sequence[int]) -> Ranking:
    """Candidates of survivals [R, K] (never rising along a row) by (-survival, position, request id).

    Equal survivals, such as saturated confidences, are ordered by what does not depend on any token, and by the
    request's own id rather than its place in the batch, so that the order of the batch means nothing.
    """
    rows, positions = np.nonzero(survival > 0)
    values = survival[rows, positions]
    order = np.lexsort((np.asarray(ids, dtype=np.int64)[rows], positions, -values))
    return Ranking(rows[order], values[order])


def throughput(requests: int, survival: FloatArray, seconds: FloatArray) -> FloatArray:
    """Theta [n + 1]: expected tokens per second if the best 0 .. n candidates are verified.

    Args:
        requests: each emits one token for certain.
        survival: [n] of the candidates, best first.
        seconds: at least [n + 1], of the step with 0 .. n draft rows.
    """
    tokens = requests + np.concatenate(([0.0], np.cumsum(survival)))
    return np.asarray(tokens / seconds[: len(tokens)], dtype=np.float64)


def stop_early(theta: FloatArray) -> int:
    """Algorithm 1: goes on while theta grows; the first candidate that does not improve it ends the scan."""
    worse = np.flatnonzero(theta[1:] <= theta[:-1])
    return int(worse[0]) if len(worse) else len(theta) - 1


def best_count(theta: FloatArray) -> int:
    """The count of the greatest theta, the smallest of several."""
    return int(np.argmax(theta)) if len(theta) else 0


def scan(requests: int, ranking: Ranking, seconds: FloatArray) -> int:
    """Algorithm 1 on the lower convex envelope of `seconds` [N + 1], then moved up to a step edge of `seconds` itself.

    tau is concave along the order and the envelope convex and positive, so their ratio has one hill and the stop finds
    its top. N must be the *planned* number of draft tokens: how many were drafted may depend on the tokens, and the
    envelope on its range.
    """
    count = stop_early(throughput(requests, ranking.survival, lower_envelope(seconds)))
    return free_up_to(seconds, count)


def lengths(ranking: Ranking, count: int, requests: int) -> list[int]:
    """[R] how many candidates of each row are among the best `count`."""
    found: list[int] = np.bincount(ranking.rows[:count], minlength=requests).tolist()
    return found


__all__ = ["Ranking", "best_count", "lengths", "rank", "scan", "stop_early", "survivals", "throughput"]
