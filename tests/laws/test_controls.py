"""The proof can fail: each known way of losing the law is caught by the very comparison that passes without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.sampling import Row, Sampling, distribution, draw
from forerun.verify import Draft, Verdict, reject
from laws.cases import PROMPT, SlotOf, argmax, logits_of, sampled, target_of
from laws.kit import (
    EXACT,
    Carry,
    Drafting,
    Lengths,
    Model,
    Round,
    Slot,
    Tokens,
    all_of_it,
    bias,
    inversion_cuts,
    rejection_round,
    serial,
)

CAUGHT = 1e-4
"""The smallest bias of a control, 10^8 times what the proof tolerates."""

CASE = {"temperature": 1.0, "filters": "none", "adjust": "none", "target": "history"}


def target() -> Model:
    return target_of(CASE, 3)


def bias_of(rounds: Round) -> float:
    return bias(rounds, target(), PROMPT, 5)


def drafted_by(slot: SlotOf, k: int = 2) -> Drafting:
    return serial(slot(target(), 3), k)


def with_slots(change: Callable[[Slot, list[float]], Slot], k: int = 2) -> Drafting:
    """The sampled drafter, one thing changed between its logits and its report."""
    inner, logits = sampled(target(), 3), logits_of("table", "draft", 3)
    return serial(lambda prefix, drafted: change(inner(prefix, drafted), logits([*prefix, *drafted])), k)


# ------------------------------------------------------------------------------- what the drafter reports (PB-7, PB-8)


def bfloat16_draws(slot: Slot, logits: list[float]) -> Slot:
    """NU-4: drawn from a softmax in bfloat16, verified with the exact one."""
    return Slot(torch.softmax(torch.tensor(logits, dtype=torch.bfloat16), -1).double(), slot.reported)


def unfiltered_report(slot: Slot, logits: list[float]) -> Slot:
    """PB-7: drawn after top_k, reported before."""
    filtered = distribution(torch.tensor([logits], dtype=torch.float64), [Row(Sampling(top_k=2), PROMPT, 2)])[0]
    return Slot(filtered, slot.reported)


def soft_report_of_argmax(slot: Slot, logits: list[float]) -> Slot:
    """PB-8: the most probable token taken, its softmax reported."""
    return Slot(torch.nn.functional.one_hot(slot.drawn.argmax(), 3).double(), slot.reported)


def clamped_report(slot: Slot, logits: list[float]) -> Slot:
    """A floor under the denominator that is not there in the draw."""
    return Slot(slot.drawn, slot.drawn.clamp_min(0.3))


@pytest.mark.parametrize("change", [bfloat16_draws, unfiltered_report, soft_report_of_argmax, clamped_report])
def test_a_report_that_is_not_the_law_drawn_from_is_caught(change: Callable[[Slot, list[float]], Slot]) -> None:
    """What a draft is divided by is what it was drawn from. The same drafter reporting what it draws from passes."""
    assert bias_of(rejection_round(target(), with_slots(change))) > CAUGHT
    honest = with_slots(lambda slot, logits: Slot(change(slot, logits).drawn, change(slot, logits).drawn))
    assert bias_of(rejection_round(target(), honest)) < EXACT


# ----------------------------------------------------------------------------------------------- wrong rules to verify


def final_from_target(tokens: Tensor, q: Tensor | None, lengths: Tensor, p: Tensor, u: Tensor) -> Verdict:
    """The token after a rejection drawn from the target itself instead of the residual."""
    accepted = reject(tokens, q, lengths, p, u).accepted
    return Verdict(accepted, draw(p[torch.arange(len(p)), accepted], u[:, -1]))


def residual_not_renormalised(tokens: Tensor, q: Tensor | None, lengths: Tensor, p: Tensor, u: Tensor) -> Verdict:
    """Inversion of max(p - q, 0) as it is: the mass that is missing falls to the last id."""
    verdict = reject(tokens, q, lengths, p, u)
    at = torch.arange(len(p))
    rejected = verdict.accepted < lengths
    residual = (p[at, verdict.accepted] - q[at, verdict.accepted.clamp_max(q.shape[1] - 1)]).clamp_min(0)
    wrong = torch.searchsorted(residual.cumsum(-1), u[:, -1:].contiguous(), right=True)[:, 0].clamp_max(2)
    return Verdict(verdict.accepted, wrong.where(rejected, verdict.next_token))


def accepted_blindly(tokens: Tensor, q: Tensor | None, lengths: Tensor, p: Tensor, u: Tensor) -> Verdict:
    """EQ-6: drafts kept without a test."""
    return Verdict(lengths, draw(p[torch.arange(len(p)), lengths], u[:, -1]))


def ratio_upside_down(tokens: Tensor, q: Tensor | None, lengths: Tensor, p: Tensor, u: Tensor) -> Verdict:
    """Accepting with q / p."""
    at, slots = torch.arange(len(p))[:, None], torch.arange(tokens.shape[1])
    ratio = q[at, slots, tokens] / p[at, slots, tokens]
    accepted = ((u[:, :-1] < ratio).long().cumprod(-1) * (slots < lengths[:, None])).sum(-1)
    return Verdict(accepted, draw(p[torch.arange(len(p)), accepted], u[:, -1]))


def _more_cuts(p: list[float], q: list[float]) -> list[float]:
    residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [*inversion_cuts(p), *(sum(residual[: i + 1]) for i in range(3))]


@pytest.mark.parametrize("rule", [final_from_target, residual_not_renormalised, accepted_blindly])
def test_a_wrong_rule_is_caught(rule: Callable[..., Verdict]) -> None:
    """p = (.5, .3, .2), q = (.2, .5, .3) at every position. The real rule passes on the same cells."""
    model, drafter = constant([0.5, 0.3, 0.2], [0.2, 0.5, 0.3])
    assert bias(rejection_round(model, drafter(None), verify=rule, more_cuts=_more_cuts), model, (0,), 5) > CAUGHT
    assert bias(rejection_round(model, drafter(None), more_cuts=_more_cuts), model, (0,), 5) < EXACT


def test_steps_at_other_places_than_theory_says_are_caught() -> None:
    """A rule whose acceptance ends elsewhere (here q / p) answers differently at the two ends of a cell."""
    with pytest.raises(AssertionError, match="not constant"):
        bias_of(rejection_round(target(), drafted_by(sampled), verify=ratio_upside_down))


# --------------------------------------------------------------------------------------------- lengths that look ahead


def pruned_by_own_probability(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """Cut before the first token that was improbable under its own law: a decision about x_k that looks at x_k."""
    chosen = draft.probs[range(len(draft.tokens)), draft.tokens].tolist()
    return next((k for k, q in enumerate(chosen) if q < 0.35), len(draft.tokens))


def stopped_after_its_token(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """The lossless neighbour: the improbable token is still verified, what follows it is not."""
    return min(pruned_by_own_probability(draft, prefix, carry) + 1, len(draft.tokens))


def thrown_away_if_short(draft: Draft, prefix: Tokens, carry: Carry) -> int:
    """A prefix that came out too short is not verified at all."""
    length = stopped_after_its_token(draft, prefix, carry)
    return length if length > 1 else 0


@pytest.mark.parametrize("lengths", [pruned_by_own_probability, thrown_away_if_short])
def test_a_length_that_looks_at_the_tokens_it_decides_about_is_caught(lengths: Lengths) -> None:
    """Own-probability pruning, throwing short drafts away; deciding about x_{k+1} from x_k passes."""
    assert bias_of(rejection_round(target(), drafted_by(sampled), lengths)) > CAUGHT
    assert bias_of(rejection_round(target(), drafted_by(sampled), stopped_after_its_token)) < EXACT


def test_point_masses_may_be_pruned_by_any_rule() -> None:
    """A deterministic draft is a function of the history, and so is every rule about its length."""

    def by_token(draft: Draft, prefix: Tokens, carry: Carry) -> int:
        return next((k for k, x in enumerate(draft.tokens) if x == 1), len(draft.tokens))

    assert bias_of(rejection_round(target(), drafted_by(argmax), by_token)) < EXACT
    assert bias_of(rejection_round(target(), drafted_by(sampled), by_token)) > CAUGHT


# ---------------------------------------------------------------------------------------- constant laws, by arithmetic


def constant(p: list[float], q: list[float]) -> tuple[Model, Callable[[Callable[[int], Slot] | None], Drafting]]:
    """A target with the law p at every position, and a maker of drafters of two slots with the law q."""
    model = Model(lambda prefix: torch.tensor(p, dtype=torch.float64).log().tolist(), Sampling())
    law = torch.tensor(q, dtype=torch.float64)
    return model, lambda slot: serial(lambda prefix, drafted: slot(len(drafted)) if slot else Slot(law, law), 2)


def test_dropping_an_invalid_token_after_drawing_is_caught() -> None:
    """p = (.7, .3, 0), q = (.25, .25, .5): dropping id 2 gives (.6, .4), refusing it (.7, .3)."""
    model, drafter = constant([0.7, 0.3, 0.0], [0.25, 0.25, 0.5])

    def dropped(draft: Draft, prefix: Tokens, carry: Carry) -> int:
        return int(draft.tokens[0] != 2)

    def first(lengths: Lengths) -> float:
        emitted = rejection_round(model, drafter(None), lengths)((0,), None)
        return sum(weight for (tokens, _), weight in emitted.items() if tokens[0] == 0)

    assert first(dropped) == pytest.approx(0.6, abs=EXACT)
    assert first(lambda draft, prefix, carry: 1) == pytest.approx(0.7, abs=EXACT)


def noise_of_the_position(model: Model, anchored: bool) -> Round:
    """The budget of a round is the confidence that the round before had behind its second token.

    Where that token stood behind a rejection, its position is drafted again. Keyed by the position, its draft noise is
    read a second time and yields the same token; keyed by the anchor, it is fresh.
    """
    law = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def drafting(prefix: Tokens, carry: Carry) -> list:
        again = carry if isinstance(carry, int) and not anchored else None

        def slot(before: Tokens, drafted: Tokens) -> Slot:
            reread = again is not None and not drafted
            return Slot(torch.eye(2, dtype=torch.float64)[again], law) if reread else Slot(law, law)

        return list(serial(slot, 2)(prefix, carry))

    def lagged(draft: Draft, prefix: Tokens, carry: Carry) -> int:
        return 2 if carry is None else int(carry == 0)  # verify if the confidence was behind an A

    def leave(draft: Draft, accepted: int, carry: Carry) -> Carry:
        return draft.tokens[1] if accepted == 0 and carry is None else None

    return rejection_round(model, drafting, lagged, leave=leave)


@pytest.mark.parametrize(("anchored", "expected"), [(False, 0.85), (True, 0.70)])
def test_se_1_draft_noise_read_again_behind_a_rejection_is_caught(anchored: bool, expected: float) -> None:
    """https://github.com/vllm-project/vllm/issues/6038: .85 with draft noise keyed by position, .70 by anchor.

    p = (.7, .3), q = (.5, .5), K = 2, a budget that lags by one round. P(second token is A | first draft rejected).
    """
    model, _ = constant([0.7, 0.3], [0.5, 0.5])
    rounds = noise_of_the_position(model, anchored)
    after = {carry: w for (tokens, carry), w in rounds((0,), None).items() if len(tokens) == 1}
    is_a = 0.0
    for carry, weight in after.items():
        second = rounds((0, 0), carry)
        is_a += weight * sum(w for (tokens, _), w in second.items() if tokens[0] == 0)
    assert is_a / sum(after.values()) == pytest.approx(expected, abs=EXACT)
    assert (bias(rounds, model, (0,), 4) < EXACT) is anchored


def test_noise_read_again_without_a_budget_is_no_bias() -> None:
    """What leaks is the pair of the two: the same noise under a budget that looks at nothing keeps the law."""
    model, _ = constant([0.7, 0.3], [0.5, 0.5])
    law = torch.tensor([0.5, 0.5], dtype=torch.float64)

    def drafting(prefix: Tokens, carry: Carry) -> list:
        def slot(before: Tokens, drafted: Tokens) -> Slot:
            reread = isinstance(carry, int) and not drafted
            return Slot(torch.eye(2, dtype=torch.float64)[carry], law) if reread else Slot(law, law)

        return list(serial(slot, 2)(prefix, carry))

    def leave(draft: Draft, accepted: int, carry: Carry) -> Carry:
        return draft.tokens[1] if accepted == 0 else None

    assert bias(rejection_round(model, drafting, all_of_it, leave=leave), model, (0,), 4) < EXACT
