"""From the target's logits to a verdict per round: the only place where laws, noise and drafts meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from forerun.engine.request import Request
from forerun.sampling import ACCEPT, FINAL, Row, TokenLogprob, distribution, logprobs, try_distribution
from forerun.verify import Draft, Verdict, couple_packed, reject_packed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """One request's verification: its draft and where its rows of logits begin."""

    request: Request
    draft: Draft
    first_row: int
    drawn: bool = False
    """Whether the drafter draws from laws, so that a draft of a sampled request without any is no point mass."""

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.draft.tokens) + 1)

    @property
    def positions(self) -> range:
        """Of the tokens that these rows are the laws of."""
        first = self.request.anchor + 1
        return range(first, first + len(self.draft.tokens) + 1)

    @property
    def coupled(self) -> bool:
        # Greedy laws are point masses: both rules agree there and neither looks at its noise.
        return self.request.verify_mode == "coupled" and not self.request.sampling.greedy


Outcome = tuple[int, int] | Exception
"""(accepted, next token), or what the request's own processors raised where its next token is due."""


def judge(rounds: Sequence[Round], logits: Tensor) -> Sequence[Outcome]:
    """The outcome of each round; logits [sum(l + 1), V] in the order of the rounds."""
    try:
        return _judge(rounds, logits)
    except Exception as error:
        if len(rounds) == 1:
            return [error]
        # Some request's draft, most likely. A verdict does not depend on the others: each one alone then.
        alone = [(replace(one, first_row=0), logits[one.rows.start : one.rows.stop]) for one in rounds]
        return [judge([one], own)[0] for one, own in alone]


def _judge(rounds: Sequence[Round], logits: Tensor) -> list[Outcome]:
    watched = [_Watched(one) for one in rounds]
    laws, errors = try_distribution(logits, [row for one in watched for row in one.places()])
    outcomes: list[Outcome] = [(0, 0)] * len(rounds)
    for coupled in (False, True):
        mine = [i for i, one in enumerate(rounds) if one.coupled is coupled]
        if not mine:
            continue
        group = [rounds[i] for i in mine]
        own = laws if len(group) == len(rounds) else laws[[row for one in group for row in one.rows]]
        verdict = (_couple if coupled else _reject)(group, own)
        for i, accepted, token in zip(mine, verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True):
            outcomes[i] = _outcome(rounds[i], accepted, token, errors)
            watched[i].count(accepted)
    return outcomes


def _outcome(one: Round, accepted: int, token: int, errors: Mapping[int, Exception]) -> Outcome:
    """The verdict, which may have come to a row without a law because the request's own options raised there.

    Behind accepted drafts the error waits for a round of its own: the last of them is emitted as the next token. Plain
    decoding fails at that place and no earlier, and not at all where a stop rule fires before it.
    """
    error = errors.get(one.first_row + accepted)
    if error is None:
        return accepted, token
    return (accepted - 1, one.draft.tokens[accepted - 1]) if accepted else error


class _Watched:
    """A round with an eye on what the form of the answer (the request's logits processors) does to its draft, for the
    books: nothing is decided here.

    A law of 0 does not tell who made it: temperature 0, top-k and bad words leave nothing of most ids either. So of a
    draft that met no form before it was drawn, its tokens' logits are looked at on both sides of the processors.
    """

    def __init__(self, one: Round):
        self._one = one
        self._before: dict[int, Tensor] = {}
        self._behind: dict[int, Tensor] = {}
        request, draft = one.request, one.draft
        self._formed = bool(draft.tokens and request.sampling.logits_processors)
        # Coupled mode does not keep the law a draft was drawn from; whether there was one is known all the same.
        self._masked = draft.probs is not None or (one.drawn and one.coupled)

    def places(self) -> list[Row]:
        request, drafted, sampling = self._one.request, self._one.draft.tokens, self._one.request.sampling
        if self._formed and not self._masked:
            before, behind = partial(self._look, self._before), partial(self._look, self._behind)
            sampling = replace(sampling, logits_processors=(before, *sampling.logits_processors, behind))
        end_ids = request.end_ids
        return [
            Row(sampling, request.tokens, request.prompt_length, drafted[:j], end_ids) for j in range(len(drafted) + 1)
        ]

    def _look(self, seen: dict[int, Tensor], tokens: Sequence[int], logits: Tensor) -> Tensor:
        """A processor that changes nothing: is the drafted token of this place still possible?"""
        j, drafted = len(tokens) - len(self._one.request.tokens), self._one.draft.tokens
        if j < len(drafted):
            seen[j] = logits[drafted[j]] > -math.inf
        return logits

    def count(self, accepted: int) -> None:
        """So many draft tokens were accepted."""
        stats, drafted = self._one.request.stats, len(self._one.draft.tokens)
        if self._formed and self._masked:
            stats.record_invalid("grammar", "masked", drafted)
        elif accepted in self._behind and self._before[accepted] and not self._behind[accepted]:
            stats.record_invalid("grammar", "rejected")


def _reject(rounds: Sequence[Round], laws: Tensor) -> Verdict:
    accept = [_uniforms(one, ACCEPT, len(one.draft.tokens)) for one in rounds]
    final = [_uniforms(one, FINAL, 1) for one in rounds]
    return reject_packed(
        [one.draft for one in rounds],
        laws,
        torch.from_numpy(np.concatenate(accept)).to(laws.device),
        torch.from_numpy(np.concatenate(final)).to(laws.device),
    )


def _uniforms(one: Round, purpose: int, count: int) -> np.ndarray:
    if one.request.sampling.greedy or count == 0:
        return np.zeros(count)  # point masses: never looked at
    return one.request.noise.uniforms(one.request.anchor, purpose, count)


def _couple(rounds: Sequence[Round], laws: Tensor) -> Verdict:
    noise = [row for one in rounds for row in one.request.noise.gumbel_for_target(one.positions, laws.shape[-1])]
    return couple_packed([one.draft for one in rounds], laws, torch.from_numpy(np.stack(noise)).to(laws.device))


def committed_logprobs(request: Request, logits: Tensor) -> list[TokenLogprob]:
    """Log-probabilities of the newest committed tokens of a request, as many as it has rows of logits [n, V] here.

    Each row is a place of the block it was verified in, so it has the history of plain decoding. Processed ones are
    those of the law a token was drawn from; it is made again, for few requests ask and most steps have none of them.
    """
    s, start = request.sampling, len(request.tokens) - len(logits)
    before, run = request.tokens[:start], request.tokens[start:]
    if s.logprobs_mode == "processed_logprobs":
        places = [Row(s, before, request.prompt_length, run[:j], request.end_ids) for j in range(len(run))]
        logits = distribution(logits, places).log()
    return logprobs(logits, run, s.logprobs or 0)
