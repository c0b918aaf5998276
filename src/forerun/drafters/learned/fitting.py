"""What least squares can say of a drafter's starting weights: the target's next states from its features.

Reduced-rank regression (Izenman 1975) in the metric of the target's head: what changes the logits most comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forerun.drafters.learned.batch import Material, TrainingBatch
from forerun.drafters.learned.head import head_rows
from forerun.target.donor import final_norm_weight
from forerun.target.hf import HFTarget

if TYPE_CHECKING:
    from forerun.drafters.learned.learner import Learner
    from forerun.target.base import Target

ROWS = 60_000
"""Rows of the data that are looked at, at most: 12 for each number of five taps of 896."""
FEWEST_ROWS = 32
"""Of fewer, chance decides what is foreseen by what."""
SHARES = (1.0, 0.5, 0.25)
"""Weights of the state that says the first draft, of the one after it, and so on: one code serves all of them."""
RIDGE = 1e-3
"""Added to the correlation matrix of what is regressed on."""
ROUNDING = 1e-6
"""Variance, as a share of the mean square, that may be nothing but float32's rounding of the sums."""
WILD = 100.0
"""Variance along the mean of what is known, as a share of its square, from which on nothing there is near constant."""

Read = Callable[[TrainingBatch, Tensor], Tensor]
"""A batch and packed rows [n] of tokens that a drafter begins behind -> [n, F] what it knows there."""
Said = Callable[[Tensor], Tensor]
"""Token ids [n] -> [n, H], what another part of the drafter adds to the logits after that token, as a normed state
(DSpark's Markov head): what it says need not be said twice."""


@dataclass(frozen=True)
class Fit:
    """What the data say."""

    regression: Regression
    metric: Metric
    first: TrainingBatch
    """Some of the data."""
    rows: Tensor
    """[n] of it that were looked at."""


def fit_soundly(network: nn.Module, material: Material, fit: Callable[[], bool]) -> bool:
    """What `fit` says that it has written into the network. False, the network is as it was, and the user is told, if
    its numbers fail: a matrix that cannot be factored, weights that are not finite."""
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    try:
        if not fit():
            return False
        if all(bool(weight.isfinite().all()) for weight in network.state_dict().values()):
            return True
        problem = "weights that are not finite"
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        problem = str(error).split("\n")[0]
    network.load_state_dict(before)
    material.say(f"start: random weights after all; fitting them failed ({problem})")
    return False


@torch.no_grad()
def fit_states(drafter: Learner, material: Material, read: Read, said: Said | None = None) -> Fit | None:
    """Regresses the target's next states on what the drafter knows.

    Args:
        drafter: gives the target, and the ids that can be drafted: their rows of the head are the metric.
        material: only as many of its batches are taken as are needed.
        read: what is known of a row.
        said: what need not be said.

    Returns:
        None, and the user is told, if the target's final norm is no RMS norm, the data have too few rows to learn
        from, or what is known there has no mean to speak of.
    """
    target = drafter.target
    weight = final_norm_weight(target) if isinstance(target, HFTarget) else None
    if weight is None:
        material.say("start: random layers; the target's final norm is none that a fitted start could use")
        return None
    material.say(f"start: fitting layers to the target's states, up to {ROWS:,} rows")
    seen, first = Regression(), None
    for batch in material.batches:
        rows = rows_to_fit(batch)
        if len(rows):
            seen.add(read(batch, rows), next_states(batch, rows, target, said))
            first = first or (batch, rows)
        if seen.count >= ROWS:
            break
    if first is None or seen.count < FEWEST_ROWS:
        material.say(f"start: random layers; samples long enough to fit them to have {seen.count} rows, too few")
        return None
    if not seen.wildness < WILD:  # nor if it is not a number
        material.say("start: random layers; the target's features have no mean that a fitted start could use")
        return None
    metric = Metric.of(head_rows(target, drafter.vocabulary).to(target.device), weight.to(target.device))
    return Fit(seen, metric, *first)


def rows_to_fit(batch: TrainingBatch) -> Tensor:
    """[n] packed rows of tokens under the loss mask with a row before them and all the states after that are fitted."""
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return rows[batch.loss_mask & (batch.positions > 0) & (rows + len(SHARES) <= batch.ends)]


def next_states(batch: TrainingBatch, rows: Tensor, target: Target, said: Said | None) -> Tensor:
    """[n, S, H] normed states of the target at these rows and the ones after, less what is said of them."""
    states = []
    for ahead in range(len(SHARES)):
        state = target.final_norm(batch.last[rows + ahead].to(target.dtype)).float()
        states.append(state if said is None else state - said(batch.tokens[rows + ahead]))
    return torch.stack(states, 1)


