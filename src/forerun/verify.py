"""Verification: what of a proposal is kept, so that the output has exactly the target's law. Pure tensors.

`reject` is rejection sampling with a residual (Leviathan et al. 2023; Chen et al. 2023), `couple` is shared-Gumbel
coupling (Daliri et al., arXiv 2408.07978). Both take padded `[R, K]` arguments; the engine, whose requests have
different numbers of drafts, calls the packed forms. Padded and packed arguments differ in how a request's rows are
found (`_Block`); the rules (`_reject`, `_couple`) exist once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import OptionError
from forerun.sampling import draw, draw_coupled

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Draft:
    """One request's part of a proposal: K guessed tokens and the law each was drawn from."""

    tokens: list[int] = field(default_factory=list)
    """x_1 .. x_K; empty for plain decoding."""
    probs: Tensor | None = None
    """[K, V] over the target's ids, the very tensor the tokens were drawn from; None: deterministic (point masses)."""
    confidence: list[float] = field(default_factory=list)
    """c_k = estimated P(x_k accepted | x_<k accepted), a function of what was known before x_k was drawn."""
    invalid: bool = False
    """The drafter's next law was not finite, so the draft ends before it (a decision about x_<k only)."""
    predicted: int = 0
    """How many of the first tokens were taken from the text that the request said it expects."""

    def truncate(self, length: int) -> Draft:
        """The first `length` tokens with their laws."""
        if length >= len(self.tokens):
            return self
        probs = None if self.probs is None else self.probs[:length]
        predicted = min(self.predicted, length)
        return Draft(self.tokens[:length], probs, self.confidence[:length], self.invalid, predicted)


Proposal = Sequence[Draft]
"""The drafts of one step, in the order of its requests."""


class Verdict(NamedTuple):
    """What verification decided, per request."""

    accepted: Tensor
    """[R] int64: draft tokens kept, 0 .. length."""
    next_token: Tensor
    """[R] int64: the token after them: the correction at the first rejection, else the bonus.

    `NOTHING` (-1) if there is no law to draw it from: the target's row is not finite, or its masks leave nothing. That
    concerns this request alone, and only if its verdict came as far as that row.
    """


def reject(
    draft_tokens: Tensor, draft_probs: Tensor | None, lengths: Tensor, target_probs: Tensor, uniforms: Tensor
) -> Verdict:
    """Rejection sampling with residual.

    Accept x_k with probability min(1, p_k(x_k) / q_k(x_k)); at the first rejection draw from max(p_k - q_k, 0)
    renormalised; if all are accepted draw the bonus from p_{l+1}. What is emitted has exactly the law of the target.

    Args:
        draft_tokens: [R, K] integer ids; entries at and beyond a request's length are ignored.
        draft_probs: [R, K, V], the law each token was drawn from, or None for deterministic drafts (point masses). A
            law that is not finite ends the draft before its token, which is lossless: it is a function of x_<k.
        lengths: [R] draft tokens to verify, each in 0 .. K. They must not depend on the tokens they decide about.
        target_probs: [R, K + 1, V]; row k is the target's processed law after k draft tokens. Greedy = one-hot rows.
        uniforms: [R, K + 1] in [0, 1), independent of the drafts: the first K decide acceptance, the last one draws the
            final token.

    Returns:
        Verdict(accepted [R], next_token [R]).

    Raises:
        OptionError: shapes, lengths or ids do not fit together.
    """
    _check(draft_tokens, draft_probs, lengths, target_probs)
    _need(uniforms.shape == target_probs.shape[:2], "uniforms", f"must be [R, K + 1], got {tuple(uniforms.shape)}")
    verified = _verified(draft_tokens, lengths)
    block = _padded(draft_tokens[verified], lengths, target_probs)
    requests, slots = verified.nonzero().T
    chosen = None if draft_probs is None else _shares(draft_probs, _mass(draft_probs), (requests, slots), block.ids)

    def subtract(law: Tensor, requests: list[int], slots: list[int]) -> None:
        if draft_probs is None:
            law[range(len(law)), draft_tokens[requests, slots]] = 0
        else:
            laws = draft_probs[requests, slots].to(law)
            law -= laws / _mass(laws)[:, None]

    return _reject(block, chosen, subtract, uniforms[:, :-1][verified], uniforms[:, -1])


def couple(draft_tokens: Tensor, lengths: Tensor, target_probs: Tensor, gumbel: Tensor) -> Verdict:
    """Shared-Gumbel coupling: at each row the target draws y = argmax(log p + g); drafts are kept while they equal y.

    The emitted token is always the target's own draw, so with noise keyed by absolute position the output does not
    depend on the drafter, on K or on whether anything was drafted at all. A drafter that draws its tokens with the same
    noise, x = argmax(log q + g), is accepted with probability at least (1 - TV) / (1 + TV).

    Args:
        draft_tokens: [R, K] integer ids.
        lengths: [R] draft tokens to verify, each in 0 .. K.
        target_probs: [R, K + 1, V].
        gumbel: [R, K + 1, V] standard Gumbel noise of the absolute position of each row, by target token id.

    Returns:
        Verdict(accepted [R], next_token [R]).

    Raises:
        OptionError: shapes, lengths or ids do not fit together.
    """
    _check(draft_tokens, None, lengths, target_probs)
    want = tuple(target_probs.shape)
    _need(tuple(gumbel.shape) == want, "gumbel", f"must be {want}, got {tuple(gumbel.shape)}")
    block = _padded(draft_tokens[_verified(draft_tokens, lengths)], lengths, target_probs)
    return _couple(block, gumbel.flatten(0, 1))


