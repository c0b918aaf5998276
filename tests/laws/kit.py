"""Exact laws of completed outputs, through the real functions.

Every decision of drawing and verifying is a step function of the uniform numbers it reads. A round is therefore summed
exactly: the unit interval of each number is cut where theory says the outcome changes, the real function is called just
inside both ends of every cell, must answer the same there, and its answer counts with the cell's width. What is summed
are the answers, never the theory: a function whose steps lie elsewhere fails the comparison of the two ends.

    drafting          -> every draft a drafter may make at a prefix, with its probability
    rejection_round   -> law of the tokens one round emits
    completed_law     -> law of the first N tokens over two rounds, completed by plain decoding
    plain_law         -> the target's own law of N tokens
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.sampling import Row, Sampling, distribution
from forerun.verify import Draft, Verdict, reject
from laws import naive
from laws.cells import EXACT, Cell, cells, inversion_cuts, measured, shares

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Carry = Hashable
"""What a round leaves to the next one apart from tokens: confidences, noise."""

Logits = Callable[[Sequence[int]], Sequence[float]]
"""`logits(prefix)`: next-token logits [V] after all these tokens."""

Verify = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Verdict]


@dataclass(frozen=True)
class Model:
    """A target: logits and how they are sampled.

    In float64 its own law is that of the reference; in another precision it is what plain decoding draws there.
    """

    logits: Logits
    sampling: Sampling = field(default_factory=Sampling)
    prompt_length: int = 1
    end_ids: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float64

    def row(self, prefix: Sequence[int], drafted: Sequence[int] = ()) -> Row:
        return Row(self.sampling, prefix, self.prompt_length, drafted, self.end_ids)

    def plain(self, prefix: Sequence[int]) -> list[float]:
        """The law of the next token."""
        if self.dtype == torch.float64:
            return naive.law(self.logits(prefix), self.row(prefix))
        return measured(self.laws(prefix, [()]))[0]

    def laws(self, prefix: Sequence[int], drafted: Sequence[Tokens]) -> Tensor:
        """The laws [N, V] after each of these drafted prefixes, by the real function in one verify block."""
        logits = torch.tensor([self.logits([*prefix, *x]) for x in drafted], dtype=self.dtype)
        return distribution(logits, [self.row(prefix, x) for x in drafted])


class Path(NamedTuple):
    """A draft that may be made at some prefix, and how probable it is."""

    draft: Draft
    weight: float


Drafting = Callable[[Tokens, Carry], Sequence[Path]]
"""`drafting(prefix, carry)`: every draft that may be made there."""
Lengths = Callable[[Draft, Tokens, Carry], int]
"""`lengths(draft, prefix, carry)`: how many of its tokens are verified."""

Round = Callable[[Tokens, Carry], dict[tuple[Tokens, Carry], float]]
"""`round(prefix, carry)`: law of (emitted tokens, carry) of one round."""


# ------------------------------------------------------------------------------------------------------------ drafting


class Slot(NamedTuple):
    """A drafter's next token after some drafted prefix: the law it is drawn from and the law it reports."""

    drawn: Tensor
    """[V]"""
    reported: Tensor | None
    """[V]; None for a point mass. Lossless drafters report `drawn`."""
    confidence: float = 1.0


def serial(slot: Callable[[Tokens, Tokens], Slot], k: int) -> Drafting:
    """A drafter that draws k tokens one after the other; `slot(prefix, drafted)` describes the next one."""

    def drafting(prefix: Tokens, carry: Carry) -> list[Path]:
        paths: list[tuple[Tokens, list[Slot], float]] = [((), [], 1.0)]
        for _ in range(k):
            slots = [slot(prefix, tokens) for tokens, _, _ in paths]
            odds = measured([s.drawn for s in slots])
            paths = [
                ((*tokens, v), [*before, s], weight * odd)
                for (tokens, before, weight), s, row in zip(paths, slots, odds, strict=True)
                for v, odd in enumerate(row)
                if odd > 0
            ]
        return [Path(_draft(tokens, slots), weight) for tokens, slots, weight in paths]

    return drafting


