"""The policies keep the target's law, exactly: every outcome of drafting and verifying is summed (`laws.kit`).

The fixture is appendix A of the DSpark paper (arXiv 2607.05147): one request, K = 2, p = (.7, .3), q = (.5, .5) on
{A, B}; c_1 = .8; c_2 = .9 if x_1 is A, else 0; steps per second at 1, 2 and 3 tokens 1, .5 and .45.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from forerun.budget.curve import lower_envelope
from forerun.budget.policy import DraftRow, Exposure, Policy, SlotRule, choose, keep_drafting
from forerun.budget.prefix import throughput
from forerun.errors import OptionError
from forerun.sampling import Sampling
from forerun.verify import Draft
from laws.kit import EXACT, Carry, Drafting, Model, Path, Slot, Tokens, bias, joint_bias, rejection_round, serial

LAW = torch.tensor([0.5, 0.5], dtype=torch.float64)
TARGET = Model(lambda prefix: torch.tensor([0.7, 0.3], dtype=torch.float64).log().tolist(), Sampling())
SECONDS = np.array([1.0, 2.0, 1 / 0.45])
COUPLED = Exposure(verify_mode="coupled")


def slot(prefix: Tokens, drafted: Tokens) -> Slot:
    return Slot(LAW, LAW, 0.8 if not drafted else 0.9 * (drafted[-1] == 0))


def chosen(policy: Policy, seconds=SECONDS, exposure: Exposure | None = None, **options) -> Callable[..., int]:
    """The length that the real policy gives the only request."""

    def lengths(draft: Draft, prefix: Tokens, carry: Carry) -> int:
        past = None if carry is None else np.array(carry)[None, None]
        row = DraftRow(0, len(seconds) - 1, draft.confidence, exposure or Exposure(), **options)
        return choose([row], seconds, policy, past)[0]

    return lengths


def first_is_a(lengths, drafting: Drafting | None = None, carry: Carry = None) -> float:
    law = rejection_round(TARGET, drafting or serial(slot, 2), lengths)((0,), carry)
    return sum(weight for (tokens, _), weight in law.items() if tokens[0] == 0)


def vetoed(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """The scan on the envelope, thrown away where the raw cost says that it does not pay."""
    length = chosen("prefix")(draft, prefix, carry)
    theta = throughput(1, np.cumprod(draft.confidence), SECONDS)
    return length if theta[length] > theta[0] else 0


def test_the_fixture_has_the_papers_numbers() -> None:
    """Theta is 1, .9 and 1.134 behind A, .81 behind B; the envelope of the costs is 1, 1.61, 2.22."""
    for c_2, last in ((0.9, 1.134), (0.0, 0.81)):
        theta = throughput(1, np.cumprod([0.8, c_2]), SECONDS)
        assert theta.tolist() == pytest.approx([1.0, 0.9, last])
    assert lower_envelope(SECONDS).tolist() == pytest.approx([1.0, 1.61, 2.22], abs=0.003)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (chosen("fixed"), 0.70),
        (chosen("threshold", threshold=0.5), 0.70),
        (chosen("prefix"), 0.70),
        (chosen("delayed"), 0.70),
        (chosen("global", exposure=COUPLED), 0.85),  # said to be harmless, which in rejection mode is untrue
        (vetoed, 0.85),
    ],
    ids=["fixed", "threshold", "prefix", "delayed", "global", "raw veto"],
)
def test_sp_1_the_policies_keep_the_law_and_global_does_not(lengths, expected: float) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/17056: P(A) is .70, and .85 where a choice looks ahead."""
    assert first_is_a(lengths) == pytest.approx(expected, abs=EXACT)
    assert (bias(rejection_round(TARGET, serial(slot, 2), lengths), TARGET, (0,), 4) < EXACT) is (expected == 0.70)


def test_sp_1_global_is_refused_in_rejection_mode() -> None:
    """It is never asked: the fixture's rows are refused."""
    with pytest.raises(OptionError, match="policy"):
        first_is_a(chosen("global"))


def test_global_is_exact_where_confidences_are_blind_to_the_tokens() -> None:
    """c_2 = .9 whatever x_1 is: the best of all lengths is a function of the history."""
    blind = serial(lambda prefix, drafted: Slot(LAW, LAW, (0.8, 0.9)[len(drafted)]), 2)
    lengths = chosen("global", exposure=Exposure(blind=True))
    assert bias(rejection_round(TARGET, blind, lengths), TARGET, (0,), 4) < EXACT


