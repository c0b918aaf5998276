"""The law of the next token, written a second time in plain Python: what the exact part compares the engine with.

It shares no function with `forerun.sampling`; a mistake there cannot hide by being made on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.sampling import Row, Sampling


def law(logits: Sequence[float], row: Row) -> list[float]:
    """[V] probabilities at a place, by the documented order of masks, biases, penalties, temperature and filters."""
    return _shaped(_adjusted(logits, row), row.sampling)


def _adjusted(logits: Sequence[float], row: Row) -> list[float]:
    s, history = row.sampling, [*row.tokens, *row.drafted]
    output = history[row.prompt_length :]
    scores = []
    for token, x in enumerate(logits):
        if s.allowed_token_ids is not None and token not in s.allowed_token_ids:
            x = -math.inf
        if any(list(word) == [*history[len(history) + 1 - len(word) :], token] for word in s.bad_words):
            x = -math.inf
        if token in row.end_ids and len(output) < s.min_tokens:
            x = -math.inf
        x += s.logit_bias.get(token, 0.0)
        if token in history:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        scores.append(x - s.frequency_penalty * output.count(token) - s.presence_penalty * (token in output))
    return scores


def _shaped(scores: Sequence[float], s: Sampling) -> list[float]:
    """Temperature, then min_p, top_k and top_p as a shrinking list of ids, best first, ties by the lowest id."""
    order = sorted((i for i, x in enumerate(scores) if x > -math.inf), key=lambda i: (-scores[i], i))
    assert order, "a law needs at least one allowed token"
    if s.greedy:
        return [float(i == order[0]) for i in range(len(scores))]
    mass = {i: math.exp((scores[i] - scores[order[0]]) / s.temperature) for i in order}
    kept = [i for i in order if mass[i] >= s.min_p][: s.top_k if s.top_k > 0 else None]
    whole, reached = math.fsum(mass[i] for i in kept), 0.0
    nucleus: list[int] = []
    for i in kept:
        if nucleus and reached >= s.top_p * whole:
            break
        nucleus.append(i)
        reached += mass[i]
    return [mass[i] / reached if i in nucleus else 0.0 for i in range(len(scores))]
