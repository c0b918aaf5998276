"""The exact part of a certificate: right engines equal to rounding, wrong ones found with the size of their fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.bench import controls, exact, secondlaw
from forerun.engine import judge
from forerun.sampling import Row, Sampling, distribution, draw
from forerun.verify import Verdict


@pytest.mark.parametrize("case", [*exact.cases(), *controls.honest()], ids=lambda case: case.name)
def test_every_case_has_the_law_of_the_target(case):
    """The whole engine, every outcome: total variation at most 1e-12."""
    assert exact.distance(case) <= exact.EQUAL


FAULTS = {
    "drafts accepted blindly": 0.24,  # two drafts of (.5, .5) for (.7, .3): TV of (.25 x 4) and (.49, .21, .21, .09)
    "drafts cut by their own probability": 0.2844,
    "length chosen in retrospect": 0.15,
    "unfiltered draft law reported": 0.25,
    "lagged budget, noise keyed by position": 0.03,  # .15 off (.85 for .70) behind a rejection, which has P = .2
}


@pytest.mark.parametrize("case", controls.cheating(), ids=lambda case: case.name)
def test_every_control_is_found(case):
    """Negative controls: each cheat moves the law by the amount that theory says."""
    assert exact.distance(case) == pytest.approx(FAULTS[case.name], abs=1e-9)


def test_controls_and_faults_are_the_same_list():
    """No control is without its expected size."""
    assert {case.name for case in controls.cheating()} == set(FAULTS)


def _blind(drafts, target_probs, accept_uniforms, final_uniforms):
    """A rule that accepts whatever was drafted and draws the bonus."""
    first, rows = 0, []
    for draft in drafts:
        rows.append(first + len(draft.tokens))
        first += len(draft.tokens) + 1
    accepted = torch.tensor([len(draft.tokens) for draft in drafts])
    return Verdict(accepted, draw(target_probs[rows], final_uniforms))


def _no_residual(drafts, target_probs, accept_uniforms, final_uniforms):
    """A rule that draws from the target's law behind a rejection, not from the residual."""
    verdict = REAL(drafts, target_probs, accept_uniforms, final_uniforms)
    first, rows = 0, []
    for draft, accepted in zip(drafts, verdict.accepted.tolist(), strict=True):
        rows.append(first + accepted)
        first += len(draft.tokens) + 1
    return Verdict(verdict.accepted, draw(target_probs[rows], final_uniforms))


REAL = judge.reject_packed


def _one_draft(name):
    """A case at K = 1: cuts that are not where theory says are searched for, which takes many runs."""
    return replace(next(case for case in exact.cases() if case.name == name), k=1)


@pytest.mark.parametrize("rule", [_blind, _no_residual])
def test_a_wrong_rule_in_the_engine_is_found(monkeypatch, rule):
    """The enumeration goes through the engine's own verification: replacing that shows at once."""
    monkeypatch.setattr(judge, "reject_packed", rule)
    assert exact.distance(_one_draft("small, K = 2")) > 0.01


def test_stale_penalties_in_a_verify_block_are_found(monkeypatch):
    """PB-1: rows of a block that do not count the drafts before them."""
    real = judge._Watched.places

    def stale(one):
        return [Row(row.sampling, row.tokens, row.prompt_length, (), row.end_ids) for row in real(one)]

    monkeypatch.setattr(judge._Watched, "places", stale)
    assert exact.distance(_one_draft("penalties and bias")) > 0.001


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": -0.3},
        {"logit_bias": {1: -2.0}, "allowed_token_ids": [0, 1, 3], "bad_words": [[2, 1], [0]]},
        {"min_tokens": 3},
    ],
)
def test_the_second_law_is_the_first(options):
    """The law written a second time agrees with the package's own to 1e-12 (the reference is not wrong itself)."""
    torch.manual_seed(1)
    logits = torch.randn(4, dtype=torch.float64)
    row = Row(Sampling(**options), [1, 0, 2], 1, [2], frozenset({3}))
    expected = distribution(logits[None], [row])[0].tolist()
    assert secondlaw.law(logits.tolist(), row) == pytest.approx(expected, abs=1e-12)