def stopping(rule: SlotRule, k: int) -> Drafting:
    """The fixture's drafter, which asks `keep_drafting` before every slot."""

    def drafting(prefix: Tokens, carry: Carry) -> list[Path]:
        merged: dict[Tokens, Path] = {}
        for draft, weight in serial(slot, k)(prefix, carry):
            survival, kept = 1.0, 0
            while kept < k and keep_drafting(rule, kept + 1, survival, draft.confidence[kept]):
                survival *= draft.confidence[kept]
                kept += 1
            cut = draft.truncate(kept)
            before = merged.get(tuple(cut.tokens), Path(cut, 0.0))
            merged[tuple(cut.tokens)] = Path(cut, before.weight + weight)
        return list(merged.values())

    return drafting


@pytest.mark.parametrize("policy", ["fixed", "prefix", "delayed"])
@pytest.mark.parametrize("k", [2, 3])
def test_stopping_to_draft_keeps_the_law(policy: Policy, k: int) -> None:
    """Drafts that end where c_k is low (after B, never after A) and are then cut by a policy, over two rounds."""
    seconds = np.array([1.0, 2.0, 2.22, 2.3][: k + 1])
    rule = SlotRule(1.0, np.zeros(k + 1), np.array([1.0, 1.1, 1.2, 1.3][: k + 1]), np.full(k, 0.8))
    drafting = stopping(rule, k)
    assert {len(path.draft.tokens) for path in drafting((0,), None)} == set(range(1, k + 1))
    assert bias(rejection_round(TARGET, drafting, chosen(policy, seconds)), TARGET, (0,), 5) < EXACT


def test_an_envelope_over_the_drafted_length_is_caught() -> None:
    """The control: the same scan, with the envelope ending where the draft ended, gives .85."""
    drafting = stopping(SlotRule(1.0, np.zeros(3), np.array([1.0, 1.1, 1.2]), np.full(2, 0.8)), 2)

    def lengths(draft: Draft, prefix: Tokens, carry: Carry) -> int:
        row = DraftRow(0, len(draft.tokens), draft.confidence)
        return choose([row], SECONDS[: len(draft.tokens) + 1], "prefix")[0]

    assert first_is_a(chosen("prefix"), drafting) == pytest.approx(0.70, abs=EXACT)
    assert first_is_a(lengths, drafting) == pytest.approx(0.85, abs=EXACT)


def test_a_delayed_budget_keeps_the_law_over_rounds() -> None:
    """The second round's count comes from the first round's confidences, also those behind its rejection."""
    rounds = rejection_round(
        TARGET,
        serial(slot, 2),
        chosen("delayed", np.array([1.0, 1.4, 1.8])),
        leave=lambda draft, accepted, carry: tuple(np.cumprod(draft.confidence)),
    )
    counts = {chosen("delayed", np.array([1.0, 1.4, 1.8]))(Draft([0, 0], None, [0.8, 0.9]), (), carry)
              for carry in ((0.8, 0.72), (0.8, 0.0))}  # fmt: skip
    assert counts == {1, 2}  # the past does change the length
    assert bias(rounds, TARGET, (0,), 5, count=3) < EXACT


@pytest.mark.parametrize("policy", ["prefix", "delayed", "fixed"])
@pytest.mark.parametrize("seconds", [[1.0, 1.3, 1.9, 2.0, 3.0], [1.0, 1.9, 1.9, 2.0, 2.1]])
def test_two_requests_that_share_a_budget_keep_their_joint_law(policy: Policy, seconds: list[float]) -> None:
    """Whose tokens are verified depends on the other's confidences, which know the other's tokens."""

    def shared(drafts) -> list[int]:
        rows = [DraftRow(r, 2, draft.confidence) for r, draft in enumerate(drafts)]
        return choose(rows, np.array(seconds), policy, np.array([[[0.9, 0.1], [0.6, 0.5]]]))

    other = serial(lambda prefix, drafted: Slot(LAW, LAW, 0.7 if not drafted else 0.2 + 0.7 * drafted[-1]), 2)
    assert joint_bias([TARGET, TARGET], [serial(slot, 2), other], shared, [(0,), (1,)]) < EXACT


def test_a_shared_global_choice_is_caught() -> None:
    """The control for two requests: all is verified if both drew A, else nothing."""

    def shared(drafts) -> list[int]:
        rows = [DraftRow(r, 2, draft.confidence, COUPLED) for r, draft in enumerate(drafts)]
        return choose(rows, np.array([1.0, 1.9, 2.1, 2.3, 2.4]), "global")

    assert joint_bias([TARGET, TARGET], [serial(slot, 2), serial(slot, 2)], shared, [(0,), (1,)]) > 0.01


def test_the_laws_of_this_file_depend_on_the_lengths() -> None:
    """Lengths do differ between the paths of the fixture; else nothing here would be a test."""
    seen = defaultdict(set)
    for name in ("prefix", "global"):
        lengths = chosen(name, exposure=COUPLED)
        for draft, _ in serial(slot, 2)((0,), None):
            seen[name].add(lengths(draft, (0,), None))
    assert seen == {"prefix": {1, 2}, "global": {0, 2}}
