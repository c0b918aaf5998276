"""Coupled mode is lossless by equality: same seed, same tokens, whatever is drafted and whoever shares the batch."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.sampling import GUMBEL, Noise, Row, Sampling, distribution, draw_coupled
from forerun.sampling.noise import _stream
from forerun.verify import couple
from laws.cases import DRAFTERS, FACTORS, PROMPT, target_of
from laws.decode import Stream, decode
from laws.kit import Model
from laws.pairwise import pairwise

LENGTH = 16
COUPLED = {name: FACTORS[name] for name in ("temperature", "filters", "adjust", "target")}


def streams(target: Model, seeds: range, **options: object) -> list[Stream]:
    return [Stream(target, PROMPT, Noise.of(seed), **options) for seed in seeds]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", pairwise(COUPLED), ids=lambda case: "-".join(map(str, case.values())))
def test_same_seed_gives_the_same_ids_for_every_drafter_and_k(case: dict[str, Hashable]) -> None:
    """7 drafters x K in 1, 4 x 2 seeds in one batch, each against plain decoding of its seed alone."""
    target = target_of(case, 5)
    plain = [decode([stream], LENGTH)[0] for stream in streams(target, range(2))]
    batch = [
        s for make in DRAFTERS.values() for k in (1, 4) for s in streams(target, range(2), slot=make(target, 5), k=k)
    ]
    assert decode(batch, LENGTH) == plain * 14
    assert len({tuple(s.accepted) for s in batch}) > 4, "the drafters differ in what is accepted"


def test_the_perfect_drafter_is_always_accepted() -> None:
    """A drafter with the target's own law draws the very token the target will draw."""
    target = target_of({"temperature": 1.0, "filters": "none", "adjust": "none", "target": "history"}, 5)
    drafted = streams(target, range(3), slot=DRAFTERS["same"](target, 5), k=3)
    decode(drafted, LENGTH)
    assert all(a == 3 for s in drafted for a in s.accepted)


def test_acceptance_is_at_least_the_bound() -> None:
    """P(accept) >= (1 - TV) / (1 + TV) (Daliri et al.): here TV = .3, bound .538; 20,000 positions, five deviations."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    gumbel = torch.from_numpy(np.stack([Noise(3).gumbel(i, 3) for i in range(20_000)]))
    drafted = draw_coupled(q.expand(20_000, 3), gumbel)
    rows = torch.stack([p, p]).expand(20_000, 2, 3)
    verdict = couple(drafted[:, None], torch.ones(20_000, dtype=torch.long), rows, torch.stack([gumbel, gumbel], 1))
    assert verdict.accepted.double().mean() > (1 - 0.3) / (1 + 0.3) - 5 * (0.25 / 20_000) ** 0.5


# ------------------------------------------------------------------------------------------------ the law of its noise

LAW = [0.45, 0.25, 0.15, 0.1, 0.04, 0.01]
ROUNDS = 30_000
FALSE_ALARM = 1e-3
"""Seeds are fixed, so the tests below do not flake; this is how often another seed would fail one of them."""


def chi_square(tokens: np.ndarray, law: list[float]) -> float:
    """p-value of the tokens' counts under a law."""
    counts = np.bincount(tokens, minlength=len(law))
    return float(stats.chisquare(counts, np.array(law) * len(tokens)).pvalue)


def coupled_draws(gumbel: np.ndarray) -> np.ndarray:
    law = torch.tensor(LAW, dtype=torch.float64).expand(len(gumbel), -1)
    return draw_coupled(law, torch.from_numpy(gumbel)).numpy()


def test_coupled_draws_have_the_law() -> None:
    """Chi-square over 30,000 positions of one seed; false alarm 1e-3."""
    gumbel = np.stack([Noise(11).gumbel(i, len(LAW)) for i in range(ROUNDS)])
    assert chi_square(coupled_draws(gumbel), LAW) > FALSE_ALARM


def test_coupled_draws_of_coarse_noise_are_caught() -> None:
    """The control: noise of 3 bits, in the same test. It ties, and ties go to the lowest id."""
    uniform = np.stack([_stream(11, i, GUMBEL).random(len(LAW)) for i in range(ROUNDS)])
    coarse = (np.floor(uniform * 8) + 0.5) / 8
    assert chi_square(coupled_draws(-np.log(-np.log(coarse))), LAW) < 1e-9


def test_neighbouring_positions_are_independent() -> None:
    """Chi-square of the 6 x 6 table of tokens at positions i and i + 1; false alarm 1e-3."""
    tokens = coupled_draws(np.stack([Noise(12).gumbel(i, len(LAW)) for i in range(ROUNDS)]))
    table = np.zeros((6, 6))
    np.add.at(table, (tokens[0::2], tokens[1::2]), 1)
    expected = np.outer(LAW, LAW) * (ROUNDS // 2)
    many = expected >= 5
    statistic = ((table - expected) ** 2 / expected)[many].sum()
    assert stats.chi2.sf(statistic, int(many.sum()) - 1) > FALSE_ALARM


def test_coupled_draws_stay_inside_the_support() -> None:
    """A token that a filter has removed has log p = -inf, which no noise lifts."""
    logits = torch.zeros(2_000, 50, dtype=torch.float64)
    laws = distribution(logits, [Row(Sampling(top_k=3), (0,), 1)] * 2_000)
    gumbel = torch.from_numpy(np.stack([Noise(4).gumbel(i, 50) for i in range(2_000)]))
    assert set(draw_coupled(laws, gumbel).tolist()) == {0, 1, 2}
