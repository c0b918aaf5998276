"""One optimiser step: however it is cut and shared it is the same step, and it never passes over what is not finite."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.learned import DesignPlan, Exercise, Losses, TrainingBatch
from forerun.errors import TrainingFailed
from forerun.target.table import history_model
from forerun.training.features import capture
from forerun.training.metrics import Sums
from forerun.training.order import micro_batches
from forerun.training.step import Stepper, outline, seeded
from forerun.training.trainer import flat
from training.linear import Linear, LinearSettings
from training.runs import configured, random_samples, sample

VOCAB = 11
SAMPLES = random_samples(9, vocab_size=VOCAB, longest=20)
TARGET = history_model(VOCAB, seed=1)
TAPS = (1, 3)


class Captured:
    """A source that computes each sample once: a table gives a sample the same features in any company (tested with the
    features), and is slow."""

    def __init__(self) -> None:
        self.known: dict[str, TrainingBatch] = {}

    def batch(self, samples):
        for one in samples:
            if one.id not in self.known:
                self.known[one.id] = capture(TARGET, [one], TAPS)
        parts = [self.known[one.id] for one in samples]
        joined = [torch.cat([getattr(p, n) for p in parts]) for n in ("tokens", "loss_mask", "features", "last")]
        return TrainingBatch(joined[0], [len(p.tokens) for p in parts], *joined[1:])


SOURCE = Captured()


def drafter(**own) -> Linear:
    plan = DesignPlan(64, torch.arange(VOCAB), "float64", 0)
    return Linear.design(TARGET, LinearSettings(taps=TAPS, **own), plan)


class Ranks(SimpleNamespace):
    """Stands for an Accelerator: one of several devices, whose sums are taken by the test."""

    def __init__(self, count: int = 1, index: int = 0):
        super().__init__(num_processes=count, process_index=index, device=torch.device("cpu"))

    def autocast(self):
        return torch.autocast("cpu", enabled=False)

    def reduce(self, tensor, reduction):
        return tensor


def stepper(made: Linear, ranks: Ranks | None = None, **changes) -> Stepper:
    config = configured("t", "d", "o", mixed_precision="no", **changes).config
    return Stepper(made, SOURCE, config, ranks or Ranks())


def gradients(most: int, ranks: int, **own) -> tuple[list[torch.Tensor], Sums]:
    """Of step 3, summed over `ranks` devices."""
    total, sums = None, []
    for rank in range(ranks):
        one = stepper(drafter(**own), Ranks(ranks, rank), micro_batch_tokens=most)
        one._together = lambda number, mine, bad: mine
        groups = _groups(one)
        sums.append(one._gradients(3, groups))
        one._sum_over_devices()
        grads = [p.grad for p in one.parameters.values()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    return total, Sums.of(sums)


def _groups(one: Stepper):
    return [[SAMPLES[i] for i in g] for g in micro_batches([len(s.token_ids) for s in SAMPLES], one.most)]


@cache
def whole() -> tuple[list[torch.Tensor], Sums]:
    """The step in one pass on one device."""
    return gradients(10_000, 1)


@settings(max_examples=12)
@given(st.integers(1, 200), st.integers(1, 4))
def test_a_step_does_not_depend_on_how_it_is_cut_and_shared(most, ranks):
    """Any size of micro-batch on any number of devices: gradient, loss, metrics and what is drawn are those of one
    pass over everything, in float64 to its rounding."""
    grads, sums = gradients(most, ranks)
    for one, expected in zip(grads, whole()[0], strict=True):
        assert torch.allclose(one, expected, rtol=1e-9, atol=1e-12)
    assert sums.weight == whole()[1].weight
    assert flat(sums.as_dict()) == pytest.approx(flat(whole()[1].as_dict()), rel=1e-6)


def test_the_objective_is_the_sum_of_losses_over_the_sum_of_weights():
    """By hand: all samples in one batch, its total divided by its weight, differentiated."""
    made = drafter()
    batch = SOURCE.batch(SAMPLES)
    exercise = made.prepare(batch, seeded(0, 3, 0))
    losses = made.losses(batch, exercise, 0.5)
    grads = torch.autograd.grad(losses.total / exercise.weight, list(made.network.parameters()))
    for one, expected in zip(grads, whole()[0], strict=True):
        assert torch.allclose(one, expected, rtol=1e-12)
    assert exercise.weight == whole()[1].weight


def test_another_step_draws_other_exercises_and_the_same_step_the_same():
    """From the seed and the step alone; another rank draws the same."""
    draws = [
        torch.rand(4, generator=seeded(*key, rank))
        for key, rank in (((0, 1), 0), ((0, 1), 1), ((0, 2), 0), ((1, 1), 0))
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])


def test_global_random_numbers_of_a_step_are_its_own():
    """A network with dropout draws the same in a step that is taken again, another thing on another device."""
    import random

    def numbers(step, rank):
        seeded(5, step, rank)
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    assert numbers(1, 0) == numbers(1, 0)
    assert not set(numbers(1, 0)) & (set(numbers(2, 0)) | set(numbers(1, 1)))


def test_a_batch_can_be_prepared_before_the_target_has_run():
    """The outline has the tokens, masks and shapes of the captured batch, so a drafter draws the same from it."""
    made = drafter()
    batch, empty = SOURCE.batch(SAMPLES), outline(made, SAMPLES)
    assert torch.equal(batch.tokens, empty.tokens)
    assert torch.equal(batch.loss_mask, empty.loss_mask)
    assert (batch.features.shape, batch.last.shape) == (empty.features.shape, empty.last.shape)
    assert empty.features.untyped_storage().nbytes() == made.target.dtype.itemsize
    first, second = (made.prepare(one, torch.Generator().manual_seed(1)) for one in (batch, empty))
    assert torch.equal(first.drawn["taught"], second.drawn["taught"])


def test_steps_lower_the_loss_and_report_themselves():
    """Loss as a mean over what was taught, tokens, the norm before clipping and the rate that was used."""
    made = drafter(skip=0.0)
    one = stepper(made, steps=40, learning_rate=0.02, warmup_share=0.0, schedule="constant", clip=0.1)
    reports = [one.step(k, SAMPLES) for k in range(40)]
    first, last = reports[0], reports[-1]
    assert last.sums.as_dict()["loss"] < first.sums.as_dict()["loss"] - 0.01
    assert (first.step, first.tokens, first.learning_rate) == (1, sum(len(s.token_ids) for s in SAMPLES), 0.02)
    assert first.grad_norm > 0.1
    assert len(first.as_dict()["teacher_forced_acceptance"]) == 2


# ------------------------------------------------------------------------------------------------------- what stops it


def weights(one: Stepper) -> list[torch.Tensor]:
    return [p.detach().clone() for p in one.parameters.values()]


def assert_unchanged(one: Stepper, before: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(before, weights(one), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_step(value):
    """The step and the samples are named; the weights stay as they were, and nothing is skipped silently."""
    made = drafter()
    one, own = stepper(made), made.losses

    def broken(batch, exercise, progress):
        losses = own(batch, exercise, progress)
        return Losses(
            losses.total + (value if int(batch.tokens[0]) == int(SAMPLES[0].token_ids[0]) else 0), losses.metrics
        )

    made.losses = broken
    before = weights(one)
    with pytest.raises(TrainingFailed, match=r"step 8: the loss is (nan|inf) \(samples s0") as error:
        one.step(7, SAMPLES)
    assert "--learning-rate" in str(error.value)
    assert_unchanged(one, before)


def test_a_gradient_that_is_not_finite_stops_the_step():
    """Though the loss is finite; the parameter is named."""
    made = drafter()
    one, own = stepper(made), made.losses

    def broken(batch, exercise, progress):
        losses = own(batch, exercise, progress)
        zero = (made.network.second.weight - made.network.second.weight.detach()).abs().sum()
        return Losses(losses.total + zero.sqrt(), losses.metrics)  # the root's slope at 0 is infinite

    made.losses = broken
    before = weights(one)
    with pytest.raises(TrainingFailed, match=r"step 1: the gradient is not finite .*second\.weight"):
        one.step(0, SAMPLES)
    assert_unchanged(one, before)


def test_an_overflow_of_float16_repeats_the_step_with_a_smaller_scale():
    """The step is not left out: with the scale that fits it gives what the unscaled step gives."""
    plain = stepper(drafter())
    expected = plain.step(0, SAMPLES)
    made = drafter()
    one = stepper(made)
    one.scale.needed, one.scale.value = True, 2.0**40
    for parameter in one.parameters.values():
        parameter.register_hook(lambda grad: torch.where(grad.abs() > 65504, torch.inf, grad))  # as float16 would
    report = one.step(0, SAMPLES)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-9)
    assert 1 < one.scale.value < 2.0**40
    for one_weight, plain_weight in zip(weights(one), weights(plain), strict=True):
        assert torch.allclose(one_weight, plain_weight, rtol=1e-9)


def test_a_step_that_teaches_nothing_is_skipped():
    """An empty loss mask costs no pass of the target and moves no weight; the report says so."""
    made = drafter()
    one = stepper(made)
    before = weights(one)
    silent = [sample("quiet", [1, 2, 3, 4], prompt=4)]
    one.source = SimpleNamespace(batch=lambda samples: pytest.fail("the target ran"))
    report = one.step(0, silent)
    assert report.as_dict()["skipped"] is True
    assert report.as_dict()["loss"] is None
    assert_unchanged(one, before)


def test_a_step_whose_rows_weigh_but_teach_nothing_is_skipped():
    """Kinds that weigh every row, taught or not: decay and moments must not move the weights either."""
    made = drafter()
    made.prepare = lambda batch, generator: Exercise(float(len(batch.tokens)))
    made.losses = lambda *_: Losses(made.network.first.weight.sum() * 0, {})
    one = stepper(made, weight_decay=0.5)
    before = weights(one)
    assert one.step(0, SAMPLES).skipped
    assert_unchanged(one, before)


def test_weights_that_are_not_finite_after_the_update_stop_the_run():
    """By step and learning rate, though loss and gradient were finite."""
    one = stepper(drafter(), learning_rate=1e300, warmup_share=0.0)
    with pytest.raises(TrainingFailed, match=r"step 1: the weights are not finite .*1e\+300; lower --learning-rate"):
        one.step(0, SAMPLES)