def _draft(tokens: Tokens, slots: Sequence[Slot]) -> Draft:
    reported = [s.reported for s in slots if s.reported is not None]
    assert len(reported) in (0, len(slots)), "a draft is either drawn or deterministic"
    return Draft(list(tokens), torch.stack(reported) if reported else None, [s.confidence for s in slots])


def steered(propose: Callable[[Tokens, Sequence[float]], Draft], k: int) -> Drafting:
    """A real drafter: `propose(prefix, uniforms [k])` drafts with these numbers for its slots.

    Each number is steered into every cell of the law that the draft reports for its slot; that the token is the cell's
    own proves that it was drawn from the very law reported.
    """

    def drafting(prefix: Tokens, carry: Carry) -> list[Path]:
        return list(_steer(lambda uniforms: propose(prefix, uniforms), k, [], 1.0))

    return drafting


def _steer(propose: Callable[[Sequence[float]], Draft], k: int, fixed: list[float], weight: float) -> Iterator[Path]:
    slot = len(fixed)
    draft = propose([*fixed, *[0.5] * (k - slot)])
    if slot >= len(draft.tokens) or draft.probs is None:
        yield Path(draft, weight)
        return
    law = draft.probs[slot].tolist()
    for cell in cells(inversion_cuts(law)):
        tokens = {propose([*fixed, end, *[0.5] * (k - slot - 1)]).tokens[slot] for end in cell.ends()}
        assert len(tokens) == 1, f"slot {slot + 1} is not drawn from the law it reports: {tokens} on {cell}"
        yield from _steer(propose, k, [*fixed, cell.ends()[0]], weight * cell.weight)


# -------------------------------------------------------------------------------------------------------------- rounds


