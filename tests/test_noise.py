"""Randomness is a pure function of its key."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forerun.sampling import ACCEPT, DRAFT, FINAL, GUMBEL, Noise
from forerun.sampling import noise as module

seeds = st.integers(0, 2**64 - 1)
places = st.integers(0, 2**40)
purposes = st.sampled_from([DRAFT, ACCEPT, FINAL])

FALSE_ALARM = 1e-3
"""Seeds are fixed, so nothing here flakes; this is how often another seed would fail a law test."""


@given(seeds, places, purposes, st.integers(0, 80), st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_uniforms_do_not_depend_on_how_many_are_asked_for(
    seed: int, at: int, purpose: int, few: int, many: int
) -> None:
    """Slot k has the same number in a block of any length, also across the size of the internal cache."""
    few, many = sorted((few, many))
    assert np.array_equal(Noise(seed).uniforms(at, purpose, few), Noise(seed).uniforms(at, purpose, many)[:few])


def test_uniforms_do_not_depend_on_what_was_asked_before() -> None:
    """Nothing is stored that a caller could see: any order, and writing into a result changes nothing."""
    noise = Noise(42)
    first = noise.uniforms(7, DRAFT, 5)
    noise.uniforms(8, ACCEPT, 3)
    first_copy = first.copy()
    first[:] = -1
    assert np.array_equal(noise.uniforms(7, DRAFT, 5), first_copy)
    assert np.array_equal(Noise(42).uniforms(7, DRAFT, 5), first_copy)


def test_gumbel_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    """Element v belongs to token id v: a padded vocabulary has the same noise on the shared ids."""
    assert np.array_equal(Noise(1).gumbel(9, 100), Noise(1).gumbel(9, 150)[:100])


def test_noise_that_a_draft_has_read_has_the_same_bits_for_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once, whatever else the target reads beside it; another vocabulary and a later block get their own."""
    made, real = [], Noise.gumbel

    def counting(self: Noise, position: int, size: int) -> np.ndarray:
        made.append((position, size))
        return real(self, position, size)

    monkeypatch.setattr(Noise, "gumbel", counting)
    noise = Noise(3)
    read = [(4, 50), (5, 50), (6, 50), (7, 40), (5, 50)]
    drafted = [noise.gumbel_for_draft(position, size) for position, size in read]
    rows = noise.gumbel_for_target(range(4, 8), 50)
    assert made == [(4, 50), (5, 50), (6, 50), (7, 40), (7, 50)]
    assert all(np.array_equal(row, real(noise, 4 + i, 50)) for i, row in enumerate(rows))
    assert all(np.array_equal(row, kept) for row, kept in zip(rows, drafted[:3], strict=False))
    assert np.array_equal(drafted[3], rows[3][:40])
    assert np.array_equal(noise.gumbel_for_target([4], 50)[0], rows[0])
    assert made[5:] == [(4, 50)], "nothing is kept longer"


def test_se_3_two_processes_have_equal_numbers() -> None:
    """https://github.com/vllm-project/vllm/pull/17509: ranks draw the same noise without talking to each other."""
    code = (
        "import json; from forerun.sampling import Noise; n = Noise.of(2**63 + 5, 3);"
        "print(json.dumps([n.seed, n.uniforms(11, 1, 6).tolist(), n.gumbel(12, 6).tolist()]))"
    )
    answers = [json.loads(subprocess.check_output([sys.executable, "-c", code])) for _ in range(2)]
    noise = Noise.of(2**63 + 5, 3)
    own = [noise.seed, noise.uniforms(11, ACCEPT, 6).tolist(), noise.gumbel(12, 6).tolist()]
    assert answers == [own, own]


def test_the_numbers_stay_what_they_are() -> None:
    """A seed that was handed out must reproduce its text in the next release: three numbers, pinned."""
    assert Noise(0).uniforms(0, DRAFT, 1)[0].hex() == PINNED["uniform"]
    assert Noise(2**64 - 1).uniforms(5, ACCEPT, 2)[1].hex() == PINNED["large seed"]
    assert Noise.of(123, 1).seed == PINNED["mix"]


PINNED = {"uniform": "0x1.7a5d3204726c0p-7", "large seed": "0x1.9dd3639a14586p-2", "mix": 13032462758197477675}


