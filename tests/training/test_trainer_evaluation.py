"""What a drafter is judged by: real decoding by the engine, and its confidence against what was accepted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forerun import Sampling
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.learned import DesignPlan
from forerun.engine import Engine
from forerun.engine.propose import LoadedDrafter
from forerun.engine.stats import total
from forerun.target.load import load_target
from forerun.training.confidence import (
    Observed,
    Round,
    confidence_error,
    cross_entropy,
    expected_calibration_error,
    survival_pairs,
)
from forerun.training.evaluation import Evaluation, Evaluator, Interrupted, prompt_of
from forerun.training.features import open_source
from forerun.training.metrics import Sums
from training.linear import Linear, LinearSettings
from training.runs import configured, random_samples, sample

SAMPLES = random_samples(5)


@pytest.fixture(scope="module")
def drafter(tiny_qwen3_dir) -> Linear:
    target = load_target(tiny_qwen3_dir)
    plan = DesignPlan(64, torch.arange(target.vocab_size), "float32", 0)
    made = Linear.design(target, LinearSettings(), plan)
    with torch.no_grad():  # the identity on the last tap: right now and then, as the next feature is like this one
        made.network.first.weight.zero_()
        made.network.first.weight[:, 32:64] = torch.eye(32)
    return made


def evaluator(made: Linear, ranks=(1, 0), stopping=lambda: False, samples=SAMPLES, **changes) -> Evaluator:
    changes = {"eval_tokens": 20, "mixed_precision": "no", "eval_temperature": "0,1", **changes}
    config = configured("t", "d", "o", **changes).config
    accelerator = SimpleNamespace(
        num_processes=ranks[0], process_index=ranks[1], autocast=lambda: torch.autocast("cpu", enabled=False)
    )
    return Evaluator(samples, open_source(made.target, made.taps), config, accelerator, stopping)


def test_the_numbers_are_those_of_the_engine(drafter):
    """Every count of real decoding is what a plain engine with the same drafter, prompts and seeds says."""
    found = evaluator(drafter).evaluate(drafter, 7)
    for one in found.decoding:
        engine = Engine(
            drafter.target, [LoadedDrafter(drafter.for_decoding(torch.float32), SpeculativeConfig(method="x"))]
        )
        prompts = [prompt_of(s) for s in SAMPLES]
        samplings = [Sampling(temperature=one.temperature, max_tokens=20, seed=i) for i in range(len(prompts))]
        done = engine.generate(prompts, samplings)
        engine.audit()
        for name in ("drafted", "accepted", "emitted", "drafting_rounds", "accepted_by_position"):
            assert getattr(one.stats, name) == getattr(total(c.stats for c in done), name), name
        assert one.stats.drafter_faults == 0
    lengths = [one.stats.mean_accepted_length for one in found.decoding]
    assert found.score == sum(lengths) / 2
    assert lengths[1] > 1


def test_ts_7_given_text_and_decoding_have_names_of_their_own(drafter):
    """`teacher_forced_acceptance` is of given text, `acceptance_by_position` of decoding by the serving code, and
    neither word is used for the other. https://github.com/sgl-project/SpecForge/issues/455,
    https://github.com/NickL77/BaldEagle/issues/17
    """
    found = evaluator(drafter).evaluate(drafter, 7).as_dict()
    forced, decoding = found["teacher_forced"], found["decoding"]
    assert len(forced["teacher_forced_acceptance"]) == 2
    assert not [name for name in forced if "acceptance" in name and name != "teacher_forced_acceptance"]
    for one in decoding:
        assert {"mean_accepted_length", "acceptance_by_position", "tokens_per_step"} <= one.keys()
        assert not [name for name in one if "teacher" in name]


def test_an_evaluation_can_be_repeated(drafter):
    """The same exercises and seeds: the same numbers, and training mode and gradients are as they were."""
    drafter.network.train()
    first, second = (evaluator(drafter).evaluate(drafter, 7).as_dict() for _ in range(2))
    assert first == second
    assert drafter.network.training
    assert all(p.grad is None for p in drafter.network.parameters())


def test_devices_share_the_samples(drafter, monkeypatch):
    """Two devices' halves together are the evaluation of one: nothing is decoded twice or left out."""
    whole = evaluator(drafter, eval_temperature="0").evaluate(drafter, 1)
    parts = []
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: parts.extend(mine) or parts)
    evaluator(drafter, (2, 0), eval_temperature="0").evaluate(drafter, 1)
    both = evaluator(drafter, (2, 1), eval_temperature="0").evaluate(drafter, 1)
    assert both.decoding[0].prompts == len(SAMPLES)
    assert both.decoding[0].stats.emitted == whole.decoding[0].stats.emitted
    assert both.teacher_forced.parts["teacher_forced_acceptance@1"][1] > 0


