"""Drafters of known quality, for tests and for the negative controls of a certificate. They are not in the table.

Each guesses from a list of what plain decoding will emit (or from a script), so a test decides what gets accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from forerun.drafters.base import Draft, Drafter, DraftView, KeepDrafting, Proposal
from forerun.sampling import DRAFT

if TYPE_CHECKING:
    from torch import Tensor

Known = Mapping[tuple[int, ...], Sequence[int]]
"""prompt -> the output that plain decoding gives it."""


class Oracle(Drafter):
    """Proposes exactly what plain decoding will emit."""

    name = "oracle"
    deterministic = True

    def __init__(self, known: Known):
        self.known = {tuple(prompt): list(output) for prompt, output in known.items()}

    def future(self, view: DraftView, shift: int = 0) -> list[int]:
        """The next k tokens of plain decoding (fewer at its end), from `shift` places later on."""
        done = len(view.tokens) - view.prompt_length + shift
        return self.known[tuple(view.tokens[: view.prompt_length])][done : done + view.k]

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        return [Draft(self.guess(view)) for view in views]

    def guess(self, view: DraftView) -> list[int]:
        return self.future(view)


class Never(Oracle):
    """Proposes k tokens of which every one is wrong."""

    name = "never"

    def __init__(self, known: Known, vocab_size: int):
        super().__init__(known)
        self.vocab_size = vocab_size

    def guess(self, view: DraftView) -> list[int]:
        future = self.future(view)
        wrong = [(token + 1) % self.vocab_size for token in future]
        return wrong + [0] * (view.k - len(wrong))


class Coin(Never):
    """The oracle, each token right with a given probability (decided by the request's own noise)."""

    name = "coin"

    def __init__(self, known: Known, vocab_size: int, probability: float):
        super().__init__(known, vocab_size)
        self.probability = probability

    def guess(self, view: DraftView) -> list[int]:
        right = view.noise.uniforms(view.anchor, DRAFT, view.k) < self.probability
        wrong = super().guess(view)
        return [good if ok else bad for good, bad, ok in zip(self.future(view), wrong, right, strict=False)]


class Shift(Oracle):
    """The oracle moved by one: each guess is what comes a place later."""

    name = "shift"

    def guess(self, view: DraftView) -> list[int]:
        return self.future(view, shift=1)


class Script(Drafter):
    """Proposes what a function of the view returns."""

    name = "script"
    deterministic = True

    def __init__(self, guess: Callable[[DraftView], Sequence[int]]):
        self._guess = guess

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        return [Draft(list(self._guess(view))[: view.k]) for view in views]


class Broken(Drafter):
    """Returns a law of NaN from a given slot on, or raises: what a fault must not cost is the request."""

    name = "nan"

    def __init__(self, law: Callable[[DraftView], Tensor], first_bad: int = 0, raises: bool = False):
        """`law(view)` [K, V] is what it would draw from, were it not broken from slot `first_bad` (from 0) on."""
        self._law = law
        self._first_bad = first_bad
        self._raises = raises

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:  # noqa: ARG002
        if self._raises:
            raise RuntimeError("this drafter is broken on purpose")
        drafts = []
        for view in views:
            probs = self._law(view)[: view.k].clone()
            probs[self._first_bad :] = float("nan")
            tokens = probs.nan_to_num(0).argmax(-1).tolist()
            drafts.append(Draft(tokens, probs))
        return drafts
