"""Which samples a step has, how it is cut and shared, and the numbers of the optimiser: pure functions."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3ForCausalLM

from forerun.drafters.layers import Head
from forerun.errors import OptionError
from forerun.training.config import choose
from forerun.training.optimizer import (
    Average,
    LossScale,
    clip,
    gradient_norm,
    learning_rate,
    optimizer_tensors,
    optimizers,
    restore_optimizer,
    trained,
)
from forerun.training.order import Order, micro_batches, shares, shuffled
from tiny import qwen3_config
from training.runs import KIND

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def config(**changes):
    return choose(KIND, {"data": "d", "out": "o", **changes}, {}).config


@given(lengths, st.integers(1, 200), st.integers(0, 5))
def test_the_stream_goes_through_every_epoch_once(sizes, tokens, seed):
    """Steps follow one another without a gap; N samples in a row from a multiple of N on are a permutation; a step
    holds no more tokens than it may, unless it is a single sample."""
    order = Order(np.array(sizes), tokens, seed)
    place, stream = 0, []
    while place < 2 * len(sizes):
        chosen, end = order.step(place)
        assert end == place + len(chosen)
        assert sum(sizes[i] for i in chosen) <= tokens or len(chosen) == 1
        assert 1 <= len(chosen) <= len(sizes)
        stream += chosen
        place = end
    for epoch in range(2):
        assert sorted(stream[epoch * len(sizes) : (epoch + 1) * len(sizes)]) == list(range(len(sizes)))


@given(lengths, st.integers(1, 200), st.integers(0, 60))
def test_a_place_needs_no_replay(sizes, tokens, place):
    """A fresh order gives the same step at any place as one that came there step by step."""
    old = Order(np.array(sizes), tokens, 3)
    for before in range(place):
        old.sample(before)
    assert Order(np.array(sizes), tokens, 3).step(place) == old.step(place)


def test_the_orders_are_what_they_were():
    """Written down: a run of an older version is resumed with the same samples."""
    assert shuffled(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert shuffled(8, 0, 1).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert shuffled(8, 7, 0).tolist() == [4, 1, 6, 3, 2, 7, 5, 0]


@given(lengths, st.integers(1, 200), st.sampled_from([0.5, 1.0, 2.0]))
def test_steps_of_epochs(sizes, tokens, epochs):
    """So many steps go through the data that often, and one fewer does not."""
    order = Order(np.array(sizes), tokens, 0)
    steps, place, before = order.steps_of(epochs), 0, 0
    for _ in range(steps):
        before, place = place, order.step(place)[1]
    assert before < epochs * len(sizes) <= place


@given(lengths, st.integers(1, 120), st.integers(1, 5))
def test_groups_and_shares_hold_every_sample_once(sizes, most, ranks):
    """In order, within the bound unless a sample alone is above it; no rank has more than its share and a group."""
    groups = micro_batches(sizes, most)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in group) for group in groups]
    assert all(total <= most or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    taken = shares(totals, ranks)
    assert sorted(i for own in taken for i in own) == list(range(len(groups)))
    assert max(sum(totals[i] for i in own) for own in taken) <= sum(totals) / ranks + max(totals)


# -------------------------------------------------------------------------------------------------------- the optimiser


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_rises_and_falls(schedule):
    """Linearly to its peak in the first steps, then by the schedule down to the share asked for."""
    settings = config(schedule=schedule, warmup_share=0.1, learning_rate=2.0, min_lr_share=0.25)
    rates = [learning_rate(step, 100, settings) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert rates[10] == 2.0
    middle = {"cosine": 1.25, "linear": 1.25, "constant": 2.0}[schedule]
    assert rates[55] == pytest.approx(middle)
    assert rates[100] == pytest.approx(2.0 if schedule == "constant" else 0.5)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    if schedule == "cosine":
        assert rates[32] == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi * 22 / 90)) / 2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(3, 2), "fc": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_spares_norms_biases_and_embeddings(name):
    """With a gradient of zero nothing changes but what decays: the matrices."""
    net = network()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    moved_by = optimizers(net, config(weight_decay=0.5, learning_rate=0.1, optimizer=name))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in moved_by:
        optimizer.step()
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"fc.weight"}
    assert torch.allclose(net["fc"].weight, before["fc.weight"] * (1 - 0.1 * 0.5))


def test_muon_moves_no_head() -> None:
    """Logits of rare tokens would be moved as much as those of frequent ones: AdamW has a drafter's own heads, and that
    of a model of the transformers library, as it has embeddings."""
    net = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8, bias=False), Head(8, 30, bias=False))
    muon, adamw = optimizers(net, config(optimizer="muon"))
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(net[1].weight)]
    moved = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert moved == {id(net[0].weight), id(net[2].weight)}
    model = Qwen3ForCausalLM(qwen3_config(1))
    muon = optimizers(model, config(optimizer="muon"))[0]
    assert id(model.lm_head.weight) not in {id(p) for group in muon.param_groups for p in group["params"]}


def test_clipping_keeps_the_direction():
    """A gradient longer than the bound gets its length, a shorter one stays; 0 is no bound."""
    for most, scale in ((1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)):
        net = nn.Linear(2, 1, bias=False)
        net.weight.grad = torch.tensor([[3.0, 4.0]])
        parameters = trained(net)
        assert gradient_norm(parameters) == 5.0
        clip(parameters, 5.0, most)
        assert torch.allclose(net.weight.grad, torch.tensor([[3.0, 4.0]]) * scale)


def test_the_average_follows_and_stands_in():
    """a <- d a + (1 - d) w; within `in_place` the network computes with it, afterwards with its own weights again."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.0)
    average = Average(trained(net), 0.75)
    for value in (4.0, 8.0):
        with torch.no_grad():
            net.weight.fill_(value)
        average.update()
    with average.in_place():
        assert net(torch.ones(1, 1)).item() == 0.75 * 1.0 + 0.25 * 8.0
        assert net.state_dict()["weight"].item() == 2.75
    assert net.weight.item() == 8.0


