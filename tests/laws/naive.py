"""The law of the next token, written a second time: plain Python floats, one position, nothing shared with the package.

It is the reference that `distribution` is compared with, and the target's own law in the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.sampling import Row, Sampling


def law(logits: Sequence[float], row: Row) -> list[float]:
    """[V] probabilities at a place; NaN everywhere if nothing is allowed."""
    scores = penalised(biased(masked(logits, row), row.sampling), row)
    return shaped(scores, row.sampling)


def masked(logits: Sequence[float], row: Row) -> list[float]:
    s, before = row.sampling, [*row.tokens, *row.drafted]
    out = [x if s.allowed_token_ids is None or i in s.allowed_token_ids else -math.inf for i, x in enumerate(logits)]
    for word in s.bad_words:
        head = list(word[:-1])
        if before[len(before) - len(head) :] == head:
            out[int(word[-1])] = -math.inf
    if len(before) - row.prompt_length < s.min_tokens:
        without = [-math.inf if i in row.end_ids else x for i, x in enumerate(out)]
        out = without if max(without) > -math.inf else out
    return out


def biased(logits: Sequence[float], s: Sampling) -> list[float]:
    return [x + s.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]


def penalised(logits: Sequence[float], row: Row) -> list[float]:
    s, prompt = row.sampling, list(row.tokens[: row.prompt_length])
    output = [*row.tokens[row.prompt_length :], *row.drafted]
    out = []
    for i, x in enumerate(logits):
        if i in prompt or i in output:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        out.append(x - s.frequency_penalty * output.count(i) - s.presence_penalty * (i in output))
    return out


def shaped(scores: Sequence[float], s: Sampling) -> list[float]:
    """Temperature, then min_p, top_k and top_p on a list of ids that gets shorter."""
    ranked = sorted((i for i, x in enumerate(scores) if x > -math.inf), key=lambda i: (-scores[i], i))
    if not ranked:
        return [math.nan] * len(scores)
    if s.temperature < 1e-5:
        return [float(i == ranked[0]) for i in range(len(scores))]
    weight = [math.exp((x - scores[ranked[0]]) / s.temperature) for x in scores]
    ranked = [i for i in ranked if weight[i] >= s.min_p]
    ranked = ranked[: s.top_k] if s.top_k > 0 else ranked
    total, kept, mass = math.fsum(weight[i] for i in ranked), [], 0.0
    for i in ranked:
        if s.top_p < 1 and mass >= s.top_p * total:
            break
        kept.append(i)
        mass += weight[i]
    return [weight[i] / math.fsum(weight[j] for j in kept) if i in kept else 0.0 for i in range(len(scores))]