def test_a_device_without_samples_takes_part(drafter, monkeypatch):
    """More devices than samples."""
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: mine)
    found = evaluator(drafter, (3, 2), samples=SAMPLES[:1]).evaluate(drafter, 1)
    assert [one.prompts for one in found.decoding] == [0, 0]
    assert found.score is None


@pytest.mark.parametrize("after", [0, 1, 5, 30])
def test_an_evaluation_is_left_when_a_stop_is_asked_for(drafter, after):
    """Between passes and between steps of decoding; the target can be used again."""
    asked = iter(range(10_000))
    with pytest.raises(Interrupted):
        evaluator(drafter, stopping=lambda: next(asked) >= after).evaluate(drafter, 1)
    assert evaluator(drafter).evaluate(drafter, 1).score is not None


def test_the_best_is_chosen_over_all_temperatures():
    """The mean of the accepted lengths; one at which nothing was drafted does not count."""
    one = SimpleNamespace(stats=SimpleNamespace(mean_accepted_length=2.0))
    other = SimpleNamespace(stats=SimpleNamespace(mean_accepted_length=1.0))
    none = SimpleNamespace(stats=SimpleNamespace(mean_accepted_length=None))
    assert Evaluation(1, Sums(), [one, other, none]).score == 1.5
    assert Evaluation(1, Sums(), [none]).score is None


def test_prompts_end_where_the_target_begins():
    """At the first token that is learned; half of a text that is learned from the start; never nothing."""
    assert prompt_of(sample("a", [1, 2, 3, 4, 5], 3)) == [1, 2, 3]
    assert prompt_of(sample("b", [1, 2, 3, 4, 5], 0)) == [1, 2]
    assert prompt_of(sample("c", [1], 0)) == [1]


# ---------------------------------------------------------------------------------------------------------- confidence


def test_an_observed_drafter_drafts_as_before(drafter):
    """Token for token, and its rounds are the engine's: one for each that was not a request's last."""
    prompts = [prompt_of(s) for s in SAMPLES]
    samplings = [Sampling(temperature=1, max_tokens=n, seed=n) for n in (20, 9, 3, 14, 1)]
    outputs, watched = [], Observed(drafter.for_decoding(torch.float32))
    for one in (drafter.for_decoding(torch.float32), watched):
        engine = Engine(drafter.target, [LoadedDrafter(one, SpeculativeConfig(method="x"))])
        outputs.append(engine.generate(prompts, samplings))
        engine.audit()
    assert [c.token_ids for c in outputs[0]] == [c.token_ids for c in outputs[1]]
    rounds = sum(c.stats.drafting_rounds for c in outputs[1])
    drafting = sum(c.stats.drafting_rounds > 0 for c in outputs[1])
    assert rounds - drafting <= len(watched.rounds) <= rounds
    for position in (1, 2):  # those that were left out are the last ones, at most one a request
        kept = sum(one.accepted >= position for one in watched.rounds)
        every = total(c.stats for c in outputs[1]).accepted_by_position[position - 1]
        assert every - drafting <= kept <= every
    assert not watched._drafted
    assert not watched._judged


def test_survival_is_compared_with_the_product_of_confidences():
    """c_1, c_1 c_2, ..; positions behind the first rejection did not survive."""
    assert survival_pairs([Round((0.5, 0.5, 1.0), 1)]) == [(0.5, True), (0.25, False), (0.25, False)]


def test_calibration_error_by_hand():
    """Two predictions in one bin, one in another; and of a forecast that is exactly right none."""
    pairs = [(0.80, True), (0.82, False), (0.1, False)]
    assert expected_calibration_error(pairs) == pytest.approx((abs(1.62 - 1) + 0.1) / 3)
    assert expected_calibration_error([(0.25, k == 0) for k in range(4)]) == 0
    assert expected_calibration_error([(1.0, True), (0.0, False)]) == 0


def test_cross_entropy_by_hand():
    """Mean nats; a certain prediction that was wrong is bounded, not infinite."""
    assert cross_entropy([(0.5, True), (0.5, False)]) == pytest.approx(0.6931, abs=1e-4)
    assert 36 < cross_entropy([(1.0, False)]) < 37


def test_a_drafter_without_confidence_has_no_error():
    """Nothing is made up."""
    assert confidence_error([]) == {}
    assert confidence_error([Round((0.5,), 1)])["confidence_rounds"] == 1
