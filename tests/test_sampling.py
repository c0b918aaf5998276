"""From logits to a law to a token."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError, OptionError
from forerun.sampling import (
    NOTHING,
    Noise,
    Row,
    Sampling,
    adjust,
    check_ids,
    distribution,
    draw,
    draw_coupled,
    logprobs,
    try_distribution,
    undrawable,
)
from forerun.sampling.law import HEAD, best
from forerun.sampling.options import BIAS, GREEDY_BELOW, HOTTEST, REPETITION
from forerun.sampling.tokens import ascending
from laws import naive
from laws.cases import PROMPT
from laws.decode import Stream, decode
from laws.kit import Model, Slot, Tokens

VOCAB = 7


def law_of(
    logits: Sequence[float], sampling: Sampling, tokens: Sequence[int] = (0,), dtype=torch.float64
) -> list[float]:
    row = Row(sampling, tokens, 1)
    return distribution(torch.tensor([logits], dtype=dtype), [row])[0].tolist()


# ----------------------------------------------------------------------------------------------- against the reference

ids = st.integers(0, VOCAB - 1)
# Coarse values, so that ties occur; filters that no sum of their weights hits exactly.
logit_rows = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=VOCAB, max_size=VOCAB)


@st.composite
def samplings(draw_from: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw_from(st.sampled_from([0.0, 0.4, 1.0, 1.7])),
        top_k=draw_from(st.sampled_from([0, -1, 1, 2, 3, VOCAB, 50])),
        top_p=draw_from(st.sampled_from([1.0, 0.9137, 0.5113, 0.0371])),
        min_p=draw_from(st.sampled_from([0.0, 0.0731, 0.4127, 1.0])),
        repetition_penalty=draw_from(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw_from(st.sampled_from([0.0, 0.6, -0.3])),
        frequency_penalty=draw_from(st.sampled_from([0.0, 0.4, -0.2])),
        logit_bias=draw_from(st.dictionaries(ids, st.sampled_from([-100.0, -1.1, 0.7]), max_size=3)),
        min_tokens=draw_from(st.integers(0, 4)),
        bad_words=draw_from(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=2)),
        allowed_token_ids=draw_from(st.none() | st.lists(ids, min_size=3, max_size=VOCAB)),
    )


@st.composite
def places(draw_from: st.DrawFn) -> Row:
    tokens = draw_from(st.lists(ids, min_size=1, max_size=8))
    return Row(
        draw_from(samplings()),
        tokens,
        draw_from(st.integers(1, len(tokens))),
        draw_from(st.lists(ids, max_size=4)),
        draw_from(st.sampled_from([frozenset(), frozenset({2}), frozenset({0, 5, VOCAB + 3})])),
    )


@given(logit_rows, places())
@settings(max_examples=200, deadline=None)
def test_law_equals_the_reference(logits: list[float], row: Row) -> None:
    """Masks, biases, penalties, temperature and filters, in this order, against a second writing in plain Python.

    NaN on both sides where the masks leave nothing.
    """
    got = distribution(torch.tensor([logits], dtype=torch.float64), [row])[0].tolist()
    want = naive.law(logits, row)
    if math.isnan(want[0]):
        assert any(map(math.isnan, got))
    else:
        assert got == pytest.approx(want, abs=1e-12)
        assert math.fsum(got) == pytest.approx(1, abs=1e-12)
        assert [p > 0 for p in got] == [p > 0 for p in want]


@given(
    st.lists(st.tuples(logit_rows, places()), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.float64])
)
@settings(max_examples=60, deadline=None)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(batch: list[tuple[list[float], Row]], dtype: torch.dtype) -> None:
    """Verification computes a row among others, plain decoding alone: one function, bit-equal results."""
    logits = torch.tensor([x for x, _ in batch], dtype=dtype)
    together = distribution(logits, [row for _, row in batch])
    for i, (_, row) in enumerate(batch):
        assert torch.equal(together[i].nan_to_num(-1), distribution(logits[i : i + 1], [row])[0].nan_to_num(-1))


@given(logit_rows, places())
@settings(max_examples=120, deadline=None)
def test_drafted_tokens_count_as_committed(logits: list[float], row: Row) -> None:
    """The law behind a drafted prefix is, bit by bit, the one plain decoding has once these tokens are committed."""
    committed = Row(row.sampling, [*row.tokens, *row.drafted], row.prompt_length, (), row.end_ids)
    one = torch.tensor([logits], dtype=torch.float64)
    assert torch.equal(distribution(one, [row]).nan_to_num(-1), distribution(one, [committed]).nan_to_num(-1))


@given(logit_rows, places(), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_rows_of_a_verify_block_are_those_of_plain_decoding(logits: list[float], row: Row, k: int) -> None:
    """All rows of a block in one call, against one call per row with the prefix committed."""
    drafted = [*row.drafted, *range(VOCAB)][:k]
    rows = [Row(row.sampling, row.tokens, row.prompt_length, drafted[:j], row.end_ids) for j in range(k + 1)]
    block = torch.tensor([logits[j:] + logits[:j] for j in range(k + 1)], dtype=torch.float64)
    laws = distribution(block, rows)
    for j in range(k + 1):
        committed = Row(row.sampling, [*row.tokens, *drafted[:j]], row.prompt_length, (), row.end_ids)
        assert torch.equal(laws[j : j + 1].nan_to_num(-1), distribution(block[j : j + 1], [committed]).nan_to_num(-1))


def test_adjust_is_what_distribution_applies_before_the_temperature() -> None:
    """`adjust` on one row, greedy and otherwise untouched, has the argmax of the law; its input is left alone."""
    row = Row(Sampling(logit_bias={3: 5.0}, repetition_penalty=1.2, bad_words=[[1]]), (0, 2), 1)
    logits = torch.tensor([1.0, 9.0, 2.0, 0.0], dtype=torch.float64)
    before = logits.clone()
    assert adjust(logits, row).tolist() == [1.0 / 1.2, -math.inf, 2.0 / 1.2, 5.0]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_not_changed_and_half_precision_is_widened(dtype: torch.dtype) -> None:
    """The caller's logits serve raw log-probabilities afterwards; float64 stays float64, the rest is float32."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    rows = [
        Row(s, (1, 2), 1, (), frozenset({3}))
        for s in (
            Sampling(repetition_penalty=1.5, logit_bias={1: 3}),
            Sampling(min_tokens=2, top_k=3),
            Sampling(top_p=0.7),
        )
    ]
    laws = distribution(logits, rows)
    assert torch.equal(logits, before)
    assert laws.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert laws.sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-6)


