"""The proofs' own tools: what they cover, how small a bias they see, and that they refuse what they cannot sum."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from forerun.sampling import Row, Sampling, distribution, draw
from forerun.verify import Draft
from laws.cases import DRAFTERS, FACTORS, PROMPT, Case, drafting_of, logits_of, target_of
from laws.cells import EXACT, cells, inversion_cuts, measured
from laws.kit import Model, Tokens, bias, rejection_round, steered
from laws.pairwise import pairs_of, pairwise

CASE: Case = {"drafter": "sampled", "k": 2, "temperature": 1.0, "filters": "none", "adjust": "none", "target": "table"}


def test_the_cover_holds_every_pair() -> None:
    """No pair of values of two factors is left out; 41 cases stand for a product of 42,000."""
    cover = pairwise(FACTORS)
    wanted = {
        frozenset({(f, x), (g, y)})
        for f, g in itertools.combinations(FACTORS, 2)
        for x in FACTORS[f]
        for y in FACTORS[g]
    }
    assert set().union(*map(pairs_of, cover)) == wanted
    assert all(case.keys() == FACTORS.keys() for case in cover)
    assert len(cover) <= 45


def test_a_bias_of_one_in_a_million_is_seen() -> None:
    """A target whose logits differ by 1e-5 at one state is told apart."""
    target = target_of(CASE, 3)
    other = Model(lambda prefix: [x + 1e-5 * (prefix[-1] == i == 1) for i, x in enumerate(target.logits(prefix))])
    rounds = rejection_round(dataclasses.replace(other, prompt_length=2), drafting_of(CASE, target, 3))
    assert 1e-7 < bias(rounds, target, PROMPT, 4) < 1e-4


def test_a_law_is_measured_to_the_last_bits() -> None:
    """The widths of the cells of the real draw are the shares of the law, zeros included."""
    law = torch.tensor([0.1, 0.0, 0.7, 0.2], dtype=torch.float64)
    assert measured([law, law.float()])[0] == pytest.approx(law.tolist(), abs=1e-15)
    assert sum(cell.weight for cell in cells(inversion_cuts(law.tolist()))) == pytest.approx(1, abs=1e-15)


# ---------------------------------------------------------------------------------------------- drafters of the engine


def propose(prefix: Tokens, uniforms: Sequence[float], reported_temperature: float = 1.0) -> Draft:
    """A drafter as the engine has them: draws token by token with given numbers and reports its laws."""
    logits, draft, laws = logits_of("table", "draft", 3), Draft(), []
    for u in uniforms:
        row = torch.tensor([logits([*prefix, *draft.tokens])], dtype=torch.float64)
        at = (prefix, len(PROMPT), tuple(draft.tokens))
        law = distribution(row, [Row(Sampling(), *at)])
        laws.append(distribution(row, [Row(Sampling(temperature=reported_temperature), *at)])[0])
        draft.tokens.append(int(draw(law, torch.tensor([u], dtype=torch.float64))))
        draft.confidence.append(float(law.max()))
    draft.probs = torch.stack(laws)
    return draft


def test_a_real_drafter_is_steered_through_all_its_drafts() -> None:
    """Every draft with its probability, found from the laws that the drafter reports; the output's law is kept."""
    paths = steered(propose, 2)(PROMPT, None)
    assert len(paths) == 9
    assert sum(path.weight for path in paths) == pytest.approx(1, abs=EXACT)
    described = DRAFTERS["sampled"](target_of(CASE, 3), 3)
    for path in paths:
        first, second = path.draft.tokens
        odds = described(PROMPT, ()).drawn[first] * described(PROMPT, (first,)).drawn[second]
        assert path.weight == pytest.approx(odds.item(), abs=EXACT)
    target = target_of({**CASE, "target": "history"}, 3)
    assert bias(rejection_round(target, steered(propose, 2)), target, PROMPT, 5) < EXACT


def test_a_real_drafter_that_reports_another_law_is_refused() -> None:
    """Its token changes inside a cell of the law it reports."""
    with pytest.raises(AssertionError, match="not drawn from the law it reports"):
        steered(lambda prefix, uniforms: propose(prefix, uniforms, reported_temperature=0.5), 2)(PROMPT, None)