def reject_packed(drafts: Proposal, target_probs: Tensor, accept_uniforms: Tensor, final_uniforms: Tensor) -> Verdict:
    """`reject` on packed rows.

    Args:
        drafts: R drafts of l_r >= 0 tokens each.
        target_probs: [sum(l_r + 1), V], the rows of request r after those of request r - 1.
        accept_uniforms: [sum(l_r)], the acceptance numbers in the same order.
        final_uniforms: [R], for the residual or the bonus.
    """
    block = _packed(drafts, target_probs)

    def subtract(law: Tensor, requests: list[int], slots: list[int]) -> None:
        for row, r, k in zip(law, requests, slots, strict=True):
            probs = drafts[r].probs
            if probs is None:
                row[drafts[r].tokens[k]] = 0
            else:
                row -= probs[k].to(law) / _mass(probs[k])

    return _reject(block, _chosen(drafts, block), subtract, accept_uniforms, final_uniforms)


def couple_packed(drafts: Proposal, target_probs: Tensor, gumbel: Tensor) -> Verdict:
    """`couple` on packed rows: target_probs and gumbel are [sum(l_r + 1), V]."""
    return _couple(_packed(drafts, target_probs), gumbel)


# --------------------------------------------------------------------------------------------------------- the rules

Subtract = Callable[["Tensor", list[int], list[int]], None]
"""`subtract(law [n, V], requests, slots)`: takes each request's draft law at its slot off its row, in place. For a
point mass it may write 0 at the token: the difference is negative there and p elsewhere."""


class _Block(NamedTuple):
    """Where the rows of each request lie."""

    target_probs: Tensor
    """[T, V]"""
    first: list[int]
    """[R] row of the law after no draft token; the next l rows follow it."""
    counts: list[int]
    """[R] draft tokens to verify, l."""
    ids: Tensor
    """[sum(l)] the draft tokens."""

    def rows(self) -> list[int]:
        """The row that decides about each draft token."""
        return [first + k for first, count in zip(self.first, self.counts, strict=True) for k in range(count)]

    def take(self, rows: list[int]) -> Tensor:
        """Laws [n, V] at these rows; the tensor itself where that is all of them, as in plain decoding."""
        return self.target_probs if rows == list(range(len(self.target_probs))) else self.target_probs[rows]


def _reject(
    block: _Block, draft_prob: Tensor | None, subtract: Subtract, accept_uniforms: Tensor, final_uniforms: Tensor
) -> Verdict:
    """The rule, on the laws' shares p / sum(p): what `draw` draws from, to the last bit and in any precision.

    A float32 softmax sums to 1 only within 1e-7. Were its values taken as they are, drafts would be drawn from one law
    and divided by another, and plain decoding would have a third.
    """
    accepted = _count_accepted(block.counts, _tests(block, draft_prob, accept_uniforms))
    last = [first + a for first, a in zip(block.first, accepted, strict=True)]
    rejected = [r for r, a in enumerate(accepted) if a < block.counts[r]]
    whole = [r for r, a in enumerate(accepted) if a == block.counts[r]]  # nothing rejected: the target's own law
    next_token = block.ids.new_empty(len(accepted))
    if whole:
        next_token[whole] = draw(block.take([last[r] for r in whole]), final_uniforms[whole])
    if rejected:
        slots = [accepted[r] for r in rejected]
        law = _residual(block, [last[r] for r in rejected], lambda law: subtract(law, rejected, slots))
        next_token[rejected] = draw(law, final_uniforms[rejected])
    return Verdict(next_token.new_tensor(accepted), next_token)


def _residual(block: _Block, rows: list[int], subtract: Callable[[Tensor], None]) -> Tensor:
    """max(p - q, 0) [n, V] in float64 at these rows, not renormalised: `draw` divides its sum out."""
    laws = block.take(rows).double()
    law = laws / _mass(laws)[:, None]
    subtract(law)
    law.clamp_min_(0)
    # p = q up to rounding: a rejection then had probability ~ 0 and any law will do, so take the target's. The same
    # after a draft law that was NaN.
    empty = [i for i, mass in enumerate(law.sum(-1).tolist()) if not mass > 0]
    if empty:
        law[empty] = laws[empty]
    return law


