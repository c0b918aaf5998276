"""A parameter means the same with and without a drafter: penalties, biases, masks, filters, processors, logprobs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from engine.conftest import KINDS, PROMPTS, drafter_of, drive, engine_of, idle, ids, plain, same
from forerun import Sampling
from forerun.drafters.fake import Oracle, Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.sampling import Row, distribution
from forerun.target.base import Batch, Segment
from forerun.target.table import ByteTokenizer, TableTarget, history_model
from laws.pairwise import pairwise, product

# ------------------------------------------------------------------------------------- every option beside every other


def _no_three(tokens, logits):
    """A processor that looks at the history, writes into what it is given, and returns something else."""
    keep = logits.clone()
    logits.fill_(math.nan)
    if tokens[-1] == 3 or len(tokens) % 5 == 0:
        keep[3] = -math.inf
    return keep


FACTORS = {
    "kind": KINDS,
    "k": [1, 2, 3, 4, 5, 6, 7, 8],
    "temperature": [0, 0.7, 1, 1.5],
    "filters": ["none", "top_k", "top_p", "min_p", "all"],
    "batch": ["alone", "mixed"],
    "penalties": ["none", "repetition", "counts"],
    "masks": ["none", "bias", "allowed", "bad words", "processor"],
    "ends": ["none", "stop ids", "strings", "min tokens"],
}
VALUES = {
    "none": {},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.3},
    "counts": {"frequency_penalty": 0.4, "presence_penalty": -0.7},
    "bias": {"logit_bias": {2: 3.0, 5: -2.0}},
    "allowed": {"allowed_token_ids": [0, 1, 2, 4, 6]},
    "bad words": {"bad_words": [[2], [1, 4], [3, 3]]},
    "processor": {"logits_processors": [_no_three]},
    "stop ids": {"stop_token_ids": [5]},
    "strings": {"stop": ["ba", "gfd", "cc"], "include_stop_str_in_output": True},
    "min tokens": {"min_tokens": 9, "stop": ["b"], "stop_token_ids": [5]},
}
SECTIONS = ("filters", "penalties", "masks", "ends")


def _sampling(case) -> Sampling:
    values = {name: value for section in SECTIONS for name, value in VALUES[case[section]].items()}
    return Sampling(temperature=case["temperature"], max_tokens=18, seed=21, logprobs=2, **values)


def _requests(engine, case, sampling):
    """The request in question, and its batch-mates: a greedy row, a sampled one, a penalised one and a plain one."""
    requests = engine.submit(PROMPTS[2], sampling)
    if case["batch"] == "mixed":
        engine.submit(PROMPTS[0], Sampling(temperature=0, max_tokens=9))
        engine.submit(PROMPTS[1], Sampling(temperature=1.2, top_k=3, seed=5, max_tokens=25))
        engine.submit(PROMPTS[3], Sampling(repetition_penalty=1.5, seed=6, max_tokens=14), speculative=False)
    return requests


def _holds(case) -> None:
    """Coupled (greedy at T = 0): as plain decoding. Rejection: as its own repetition, alone and with batch-mates."""
    make = lambda: history_model(7, seed=3, eos_token_ids=[6])  # noqa: E731
    sampling = _sampling(case)
    known = plain(make(), [PROMPTS[2]], sampling, "coupled")
    want = engine_of(make(), verify_mode="coupled").generate(PROMPTS[2], sampling)[0]
    if not sampling.stop_strings:
        assert want.token_ids == known[tuple(PROMPTS[2])]
    known |= {tuple(p): [1, 2, 3, 4] * 8 for p in (PROMPTS[0], PROMPTS[1], PROMPTS[3])}
    results = {}
    for mode, batch in itertools.product(("coupled", "rejection"), ("alone", case["batch"])):
        engine = engine_of(
            make(), drafter_of(case["kind"], known, 7), num_speculative_tokens=case["k"], verify_mode=mode
        )
        [results[mode, batch]] = drive(engine, _requests(engine, {"batch": batch}, sampling))
        engine.cancel([*engine.core.admission.running])
        idle(engine)
    assert same(results["coupled", case["batch"]], want)
    assert same(results["coupled", "alone"], want)
    assert same(results["rejection", case["batch"]], results["rejection", "alone"])
    if sampling.greedy:
        assert same(results["rejection", "alone"], want)


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
def test_every_pair_of_options(case):
    """Each pair of (drafter, K, temperature, filters, batch, penalties, masks, ends) occurs in some case; in each the
    drafted run equals the plain one: ids, text, reasons, log-probabilities. `rejection` equals its own repetition.
    """
    _holds(case)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), list(itertools.product(KINDS, FACTORS["temperature"])))
def test_all_of_drafter_k_temperature_filters_and_batch(kind, temperature):
    """The full product of the first five factors, the others taking turns."""
    own = {name: FACTORS[name] for name in ("k", "filters", "batch")}
    turns = itertools.cycle(pairwise({name: FACTORS[name] for name in ("penalties", "masks", "ends")}))
    for case in product(own):
        _holds({"kind": kind, "temperature": temperature, **case, **next(turns)})


# --------------------------------------------------------------------------------------------------------- penalties


def _flat(row, **options) -> TableTarget:
    """The same logits everywhere."""
    return TableTarget(lambda prefix: row, len(row), **options)


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("kind", ["oracle", "never", "coin"])
def test_pb_1_counts_advance_with_every_token(kind, k):
    """A 3.0, B 2.5, frequency penalty 0.4: A A B A B A B ... at every K; position j sees drafts 0 .. j - 1 counted.

    https://github.com/sgl-project/sglang/pull/33643, https://github.com/sgl-project/sglang/pull/40244
    """
    target = _flat([3.0, 2.5, -9.0])
    sampling = Sampling(temperature=0, frequency_penalty=0.4, max_tokens=12)
    want, counts = [], [0, 0]
    for _ in range(12):
        want.append(int(2.5 - 0.4 * counts[1] > 3.0 - 0.4 * counts[0]))
        counts[want[-1]] += 1
    assert want[:7] == [0, 0, 1, 0, 1, 0, 1]
    engine = engine_of(target, drafter_of(kind, {(2,): want}, 3), num_speculative_tokens=k)
    [done] = engine.generate([[2]], sampling)
    assert done.token_ids == want
    if kind == "oracle" and k:
        assert done.stats.draft_acceptance_rate == 1


@pytest.mark.parametrize("k", range(9))
def test_pb_2_repetition_penalty_inside_a_block(k):
    """A 2.0, B 1.7, C 1.4, penalty 1.3, none of them in the prompt: A B A A ... as plain decoding; without it A A A.

    https://github.com/sgl-project/sglang/issues/28180, https://github.com/sgl-project/sglang/pull/28200,
    https://github.com/sgl-project/sglang/pull/28242
    """
    target = _flat([2.0, 1.7, 1.4, -9.0])
    sampling = Sampling(temperature=0, repetition_penalty=1.3, max_tokens=9)
    known = plain(target, [[3]], sampling)
    assert known[3,][:4] == [0, 1, 0, 0]
    for drafter in (Oracle(known), Script(lambda view: [0] * view.k), Script(lambda view: [2] * view.k)):
        engine = engine_of(_flat([2.0, 1.7, 1.4, -9.0]), drafter, num_speculative_tokens=k)
        assert engine.generate([[3]], sampling)[0].token_ids == known[3,]
        without = engine.generate([[3]], Sampling(temperature=0, max_tokens=9))[0]
        assert without.token_ids == [0] * 9


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 9.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}], ids=str
)
def test_pb_3_penalties_are_not_dropped(penalty):
    """Any penalty that flips the argmax changes the output exactly as without a drafter.

    https://github.com/NVIDIA/TensorRT-LLM/pull/17701
    """
    row = [2.0, 1.0, 0.5, 0.1]
    sampling = Sampling(temperature=0, max_tokens=12, **penalty)
    known = plain(_flat(row), [[3]], sampling)
    assert known[3,] != [0] * 12
    for drafter in (Oracle(known), Script(lambda view: [0] * view.k), Ngram(1), Small(_flat(row), 4)):
        [done] = engine_of(_flat(row), drafter, num_speculative_tokens=4).generate([[3]], sampling)
        assert done.token_ids == known[3,]
        assert done.stats.drafted > 0


def test_pb_4_the_penalty_is_applied_at_every_position():
    """PB-2 with three tokens and one block: not only the first one is penalised.

    https://github.com/mlx-node/mlx-node/pull/11
    """
    target = _flat([2.0, 1.7, 1.4, -9.0])
    engine = engine_of(target, Script(lambda view: [0] * view.k), num_speculative_tokens=8)
    [done] = engine.generate([[3]], Sampling(temperature=0, repetition_penalty=1.3, max_tokens=3))
    assert done.token_ids == [0, 1, 0]


@pytest.mark.parametrize(("temperature", "mode"), [(0, "rejection"), (1.0, "rejection"), (1.0, "coupled")])
def test_pb_5_processors_see_every_position_once(temperature, mode):
    """A processor that bans token 7, and a drafter that always proposes it: it never appears; the processor is called
    once per row, with prompt, output and the drafts before that row.

    https://github.com/ml-explore/mlx-examples/issues/1255
    """
    calls = []

    def ban(tokens, logits):
        calls.append(list(tokens))
        logits[7] = -math.inf
        return logits

    target = history_model(9, seed=2)
    sampling = Sampling(temperature=temperature, max_tokens=15, seed=3, logits_processors=[ban])
    engine = engine_of(target, Script(lambda view: [7] * view.k), num_speculative_tokens=3, verify_mode=mode)
    [done] = engine.generate([[1, 2]], sampling)
    assert 7 not in done.token_ids
    assert done.stats.accepted == 0
    whole = [1, 2, *done.token_ids]
    want = []
    for length in range(2, 17):  # the history at each anchor; drafts come only behind the first token
        k = 0 if length == 2 else min(3, 17 - length - 1)
        want += [whole[:length] + [7] * j for j in range(k + 1)]
    assert calls == want


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_pb_6_bias_and_min_p_reach_every_row(mode, k):
    """A bias of +100 on token 5 makes every output 5; min_p 0.99 makes it greedy; with a drafter of random tokens.

    https://github.com/vllm-project/vllm/issues/42744, https://github.com/vllm-project/vllm/issues/38202
    """
    random_tokens = Script(lambda view: (view.noise.uniforms(view.anchor, 0, view.k) * 7).astype(int).tolist())
    engine = engine_of(history_model(7, seed=3), random_tokens, num_speculative_tokens=k, verify_mode=mode)
    for seed in range(5):
        [done] = engine.generate([[1, 2]], Sampling(logit_bias={5: 100}, max_tokens=20, seed=seed))
        assert done.token_ids == [5] * 20
    greedy = plain(history_model(7, seed=3), PROMPTS, Sampling(temperature=0, max_tokens=20))
    for seed in range(5):
        done = engine.generate(PROMPTS, Sampling(min_p=0.99, max_tokens=20, seed=seed))
        assert ids(done) == list(greedy.values())


def test_bad_words_as_text_and_as_ids():
    """A banned word is the same as text and as ids, at every block border; its beginning alone may appear."""
    follower = {ord("a"): "bc ", ord("b"): "a c", ord("c"): " ab", ord(" "): "bac"}

    def row(prefix):
        best = follower.get(prefix[-1], "abc")
        return [9.0 - best.index(chr(i)) if chr(i) in best else 0.0 for i in range(257)]

    make = lambda: TableTarget(row, 257, tokenizer=ByteTokenizer())  # noqa: E731
    for word in ("ba", "b", "bab", " ba"):
        as_ids = [list(word.encode()), [ord(" "), *word.lstrip().encode()]]
        sampling = [Sampling(temperature=0, max_tokens=25, bad_words=form) for form in ([word], as_ids)]
        known = plain(make(), [[0]], sampling[1])
        for k in (0, 1, 4):
            engine = engine_of(make(), Script(lambda view: list(b"baba")), num_speculative_tokens=k)
            text, by_id = (engine.generate([[0]], one)[0] for one in sampling)
            assert text.token_ids == by_id.token_ids == known[0,]
            assert word not in text.text
            assert len(set(text.text)) > 1


# ---------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("kind", ["oracle", "never", "coin", "other small"])
@pytest.mark.parametrize(("temperature", "mode"), [(0, "rejection"), (0.8, "rejection"), (0.8, "coupled")])
def test_lp_1_log_probabilities_are_the_targets(kind, temperature, mode):
    """K = 4, five alternatives: each value within 1e-5 of a teacher-forced plain forward, one per token, lists sorted
    and containing the token; none is null or the drafter's.

    https://github.com/vllm-project/vllm/issues/34497, https://github.com/vllm-project/vllm/issues/17876,
    https://github.com/ggml-org/llama.cpp/issues/27972, https://github.com/ggml-org/llama.cpp/pull/27196,
    https://github.com/Pushkinist/rMLX/issues/542
    """
    sampling = Sampling(temperature=temperature, max_tokens=20, seed=4, logprobs=5, repetition_penalty=1.2)
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, sampling, mode)
    engine = engine_of(target, drafter_of(kind, known, 7), num_speculative_tokens=4, verify_mode=mode)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True):
        whole = [*prompt, *done.token_ids]
        exact = history_model(7, seed=3)
        exact.allocate(8)
        rows = exact.forward(Batch([Segment(whole, 0, list(range(8)), len(done.token_ids) + 1)])).logits
        values = rows[:-1].log_softmax(-1)
        assert len(done.logprobs) == len(done.token_ids)
        for entry, token, row in zip(done.logprobs, done.token_ids, values, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
            listed = [value for _, value in entry.top]
            assert listed[:5] == sorted(listed[:5], reverse=True)
            assert [i for i, _ in entry.top[:5]] == row.argsort(descending=True)[:5].tolist()
            assert (token, pytest.approx(entry.logprob)) in entry.top
    idle(engine)


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_lp_1_no_entry_for_what_was_cut(max_tokens):
    """Stopped by length, by a stop id or by a stop string in the middle of a block: one entry per committed token."""
    target = history_model(7, seed=3)
    known = plain(target, [[1, 2, 3]], Sampling(temperature=0, max_tokens=30))
    output = known[1, 2, 3]
    engine = engine_of(target, Oracle(known), num_speculative_tokens=8)
    letter = chr(ord("a") + output[max_tokens - 1])
    for ends in ({"max_tokens": max_tokens}, {"stop_token_ids": [output[max_tokens - 1]]}, {"stop": letter}):
        [done] = engine.generate([[1, 2, 3]], Sampling(temperature=0, logprobs=0, **{"max_tokens": 30, **ends}))
        assert [entry.token_id for entry in done.logprobs] == done.token_ids == output[: len(done.token_ids)]
        assert all(entry.top == [] for entry in done.logprobs)


def test_processed_rows_do_not_leak_into_log_probabilities():
    """Raw log-probabilities are of the untouched logits, though processors and biases changed the law beside them."""
    sampling = Sampling(temperature=0, max_tokens=8, logprobs=1, logit_bias={5: 50.0}, logits_processors=[_no_three])
    [done] = engine_of(history_model(7, seed=3), Ngram(1)).generate([[1, 2, 3]], sampling)
    assert done.token_ids == [5] * 8
    assert any(entry.top[0][0] != 5 for entry in done.logprobs)
    assert all(entry.logprob < 0 for entry in done.logprobs)


# ------------------------------------------------------------------------------------------------ rows of mixed batches


def test_nu_1_greedy_rows_inside_a_sampled_batch():
    """T = 0, 0.7, 1 and top_k = 1 in one batch, two neighbours of which differ in their temperature alone, drafts of
    probability 0 under the target and under the drafter: no NaN, each row as alone, counts within 0 .. K.

    https://github.com/vllm-project/vllm/pull/27077, https://github.com/sgl-project/sglang/pull/23296
    """
    samplings = [
        Sampling(temperature=0, max_tokens=12, seed=1, logprobs=1),
        Sampling(temperature=0.7, max_tokens=12, seed=5, logprobs=1),
        Sampling(temperature=0.7, top_k=2, max_tokens=12, seed=2, logprobs=1),
        Sampling(temperature=1, max_tokens=12, seed=3, logprobs=1),
        Sampling(temperature=1, top_k=1, max_tokens=12, seed=4, logprobs=1),
    ]
    drafters = {
        "impossible": lambda: Script(lambda view: [6, 5, 4][: view.k]),
        "small": lambda: drafter_of("other small", {}, 7),
    }
    for mode, make in itertools.product(("rejection", "coupled"), drafters.values()):
        engine = lambda make=make, mode=mode: engine_of(  # noqa: E731
            history_model(7, seed=3), make(), num_speculative_tokens=3, verify_mode=mode
        )
        together = engine().generate([[1, 2, 3]] * 5, samplings)
        for one, sampling in zip(together, samplings, strict=True):
            assert same(one, engine().generate([[1, 2, 3]], sampling)[0])
            assert all(math.isfinite(entry.logprob) for entry in one.logprobs)
            assert 0 <= one.stats.accepted <= one.stats.verified <= 3 * one.stats.target_steps
        assert together[0].token_ids == together[4].token_ids


def test_the_law_of_a_verify_row_is_that_of_its_own_place():
    """`distribution` on a whole verify block equals one call per position, for every option at once: the property all
    rows of this file rest on.
    """
    sampling = Sampling(
        temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=6,
        bad_words=[[1, 4]], logit_bias={2: 1.0}, logits_processors=[_no_three],
    )  # fmt: skip
    tokens, drafts = [1, 2, 3, 0, 4], [1, 4, 4, 2]
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = distribution(logits, [Row(sampling, tokens, 3, drafts[:j], frozenset({6})) for j in range(5)])
    for j in range(5):
        own = distribution(logits[j : j + 1], [Row(sampling, tokens + drafts[:j], 3, (), frozenset({6}))])
        assert torch.equal(block[j : j + 1], own)