def test_streams_do_not_overlap() -> None:
    """Every (seed, anchor, purpose) has numbers of its own: 40,000 of 53 bits without one repetition.

    Chance would repeat one with probability 1e-7.
    """
    parts = [
        Noise(seed).uniforms(anchor, purpose, 50)
        for seed in (0, 1, 2**63, 2**64 - 1)
        for anchor in range(50)
        for purpose in (DRAFT, ACCEPT, FINAL, GUMBEL)
    ]
    numbers = np.concatenate(parts)
    assert len(np.unique(numbers)) == len(numbers) == 40_000


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 2])
def test_neighbouring_seeds_differ(seed: int) -> None:
    """Also beyond 2**63, where a list of Python integers would become floats and lose the last bits."""
    assert not np.array_equal(Noise(seed).uniforms(0, DRAFT, 4), Noise(seed + 1).uniforms(0, DRAFT, 4))


# -------------------------------------------------------------------------------------------------------- seeds (SE-2)


@given(st.integers(-(2**63), 2**64 - 1))
def test_sample_0_has_the_seed_itself(seed: int) -> None:
    """A returned seed, sent alone with n = 1, reproduces its sample; negative seeds are taken modulo 2**64."""
    assert Noise.of(seed) == Noise(seed % 2**64)
    assert Noise.of(Noise.of(seed, 3).seed) == Noise.of(seed, 3)


def test_a_seed_may_come_from_numpy() -> None:
    """A signed 64-bit integer, negative ones included."""
    assert Noise.of(np.int64(-3), 2) == Noise.of(-3, 2)


def test_se_2_samples_and_seeds_have_streams_of_their_own() -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/17599: 100 seeds x 20 samples, all keys and streams differ."""
    noises = [Noise.of(seed, sample) for seed in range(100) for sample in range(20)]
    assert len({n.seed for n in noises}) == 2000
    assert len({n.uniforms(3, DRAFT, 1)[0] for n in noises}) == 2000


def test_the_mix_is_a_bijection_of_the_seed() -> None:
    """For one sample index no two seeds share a stream: the mix is undone step by step."""

    def undo_shift(z: int, by: int) -> int:
        out = z
        for _ in range(64 // by + 1):
            out = z ^ (out >> by)
        return out

    for seed in (0, 1, 2**63, 2**64 - 1, 123456789):
        z = undo_shift(module._mix(seed, 7), 31)
        z = undo_shift(z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64, 27)
        z = undo_shift(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)
        assert (z - 7 * 0x9E3779B97F4A7C15) % 2**64 == seed


# ---------------------------------------------------------------------------------------------------------------- laws


def test_uniforms_are_uniform_over_anchors() -> None:
    """What a decoder reads are the first numbers of many streams: Kolmogorov-Smirnov over 20,000 anchors and slots."""
    numbers = np.concatenate([Noise(5).uniforms(anchor, ACCEPT, 4) for anchor in range(5_000)])
    assert stats.kstest(numbers, "uniform").pvalue > FALSE_ALARM


def test_slots_purposes_and_anchors_are_uncorrelated() -> None:
    """Neighbours in each direction of the key, 5,000 pairs each: no correlation beyond five deviations."""
    table = np.array([[Noise(6).uniforms(a, p, 3) for p in (DRAFT, ACCEPT, FINAL)] for a in range(5_000)])
    neighbours = [
        (table[1:, 0, 0], table[:-1, 0, 0]),
        (table[:, 0, 0], table[:, 1, 0]),
        (table[:, 1, 0], table[:, 2, 0]),
        (table[:, 0, 0], table[:, 0, 1]),
        (table[1:, 0, 0], table[:-1, 0, 1]),
    ]
    for x, y in neighbours:
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / len(x) ** 0.5


def test_gumbel_has_its_law() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), 50,000 numbers; a normal law of the same moments is caught."""
    numbers = np.concatenate([Noise(8).gumbel(position, 100) for position in range(500)])
    assert stats.kstest(numbers, "gumbel_r").pvalue > FALSE_ALARM
    normal = np.random.default_rng(0).normal(numbers.mean(), numbers.std(), len(numbers))
    assert stats.kstest(normal, "gumbel_r").pvalue < 1e-9


class _Extreme:
    """A generator whose numbers are the ends of [0, 1)."""

    def random(self, count: int) -> np.ndarray:
        return np.array([0.0, 2.0**-53, 0.5, 1 - 2.0**-53])[:count]


def test_gumbel_is_finite_at_the_ends_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite value would draw a token of probability 0, or lose the only one there is."""
    monkeypatch.setattr(module, "_stream", lambda seed, place, purpose: _Extreme())
    values = Noise(0).gumbel(0, 4)
    assert np.isfinite(values).all()
    assert values[0] > 37, "the tail reaches as far as 53 bits can"
    assert (np.diff(values) < 0).all()


def test_numbers_have_53_bits() -> None:
    """Every number is a multiple of 2**-53, and the last bit is used (32 bits a word would leave it 0)."""
    scaled = Noise(2).uniforms(0, DRAFT, 1000) * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert 400 < (scaled % 2).sum() < 600
