"""One micro-batch on its way: what goes in, what is drawn for it, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences packed one behind the other, without padding, with what the target computed for them."""

    tokens: Tensor
    """[T] int64."""
    lengths: Sequence[int]
    """Tokens of each sequence; they sum to T."""
    loss_mask: Tensor
    """[T] bool: the target wrote this token, so a drafter may learn to predict it."""
    features: Tensor
    """[T, m * H], the drafter's taps in ascending h, as `target.forward` gives them."""
    last: Tensor
    """[T, H], hidden state h = n, before the final norm: the teacher's law at row t is that of token t + 1."""
    log_normalizer: Tensor | None = None
    """[T] log-sum-exp of the teacher's logits, where it is known: a pruned vocabulary then needs no full head."""

    @cached_property
    def starts(self) -> list[int]:
        """Packed row at which each sequence begins."""
        out, at = [], 0
        for length in self.lengths:
            out.append(at)
            at += length
        return out

    @cached_property
    def ends(self) -> Tensor:
        """[T] packed row behind the last one of each row's sequence."""
        import torch

        lengths = torch.tensor(list(self.lengths), device=self.tokens.device)
        return lengths.cumsum(0).repeat_interleave(lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of each row within its sequence."""
        import torch

        return torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])


@dataclass(frozen=True)
class Exercise:
    """What is drawn for one batch before anything is computed: anchors, noise. Its weight is known beforehand, so that
    a step is divided by the weight of all its micro-batches, on all devices, and does not depend on how it is split."""

    weight: float
    drawn: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Losses:
    """One micro-batch: the objective, not yet divided by the weight of the step, and what is worth writing down."""

    total: Tensor
    """Scalar with a graph: a weighted sum over rows."""
    metrics: Mapping[str, tuple[float, float]]
    """name -> (sum, weight); their quotient, over any number of micro-batches, is the metric. `name@k` for position k.
    Reserved: `teacher_forced_acceptance@k`, which evaluation prints by position."""


class Text(Protocol):
    """One sample of the training data."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[S]"""

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[S]"""


@dataclass(frozen=True)
class Material:
    """What a start may be fitted to before the first step: the training data and no other."""

    texts: Sequence[Text]
    """All samples."""
    batches: Iterable[TrainingBatch]
    """The same with features, in the order of the training: computed when asked for, so only as many as are taken."""
    seed: int
    say: Callable[[str], None]
    """Tells the user what takes a while, and what came of it."""


class Held(NamedTuple):
    """Memory of a pass in training, for plans."""

    name: str
    size: float
    """Bytes."""
    arithmetic: str
    """How it comes about."""


def wide(x: Tensor) -> Tensor:
    """In at least float32."""
    import torch

    return x if x.dtype == torch.float64 else x.float()
