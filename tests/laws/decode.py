"""Decoding several requests in a batch with the real rules and the real noise: what an engine does, without a cache.

For equality of token ids: greedy requests, coupled mode, and rejection mode against its own repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.sampling import ACCEPT, DRAFT, FINAL, Noise, VerifyMode, distribution, draw, draw_coupled
from forerun.verify import Draft, Verdict, couple_packed, reject_packed
from laws.cases import SlotOf
from laws.kit import Model, Tokens


@dataclass
class Stream:
    """One request: its target, its drafter (None: plain decoding), K, and what has come out so far."""

    target: Model
    prompt: Tokens
    noise: Noise
    mode: VerifyMode = "coupled"
    slot: SlotOf | None = None
    k: int = 0
    output: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> Tokens:
        return (*self.prompt, *self.output)

    @property
    def anchor(self) -> int:
        return len(self.prefix) - 1


def decode(streams: Sequence[Stream], length: int) -> list[list[int]]:
    """Runs all requests to `length` output tokens; they leave the batch as they finish."""
    while active := [s for s in streams if len(s.output) < length]:
        for mode in ("coupled", "rejection"):
            group = [s for s in active if s.mode == mode]
            if group:
                _step(group, mode)
    return [s.output[:length] for s in streams]


def _step(streams: Sequence[Stream], mode: str) -> None:
    drafts = [_draft(s) for s in streams]
    places = [
        (s, tuple(draft.tokens[:j]))
        for s, draft in zip(streams, drafts, strict=True)
        for j in range(len(draft.tokens) + 1)
    ]
    logits = torch.tensor([s.target.logits([*s.prefix, *x]) for s, x in places], dtype=torch.float64)
    laws = distribution(logits, [s.target.row(s.prefix, x) for s, x in places])
    verdict = (_couple if mode == "coupled" else _reject)(streams, drafts, laws)
    for s, draft, a, y in zip(streams, drafts, verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True):
        s.output += [*draft.tokens[:a], y]
        s.accepted.append(a)


def _couple(streams: Sequence[Stream], drafts: Sequence[Draft], laws: torch.Tensor) -> Verdict:
    positions = [(s, s.anchor + 1 + j) for s, d in zip(streams, drafts, strict=True) for j in range(len(d.tokens) + 1)]
    noise = np.stack([s.noise.gumbel(position, laws.shape[-1]) for s, position in positions])
    return couple_packed(drafts, laws, torch.from_numpy(noise))


def _reject(streams: Sequence[Stream], drafts: Sequence[Draft], laws: torch.Tensor) -> Verdict:
    accept = [s.noise.uniforms(s.anchor, ACCEPT, len(d.tokens)) for s, d in zip(streams, drafts, strict=True)]
    final = [s.noise.uniforms(s.anchor, FINAL, 1) for s in streams]
    return reject_packed(
        drafts, laws, torch.from_numpy(np.concatenate(accept)), torch.from_numpy(np.concatenate(final))
    )


def _draft(s: Stream) -> Draft:
    """K tokens, drawn with the noise of the mode, each from the law of its slot."""
    draft, reported = Draft(), []
    for k in range(s.k if s.slot else 0):
        assert s.slot is not None
        slot = s.slot(s.prefix, tuple(draft.tokens))
        if s.mode == "coupled":
            gumbel = torch.from_numpy(s.noise.gumbel(s.anchor + 1 + k, len(slot.drawn)))
            token = draw_coupled(slot.drawn[None], gumbel[None])
        else:
            token = draw(slot.drawn[None], torch.from_numpy(s.noise.uniforms(s.anchor, DRAFT, k + 1)[k:]))
        draft.tokens.append(int(token))
        reported.append(slot.reported)
    if s.mode == "rejection" and reported and reported[0] is not None:
        draft.probs = torch.stack([law for law in reported if law is not None])
    return draft
