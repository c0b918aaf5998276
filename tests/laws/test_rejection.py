"""Rejection sampling is lossless, exactly: the joint law of the output over two rounds is the target's to 1e-12."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import pytest
import torch

from forerun.sampling import ACCEPT, DRAFT, FINAL, Noise
from laws.cases import DRAFTERS, FACTORS, LENGTHS, PROMPT, Case, drafting_of, target_of
from laws.decode import Stream, decode
from laws.kit import EXACT, bias, completed_law, distance, joint_bias, plain_law, rejection_round
from laws.pairwise import pairwise, product


def name(case: Mapping[str, Hashable]) -> str:
    return "-".join(map(str, case.values()))


def case_bias(case: Case, vocab_size: int, dtype: torch.dtype = torch.float64) -> float:
    """Two rounds emit at most 2 (K + 1) tokens: the whole of them is compared, except beyond 6."""
    target = dataclasses.replace(target_of(case, vocab_size), dtype=dtype)
    rounds = rejection_round(target, drafting_of(case, target, vocab_size), LENGTHS[case["lengths"]])
    return bias(rounds, target, PROMPT, min(2 * (int(str(case["k"])) + 1), 6))


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name)
def test_output_has_exactly_the_targets_law(case: Case) -> None:
    """Every pair of factor values occurs: drafter, K, temperature, filters, adjustments, lengths, target. V = 3."""
    assert case_bias(case, 3) < EXACT


@pytest.mark.parametrize("case", pairwise({**FACTORS, "k": (1, 2), "temperature": (1.0, 1.7)}), ids=name)
def test_output_has_exactly_the_targets_law_over_four_tokens(case: Case) -> None:
    """The same with V = 4."""
    assert case_bias(case, 4) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("part", product({n: FACTORS[n] for n in ("drafter", "adjust")}), ids=name)
def test_output_has_exactly_the_targets_law_in_the_full_product(part: Case) -> None:
    """All 42,000 combinations, V = 3, 1,200 in each part."""
    for case in product({**FACTORS, **{n: (value,) for n, value in part.items()}}):
        assert case_bias(case, 3) < EXACT, case


@pytest.mark.parametrize("case", pairwise({**FACTORS, "k": (2,), "temperature": (0.5, 1.7)}), ids=name)
def test_float32_loses_nothing_against_plain_decoding(case: Case) -> None:
    """In float32 the output has exactly (1e-12) the law that plain decoding has in float32, up to twice.

    Each law is used as its share p / sum(p), so that what a draft is drawn from and what it is divided by are one.
    """
    assert case_bias(case, 3, torch.float32) < EXACT


def test_float32_is_near_float64() -> None:
    """What float32 changes is the target's own law: below 1e-6 in total variation over four tokens."""
    for case in pairwise({**FACTORS, "temperature": (0.5, 1.7)}):
        target = target_of(case, 3)
        single = dataclasses.replace(target, dtype=torch.float32)
        assert distance(plain_law(single, PROMPT, 4), plain_law(target, PROMPT, 4)) < 1e-6, case


def test_the_law_is_kept_from_any_number_of_rounds() -> None:
    """One, two and three rounds of K = 1, on a target that looks at its whole history and a drafter that does not."""
    case = {**BASE, "k": 1, "target": "history", "adjust": "penalties"}
    target = target_of(case, 3)
    rounds = rejection_round(target, drafting_of(case, target, 3))
    for count in (0, 1, 2, 3):
        law = completed_law(rounds, target, PROMPT, 6, count)
        assert sum(law.values()) == pytest.approx(1, abs=EXACT)
        assert distance(law, plain_law(target, PROMPT, 6)) < EXACT


BASE: Case = {"drafter": "sampled", "k": 2, "temperature": 1.0, "filters": "none", "adjust": "none", "target": "table"}


# ------------------------------------------------------------------------------------------------- a batch of requests


def test_requests_of_a_batch_keep_their_joint_law() -> None:
    """Two requests share a budget of two tokens by survival, scanned in order: the joint law is the product."""
    first, second = target_of(BASE, 3), target_of({**BASE, "temperature": 1.7, "target": "history"}, 3)
    draftings = [drafting_of(BASE, first, 3), drafting_of({**BASE, "drafter": "markov"}, second, 3)]
    assert joint_bias([first, second], draftings, best_survivals(2), [PROMPT, (0, 2)]) < EXACT


def test_a_budget_shared_by_tokens_of_the_other_request_is_caught() -> None:
    """The control: the length of each request depends on a token it decides about."""
    first, second = target_of(BASE, 3), target_of({**BASE, "target": "history"}, 3)
    draftings = [drafting_of(BASE, first, 3), drafting_of(BASE, second, 3)]
    assert joint_bias([first, second], draftings, lambda ds: [2 * (d.tokens[0] > 0) for d in ds], [PROMPT] * 2) > 1e-4


def best_survivals(budget: int):
    """Admits the `budget` best of all survivals; a candidate is looked at only after the one before it in its row."""

    def choose(drafts: list) -> list[int]:
        lengths, survival = [0] * len(drafts), [1.0] * len(drafts)
        for _ in range(budget):
            open_rows = [r for r, d in enumerate(drafts) if lengths[r] < len(d.tokens)]
            row = max(open_rows, key=lambda r: (survival[r] * drafts[r].confidence[lengths[r]], -lengths[r], -r))
            survival[row] *= drafts[row].confidence[lengths[row]]
            lengths[row] += 1
        return lengths

    return choose


# ---------------------------------------------------------------------------------------------- greedy and repetitions


@pytest.mark.parametrize("case", pairwise({**FACTORS, "temperature": (0.0,), "k": (1, 2, 5)}), ids=name)
def test_greedy_ids_equal_plain_decoding(case: Case) -> None:
    """T = 0 through the same rule, no special case: ids equal for every drafter and K, 30 tokens, ties included."""
    target = target_of(case, 5)
    plain = Stream(target, PROMPT, Noise(0), "rejection")
    drafted = Stream(
        target, PROMPT, Noise(1), "rejection", DRAFTERS[str(case["drafter"])](target, 5), int(str(case["k"]))
    )
    assert decode([drafted], 30) == decode([plain], 30)


def test_se_1_a_seed_repeats_its_tokens_whoever_shares_the_batch() -> None:
    """https://github.com/vllm-project/vllm/issues/6038: equal ids alone, again, and with batch-mates of other seeds."""
    target = target_of({**BASE, "target": "history"}, 5)

    def stream(seed: int, k: int = 3) -> Stream:
        return Stream(target, PROMPT, Noise.of(seed), "rejection", DRAFTERS["sampled"](target, 5), k)

    alone = decode([stream(5)], 40)[0]
    assert decode([stream(5)], 40)[0] == alone
    assert decode([stream(6, 1), stream(7, 0), stream(5), stream(8, 2)], 40)[2] == alone
    assert decode([stream(6)], 40)[0] != alone


def test_no_round_reads_the_noise_of_another() -> None:
    """Anchors strictly increase, so a position that is drafted again is drafted with other numbers."""
    noise = Noise(9)
    streams = {
        (anchor, purpose): noise.uniforms(anchor, purpose, 8).tolist()
        for anchor in range(20)
        for purpose in (DRAFT, ACCEPT, FINAL)
    }
    numbers = [x for stream in streams.values() for x in stream]
    assert len(set(numbers)) == len(numbers)
