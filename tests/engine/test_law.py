"""The law of sampled text through the whole engine: chi-square against the exact law of tiny table models.

Each case draws SAMPLES texts with seeds 0, 1, ... and compares the counts of all V^3 texts with what the table says.
Tokens 2 and 3 meet verification (the one after the prefill never does). Seeds are fixed, so a case passes or fails for
ever; a correct engine had a chance of ALARM to fail a case when its seeds were chosen. The controls are drafters that
break a rule of losslessness; the same test must refuse each of them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import chi2

from engine.conftest import configured, engine_of
from forerun import Sampling
from forerun.drafters.base import Draft, Drafter, DraftView
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.sampling import ACCEPT, DRAFT, Row, distribution
from forerun.target.table import TableTarget

V = 3
SAMPLES = 1200
ALARM = 1e-4
TARGET = [[0.2, 0.8, -0.4], [0.8, 0.1, 0.3], [-0.2, 0.2, 0.9]]
DRAFTER = [[1.0, 0.1, 0.0], [0.0, 0.9, 0.2], [0.8, -0.5, 0.9]]  # overlaps, and is wrong everywhere


def _table(rows) -> TableTarget:
    return TableTarget(lambda prefix: rows[prefix[-1]], V, window=64)


def _law(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each text of three tokens after the prompt [0], by the law of one row at a time."""
    law = {}
    for text in itertools.product(range(V), repeat=3):
        chance = 1.0
        for place in range(3):
            tokens = [0, *text[:place]]
            logits = torch.tensor([TARGET[tokens[-1]]], dtype=torch.float64)
            chance *= float(distribution(logits, [Row(sampling, tokens, 1)])[0, text[place]])
        law[text] = chance
    return law


def _p_value(engine, sampling: dict) -> float:
    """Chance of counts at least as far from the law as those drawn."""
    limits = {"max_tokens": 3, **sampling}
    counts = dict.fromkeys(itertools.product(range(V), repeat=3), 0)
    for done in engine.generate([[0]] * SAMPLES, [Sampling(seed=seed, **limits) for seed in range(SAMPLES)]):
        counts[tuple(done.token_ids)] += 1
    law = _law(Sampling(**limits))
    assert sum(counts[text] for text, p in law.items() if p == 0) == 0, "a text of probability 0 was drawn"
    possible = [(counts[text], p * SAMPLES) for text, p in law.items() if p > 0]
    assert min(expected for _, expected in possible) > 3
    statistic = sum((count - expected) ** 2 / expected for count, expected in possible)
    return float(chi2.sf(statistic, len(possible) - 1))


def _engine(drafter: Drafter, **config):
    return configured(_table(TARGET), drafter, config, max_num_seqs=500, max_num_batched_tokens=4000)


class SoftArgmax(Drafter):
    """Drafts the most probable token, reported with the law of a drawn one (PB-8), or with none."""

    name = "soft argmax"
    soft = True

    def propose(self, views, keep_drafting):
        return [self._draft(view) for view in views]

    def _token(self, view: DraftView, probs: torch.Tensor, slot: int) -> int:
        return int(probs.argmax())

    def _draft(self, view: DraftView) -> Draft:
        tokens, laws = [], []
        for slot in range(view.k):
            last = [*view.tokens, *tokens][-1]
            laws.append(torch.tensor(DRAFTER[last], dtype=torch.float64).softmax(-1))
            tokens.append(self._token(view, laws[-1], slot))
        return Draft(tokens, torch.stack(laws) if self.soft else None)


class HonestDraw(SoftArgmax):
    """Draws from its law and reports it: an honest drafter."""

    name = "honest draw"

    def _token(self, view, probs, slot):
        return int(torch.searchsorted(probs.cumsum(-1), view.noise.uniforms(view.anchor, DRAFT, slot + 1)[slot]))


class SharedNoise(HonestDraw):
    """Draws honestly and reports honestly, but with the numbers that decide acceptance."""

    name = "shared noise"

    def _token(self, view, probs, slot):
        return int(torch.searchsorted(probs.cumsum(-1), view.noise.uniforms(view.anchor, ACCEPT, slot + 1)[slot]))


class DropsUnlikely(HonestDraw):
    """Draws honestly, then ends the draft before a token it finds improbable (a foreign `p-min`)."""

    name = "drops unlikely"

    def _draft(self, view):
        draft = super()._draft(view)
        chosen = draft.probs[range(len(draft.tokens)), draft.tokens]
        return draft.truncate(int((chosen > 0.3).long().cumprod(-1).sum()))


