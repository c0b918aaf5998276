"""Rows of a benchmark: their numbers by a clock that counts passes, their names, and how runs are paired."""

from __future__ import annotations

import pytest

from bench.clocks import cost, engine, pass_clock
from forerun.bench import measurement
from forerun.bench.measurement import Cell, Workload, accepted_histogram, measure, pairs_of, row_of
from forerun.engine.stats import DecodingStats

PROMPTS = [[1, 2, 3], [4, 4, 1], [0, 6, 2]]
PERFECT = Cell("small", 3, 1, 0.0)


def test_speedup_is_plain_over_speculative_seconds_per_token():
    """13 tokens, K = 3, all accepted: 1 + 12 passes plainly, 1 + 3 passes of 4 rows with drafts."""
    made = engine()
    row = measure(made, PERFECT, Workload(PROMPTS, max_tokens=13, rounds=2), pass_clock(made))
    prefill = cost(3)
    plain, drafted = prefill + 12 * cost(1), prefill + 3 * cost(4)
    assert row["plain_tokens_per_second"] == pytest.approx(13 / plain)
    assert row["tokens_per_second"] == pytest.approx(13 / drafted)
    assert row["speedup"] == pytest.approx(plain / drafted)
    assert row["speedup_spread"]["pairs"] == 6
    spread = [row["speedup_spread"][name] for name in ("min", "median", "max")]
    assert spread == pytest.approx([plain / drafted] * 3)
    assert row["speedup_spread"]["interval_95"] == pytest.approx([plain / drafted] * 2)
    assert row["ttft_ms"]["p50"] == row["plain_ttft_ms"]["p50"] == pytest.approx(1e3 * prefill)
    assert row["itl_ms"]["p50"] == pytest.approx(1e3 * cost(4))
    assert row["tpot_ms"]["p50"] == pytest.approx(1e3 * cost(4) / 4)
    assert row["plain_tpot_ms"]["p50"] == pytest.approx(1e3 * cost(1))


def test_a_row_says_whether_both_ways_did_the_same_work():
    """Greedy: every output identical, the same tokens and reasons to end."""
    made = engine()
    row = measure(made, PERFECT, Workload(PROMPTS, max_tokens=9), pass_clock(made))
    assert row["outputs"] == row["outputs_identical"] == 9
    assert row["tokens"] == row["plain_tokens"] == 81
    assert row["finish_reasons"] == row["plain_finish_reasons"] == {"length": 9}


def test_a_batch_is_decoded_together():
    """Batch 3: one prefill pass of 9 rows, then passes of 3 and of 12 rows."""
    made = engine()
    workload = Workload(PROMPTS, max_tokens=13, rounds=1)
    row = measure(made, Cell("small", 3, 3, 0.0), workload, pass_clock(made))
    plain, drafted = cost(9) + 12 * cost(3), cost(9) + 3 * cost(12)
    assert row["speedup"] == pytest.approx(plain / drafted)
    assert row["tokens"] == 39


def test_groups_are_filled_up_to_the_batch():
    """A batch size means that many requests, also in the last group."""
    workload = Workload(PROMPTS)
    assert workload.groups(2) == [[0, 1], [2, 0]]
    assert workload.groups(4) == [[0, 1, 2, 0]]
    assert pairs_of(Cell("small", 3, 2, 0.0), workload) == 2 * workload.rounds