def all_of_it(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    return len(draft.tokens)


Ask = tuple[Draft, int]
"""A draft and how many of its tokens are verified."""

Cuts = Callable[[list[float], list[float]], Sequence[float]]
"""Where a rule under suspicion changes its final token, from (target law, draft law) at the last row reached."""


class _Case(NamedTuple):
    """One call of the verification rule: uniform numbers, and the probability of the cell they stand for."""

    ask: int
    uniforms: list[float]
    weight: float


def verdict_laws(
    target: Model, prefix: Tokens, asks: Sequence[Ask], verify: Verify = reject, more_cuts: Cuts | None = None
) -> list[Law]:
    """For each draft at this prefix, the law of the tokens that verification emits."""
    laws = _target_laws(target, prefix, [draft for draft, _ in asks])
    cases = [
        _Case(i, uniforms, weight)
        for i, (draft, count) in enumerate(asks)
        for uniforms, weight in _cases(draft, count, laws, more_cuts)
    ]
    accepted, tokens = _verify(verify, asks, laws, cases)
    out: list[Law] = [defaultdict(float) for _ in asks]
    for at in range(0, len(cases), 2):
        assert (accepted[at], tokens[at]) == (accepted[at + 1], tokens[at + 1]), f"not constant on {cases[at]}"
        draft, _ = asks[cases[at].ask]
        out[cases[at].ask][(*draft.tokens[: accepted[at]], tokens[at])] += cases[at].weight
    return out


def _target_laws(target: Model, prefix: Tokens, drafts: Sequence[Draft]) -> dict[Tokens, Tensor]:
    """The target's law after every drafted prefix, computed in one block."""
    nodes = list({tuple(d.tokens[:k]): None for d in drafts for k in range(len(d.tokens) + 1)})
    return dict(zip(nodes, target.laws(prefix, nodes), strict=True))


def _cases(
    draft: Draft, count: int, laws: dict[Tokens, Tensor], more_cuts: Cuts | None
) -> Iterator[tuple[list[float], float]]:
    """Both ends of every cell of all uniforms of a draft: the first `count` accept, the last one draws."""
    before: list[Cell] = []
    weight = 1.0
    for k in range(count + 1):
        law = shares(laws[tuple(draft.tokens[:k])])
        own = None if k == count else _draft_law(draft, k, len(law))
        threshold = 1.0 if own is None else _threshold(law[draft.tokens[k]], own[draft.tokens[k]])
        residual = law if own is None else [max(p - q, 0.0) for p, q in zip(law, own, strict=True)]
        here, mass = 1.0 if own is None else 1.0 - threshold, math.fsum(residual)
        if weight * here > 0:
            cuts = inversion_cuts(residual if mass > 0 else law)
            cuts += more_cuts(law, own or [0.0] * len(law)) if more_cuts else []
            reached = [*before, *([] if own is None else [Cell(threshold, 1.0)])]
            for cell in cells(cuts):
                for end in (0, 1):
                    accept = [c.ends()[end] for c in reached]
                    final = cell.ends(mass if mass > 0 else 1.0)[end]
                    yield [*accept, *[0.5] * (count - len(accept)), final], weight * here * cell.weight
        before.append(Cell(0.0, threshold))
        weight *= threshold


def _threshold(target: float, own: float) -> float:
    """Where acceptance ends. A draft law of 0 at its own token is a false report: accepted wherever the target can."""
    return min(1.0, target / own) if own > 0 else float(target > 0)


def _draft_law(draft: Draft, k: int, vocab_size: int) -> list[float]:
    if draft.probs is None:
        return [float(v == draft.tokens[k]) for v in range(vocab_size)]
    return shares(draft.probs[k])


def _verify(
    verify: Verify, asks: Sequence[Ask], laws: dict[Tokens, Tensor], cases: Sequence[_Case]
) -> tuple[list[int], list[int]]:
    """The rule's answers to all cases in one padded call; what is padded is never looked at."""
    k = max(count for _, count in asks)
    number = {node: n for n, node in enumerate(laws)}
    table = torch.stack(list(laws.values()))
    nodes = [[number[tuple(d.tokens[: min(j, count)])] for j in range(k + 1)] for d, count in asks]
    at = torch.tensor([case.ask for case in cases])
    tokens = torch.tensor([(d.tokens + [0] * k)[:k] for d, _ in asks], dtype=torch.long).reshape(len(asks), k)
    reported = [d.probs for d, _ in asks if d.probs is not None]
    padded = [torch.cat([probs, probs[-1:].expand(k, -1)])[:k] for probs in reported]
    assert len(padded) in (0, len(asks)), "at one prefix all drafts are drawn or all are deterministic"
    uniforms = [[*c.uniforms[:-1], *[0.5] * (k + 1 - len(c.uniforms)), c.uniforms[-1]] for c in cases]
    verdict = verify(
        tokens[at],
        torch.stack(padded)[at] if padded and k > 0 else None,
        torch.tensor([count for _, count in asks])[at],
        table[torch.tensor(nodes)][at],
        torch.tensor(uniforms, dtype=torch.float64),
    )
    return verdict.accepted.tolist(), verdict.next_token.tolist()


def rejection_round(
    target: Model,
    drafting: Drafting,
    lengths: Lengths = all_of_it,
    verify: Verify = reject,
    more_cuts: Cuts | None = None,
    leave: Callable[[Draft, int, Carry], Carry] = lambda draft, accepted, carry: None,
) -> Round:
    """One round of drafting and verifying.

    Args:
        target: whose law is to come out.
        drafting: the drafter.
        lengths: the budget.
        verify: `reject`, or a rule under suspicion with `more_cuts`.
        leave: `leave(draft, accepted, carry)`, what the next round gets to know.
    """

    def round_law(prefix: Tokens, carry: Carry) -> dict[tuple[Tokens, Carry], float]:
        paths = drafting(prefix, carry)
        asks = [(path.draft, lengths(path.draft, prefix, carry)) for path in paths]
        out: dict[tuple[Tokens, Carry], float] = defaultdict(float)
        for path, law in zip(paths, verdict_laws(target, prefix, asks, verify, more_cuts), strict=True):
            for emitted, weight in law.items():
                out[emitted, leave(path.draft, len(emitted) - 1, carry)] += path.weight * weight
        return dict(out)

    return round_law


# --------------------------------------------------------------------------------------------------- completed outputs


def completed_law(
    rounds: Round, target: Model, prompt: Tokens, length: int, count: int = 2, carry: Carry = None
) -> Law:
    """Law of the first `length` tokens after `count` rounds, the rest by plain decoding."""
    here: dict[tuple[Tokens, Carry], float] = {((), carry): 1.0}
    for _ in range(count):
        after: dict[tuple[Tokens, Carry], float] = defaultdict(float)
        for (output, left), weight in here.items():
            if len(output) >= length:
                after[output, left] += weight
                continue
            for (emitted, leaves), odd in rounds((*prompt, *output), left).items():
                after[(*output, *emitted)[:length], leaves] += weight * odd
        here = after
    law: Law = defaultdict(float)
    for (output, _), weight in here.items():
        law[output] += weight
    return _extend(law, target, prompt, length)


def plain_law(target: Model, prompt: Tokens, length: int) -> Law:
    """The target's own law of `length` tokens."""
    return _extend({(): 1.0}, target, prompt, length)


def _extend(law: Law, target: Model, prompt: Tokens, length: int) -> Law:
    done: Law = defaultdict(float)
    open_ = dict(law)
    for size in range(length + 1):
        for output in [o for o in open_ if len(o) == size]:
            weight = open_.pop(output)
            if size == length:
                done[output] += weight
                continue
            for v, p in enumerate(target.plain((*prompt, *output))):
                if p > 0:
                    open_[(*output, v)] = open_.get((*output, v), 0.0) + weight * p
    return done


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return math.fsum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


def bias(rounds: Round, target: Model, prompt: Tokens, length: int, count: int = 2, carry: Carry = None) -> float:
    """Total variation between what `count` rounds emit and the target's own law."""
    return distance(completed_law(rounds, target, prompt, length, count, carry), plain_law(target, prompt, length))


# ----------------------------------------------------------------------------------------- several requests in a batch

Choose = Callable[[Sequence[Draft]], Sequence[int]]
"""`choose(drafts)`: a budget shared by the requests of a step; how many tokens of each are verified."""


def joint_bias(
    targets: Sequence[Model], draftings: Sequence[Drafting], choose: Choose, prompts: Sequence[Tokens]
) -> float:
    """Total variation between the joint law of what one round emits for all requests, completed, and the product law.

    The outputs are compared up to the longest draft and the token behind it.
    """
    paths = [drafting(prompt, None) for drafting, prompt in zip(draftings, prompts, strict=True)]
    size = 1 + max(len(path.draft.tokens) for own in paths for path in own)
    every = [[(path.draft, n) for path in own for n in range(len(path.draft.tokens) + 1)] for own in paths]
    done = [
        {(id(ask[0]), ask[1]): _extend(law, target, prompt, size) for ask, law in zip(asks, laws, strict=True)}
        for target, prompt, asks in zip(targets, prompts, every, strict=True)
        for laws in [verdict_laws(target, prompt, asks)]
    ]
    joint: dict[tuple[Tokens, ...], float] = defaultdict(float)
    for chosen in itertools.product(*paths):
        lengths = choose([path.draft for path in chosen])
        laws = [done[r][id(path.draft), n] for r, (path, n) in enumerate(zip(chosen, lengths, strict=True))]
        _add_product(joint, laws, math.prod(path.weight for path in chosen))
    own: dict[tuple[Tokens, ...], float] = defaultdict(float)
    _add_product(own, [plain_law(target, prompt, size) for target, prompt in zip(targets, prompts, strict=True)], 1.0)
    return math.fsum(abs(joint[x] - own[x]) for x in joint.keys() | own.keys()) / 2


def _add_product(joint: dict[tuple[Tokens, ...], float], laws: Sequence[Law], weight: float) -> None:
    for outputs in itertools.product(*(law.items() for law in laws)):
        joint[tuple(tokens for tokens, _ in outputs)] += weight * math.prod(odd for _, odd in outputs)


__all__ = ["EXACT", "inversion_cuts", "measured"]
