"""The margin rule on constructed margins: below the noise is accepted, one above it is not."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.bench.margins import Choice, Difference, worst
from forerun.sampling import Row, Sampling


def _choice(logits, gumbel=None, **options):
    noise = None if gumbel is None else torch.tensor(gumbel, dtype=torch.float64)
    sampling = Sampling(**{"temperature": 0.0 if gumbel is None else 1.0, **options})
    return Choice(torch.tensor(logits), Row(sampling, [0, 1], 1), noise)


def test_greedy_margin_is_the_gap_of_the_logits():
    """Best minus second best; to a third token the gap is the wider one."""
    choice = _choice([1.0, 3.0, 2.75, 0.0])
    assert choice.top_margin == 0.25
    assert choice.margin(1) == 0.0
    assert choice.margin(2) == pytest.approx(0.25, abs=1e-9)
    assert choice.margin(3) == pytest.approx(3.0, abs=1e-9)


def test_greedy_margin_counts_penalties():
    """Adjusted logits are compared: token 1 is in the prompt's output and penalised."""
    choice = Choice(
        torch.tensor([1.0, 3.0, 2.75]), Row(Sampling(temperature=0, frequency_penalty=0.5), [0, 1], 1), None
    )
    assert choice.token() == 2
    assert choice.top_margin == pytest.approx(0.25)


def test_coupled_margin_is_the_gap_of_log_p_plus_noise_in_logits():
    """At temperature T a logit must rise by T times the gap of the scores."""
    choice = _choice([0.0, 1.0], gumbel=[2.0, 0.0], temperature=0.5)
    # log p = (-2, 0) + const; scores (0, 0) + const: a tie goes to the lower id, so no rise makes it the choice sooner
    assert choice.top_margin == pytest.approx(0.0, abs=1e-12)
    choice = _choice([0.0, 1.0], gumbel=[1.5, 0.0], temperature=0.5)
    assert choice.token() == 1
    assert choice.margin(0) == pytest.approx(0.25, abs=1e-9)
    assert choice.top_margin == pytest.approx(0.25, abs=1e-9)


def test_a_token_outside_a_filter_is_as_far_as_its_rise_into_it():
    """top_k = 1 at T = 1: token 2 wins on noise as soon as its logit reaches the edge."""
    choice = _choice([1.0, 0.9, -5.0], gumbel=[0.0, 9.0, 0.0], top_k=1)
    assert choice.token() == 0
    assert choice.margin(1) == pytest.approx(0.1, abs=1e-6)
    assert choice.margin(2) == pytest.approx(6.0, abs=1e-6)


def test_a_forbidden_token_has_no_margin():
    """No rise makes a masked token the choice."""
    assert _choice([1.0, 0.0], allowed_token_ids=[0]).margin(1) == math.inf


@pytest.mark.parametrize(
    ("margin", "noise", "explained"), [(0.1, 0.2, True), (0.2, 0.2, False), (0.3, 0.2, False), (1e-9, 0.0, False)]
)
def test_a_difference_is_explained_only_below_the_noise(margin, noise, explained):
    """Equal is not below; without noise nothing is explained."""
    assert Difference(0, 3, 5, 6, margin, noise).explained is explained


def test_the_worst_difference_is_the_one_furthest_above_its_noise():
    """Not the one with the largest margin."""
    near, far = Difference(0, 1, 2, 3, 0.5, 0.6), Difference(1, 1, 2, 3, 0.2, 0.1)
    assert worst([near, far]) is far
    assert worst([]) is None
