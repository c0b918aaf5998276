"""Speculative output beside plain output on a target that rounds: what is put down to noise, and what is not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from bench.rounding import NOISE, Rounding, near_ties
from forerun import Sampling
from forerun.bench.comparison import Comparison, Findings, Task, first_difference
from forerun.bench.margins import Difference
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions, judge
from forerun.engine.load import load_drafters
from forerun.target.table import TableTarget, history_model

VOCAB = 6
PROMPT = [1, 2, 3]


_near_ties = near_ties(VOCAB)


def _engine(target, k=4):
    options = EngineOptions(num_speculative_tokens=k)
    twin = Small(TableTarget(target._logits, VOCAB), VOCAB)
    return Engine(target, load_drafters([twin], target, options), options)


def _task(tokens=24):
    return Task(PROMPT, Sampling(temperature=0, max_tokens=tokens), "rejection")


def test_first_difference_also_finds_a_shorter_output():
    """Position of the first other id, or the end of the shorter output."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0


def test_margins_of_a_plain_output_are_those_of_its_choices():
    """One per token: .0625 at near ties, 1 elsewhere."""
    target = Rounding(_near_ties, VOCAB)
    plain = Comparison(_engine(target)).plain(_task())
    expected = [0.0625 if (len(PROMPT) + i) % 4 == 0 else 1.0 for i in range(24)]
    assert list(plain.margins) == pytest.approx(expected, abs=1e-2)


def test_differences_below_the_noise_are_explained_and_the_check_goes_on_behind_them():
    """Near ties flip in verify blocks: several differences along one output, each below the measured noise."""
    comparison = Comparison(_engine(Rounding(_near_ties, VOCAB)))
    findings = Findings()
    comparison.check(findings, comparison.plain(_task()), "small", 4, prompt=0)
    assert len(findings.differences) >= 3
    assert len({d.position for d in findings.differences}) == len(findings.differences)
    assert all(d.margin == pytest.approx(0.0625, abs=1e-6) for d in findings.differences)
    assert all(d.noise == pytest.approx(NOISE, abs=1e-2) for d in findings.differences)
    assert findings.explained


def test_one_margin_above_the_noise_fails(monkeypatch):
    """The same target, but the engine commits the first draft token unchecked: its margins are 1 and more (EQ-6)."""
    real = judge.reject_packed

    def unchecked(drafts, laws, accept, final):
        verdict = real(drafts, laws, accept, final)
        free = torch.tensor([min(1, len(draft.tokens)) for draft in drafts])
        return verdict._replace(accepted=verdict.accepted.maximum(free))

    options = EngineOptions(num_speculative_tokens=2)
    target = Rounding(_near_ties, VOCAB)
    wrong = Small(TableTarget(lambda prefix: [-x for x in _near_ties(prefix)], VOCAB), VOCAB)
    engine = Engine(target, load_drafters([wrong], target, options), options)
    comparison, findings = Comparison(engine), Findings()
    plain = comparison.plain(_task())
    monkeypatch.setattr(judge, "reject_packed", unchecked)
    comparison.check(findings, plain, "small", 2, prompt=0)
    assert not findings.explained
    assert findings.differences[-1].margin > findings.differences[-1].noise > 0


def test_in_float32_no_difference_is_accepted():
    """The same near ties in an exact dtype fail: there the claim is that none is observed."""

    class Exactly(Rounding):
        dtype = torch.float32

    comparison, findings = Comparison(_engine(Exactly(_near_ties, VOCAB))), Findings()
    comparison.check(findings, comparison.plain(_task()), "small", 4, prompt=0)
    assert findings.differences
    assert not findings.explained
    assert findings.differences[0].noise == 0


def test_an_output_of_another_length_is_never_explained():
    """Stopping too early is no rounding, whatever the noise."""
    comparison = Comparison(_engine(Rounding(_near_ties, VOCAB)))
    plain = comparison.plain(_task())
    shorter = SimpleNamespace(token_ids=plain.token_ids[:5])
    [difference] = comparison.differences(plain, shorter, "small", 4, prompt=0)
    assert difference == Difference(0, 5, plain.token_ids[5], None, math.inf, difference.noise)
    assert not difference.explained


def test_outputs_in_one_batch_are_compared_as_well():
    """Exact logits: no difference, every output counted, drafts accepted."""
    comparison, findings = Comparison(_engine(history_model(VOCAB, seed=4))), Findings()
    plains = [
        comparison.plain(Task(p, Sampling(temperature=0.9, seed=3, max_tokens=20), "coupled")) for p in ([1], [2, 5])
    ]
    comparison.check_together(findings, plains, "small", 3)
    assert (findings.outputs, findings.differences) == (2, [])
    assert findings.stats.accepted > 0


def test_the_engine_decodes_as_before_after_a_noise_measurement():
    """The measurement takes the target's storage; what follows must not read what it left there."""
    comparison = Comparison(_engine(Rounding(_near_ties, VOCAB)))
    before = comparison.plain(_task())
    noise = comparison.noise(before, 5)
    assert noise.max_difference == pytest.approx(NOISE, abs=1e-2)
    assert comparison.plain(_task()).token_ids == before.token_ids