# ------------------------------------------------------------------------------------------------------------- filters


def test_filters_that_keep_everything_change_no_bit() -> None:
    """top_p = 1, top_k = 0, -1, V or more, min_p = 0."""
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))
    plain = distribution(logits, [Row(Sampling(temperature=0.7), (0,), 1)] * 4)
    for options in ({"top_k": -1}, {"top_k": 100}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(distribution(logits, [Row(Sampling(temperature=0.7, **options), (0,), 1)] * 4), plain)


@pytest.mark.parametrize("vocab_size", [HEAD - 1, HEAD, HEAD + 1, 3000])
@pytest.mark.parametrize("top_p", [0.02, 0.5003, 0.9997])
def test_nucleus_is_right_at_every_width(vocab_size: int, top_p: float) -> None:
    """Peaked, middling and flat laws: within the first head, beyond it, and up to the whole vocabulary."""
    source = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=source, dtype=torch.float64) * torch.tensor([[8.0], [2.0], [0.01]])
    sampling = Sampling(top_p=top_p)
    laws = distribution(logits, [Row(sampling, (0,), 1)] * 3)
    for got, row in zip(laws.tolist(), logits.tolist(), strict=True):
        assert got == pytest.approx(naive.shaped(row, sampling), abs=1e-12)


def test_nucleus_of_equal_logits_takes_the_lowest_ids() -> None:
    """1000 equal logits and top_p = .25 (a little less): ids 0 .. 249, each with 1/250; the ties cross every width."""
    law = torch.tensor(law_of([1.0] * 1000, Sampling(top_p=0.2499)))
    assert law.nonzero()[:, 0].tolist() == list(range(250))
    assert law[:250].tolist() == pytest.approx([1 / 250] * 250)


