"""Whatever drafts, however many and beside whom: the engine emits what plain decoding emits."""

from __future__ import annotations

import ast
import itertools
import random
import subprocess
import sys
from functools import cache

import pytest

from engine.conftest import KINDS, PROMPTS, drafter_of, drive, engine_of, ids, plain, preempt_all
from forerun import Sampling
from forerun.drafters.fake import Never, Oracle, Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Completion
from forerun.sampling import VerifyMode
from forerun.target.base import BLOCK_SIZE, Batch, Segment, Target
from forerun.target.table import LetterTokenizer, history_model, table_model


@pytest.mark.parametrize(("kind", "k"), list(itertools.product(KINDS, [1, 2, 5])))
def test_greedy_output_is_that_of_plain_decoding(kind, k):
    """Every drafter, K and batch-mate: the greedy ids are the reference's; the books balance."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0, max_tokens=23)
    known = plain(target, PROMPTS, sampling)
    engine = engine_of(target, drafter_of(kind, known, 7), num_speculative_tokens=k)
    for completion, prompt in zip(engine.generate(PROMPTS, sampling), PROMPTS, strict=True):
        assert completion.token_ids == known[tuple(prompt)]
        assert completion.finish_reason == "length"
        stats = completion.stats
        assert 1 + stats.emitted - stats.discarded == len(completion.token_ids)
    engine.audit()
    assert engine.core.pool.used == 0


@pytest.mark.parametrize(("kind", "k"), list(itertools.product(["ngram", "small", "other small"], [1, 4])))
def test_coupled_output_is_that_of_plain_decoding_at_any_temperature(kind, k):
    """Coupled mode: one seed gives one text, with any drafter and K and with none."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0.9, max_tokens=23, seed=11)
    known = plain(target, PROMPTS, sampling, "coupled")
    engine = engine_of(target, drafter_of(kind, known, 7), num_speculative_tokens=k, verify_mode="coupled")
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling)] == list(known.values())
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling, speculative=False)] == list(known.values())


def test_the_oracle_is_always_accepted_and_never_is_not():
    """Accepted length K + 1 with a perfect drafter, 1 with one that is always wrong."""
    target = history_model(7, seed=3)
    sampling = Sampling(temperature=0, max_tokens=25)
    known = plain(target, PROMPTS, sampling)
    best = engine_of(target, Oracle(known), num_speculative_tokens=3).generate(PROMPTS, sampling)
    assert all(c.stats.mean_accepted_length == 4 for c in best)
    worst = engine_of(target, Never(known, 7), num_speculative_tokens=3).generate(PROMPTS, sampling)
    assert all(c.stats.mean_accepted_length == 1 and not any(c.from_draft) for c in worst)


# -------------------------------------------------------------------------------------------------------- rows of EQ


@pytest.mark.parametrize("kind", ["oracle", "never", "ngram", "small"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_eq_1_ties_go_to_the_lowest_id(kind, k):
    """Two equal top logits after every token: decoding, drafting and verification all take the lower id.

    https://github.com/vllm-project/vllm/issues/7627
    """
    table = [[0, 5, 1, 5, 2], [5, 1, 5, 0, 2], [1, 0, 2, 5, 5], [2, 5, 5, 1, 0], [5, 5, 2, 1, 0]]
    sampling = Sampling(temperature=0, max_tokens=12)
    want, token = [], 4
    for _ in range(12):
        token = [1, 0, 3, 1, 0][token]
        want.append(token)
    known = plain(table_model(table), [[4]], sampling)
    assert known[4,] == want
    drafter = Small(table_model(table), 5) if kind == "small" else drafter_of(kind, known, 5)
    [done] = engine_of(table_model(table), drafter, num_speculative_tokens=k).generate([[4]], sampling)
    assert done.token_ids == want
    if kind in ("oracle", "small"):
        assert done.stats.draft_acceptance_rate == 1


def _transformer(layers: int = 3) -> Target:
    from forerun.target.hf import HFTarget
    from tiny import VOCAB_SIZE, qwen3

    return HFTarget(qwen3(layers), LetterTokenizer(VOCAB_SIZE))


def _texts(count: int, seed: int = 4) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(2, 40))] for _ in range(count)]