def _tests(block: _Block, draft_prob: Tensor | None, uniforms: Tensor) -> list[bool]:
    """For each draft token, whether it would be accepted were all before it.

    u < p / q is tested as u * q < p: nothing to clamp, and a token of p = 0 is refused even at u = 0.
    """
    import torch

    rows = block.rows()
    if not rows:
        return []
    laws = block.target_probs
    target = _shares(laws, _mass(laws), (torch.tensor(rows, device=laws.device),), block.ids)  # [sum(l)]
    level = uniforms.to(target)
    passed: list[bool] = ((level if draft_prob is None else level * draft_prob) < target).tolist()
    return passed


def _mass(laws: Tensor) -> Tensor:
    """Sums of laws [..., V] in float64."""
    import torch

    return laws.sum(-1, dtype=torch.float64)


def _shares(laws: Tensor, mass: Tensor, rows: tuple[Tensor, ...], ids: Tensor) -> Tensor:
    """[n] float64: the probabilities of ids [n] under rows [n] of some laws, the sums divided out."""
    return laws[(*rows, ids)].double() / mass[rows]


def _count_accepted(counts: Sequence[int], passed: Sequence[bool]) -> list[int]:
    """Length of the accepted prefix of each draft: the first failure discards everything behind it."""
    accepted, start = [], 0
    for count in counts:
        own = passed[start : start + count]
        accepted.append(own.index(False) if False in own else count)
        start += count
    return accepted


def _couple(block: _Block, gumbel: Tensor) -> Verdict:
    own = draw_coupled(block.target_probs, gumbel)  # [T]
    own_ids = own.tolist()
    matches = [own_ids[row] == token for row, token in zip(block.rows(), block.ids.tolist(), strict=True)]
    accepted = _count_accepted(block.counts, matches)
    last = [first + a for first, a in zip(block.first, accepted, strict=True)]
    return Verdict(own.new_tensor(accepted), own.new_tensor([own_ids[row] for row in last]))


# ---------------------------------------------------------------------------------------------------- where rows lie


def _packed(drafts: Proposal, target_probs: Tensor) -> _Block:
    import torch

    first, row = [], 0
    for draft in drafts:
        first.append(row)
        row += len(draft.tokens) + 1
    assert row == target_probs.shape[0], f"{row} rows for the drafts, {target_probs.shape[0]} laws"
    ids = [token for draft in drafts for token in draft.tokens]
    assert all(0 <= token < target_probs.shape[-1] for token in ids), f"draft ids beyond the vocabulary: {ids}"
    tokens = torch.tensor(ids, dtype=torch.long, device=target_probs.device)
    return _Block(target_probs, first, [len(draft.tokens) for draft in drafts], tokens)


def _chosen(drafts: Proposal, block: _Block) -> Tensor | None:
    """[sum(l)] the drafts' own probabilities of their tokens: 1 where deterministic, None if all are."""
    import torch

    if all(draft.probs is None for draft in drafts):
        return None
    parts, start = [], 0
    for draft, count in zip(drafts, block.counts, strict=True):
        ids = block.ids[start : start + count]
        start += count
        if draft.probs is None:
            parts.append(torch.ones(count, dtype=torch.float64, device=ids.device))
        else:
            slots = torch.arange(count, device=ids.device)
            parts.append(_shares(draft.probs, _mass(draft.probs), (slots,), ids))
    return torch.cat(parts)


def _padded(ids: Tensor, lengths: Tensor, target_probs: Tensor) -> _Block:
    requests, rows, _ = target_probs.shape
    return _Block(target_probs.flatten(0, 1), list(range(0, requests * rows, rows)), lengths.tolist(), ids)


def _verified(draft_tokens: Tensor, lengths: Tensor) -> Tensor:
    """[R, K] bool: the draft tokens within their request's length."""
    import torch

    return torch.arange(draft_tokens.shape[1], device=lengths.device) < lengths[:, None]


def _check(draft_tokens: Tensor, draft_probs: Tensor | None, lengths: Tensor, target_probs: Tensor) -> None:
    _need(draft_tokens.dim() == 2, "draft_tokens", f"must be [R, K], got {tuple(draft_tokens.shape)}")
    requests, k = draft_tokens.shape
    shape = tuple(target_probs.shape)
    _need(shape[:2] == (requests, k + 1) and len(shape) == 3, "target_probs", f"must be [R, K + 1, V], got {shape}")
    if draft_probs is not None:
        want = (requests, k, shape[2])
        _need(tuple(draft_probs.shape) == want, "draft_probs", f"must be {want}, got {tuple(draft_probs.shape)}")
    _need(tuple(lengths.shape) == (requests,), "lengths", f"must be [R], got {tuple(lengths.shape)}")
    _need(all(0 <= n <= k for n in lengths.tolist()), "lengths", f"must lie in 0 .. {k}, got {lengths.tolist()}")
    ids = draft_tokens[_verified(draft_tokens, lengths)]
    _need(bool(((ids >= 0) & (ids < shape[2])).all()), "draft_tokens", f"must lie in 0 .. {shape[2] - 1}")


def _need(ok: bool, argument: str, message: str) -> None:
    if not ok:
        raise OptionError(argument, message)


__all__ = ["Draft", "Proposal", "Verdict", "couple", "couple_packed", "reject", "reject_packed"]