@pytest.mark.parametrize("rows", [1, 5])
def test_eq_1_ties_go_to_the_lowest_id_in_any_number_of_rows(rows: int) -> None:
    """https://github.com/vllm-project/vllm/issues/7627: argmax, top_k and top_p cut ties alike in 1 and K + 1 rows."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0]]).expand(rows, -1)
    for sampling, support in [
        (Sampling(temperature=0), [1]),
        (Sampling(top_k=1), [1]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_k=4), [1, 2, 3, 4]),
        (Sampling(top_p=0.01), [1]),
        (Sampling(top_p=0.5), [1, 3]),
        (Sampling(min_p=1.0), [1, 3, 4]),
    ]:
        laws = distribution(logits, [Row(sampling, (0,), 1)] * rows)
        assert all(law.nonzero()[:, 0].tolist() == support for law in laws), sampling


def test_the_largest_of_coarse_logits_are_ordered_by_value_then_id() -> None:
    """bfloat16 logits tie all the time: `best` against a stable sort, for every k."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3)).mul(8).to(torch.bfloat16).float()
    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    for k in (1, 2, 20, 150, 299, 300):
        got_values, got_ids = best(logits, k)
        assert torch.equal(got_values, values[:, :k])
        assert torch.equal(got_ids, order[:, :k])


def test_nu_2_a_tiny_temperature_is_exact() -> None:
    """https://github.com/flashinfer-ai/flashinfer/pull/5088: logits (42, -20, ..), T = 1e-3: sums to 1 within 1e-6."""
    for dtype in (torch.float32, torch.bfloat16):
        law = law_of([42.0] + [-20.0] * 50, Sampling(temperature=1e-3), dtype=dtype)
        assert law == [1.0] + [0.0] * 50
    near = law_of([1000.0, 999.999, 0.0], Sampling(temperature=1e-3), dtype=torch.float32)
    assert sum(near) == pytest.approx(1, abs=1e-6)
    assert near[1] / near[0] == pytest.approx(math.exp(-1), rel=0.05), "the difference survives the division"


def test_greedy_begins_below_1e_5() -> None:
    """One limit everywhere: 1e-5 itself is sampled, anything below is the argmax."""
    logits = [0.0, 1e-6, 0.0]
    assert law_of(logits, Sampling(temperature=0.99e-5)) == [0.0, 1.0, 0.0]
    assert 0 < law_of(logits, Sampling(temperature=1e-5))[0] < 1


def test_rows_of_minus_infinity_keep_their_zeros() -> None:
    """A reduced vocabulary: ids that the model cannot produce have -inf and stay at exactly 0."""
    logits = [-math.inf, 1.0, -math.inf, 0.0]
    for options in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.01}, {"temperature": 0.0}):
        law = law_of(logits, Sampling(**options))
        assert law[0] == law[2] == 0.0
        assert sum(law) == pytest.approx(1)


def test_work_grows_with_the_vocabulary_and_not_with_its_square() -> None:
    """V = 151,936 against a tenth of it, every option on: less than 60 times the time (linear 10, quadratic 100)."""

    def seconds(vocab_size: int) -> float:
        logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(4)) * 6
        sampling = Sampling(temperature=0.7, top_p=0.8, min_p=0.01, repetition_penalty=1.1, logit_bias={1: 1.0})
        rows = [Row(sampling, range(500), 300, range(j)) for j in range(4)]
        uniforms = torch.full((4,), 0.5, dtype=torch.float64)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            draw(distribution(logits, rows), uniforms)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(151_936) < 60 * seconds(15_194)


# ----------------------------------------------------------------------------- penalties and masks inside a block (PB)


def oracle(target: Model):
    """Drafts what plain greedy decoding will emit."""

    def slot(prefix: Tokens, drafted: Tokens) -> Slot:
        return Slot(target.laws((*prefix, *drafted), [()])[0], None)

    return slot


def greedy_ids(logits: Sequence[float], length: int, prompt: Tokens = (0,), **options: object) -> list[int]:
    """Greedy ids of a context-free target, asserted equal for plain decoding and for an oracle at K = 1 .. 8."""
    target = Model(lambda prefix: logits, Sampling(temperature=0, **options), len(prompt))  # type: ignore[arg-type]
    plain = decode([Stream(target, prompt, Noise(0), "rejection")], length)[0]
    for k in range(1, 9):
        stream = Stream(target, prompt, Noise(0), "rejection", oracle(target), k)
        assert decode([stream], length)[0] == plain, k
        assert all(a == k for a in stream.accepted), "the oracle knows every token, penalties included"
    return plain