class PointArgmax(SoftArgmax):
    """The most probable token as the point mass it is: an honest drafter."""

    name, soft = "point argmax", False


class UndeclaredDraw(HonestDraw):
    """Draws from its law and reports a point mass, which is lossless too: it is one, given what was drawn."""

    name, soft = "undeclared draw", False


class NanSometimes(HonestDraw):
    """An honest drafter whose law is NaN behind some histories (NU-3)."""

    name = "nan sometimes"

    def _draft(self, view):
        draft = super()._draft(view)
        for slot in range(view.k):
            if [*view.tokens, *draft.tokens[:slot]][-1] == 1:
                draft.probs[slot] = math.nan
        return draft


def _small() -> Small:
    return Small(_table(DRAFTER), V)


LOSSLESS = {
    "small": (_small, {"num_speculative_tokens": 2}, {}),
    "small, K 1": (_small, {"num_speculative_tokens": 1}, {}),
    "small, filters": (_small, {"num_speculative_tokens": 2}, {"temperature": 0.7, "top_k": 2}),
    "small, hot and penalised": (
        _small,
        {"num_speculative_tokens": 2},
        {"temperature": 1.5, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    ),
    "small, greedy drafts": (_small, {"num_speculative_tokens": 2, "draft_sample_method": "greedy"}, {}),
    "small, coupled": (_small, {"num_speculative_tokens": 2, "verify_mode": "coupled"}, {}),
    "small, K by batch": (_small, {"num_speculative_tokens_per_batch_size": {"1-200": 2, "201-400": 0}}, {}),
    "ngram": (lambda: Ngram(1), {"num_speculative_tokens": 2}, {}),
    "point argmax": (PointArgmax, {"num_speculative_tokens": 2}, {}),
    "honest draw": (HonestDraw, {"num_speculative_tokens": 2}, {}),
    "undeclared draw": (UndeclaredDraw, {"num_speculative_tokens": 2}, {}),
    "nan sometimes": (NanSometimes, {"num_speculative_tokens": 2}, {}),
}


USUAL = ("small", "small, filters", "small, greedy drafts", "small, coupled", "ngram", "nan sometimes")


@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.slow) for case in LOSSLESS]
)
def test_the_law_is_the_targets(case):
    """Every honest drafter, mode and draft method leaves the target's law: chance of a false alarm 1e-4 a case."""
    make, config, sampling = LOSSLESS[case]
    drafter = make()
    p_value = _p_value(_engine(drafter, **config), sampling)
    print(f"{case}: p = {p_value:.2g}")
    assert p_value > ALARM


@pytest.mark.parametrize("control", [SoftArgmax, SharedNoise, DropsUnlikely])
def test_the_same_test_refuses_what_is_biased(control):
    """Negative controls: a law reported that was not drawn from, noise used twice, and drafts dropped by what they
    turned out to be. Each is refused at the same level.
    """
    p_value = _p_value(_engine(control(), num_speculative_tokens=2), {})
    print(f"{control.name}: p = {p_value:.1e}")
    assert p_value < ALARM


def test_greedy_drafts_are_point_masses():
    """`draft_sample_method: greedy` drafts the most probable token at any temperature, in every round the same."""
    seen = []

    class Watched(Small):
        def propose(self, views, keep_drafting):
            drafts = super().propose(views, keep_drafting)
            seen.extend((view.tokens[-1], draft) for view, draft in zip(views, drafts, strict=True))
            return drafts

    engine = _engine(Watched(_table(DRAFTER), V), num_speculative_tokens=1, draft_sample_method="greedy")
    engine.generate([[0]] * 20, [Sampling(max_tokens=10, temperature=1.3, seed=seed) for seed in range(20)])
    assert {(last, *draft.tokens) for last, draft in seen} == {(0, 0), (1, 1), (2, 2)}
    assert all(draft.probs is None for _, draft in seen)


def test_se_1_no_round_reads_the_noise_of_an_earlier_one():
    """Every number a round reads is keyed by its anchor, and anchors strictly ascend: no key is read by two rounds,
    also behind a rejection, where the same positions are drafted again.

    https://github.com/vllm-project/vllm/issues/6038
    """
    keys = []

    class Recording(HonestDraw):
        def _draft(self, view):
            keys.append(view.anchor)
            return super()._draft(view)

    engine = engine_of(_table(TARGET), Recording(), num_speculative_tokens=3)
    [done] = engine.generate([[0]], Sampling(seed=1, max_tokens=60))
    assert done.stats.accepted < done.stats.drafted
    assert keys == sorted(set(keys))
