"""The margin rule: what a difference from plain decoding may be put down to.

A pass over K + 1 rows and K + 1 passes over one row need not agree in the last bit, so in half precision two nearly
equal logits may change places. The rule measures both sides of that: how much a logit moves between such passes (the
noise) and how far the emitted token was from being plain decoding's choice (the margin). A difference is accepted only
where margin < noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.sampling import Row, adjust, distribution

if TYPE_CHECKING:
    from torch import Tensor

HOPELESS = 2.0**20
"""No finite rise of a logit up to here makes the token the choice: the margin is infinite."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where plain decoding chose a token: the logits of its one-row pass and all that turns them into a choice."""

    logits: Tensor
    """[V] as the pass gave them."""
    row: Row
    gumbel: Tensor | None
    """[V] the noise of this position; None: greedy."""

    def scores(self, token: int | None = None, rise: float = 0.0) -> Tensor:
        """[V] what is compared, in units of logits: adjusted logits if greedy, T (log p + g) if coupled.

        `rise` is added to the logit of `token` first.
        """
        logits = self.logits.double()
        if token is not None:
            logits = logits.clone()
            logits[token] += rise
        if self.gumbel is None:
            return adjust(logits, self.row)
        law = distribution(logits[None], [self.row])[0]
        return (law.log() + self.gumbel) * self.row.sampling.temperature

    def token(self, favoured: int | None = None, rise: float = 0.0) -> int:
        return int(self.scores(favoured, rise).argmax())

    @property
    def top_margin(self) -> float:
        """Best score minus second best; infinite where only one token is possible."""
        best = self.scores().topk(2).values.tolist()
        return float(best[0] - best[1])

    def margin(self, emitted: int) -> float:
        """How much the emitted token's logit would have to rise for plain decoding to choose it.

        Without filters this is the chosen token's score minus its own, so at least `top_margin`; with them it also
        covers a token that lies just outside a nucleus. 0: it is the choice.
        """
        if self.token() == emitted:
            return 0.0
        low, high = 0.0, 2.0**-20
        while self.token(emitted, high) != emitted:
            low, high = high, high * 2
            if high > HOPELESS:
                return math.inf
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.token(emitted, middle) == emitted else (middle, high)
        return high


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where the output is not that of plain decoding."""

    prompt: int
    position: int
    """Of the output, from 0."""
    expected: int | None
    """None: plain decoding had ended."""
    emitted: int | None
    margin: float
    noise: float
    """0 where no difference is accepted."""

    @property
    def explained(self) -> bool:
        return self.margin < self.noise

    def __str__(self) -> str:
        sign = "<" if self.explained else ">="
        bound = f"{sign} noise {self.noise:.3g}" if self.noise > 0 else "where none is accepted"
        return (
            f"prompt {self.prompt}, position {self.position}: {self.emitted} for {self.expected}, "
            f"margin {self.margin:.3g} {bound}"
        )


def worst(differences: Sequence[Difference]) -> Difference | None:
    """The one whose margin exceeds the noise most."""
    return max(differences, key=lambda d: d.margin - d.noise, default=None)