def test_pb_1_counts_advance_within_a_block() -> None:
    """https://github.com/sgl-project/sglang/pull/33643, /40244: frequency penalty gives A A B A B A B at every K."""
    assert greedy_ids([3.0, 2.5, -9.0], 7, (2,), frequency_penalty=0.4) == [0, 0, 1, 0, 1, 0, 1]


def test_pb_2_repetition_penalty_acts_inside_a_block() -> None:
    """https://github.com/sgl-project/sglang/issues/28180: A B A A .. with the penalty, A A A .. without, at every K."""
    logits = [2.0, 1.7, 1.4, -9.0]
    assert greedy_ids(logits, 6, (3,), repetition_penalty=1.3) == [0, 1, 0, 0, 0, 0]
    assert greedy_ids(logits, 6, (3,)) == [0] * 6


def test_pb_3_no_penalty_is_dropped() -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/17701: each one flips the argmax, with a drafter as without."""
    for options in ({"presence_penalty": 1.5}, {"frequency_penalty": 1.5}, {"repetition_penalty": 2.0}):
        assert greedy_ids([2.0, 1.2, -9.0], 2, (2,), **options) == [0, 1]
        assert greedy_ids([2.0, 1.2, -9.0], 2, (2,)) == [0, 0]


def test_pb_4_a_penalty_acts_beyond_the_first_token() -> None:
    """https://github.com/mlx-node/mlx-node/pull/11: three tokens of PB-2, each penalised."""
    assert greedy_ids([2.0, 1.7, 1.6, -9.0], 3, (3,), presence_penalty=1.0) == [0, 1, 2]


def test_pb_5_processors_see_the_history_of_their_row() -> None:
    """https://github.com/ml-explore/mlx-examples/issues/1255: a banned token never appears; one call per row.

    A drafter that always proposes the banned token 2 has everything rejected.
    """
    seen: list[list[int]] = []

    def ban(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(tokens))
        return logits.index_fill(0, torch.tensor([2]), -math.inf)

    target = Model(lambda prefix: [1.0, 0.5, 3.0], Sampling(temperature=0, logits_processors=[ban]))
    law = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    stream = Stream(target, (1,), Noise(0), "rejection", lambda prefix, drafted: Slot(law, None), 3)
    assert decode([stream], 3)[0] == [0, 0, 0]
    assert seen[:4] == [[1], [1, 2], [1, 2, 2], [1, 2, 2, 2]], "each row sees its own drafted prefix"
    assert stream.accepted == [0, 0, 0]


