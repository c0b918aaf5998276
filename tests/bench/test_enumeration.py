"""Measuring the law of a program that reads random numbers, without knowing how it decides."""

from __future__ import annotations

import pytest

from forerun.bench.enumeration import Run, Scripted, measure

A, B, C = (0, 0, 0), (0, 0, 1), (1, 0, 0)


def _runner(program, hints=()):
    """`program(numbers)` reads by calling numbers(key) and returns (acts, output)."""

    def run(script):
        reads = []

        def number(key):
            reads.append(key)
            return script.get(key, 0.5)

        acts, output = program(number)
        return Run(reads, acts, output, lambda key: hints)

    return lambda scripts: [run(script) for script in scripts]


@pytest.mark.parametrize("hints", [(), (0.3, 0.9), (0.1, 0.5, 0.77)])
def test_cuts_are_found_with_right_wrong_and_no_hints(hints):
    """Three outcomes at .3 and .9: their widths to 1e-13, whatever the hints say."""

    def program(number):
        outcome = sum(number(A) >= cut for cut in (0.3, 0.9))
        return outcome, (outcome,)

    law = measure(_runner(program, hints))
    assert law == {(0,): pytest.approx(0.3, abs=1e-13), (1,): pytest.approx(0.6, abs=1e-13), (2,): pytest.approx(0.1)}


def test_a_later_read_may_depend_on_an_earlier_decision():
    """B is read only below .25, C only above: the joint law is that of the tree."""

    def program(number):
        left = number(A) < 0.25
        second = number(B) < 0.5 if left else number(C) < 0.75
        return (left, second), (int(left), int(second))

    law = measure(_runner(program))
    expected = {(1, 1): 0.125, (1, 0): 0.125, (0, 1): 0.5625, (0, 0): 0.1875}
    assert {k: pytest.approx(v, abs=1e-12) for k, v in expected.items()} == law


def test_a_number_that_decides_nothing_does_not_branch():
    """It counts with its whole width."""
    assert measure(_runner(lambda number: (number(A) < 2, (7,)))) == {(7,): pytest.approx(1.0, abs=1e-15)}


def test_scripted_noise_reads_its_script_and_remembers_what_counts():
    """0.5 where the script is silent; reads outside the span are not branchings."""
    tokens = [1]
    noise = Scripted(0, {(3, 1, 1): 0.125}, tokens, range(2, 3))
    assert noise.uniforms(2, 1, 1).tolist() == [0.5]
    tokens.append(5)
    assert noise.uniforms(3, 1, 2).tolist() == [0.5, 0.125]
    assert noise.reads == [(3, 1, 0), (3, 1, 1)]