def _margins(target: Target, done: Completion) -> list[float]:
    """Top-2 margin of the logits at each emitted token, teacher-forced in one row after the other; asserts on the way
    that every one is the argmax there."""
    whole = [*done.prompt_token_ids, *done.token_ids]
    target.allocate(len(whole) // BLOCK_SIZE + 1)
    blocks, margins = list(range(len(whole) // BLOCK_SIZE + 1)), []
    logits = target.forward(Batch([Segment(done.prompt_token_ids, 0, blocks, 1)])).logits
    for place, token in enumerate(done.token_ids, len(done.prompt_token_ids)):
        best = logits[0].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        assert int(best.indices[0]) == token, f"position {place}: {token} emitted, margin {margins[-1]:.2e}"
        logits = target.forward(Batch([Segment([token], place, blocks, 1)])).logits
    return margins


@cache
def _plainly(count: int) -> tuple[Target, list[Completion]]:
    """A transformer and what plain decoding makes of so many prompts; each token is checked to be the argmax."""
    greedy = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
    target, prompts = _transformer(), _texts(count)
    want = engine_of(target, max_num_batched_tokens=512, max_num_seqs=16).generate(prompts, greedy)
    smallest = min(margin for done in want for margin in _margins(target, done))
    print(f"{len(prompts)} prompts, smallest top-2 margin {smallest:.2e}")
    return target, want


def _eq_2(count: int, ks: range) -> None:
    greedy = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
    target, want = _plainly(count)
    prompts = [one.prompt_token_ids for one in want]
    for k in ks:
        drafters = Ngram(1), Small(_transformer(2), target.vocab_size)
        engine = engine_of(target, *drafters, num_speculative_tokens=k, max_num_batched_tokens=512, max_num_seqs=16)
        done = engine.generate(prompts, greedy)
        assert sum(one.stats.accepted for one in done) > 0
        for one, other in zip(done, want, strict=True):
            if one.token_ids != other.token_ids:  # say where and by how little, before the comparison fails
                _margins(target, one)
            assert one.token_ids == other.token_ids


@pytest.mark.parametrize("k", [1, 3, 8])
def test_eq_2_a_transformer_in_float32(k):
    """12 prompts of a tiny transformer in float32, greedy, with n-grams and a smaller model: no difference from plain
    decoding observed; every plain token is the argmax of its own one-row pass.

    https://github.com/vllm-project/vllm/issues/5313, https://github.com/vllm-project/vllm/issues/10913,
    https://github.com/vllm-project/vllm/issues/41758
    """
    _eq_2(12, range(k, k + 1))


@pytest.mark.slow
def test_eq_2_in_full():
    """200 prompts, each K in 1 .. 8."""
    _eq_2(200, range(1, 9))


EQ_4 = Sampling(temperature=0.8, seed=123, max_tokens=24)


def _eq_4(mode: VerifyMode) -> list[int]:
    engine = engine_of(history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode=mode)
    return engine.generate([PROMPTS[0]], EQ_4)[0].token_ids


@pytest.fixture(scope="module")
def of_another_process() -> dict[str, list[int]]:
    code = "from engine.test_equality import _eq_4; print({m: _eq_4(m) for m in ('rejection', 'coupled')})"
    path = [entry for entry in sys.path if entry.endswith("tests")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = ast.literal_eval(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_eq_4_one_request_in_four_surroundings(mode, of_another_process):
    """A seeded request at T = 0.8: alone, in a batch of 8, preempted half-way, in another process: the same ids, in
    either mode with a fixed K.

    https://github.com/vllm-project/vllm/issues/54506, https://github.com/vllm-project/vllm/pull/52522
    """
    want = _eq_4(mode)
    make = lambda: engine_of(history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode=mode)  # noqa: E731
    engine = make()
    mates = engine.submit([[i, i] for i in range(7)], Sampling(temperature=1, max_tokens=20))
    requests = engine.submit([PROMPTS[0]], EQ_4)
    drive(engine, [*mates, *requests])
    assert requests[0].output == want
    engine = make()
    halfway = lambda step: preempt_all(engine) if step == 5 else None  # noqa: E731
    assert ids(drive(engine, engine.submit([PROMPTS[0]], EQ_4), halfway)) == [want]
    assert of_another_process[mode] == want


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_eq_6_the_first_drafted_token_is_compared(mode, temperature):
    """K = 1 and a drafter that is always wrong: nothing of the proposal survives, accepted is 0. Sampled in `rejection`
    only a token that the target cannot produce is wrong.

    https://github.com/ohdearquant/lattice/issues/243, https://github.com/ohdearquant/lattice/pull/258
    """
    sampled = mode == "rejection" and temperature > 0
    allowed = range(6) if sampled else None
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=20, allowed_token_ids=allowed)
    known = plain(history_model(7, seed=3), PROMPTS, sampling, mode)
    drafter = Script(lambda view: [6]) if sampled else Never(known, 7)
    engine = engine_of(history_model(7, seed=3), drafter, num_speculative_tokens=1, verify_mode=mode)
    done = engine.generate(PROMPTS, sampling)
    assert all(one.stats.accepted == 0 and not any(one.from_draft) for one in done)
    assert all(one.stats.drafted == one.stats.drafting_rounds > 0 for one in done)
    # Refusing what cannot be produced takes nothing off the target's law: the token is plain decoding's own draw.
    assert ids(done) == list(known.values())


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 17, 33])
def test_eq_7_every_number_of_rows_selects_alike(rows):
    """A tiny transformer whose verify blocks have so many rows: every emitted id is the argmax of a one-row pass.

    https://github.com/antirez/ds4/issues/913
    """
    target, greedy = _transformer(), Sampling(temperature=0, max_tokens=36, ignore_eos=True)
    prompt = _texts(1, seed=9)[0]
    [want] = engine_of(target).generate([prompt], greedy)
    _margins(target, want)
    engine = engine_of(
        target, Oracle({tuple(prompt): want.token_ids}), num_speculative_tokens=rows - 1, max_num_batched_tokens=99
    )
    [done] = engine.generate([prompt], greedy)
    assert done.token_ids == want.token_ids
    if rows > 1:
        assert done.stats.draft_acceptance_rate == 1
        assert len(done.stats.verified_by_position) == min(rows, 36) - 1