def test_plain_and_drafted_runs_alternate_in_a_seeded_order(monkeypatch):
    """A pair is two neighbours over the same prompts and seeds; which comes first varies, the same way every time."""
    calls = []
    real = measurement.decode

    def spy(made, prompts, sampling, speculative, clock):
        calls.append((tuple(map(tuple, prompts)), tuple(s.seed for s in sampling), bool(speculative)))
        return real(made, prompts, sampling, speculative, clock)

    monkeypatch.setattr(measurement, "decode", spy)
    workload = Workload(PROMPTS, max_tokens=4, rounds=4)
    made = engine()
    measure(made, Cell("ngram", 2, 1, 0.7), workload, pass_clock(made))
    once, calls[:] = calls[2:], []  # the first two are the warm-up
    measure(made, Cell("ngram", 2, 1, 0.7), workload, pass_clock(made))
    assert calls[2:] == once
    pairs = list(zip(once[::2], once[1::2], strict=True))
    assert all(a[:2] == b[:2] and {a[2], b[2]} == {False, True} for a, b in pairs)
    assert {a[2] for a, _ in pairs} == {False, True}
    assert len({a[1] for a, _ in pairs}) == 12, "each prompt and round has a seed of its own"


def test_a_row_has_the_names_readers_look_for():
    """Also where nothing was drafted; rates without a denominator are None or absent, never 0 or NaN."""
    made = engine()
    row = measure(made, Cell("ngram", 2, 1, 0.0), Workload([[5]], max_tokens=2, rounds=1), pass_clock(made))
    names = ["drafter", "k", "batch", "temperature", "tokens_per_second", "plain_tokens_per_second", "speedup"]
    assert set(names) <= set(row)
    assert row["mean_accepted_length"] is None
    assert row["acceptance_by_position"] == []
    assert row["accepted_histogram"] == []
    assert "draft_acceptance_rate" not in row


def _trace() -> DecodingStats:
    stats = DecodingStats()
    for drafted, verified, accepted in zip((3, 3, 3, 3, 0), (3, 3, 2, 0, 0), (3, 0, 1, 0, 0), strict=True):
        stats.record(drafted, verified, accepted)
    return stats


def test_sp_6_the_rates_of_the_worked_trace():
    """Drafted 3,3,3,3,0, verified 3,3,2,0,0, accepted 3,0,1,0,0: every rate of the metrics list, to the last digit.

    https://github.com/sgl-project/sglang/pull/13212, https://github.com/SafeAILab/EAGLE/issues/95,
    https://github.com/SafeAILab/EAGLE/issues/153
    """
    row = measurement._rates(_trace())
    assert row["acceptance_by_position"] == [2 / 3, 1 / 2, 1]
    assert row["prefix_survival"] == [2 / 3, 1 / 3, 1 / 2]
    assert row["draft_acceptance_rate"] == 4 / 8
    assert row["accepted_per_drafted"] == 4 / 12
    assert row["mean_accepted_length"] == 2
    assert row["tokens_per_step"] == 9 / 5
    assert row["verify_rate"] == 8 / 12
    assert (row["drafting_rounds"], row["target_steps"]) == (4, 5)


def test_the_histogram_counts_rounds_by_what_they_accepted():
    """Of the trace's three verified rounds one accepted 0, one 1, none 2, one 3."""
    assert accepted_histogram(_trace()) == [1, 1, 0, 1]
    assert accepted_histogram(DecodingStats()) == []


def test_the_interval_widens_with_the_spread():
    """Equal pairs give a point, unequal ones an interval around the ratio of sums."""

    def pair(plain, drafted):
        runs = [measurement.Run(seconds, completions=[_Done()]) for seconds in (plain, drafted)]
        return measurement.Pair(*runs)

    same = row_of(PERFECT, [pair(4.0, 2.0)] * 5)["speedup_spread"]
    assert same["interval_95"] == [2.0, 2.0]
    mixed = row_of(PERFECT, [pair(4.0, 2.0), pair(4.0, 4.0), pair(4.0, 1.0), pair(4.0, 2.0)])
    low, high = mixed["speedup_spread"]["interval_95"]
    assert mixed["speedup"] == pytest.approx(16 / 9)
    assert low < mixed["speedup"] < high
    assert (mixed["speedup_spread"]["min"], mixed["speedup_spread"]["max"]) == (1.0, 4.0)


class _Done:
    """A completion of one token."""

    token_ids = (1,)
    stats = DecodingStats()
    finish_reason = "length"
