"""Chi-square with its power: against scipy, and against the numbers the certificate's documentation quotes."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from scipy import stats

from forerun.bench.chisquare import chi_square, critical, detectable, holm, sample_size, tail


@pytest.mark.parametrize(("x", "dof", "noncentrality"), [(0.5, 1, 0), (9, 3, 0), (40, 12, 10), (700, 18, 600)])
def test_tail_agrees_with_scipy(x, dof, noncentrality):
    """Central and noncentral tails to 1e-6."""
    expected = stats.ncx2.sf(x, dof, noncentrality) if noncentrality else stats.chi2.sf(x, dof)
    assert tail(x, dof, noncentrality) == pytest.approx(expected, abs=1e-6)


def test_critical_value_is_where_the_tail_is_the_alarm():
    """P(X > critical) = alarm, with and without noncentrality."""
    for noncentrality in (0.0, 25.0):
        assert tail(critical(0.01, 4, noncentrality), 4, noncentrality) == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(("dof", "samples"), [(1, 6600), (2, 7900), (3, 8900), (15, 14700)])
def test_sample_sizes_of_the_documentation(dof, samples):
    """TV .02 at power .9 and alarm .05: about 6,600 / 7,900 / 8,900 / 14,700 samples."""
    assert sample_size(0.02, 0.9, 0.05, dof) == pytest.approx(samples, abs=50)


def test_what_is_detectable_with_the_computed_sample_size_is_what_was_asked():
    """sample_size and detectable are inverse; an allowed error raises the bound."""
    n = sample_size(0.03, 0.9, 0.01, 5)
    assert detectable(n, 0.9, 0.01, 5) == pytest.approx(0.03, rel=1e-3)
    assert detectable(n, 0.9, 0.01, 5, allowed=30.0) > 0.035


def test_power_is_what_it_says():
    """200 seeded repetitions at the computed sample size: a law off by TV .1 is found in about 90 % of them.

    At a true power of .9 fewer than 165 or more than 195 finds have a probability below 0.01 %; the shift is put on two
    equal cells, where the worst case of the formula is attained.
    """
    n, rng = sample_size(0.1, 0.9, 0.05, 1), random.Random(3)
    found = 0
    for _ in range(200):
        counts = Counter(int(rng.random() < 0.6) for _ in range(n))
        found += chi_square([(counts, {0: 0.5, 1: 0.5})]).p_value < 0.05
    assert 165 <= found <= 195


def test_an_impossible_outcome_has_p_value_zero():
    """No count excuses a token the law excludes."""
    assert chi_square([({0: 10_000, 2: 1}, {0: 0.5, 1: 0.5})]).p_value == 0.0


def test_rare_cells_are_counted_together():
    """Cells expected less than five times do not add degrees of freedom of their own; nothing is lost."""
    law = {0: 0.9, 1: 0.04, 2: 0.03, 3: 0.03}
    assert chi_square([({0: 90, 1: 4, 2: 3, 3: 3}, law)]).dof == 1
    assert chi_square([({0: 9}, {0: 0.9, 1: 0.1})]) == chi_square([])


def test_an_allowed_error_forgives_what_it_explains_and_no_more():
    """A law off by 10 % relative is rejected as exact, accepted within 15 %, and rejected within 2 %."""
    counts, law = {0: 5500, 1: 4500}, {0: 0.5, 1: 0.5}
    assert chi_square([(counts, law)]).p_value < 1e-10
    assert chi_square([(counts, law)], relative_error=0.15).p_value > 0.5
    assert chi_square([(counts, law)], relative_error=0.02).p_value < 1e-6
    assert chi_square([(counts, law)], relative_error=math.inf).p_value == 1.0


def test_holm_adjusts_as_by_hand():
    """p = .01, .04, .03 -> .03, .06, .06: times 3, 2, 1 in ascending order, never decreasing."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
