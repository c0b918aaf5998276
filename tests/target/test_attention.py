"""The two attention plans against a definition of a few lines, and what a row's numbers may depend on."""

from __future__ import annotations

import math
import random

import pytest
import torch
from target_families import scattered_tables

from forerun.target.attention import FOLD_ROWS, LayerStore, LoopPlan, PaddedPlan, Rule
from forerun.target.base import BLOCK_SIZE, Batch, Segment

CPU = torch.device("cpu")
PLANS = [LoopPlan, PaddedPlan]


def _slots(segment):
    """Slots of positions 0 .. end - 1, by the definition."""
    return [segment.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(segment.end)]


def _definition(query, store, segment, first, rule):
    """Row by row, head by head: softmax over the visible keys, times the values. Without causality a row sees the whole
    segment and what lies before it."""
    slots = _slots(segment)
    keys, values = store.keys[slots], store.values[slots]
    heads, kv_heads = query.shape[1], keys.shape[1]
    out = torch.empty(len(segment.tokens), heads, values.shape[-1], dtype=query.dtype)
    for i in range(len(segment.tokens)):
        place = segment.start + i
        low = 0 if rule.window is None else max(0, place - rule.window + 1)
        for h in range(heads):
            g = h // (heads // kv_heads)
            high = place + 1 if rule.causal else segment.end
            scores = keys[low:high, g] @ query[0, h, first + i] * rule.scaling
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            out[i, h] = torch.softmax(scores, 0) @ values[low:high, g]
    return out


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("window", "causal"), [(None, True), (1, True), (5, True), (40, True), (None, False)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_both_plans_are_the_definition(plan, window, causal, softcap, heads):
    """Random batches in float64 - one row, verify blocks, first and later prefill chunks - to 1e-12."""
    draw = random.Random(str((window, softcap, heads)))
    torch.manual_seed(0)
    rule = Rule(1 / math.sqrt(8), window, softcap, causal)
    shapes = [(0, FOLD_ROWS + 9), (70, 1), (33, 5), (0, 7), (11, FOLD_ROWS + 1), (0, 1)]
    draw.shuffle(shapes)
    ends = [start + rows for start, rows in shapes]
    tables = scattered_tables(ends, 20)
    tables[0] = sorted(tables[0])  # at times consecutive, at times not
    segments = [Segment([0] * rows, start, t, 0) for (start, rows), t in zip(shapes, tables, strict=True)]
    store = LayerStore(
        torch.randn(20 * BLOCK_SIZE, heads[1], 8).double(), torch.randn(20 * BLOCK_SIZE, heads[1], 6).double(), window
    )
    query = torch.randn(1, heads[0], sum(r for _, r in shapes), 8).double()
    ours = plan(Batch(segments), CPU).attend(query, store, rule)
    first = 0
    for segment in segments:
        last = first + len(segment.tokens)
        expected = _definition(query, store, segment, first, rule)
        torch.testing.assert_close(ours[0, first:last], expected, rtol=0, atol=1e-12)
        first = last


def _last_row(plan, rows, mates, dtype):
    """One fixed query over a fixed context of 300 rows, as the last of `rows` rows, beside `mates` rows of another."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    store = LayerStore(draw(40 * BLOCK_SIZE, 2, 64), draw(40 * BLOCK_SIZE, 2, 64), None)
    queries = draw(1, 8, 64, 64)
    segments = [Segment([0] * rows, 300 - rows, list(range(19)), 0)]
    query = queries[:, :, :rows].flip(2)
    if mates:
        segments.append(Segment([0] * mates, 250, list(range(20, 40)), 0))
        query = torch.cat([query, queries[:, :, -mates:]], 2)
    return plan(Batch(segments), CPU).attend(query, store, Rule(0.125))[0, rows - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eq_5_a_row_does_not_depend_on_its_batch_mates(dtype):
    """EQ-5: in the loop plan the order of the sums depends on a request's own context; bit by bit, with 1, 5 and 60
    rows of another request in the same pass.

    https://github.com/lightseekorg/tokenspeed/issues/904
    """
    alone = _last_row(LoopPlan, 1, 0, dtype)
    for mates in (1, 5, 60):
        assert torch.equal(_last_row(LoopPlan, 1, mates, dtype), alone)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_eq_5_the_number_of_rows_moves_a_row_by_rounding_only(plan, dtype, bound):
    """EQ-5: one query in calls of 1, 2, 5, 16 and 33 rows: the context is never split otherwise, so what is left is the
    rounding of one product (`measure_noise` reports it for a whole model; no bit equality is claimed).
    """
    one = _last_row(plan, 1, 0, dtype)
    for rows in (2, 5, 16, FOLD_ROWS + 1):
        assert (_last_row(plan, rows, 0, dtype) - one).abs().max() <= bound * one.abs().max()


@pytest.mark.parametrize("end", [21, 130])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (8, None), (None, 2.0)])
def test_eq_5_bfloat16_rows_of_a_verify_block_have_the_bits_of_single_rows(end, window, softcap):
    """EQ-5: in the loop plan 2, 5 and 8 rows in one call equal as many calls of one row, bit by bit. (Attended to
    together, some CPUs sum them in another order at these lengths.)

    https://github.com/lightseekorg/tokenspeed/issues/904, https://github.com/ml-explore/mlx-lm/issues/1423
    """
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    table, rule = list(range(-(-end // BLOCK_SIZE))), Rule(0.125, window, softcap)
    store = LayerStore(draw(len(table) * BLOCK_SIZE, 2, 64), draw(len(table) * BLOCK_SIZE, 2, 64), window)
    for rows in (2, 5, 8):
        query = draw(1, 8, rows, 64)
        start = end - rows
        together = LoopPlan(Batch([Segment([0] * rows, start, table, 0)]), CPU).attend(query, store, rule)
        for row in range(rows):
            alone = LoopPlan(Batch([Segment([0], start + row, table, 0)]), CPU)
            assert torch.equal(together[:, row], alone.attend(query[:, :, row : row + 1], store, rule)[:, 0])


@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_nobody_wrote_are_not_seen(plan):
    """NaN in every slot beyond the segment's own rows changes nothing: no plan reads past `end`."""
    store = LayerStore(torch.randn(4 * BLOCK_SIZE, 2, 8), torch.randn(4 * BLOCK_SIZE, 2, 8), None)
    segments = [Segment([0], 20, [0, 1], 0), Segment([0] * 3, 2, [3], 0)]
    written = [s for segment in segments for s in _slots(segment)]
    unwritten = [s for s in range(4 * BLOCK_SIZE) if s not in written]
    query = torch.randn(1, 4, 4, 8)
    before = plan(Batch(segments), CPU).attend(query, store, Rule(0.3))
    store.keys[unwritten] = torch.nan
    store.values[unwritten] = torch.nan
    after = plan(Batch(segments), CPU).attend(query, store, Rule(0.3))
    assert torch.equal(before, after)
