"""From logits to a distribution to a token.

The same `distribution` gives the target's law, the drafter's law and thereby both inputs of the residual, so that the
three cannot disagree. Randomness is a pure function of its key (`Noise`).

    options.py   Sampling and its checks
    adjust.py    Row; masks, biases and penalties before the temperature
    law.py       distribution, try_distribution: temperature, filters, one softmax
    noise.py     Noise
    tokens.py    draw, draw_coupled, logprobs
"""

from forerun.sampling.adjust import Row, adjust
from forerun.sampling.law import distribution, one_hot, try_distribution
from forerun.sampling.noise import ACCEPT, DRAFT, FINAL, GUMBEL, Noise
from forerun.sampling.options import (
    GREEDY_BELOW,
    LogitsProcessor,
    LogprobsMode,
    Sampling,
    VerifyMode,
    check_ids,
    undrawable,
)
from forerun.sampling.tokens import NOTHING, TokenLogprob, draw, draw_coupled, logprobs

__all__ = [
    "ACCEPT",
    "DRAFT",
    "FINAL",
    "GREEDY_BELOW",
    "GUMBEL",
    "NOTHING",
    "LogitsProcessor",
    "LogprobsMode",
    "Noise",
    "Row",
    "Sampling",
    "TokenLogprob",
    "VerifyMode",
    "adjust",
    "check_ids",
    "distribution",
    "draw",
    "draw_coupled",
    "logprobs",
    "one_hot",
    "try_distribution",
    "undrawable",
]
