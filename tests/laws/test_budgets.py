"""Choosing the length after drafting: which choices keep the law (SP-1; DSpark paper, arXiv 2607.05147, appendix A).

One request, K = 2, p = (.7, .3), q = (.5, .5) on {A, B}. c_1 = .8; c_2 = .9 if x_1 is A, else 0. The steps per second
at 1, 2 and 3 tokens in the batch are 1, .5 and .45.
"""

from __future__ import annotations

import pytest
import torch

from forerun.sampling import Sampling
from forerun.verify import Draft
from laws.kit import EXACT, Carry, Lengths, Model, Slot, Tokens, bias, rejection_round, serial

LAW = torch.tensor([0.5, 0.5], dtype=torch.float64)
TARGET = Model(lambda prefix: torch.tensor([0.7, 0.3], dtype=torch.float64).log().tolist(), Sampling())
STEPS = (1.0, 0.5, 0.45)
ENVELOPE = tuple(1 / cost for cost in (1.0, 1.61, 2.22))
"""Steps per second on the lower convex envelope of the costs 1, 2, 2.22 (rounded)."""


def slot(prefix: Tokens, drafted: Tokens) -> Slot:
    return Slot(LAW, LAW, 0.8 if not drafted else 0.9 * (drafted[-1] == 0))


def gains(draft: Draft, steps: tuple[float, ...]) -> list[float]:
    """Theta at lengths 0 .. K: expected tokens times steps per second."""
    survival, expected, out = 1.0, 1.0, [steps[0]]
    for c, s in zip(draft.confidence, steps[1:], strict=True):
        survival *= c
        expected += survival
        out.append(expected * s)
    return out


def retrospective(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """The best of all lengths, chosen after seeing every confidence."""
    theta = gains(draft, STEPS)
    return theta.index(max(theta))


def stopped(steps: tuple[float, ...]) -> Lengths:
    """Algorithm 1: the scan ends at the first length that does not improve."""

    def lengths(draft: Draft, prefix: Tokens, carry: Carry) -> int:
        theta = gains(draft, steps)
        return next((k for k in range(len(theta) - 1) if theta[k + 1] <= theta[k]), len(theta) - 1)

    return lengths


def vetoed(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """The scan on the envelope, set to 0 afterwards where the raw cost says that its length does not pay."""
    length, theta = stopped(ENVELOPE)(draft, prefix, carry), gains(draft, STEPS)
    return length if theta[length] > theta[0] else 0


def moved_down(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """The scan on the envelope, moved down to a step edge of the raw cost (0 or 2 draft tokens)."""
    return stopped(ENVELOPE)(draft, prefix, carry) // 2 * 2


def moved_up(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """The same, moved up: rows to the edge are free."""
    return -(-stopped(ENVELOPE)(draft, prefix, carry) // 2) * 2


def first_is_a(lengths: Lengths) -> float:
    law = rejection_round(TARGET, serial(slot, 2), lengths)((0,), None)
    return sum(weight for (tokens, _), weight in law.items() if tokens[0] == 0)


def test_the_fixture_has_the_papers_numbers() -> None:
    """Theta = 1, .9, 1.134 behind A and 1, .9, .81 behind B."""
    behind = {x: gains(Draft([x, 0], None, [0.8, 0.9 * (x == 0)]), STEPS) for x in (0, 1)}
    assert behind[0] == pytest.approx([1.0, 0.9, 1.134])
    assert behind[1] == pytest.approx([1.0, 0.9, 0.81])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (retrospective, 0.85),
        (stopped(STEPS), 0.70),
        (stopped(ENVELOPE), 0.70),
        (moved_up, 0.70),
        (moved_down, 0.85),
        (vetoed, 0.85),
    ],
    ids=["retrospective", "stopped", "stopped on the envelope", "moved up", "moved down", "vetoed"],
)
def test_sp_1_only_choices_that_do_not_look_ahead_keep_the_law(lengths: Lengths, expected: float) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/17056: P(A) is .85 where the choice looks ahead and .70 where not."""
    assert first_is_a(lengths) == pytest.approx(expected, abs=EXACT)
    assert (bias(rejection_round(TARGET, serial(slot, 2), lengths), TARGET, (0,), 4) < EXACT) is (expected == 0.70)


def test_sp_1_confidences_blind_to_the_tokens_allow_any_choice() -> None:
    """Where c_2 does not depend on x_1 the best of all lengths is a function of the history."""

    def blind(prefix: Tokens, drafted: Tokens) -> Slot:
        return Slot(LAW, LAW, (0.8, 0.9)[len(drafted)])

    assert bias(rejection_round(TARGET, serial(blind, 2), retrospective), TARGET, (0,), 4) < EXACT
