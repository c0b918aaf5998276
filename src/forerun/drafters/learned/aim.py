"""Attention that begins with an aim: what it reads, what it writes, and how far back it looks.

For drafters that begin fitted (`fitting.py`). From random weights attention has to find out first which rows matter,
and a short run spends most of its steps on that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forerun.drafters.learned.fitting import steadied

if TYPE_CHECKING:
    from forerun.drafters.layers import Attention, Rotary

NOISE = 0.002
"""Standard deviation of what is added to queries, keys, values and outputs."""
SLOWEST = 1 / 16
"""Radians per token of the slowest rotation that begins with a part in the attention: slower ones tell near rows from
nearer ones too little."""
EVEN = 1e-2
"""Added to the mean square of what is mapped to one direction, as a share of it."""


def pass_on(attention: Attention, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Each value takes one part of what it reads; the query heads that mix it share in writing it.

    Args:
        attention: of a layer.
        parts: (read [input], written [hidden]) of each value, at most as many as there are values; the others are 0.
    """
    sharing, dim = attention.heads // attention.kv_heads, attention.head_dim
    attention.v_proj.weight.zero_()
    attention.o_proj.weight.zero_()
    for value, (read, written) in enumerate(parts):
        attention.v_proj.weight[value] = read
        head, column = divmod(value, dim)
        for query in range(head * sharing, (head + 1) * sharing):
            attention.o_proj.weight[:, query * dim + column] = written / sharing


def look_back(
    attention: Attention,
    rotary: Rotary,
    distance: int,
    asking: Sequence[Tensor],
    seen: Sequence[Tensor],
    unseen: Sequence[Tensor] = (),
    peak: float = 16.0,
) -> None:
    """Queries and keys of one direction, which rotation makes most alike at that distance back.

    Args:
        attention: of a layer.
        rotary: turns its queries and keys.
        distance: in tokens.
        asking: groups of rows [n, input] that queries are made of.
        seen: groups of rows that are to be found.
        unseen: groups of rows, nearer than these, that are not: their keys have the direction reversed.
        peak: score of a row at that distance.
    """
    size = attention.head_dim
    turning = rotary.frequencies.to(asking[0])  # [head_dim / 2] radians per token
    strength = (turning >= min(SLOWEST, float(turning.max()))).to(turning)
    strength *= math.sqrt(size / float(strength.sum()))
    angles = turning * distance
    key = torch.cat([strength, torch.zeros_like(strength)])
    query = torch.cat([strength * angles.cos(), -strength * angles.sin()])
    # By itself, a score of normed heads in one direction is the square root of head_dim times YaRN's factor, twice.
    louder = peak * attention.scaling / rotary.factor**2
    if isinstance(attention.q_norm, nn.Identity):
        query *= louder
    else:
        attention.q_norm.weight.fill_(louder)
    asked = _directed([(own, query) for own in asking])
    found = _directed([*((own, key) for own in seen), *((own, -key) for own in unseen)])
    attention.q_proj.weight.copy_(asked.repeat(attention.heads, 1))
    attention.k_proj.weight.copy_(found.repeat(attention.kv_heads, 1))


def _directed(wanted: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[out, d]: the map that brings all rows [n, d] of a group nearest to its vector [out], groups counting alike."""
    gram = torch.stack([rows.T @ rows / len(rows) for rows, _ in wanted]).mean(0)
    towards = torch.stack([torch.outer(rows.mean(0), vector) for rows, vector in wanted]).mean(0)
    found: Tensor = torch.linalg.solve(steadied(gram, EVEN), towards).T
    return found


def disturb(attention: Attention, generator: torch.Generator) -> None:
    """Adds a little noise to all of it, so that heads that begin alike can grow apart."""
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        assert isinstance(layer, nn.Linear)
        noise = torch.randn(layer.weight.shape, generator=generator) * NOISE
        layer.weight.add_(noise.to(layer.weight.device))