@dataclass(frozen=True)
class Metric:
    """How far apart two normed states are in their logits."""

    gram: Tensor
    """[H, H] U^T U / D of the head's rows U [D, H], a little of the identity added."""
    weight: Tensor
    """[H] of the final norm; small ones are held away from 0, they are divided by."""

    @classmethod
    def of(cls, head: Tensor, weight: Tensor) -> Metric:
        """From rows [D, H] of the head and the final norm's weight [H]."""
        gram = steadied(head.T @ head / len(head), 1e-3)
        usual = torch.maximum(weight.abs().median(), 0.1 * weight.abs().mean())  # half of them may be 0
        least = 0.05 * usual.clamp(min=1e-6)
        return cls(gram, torch.where(weight < 0, -1.0, 1.0) * weight.abs().clamp(min=least))

    @property
    def silent(self) -> Tensor:
        """[H] of mean square 1: the direction before the final norm that changes the logits least."""
        before = self.weight[:, None] * self.gram * self.weight
        least: Tensor = torch.linalg.eigh(before).eigenvectors[:, 0]
        return least * math.sqrt(len(before))

    def filling(self, spoken: Tensor) -> Tensor:
        """[H] before the final norm, silent, so that together with vectors [..., H] that speak, already divided by the
        norm's weight, the mean square is about 1 and the norm leaves them as they are."""
        rest = (1 - spoken.square().mean()).clamp(min=0.2).sqrt()
        return rest * self.silent


@dataclass(frozen=True)
class Code:
    """What of the known says something of the next states: k numbers of variance 1, the most telling ones first."""

    read: Tensor
    """[F, k]: what is known, less its mean, -> code."""
    write: Tensor
    """[k, H]: code -> the next normed state, less its mean."""


class Regression:
    """Sums over rows, from which next states [S, H] are foreseen by what is known [F]."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor] = []

    def add(self, known: Tensor, states: Tensor) -> None:
        """known [n, F], states [n, S, H]."""
        known, states = known.float(), states.flatten(1)
        own = [known.T @ known, known.T @ states, known.sum(0), states.sum(0)]
        self._sums = [old.add_(new) for old, new in zip(self._sums, own, strict=True)] if self._sums else own
        self.count += len(known)

    @property
    def mean(self) -> Tensor:
        """[F] of what is known."""
        return self._sums[2] / self.count

    @property
    def covariance(self) -> Tensor:
        """[F, F] of what is known."""
        return (self._sums[0] / self.count).sub_(self.mean[:, None] * self.mean)

    @property
    def wildness(self) -> float:
        """Variance of what is known along its mean, as a share of the square of that: near 0 where all rows have much
        in common, not finite where they have no mean."""
        mean = self.mean
        square = mean @ mean
        return float((self._sums[0] @ mean) @ mean / self.count / square / square) - 1

    @property
    def base(self) -> Tensor:
        """[S, H] mean of the states."""
        return (self._sums[3] / self.count).reshape(len(SHARES), -1)

    def slopes(self) -> Tensor:
        """[F, S, H]: what is known, less its mean, -> the states, less theirs. What is constant says nothing."""
        covariance, base = self.covariance, self.base
        cross = self._sums[1] / self.count - self.mean[:, None] * base.flatten()
        varies = covariance.diagonal() > ROUNDING * self._sums[0].diagonal() / self.count
        spread = covariance.diagonal().where(varies, 1.0).sqrt()
        # In place: these are the largest numbers of a fit.
        related = covariance.div_(spread[:, None]).div_(spread).mul_(varies[:, None]).mul_(varies)
        related.diagonal().add_(RIDGE)
        solved: Tensor = torch.linalg.solve(related, cross * varies[:, None] / spread[:, None]) / spread[:, None]
        return solved.reshape(len(spread), *base.shape)


def constant_part(mean: Tensor) -> Tensor:
    """[F] of a mean [F]: the direction whose product with the mean is 1, and with every row nearly so."""
    return mean / (mean @ mean).clamp(min=1e-12)


def steadied(gram: Tensor, share: float) -> Tensor:
    """[n, n] that can be factored: that share of its mean square is added to all squares."""
    usual = gram.diagonal().mean().clamp(min=1e-12)
    return gram + share * usual * torch.eye(len(gram), device=gram.device)


def reduced(slopes: Tensor, covariance: Tensor, metric: Metric, most: int) -> Code:
    """Of slopes [F, S, H] on what has that covariance [F, F], at most so many numbers, fewer where no more of them say
    anything; they are written as the first state."""
    whitened = torch.linalg.cholesky(metric.gram)  # a state times it: as far apart as logits are
    shares = torch.tensor(SHARES[: slopes.shape[1]], device=slopes.device)
    wanted = (slopes * shares[:, None] @ whitened).flatten(1)
    told, ways = torch.linalg.eigh(wanted.T @ covariance @ wanted)
    told, ways = told.flip(0)[:most], ways.flip(1)[:, :most]
    kept = told > 1e-6 * told[0].clamp(min=1e-12)
    told, ways = told[kept].sqrt(), ways[:, kept]
    size = len(metric.gram)
    write = torch.linalg.solve_triangular(whitened, (told[:, None] * ways[:size].T), upper=False, left=False)
    return Code(wanted @ ways / told, write / SHARES[0])