def test_the_loss_scale_halves_until_it_is_one_and_grows_when_it_is_calm():
    """A step is tried again while there is a smaller scale; without float16 there is none."""
    scale = LossScale(True, start=4.0, patience=2)
    assert scale.lower()
    assert scale.value == 2.0
    for expected in (2.0, 4.0, 4.0, 8.0):
        scale.passed()
        assert scale.value == expected
    assert all(scale.lower() for _ in range(3))
    assert not scale.lower()
    assert not LossScale(False).lower()


def test_muon_moves_matrices_as_far_as_adamw_and_in_orthogonal_directions():
    """The rest is AdamW's; a matrix's update has singular values of nearly one size and about AdamW's norm."""
    torch.manual_seed(0)
    nets = {name: nn.ModuleDict({"fc": nn.Linear(32, 24), "norm": nn.LayerNorm(4)}) for name in ("adamw", "muon")}
    nets["muon"].load_state_dict(nets["adamw"].state_dict())
    gradient = torch.randn(24, 32) @ torch.diag(torch.logspace(0, -3, 32))
    updates = {}
    for name, net in nets.items():
        before = net["fc"].weight.detach().clone()
        moved_by = optimizers(net, config(learning_rate=0.1, optimizer=name))
        assert [type(o).__name__ for o in moved_by] == (["AdamW"] if name == "adamw" else ["Muon", "AdamW"])
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        net["fc"].weight.grad = gradient.clone()
        for optimizer in moved_by:
            optimizer.step()
        updates[name] = net["fc"].weight.detach() - before
        assert torch.allclose(net["norm"].weight, torch.full((4,), 0.9), atol=1e-4)
    size = {name: update.square().mean().sqrt() for name, update in updates.items()}
    assert 0.1 < size["muon"] / size["adamw"] < 1.5
    spread = torch.linalg.svdvals(updates["muon"])
    assert spread[0] / spread[15] < 3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimiser_goes_on_from_named_tensors(name):
    """Two steps, or one, its state into a new optimiser, and another: the same bits."""

    def steps(net, moved_by, count):
        for k in range(count):
            for p in net.parameters():
                p.grad = torch.sin(p.detach() * 3 + k)
            for optimizer in moved_by:
                optimizer.step()

    straight, halved = network(), network()
    settings = config(weight_decay=0.1, optimizer=name)
    optimizer = optimizers(straight, settings)
    steps(straight, optimizer, 1)
    steps(straight, optimizer, 1)
    first = optimizers(halved, settings)
    assert optimizer_tensors(first, trained(halved)) == {}
    steps(halved, first, 1)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(first, trained(halved)).items()}
    second = optimizers(halved, settings)
    restore_optimizer(second, trained(halved), saved)
    steps(halved, second, 1)
    for one, other in zip(straight.parameters(), halved.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("epochs", [1e15, float("inf"), float("nan")])
def test_more_epochs_than_can_be_counted_are_refused(epochs):
    """At once, with the option."""
    with pytest.raises(OptionError, match=r"--epochs: .*say how many --steps"):
        Order(np.array([3, 4]), 8, 0).steps_of(epochs)