def test_a_processor_that_returns_another_shape_is_named() -> None:
    """OptionError, not a broadcast."""
    sampling = Sampling(logits_processors=[lambda tokens, logits: logits[:2]])
    with pytest.raises(OptionError, match=r"logits_processors: must return logits \(3,\)"):
        law_of([1.0, 2.0, 3.0], sampling)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_processor_that_raises_takes_the_law_of_its_own_row_only(dtype: torch.dtype) -> None:
    """NaN there, with what it raised; every other row has the bits it has alone, those of its own block too."""

    def fussy(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 3:
            raise KeyError("on purpose")
        return logits.mul_(2)

    own, mate = Sampling(temperature=1.3, logits_processors=[fussy]), Sampling(temperature=0.7, top_k=3)
    block = [Row(own, (2, 3), 1, (4, 5, 6)[:j]) for j in range(4)]
    rows = [Row(mate, (1,), 1), *block, Row(Sampling(temperature=0, repetition_penalty=1.5), (1, 2), 1)]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    laws, errors = try_distribution(logits, rows)
    assert torch.equal(logits, before)
    assert [(r, type(error)) for r, error in errors.items()] == [(2, KeyError)]
    assert laws[2].isnan().all()
    for r in (0, 1, 3, 4, 5):
        assert torch.equal(laws[r], distribution(logits[r : r + 1], [rows[r]])[0])
    whole, none = try_distribution(logits[3:], rows[3:])
    assert torch.equal(whole, laws[3:])
    assert not none


def test_pb_6_bias_and_min_p_reach_every_row() -> None:
    """https://github.com/vllm-project/vllm/issues/42744, /38202: bias +100 forces id 2; min_p .99 is greedy."""
    assert greedy_ids([1.0, 0.5, -3.0], 9, logit_bias={2: 100.0}) == [2] * 9
    target = Model(lambda prefix: [1.0, 0.5, -3.0], Sampling(min_p=0.99))
    coin = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    stream = Stream(target, (0,), Noise(5), "rejection", lambda prefix, drafted: Slot(coin, coin), 4)
    assert decode([stream], 30)[0] == [0] * 30


def test_min_tokens_holds_ends_back_and_then_lets_them_come() -> None:
    """End ids cannot be produced while fewer than min_tokens are generated, drafted ones counted."""
    target = Model(lambda prefix: [0.0, 5.0], Sampling(temperature=0, min_tokens=3), 1, frozenset({1}))
    for k in range(5):
        stream = Stream(target, (0,), Noise(0), "rejection", oracle(target), k)
        assert decode([stream], 5)[0] == [0, 0, 0, 1, 1]


def test_min_tokens_yields_where_only_an_end_is_allowed() -> None:
    """An empty support has no law: the end comes although min_tokens forbids it."""
    row = Row(Sampling(min_tokens=5, allowed_token_ids=[2]), (0,), 1, (), frozenset({2}))
    assert distribution(torch.zeros(1, 4), [row])[0].tolist() == [0, 0, 1, 0]


def test_bad_words_look_at_drafted_tokens() -> None:
    """The last token of a banned sequence is masked where the tokens before it, drafts included, have just come."""
    sampling = Sampling(bad_words=[[1, 2, 0], [3]])
    for tokens, drafted, banned in [((1,), (2,), {0, 3}), ((1, 2), (), {0, 3}), ((2,), (1,), {3}), ((2,), (), {3})]:
        law = distribution(torch.zeros(1, 4), [Row(sampling, tokens, 1, drafted)])[0]
        assert set((law == 0).nonzero()[:, 0].tolist()) == banned, (tokens, drafted)


# ---------------------------------------------------------------------------------------------------- where nothing is


def broken(logits: Sequence[float], sampling: Sampling) -> bool:
    """Whether drawing in either mode answers NOTHING."""
    law = distribution(torch.tensor([logits]), [Row(sampling, (0,), 1)])
    drawn = draw(law, torch.tensor([0.5])).item(), draw_coupled(law, torch.zeros(1, len(logits))).item()
    assert (drawn[0] == NOTHING) is (drawn[1] == NOTHING)
    return drawn[0] == NOTHING


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_cannot_be_drawn_from(options: dict[str, float], bad: float) -> None:
    """NaN or +inf anywhere in a row: NOTHING, also for greedy, and never a token id; -inf in some places is fine."""
    assert broken([0.0, bad, 1.0, 2.0], Sampling(**options))
    assert broken([-math.inf] * 4, Sampling(**options))
    assert not broken([0.0, -math.inf, 1.0, 2.0], Sampling(**options))


def test_masks_that_leave_nothing_are_named() -> None:
    """The row cannot be drawn from, its neighbours can, and the error names the options that did it."""
    sampling = Sampling(allowed_token_ids=[1, 2], bad_words=[[0, 1], [0, 2]])
    laws = distribution(torch.zeros(2, 4), [Row(sampling, (0,), 1), Row(sampling, (1,), 1)])
    assert draw(laws, torch.tensor([0.1, 0.1])).tolist() == [NOTHING, 1]
    error = undrawable(sampling)
    assert isinstance(error, OptionError)
    assert error.option == "bad_words"
    assert "allowed_token_ids" in str(error)


def test_a_broken_model_is_not_blamed_on_the_options() -> None:
    """Without masks a row that cannot be drawn from is the model's: the dtype is what to change."""
    assert isinstance(undrawable(Sampling(logit_bias={1: 2.0})), ModelError)


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", True),
        ("temperature", 1e39),
        pytest.param("temperature", 10**400, id="temperature beyond every float"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-320),
        ("repetition_penalty", 1e300),
        ("presence_penalty", 2.1),
        pytest.param("presence_penalty", -(10**400), id="presence_penalty beyond every float"),
        ("frequency_penalty", math.nan),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 1e300}),
        ("logit_bias", {1: -100.5}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", [1]),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [5]),
        ("bad_words", [[-1]]),
        ("bad_words", 5),
        ("bad_words", [b"ab"]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-3]),
        ("allowed_token_ids", 5),
        ("logits_processors", ["not a function"]),
        ("logits_processors", len),
        ("stop_when", len),
        ("seed", 2**64),
        ("seed", 0.5),
        ("n", 0),
        ("max_tokens", -1),
        ("stop", [""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop", None),
        ("stop", (word for word in ["a"])),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["</s>"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", b"ab"),
        ("logprobs", -1),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(option: str, value: object) -> None:
    """OptionError, also a ValueError, with the option as the user typed it."""
    with pytest.raises(OptionError, match=option) as caught:
        Sampling(**{option: value})  # type: ignore[arg-type]
    assert caught.value.option == option
    assert isinstance(caught.value, ValueError)


def test_values_at_the_border_are_accepted() -> None:
    """The ends of every range, and numbers of numpy."""
    import numpy as np

    Sampling(
        temperature=0, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=-(2**63), n=1, max_tokens=0
    )
    assert Sampling(temperature=np.float32(0.5), seed=np.int64(3), top_k=np.int32(2)).top_k == 2


@pytest.mark.parametrize(
    "masked", [{}, {"allowed_token_ids": [1, 2]}, {"min_p": 1e-320}, {"top_k": 2, "top_p": 1e-320}]
)
@pytest.mark.parametrize("temperature", [0.0, 1e-320, GREEDY_BELOW, HOTTEST])
@pytest.mark.parametrize("penalty", [*REPETITION, 1.0])
def test_every_value_that_is_accepted_has_a_law(temperature: float, penalty: float, masked: dict[str, Any]) -> None:
    """Numbers at the ends of their ranges, together and with masks: finite probabilities that sum to 1."""
    s = Sampling(
        temperature=temperature, repetition_penalty=penalty, presence_penalty=2.0, frequency_penalty=-2.0,
        logit_bias={0: BIAS, 1: -BIAS}, **masked,
    )  # fmt: skip
    law = law_of([9e3, -9e3, 0.0, 1.0], s, tokens=(3, 0, 1), dtype=torch.float32)
    assert sum(law) == pytest.approx(1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("logit_bias", {10: 1.0}),
        ("allowed_token_ids", [3, 10]),
        ("bad_words", [[1, 2], [1, 10]]),
        ("stop_token_ids", [11]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_at_admission(option: str, value: object) -> None:
    """They would fail, wrap around or do nothing later on; the message names option, ids and limit."""
    sampling = Sampling(**{option: value})  # type: ignore[arg-type]
    check_ids(sampling, 12)
    with pytest.raises(OptionError, match=rf"{option}: .*below 10.*1[01]"):
        check_ids(sampling, 10)


def test_bans_that_leave_nothing_from_the_start_are_refused_at_admission() -> None:
    """Single banned tokens that cover all that is allowed, or the whole vocabulary."""
    check_ids(Sampling(allowed_token_ids=[1, 2], bad_words=[[1], [2, 2]]), 4)
    for sampling in (
        Sampling(allowed_token_ids=[1, 2], bad_words=[[1], [2]]),
        Sampling(bad_words=[[0], [1], [2], [3]]),
    ):
        with pytest.raises(OptionError, match="bad_words"):
            check_ids(sampling, 4)


# --------------------------------------------------------------------------------------------------------------- draws


@given(st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.1, 3.0]), min_size=1, max_size=9).filter(any), st.data())
@settings(max_examples=200, deadline=None)
def test_draw_never_leaves_the_support_and_goes_up_with_its_number(weights: list[float], data: st.DataObject) -> None:
    """Unnormalised laws with zeros, down to subnormal ones; numbers at and near both ends of [0, 1)."""
    ends = [0.0, 2.0**-53, 1 - 2.0**-53]
    numbers = sorted([*ends, *data.draw(st.lists(st.floats(0, 1, exclude_max=True), max_size=8))])
    probs = torch.tensor([weights] * len(numbers), dtype=torch.float64)
    tokens = draw(probs, torch.tensor(numbers, dtype=torch.float64)).tolist()
    assert all(weights[token] > 0 for token in tokens)
    assert tokens == sorted(tokens)


def test_a_subnormal_law_is_drawn_from() -> None:
    """u * sum rounds up to the sum there; the draw must not run over the end."""
    law = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert draw(law, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [1]


def test_running_sums_of_a_parallel_scan_are_repaired() -> None:
    """Sums that dip, or rise where a probability is 0, would yield an impossible token; repaired they do not."""
    probs = torch.tensor([[0.2, 0.0, 0.3, 0.0, 0.5, 0.0]], dtype=torch.float64)
    scanned = torch.tensor([[0.2, 0.2 + 1e-16 * 4, 0.5, 0.5 - 1e-16, 1.0, 1.0 + 4e-16]], dtype=torch.float64)
    repaired = ascending(scanned, probs)[0]
    rises = (repaired.diff(prepend=torch.zeros(1, dtype=torch.float64)) > 0).tolist()
    assert rises == [True, False, True, False, True, False]
    assert (scanned[0].diff() > 0).tolist() != rises[1:], "the fixture is broken as a parallel scan breaks it"


def test_nu_4_a_float32_law_is_drawn_with_its_own_shares() -> None:
    """A float32 softmax sums to 1 only within 1e-7; the draw divides the sum out, in float64."""
    law = torch.tensor([[1.0, 3.0]], dtype=torch.float32)
    below, above = 0.25 - 2.0**-50, 0.25 + 2.0**-50
    assert draw(law.expand(2, -1), torch.tensor([below, above], dtype=torch.float64)).tolist() == [0, 1]


# ------------------------------------------------------------------------------------------------------- logprobs (LP)


def test_lp_1_logprobs_are_those_of_a_plain_forward() -> None:
    """https://github.com/vllm-project/vllm/issues/34497, /17876: within 1e-5 of a float64 log-softmax."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(6)) * 4
    tokens = [3, 39, 0, 7, int(logits[4].argmax())]
    want = logits.double().log_softmax(-1)
    for entry, row, token in zip(logprobs(logits, tokens, 5), want, tokens, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
        values = dict(entry.top)
        assert values[token] == entry.logprob, "the list holds the chosen token's value"
        assert entry.top[:5] == sorted(entry.top[:5], key=lambda pair: (-pair[1], pair[0]))
        assert [i for i, _ in entry.top[:5]] == row.topk(5).indices.tolist()
        assert len(entry.top) == 5 + (token not in row.topk(5).indices.tolist())


def test_logprobs_of_ties_are_listed_by_the_lowest_id() -> None:
    """Five equal values, three asked for."""
    (entry,) = logprobs(torch.zeros(1, 5), [4], 3)
    assert [i for i, _ in entry.top] == [0, 1, 2, 4]


def test_logprobs_without_a_list_and_beyond_the_vocabulary() -> None:
    """top = 0: the token alone; more than V: all of V."""
    assert logprobs(torch.zeros(1, 4), [2])[0].top == []
    assert logprobs(torch.zeros(1, 4), [2])[0].logprob == pytest.approx(-math.log(4))
    assert len(logprobs(torch.zeros(1, 4), [2], 20)[0].top) == 4


def test_processed_logprobs_are_those_of_the_law_drawn_from() -> None:
    """The log of `distribution`; ids of probability 0 are left out of the list, so that no -inf is reported."""
    law = distribution(torch.tensor([[2.0, 1.0, 0.0]]), [Row(Sampling(temperature=0.5, top_k=2), (0,), 1)])
    (entry,) = logprobs(law.log(), [1], 3)
    assert entry.logprob == pytest.approx(math.log(1 / (1 + math.exp(2))), abs=1e-6)
    assert [i for i, _ in entry.top] == [0, 1]


def test_raw_logprobs_ignore_temperature_filters_and_bias() -> None:
    """They come from untouched logits: the same numbers whatever the sampling options."""
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(7))
    before = logprobs(logits, [1], 2)
    distribution(logits, [Row(Sampling(temperature=0.2, logit_bias={1: 9.0}, top_k=1), PROMPT, 1)])
    assert logprobs(logits, [1], 2) == before
