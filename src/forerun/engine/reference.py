"""The oracle of the tests: plain decoding of one request without cache, batching or drafts.

It recomputes the whole prefix for every token and shares with the engine only what defines the result: the target, the
law of floor 0 and the noise. Whatever the engine emits for a request must be what this emits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.sampling import FINAL, Noise, Row, Sampling, VerifyMode, distribution, draw, draw_coupled
from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import blocks_for


def decode(
    target: Target, prompt: Sequence[int], sampling: Sampling, noise: Noise, mode: VerifyMode = "rejection"
) -> list[int]:
    """Output ids of at most sampling.max_tokens, ended by an end-of-sequence or stop id; stop strings are not applied.

    The target must have been allocated for the whole text; block 0 onwards is overwritten.
    """
    assert sampling.max_tokens is not None
    tokens, stops = list(prompt), frozenset(sampling.stop_token_ids)
    eos = frozenset() if sampling.ignore_eos else target.eos_token_ids
    for _ in range(min(sampling.max_tokens, target.window - len(prompt))):
        blocks = list(range(blocks_for(len(tokens))))
        logits = target.forward(Batch([Segment(tokens, 0, blocks, 1)])).logits
        law = distribution(logits, [Row(sampling, tokens, len(prompt), end_ids=eos | stops)])
        anchor = len(tokens) - 1
        if mode == "coupled" and not sampling.greedy:
            gumbel = torch.from_numpy(noise.gumbel(anchor + 1, law.shape[-1]))
            token = int(draw_coupled(law.cpu(), gumbel[None]))
        else:
            token = int(draw(law.cpu(), torch.from_numpy(noise.uniforms(anchor, FINAL, 1))))
        tokens.append(token)
        if token in eos or (token in stops and len(tokens) - len(prompt) > sampling.min_tokens):
            break
    return tokens[len(prompt) :]
