"""EAGLE and EAGLE-3: training and decoding are one function of a row, which sees what it may and nothing else.

All in float64, so that what is equal is equal to 1e-9.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from drafters.learning import (
    VOCAB,
    always,
    batch_of,
    decoding,
    features_of,
    give,
    plan_for,
    shaken,
    texts,
    tiny_target,
    view_of,
)
from forerun import Sampling
from forerun.drafters.base import Accepted
from forerun.drafters.chain import rows as chain_rows
from forerun.drafters.chain.start import take_over
from forerun.drafters.chain.unroll import Unroll, taught
from forerun.drafters.eagle import Eagle
from forerun.drafters.eagle.config import EagleSettings
from forerun.drafters.eagle3 import Eagle3
from forerun.drafters.eagle3.config import Eagle3Settings
from forerun.drafters.layers import Attention, like_target
from forerun.drafters.learned import TrainingBatch
from forerun.drafters.learned.head import head_rows
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.sampling import Row, distribution
from forerun.target.table import history_model

KINDS = {
    "eagle": (Eagle, EagleSettings()),
    "eagle-bias-pruned": (Eagle, EagleSettings(bias=True, draft_vocab_size=60)),
    "eagle3": (Eagle3, Eagle3Settings(ttt_steps=3)),
    "eagle3-pruned": (Eagle3, Eagle3Settings(ttt_steps=3, draft_vocab_size=60)),
    "eagle3-qwen3": (Eagle3, Eagle3Settings(ttt_steps=3, layer_type="qwen3", taps=(1, 4))),
    "eagle3-normed": (
        Eagle3, Eagle3Settings(ttt_steps=3, norm_before_residual=True, norm_before_fc=True, norm_output=True)
    ),
    "eagle3-fc-norm": (Eagle3, Eagle3Settings(ttt_steps=3, fc_norm=True)),
}  # fmt: skip
USUAL = ["eagle", "eagle3", "eagle3-normed"]
STEPS = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float64)


def _made(kind, target, seed=0):
    """With weights at which no attention is saturated and every part of the network matters."""
    cls, settings = KINDS[kind]
    drafter = cls.design(target, settings.model_copy(update={"init": "random"}), plan_for(target, seed))
    shaken(drafter, 0.1).network.double()  # shaken in float32, as it is saved
    return drafter


def _close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def _unroll(drafter, batch) -> Unroll:
    features = drafter.fuse(batch.features)
    return Unroll(drafter.network, batch, drafter.target.embed(batch.tokens).to(features.dtype), features)


@torch.no_grad()
def _training_logits(drafter, batch, rows, steps=STEPS):
    """[n, steps, V] of the training forward from these packed rows."""
    hidden = _unroll(drafter, batch).hidden(torch.tensor(rows), steps)
    return drafter.vocabulary.to_target(drafter.logits(hidden))


def _watched(copy, views):
    """Drafts, and the logits over V as each slot was drawn."""
    seen, original = [], copy.vocabulary.to_target

    def keep(logits):
        seen.append(original(logits))
        return seen[-1]

    copy.vocabulary.to_target = keep
    try:
        return copy.propose(views, always), seen
    finally:
        del copy.vocabulary.to_target


def _drafting(drafter, tokens, anchor, k=STEPS, **options):
    """Draft at an anchor by a fresh drafter, and its logits [K, V]."""
    copy = decoding(drafter)
    give(copy, tokens, 0, anchor)
    [draft], seen = _watched(copy, [view_of(tokens[: anchor + 1], k, **options)])
    return draft, torch.cat(seen)


# ------------------------------------------------------------------------------------------- training equals decoding


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_of_a_row_are_the_inference_logits_where_the_context_ends(kind, target):
    """From row i the training forward gives, at every step, what the drafter has at anchor i + 1 for that slot. The
    text goes on with the draft's own tokens; what the target says about them is not looked at.
    """
    drafter = _made(kind, target)
    [text] = texts([40], seed=3)
    for anchor in (1, 7, 22):
        draft, seen = _drafting(drafter, text, anchor)
        assert len(draft.tokens) == STEPS
        batch = batch_of(target, [[*text[: anchor + 1], *draft.tokens]], drafter.taps)
        batch.features[anchor:] = torch.randn_like(batch.features[anchor:])
        logits = _training_logits(drafter, batch, [anchor - 1])
        _close(seen, logits[0])


@pytest.mark.parametrize("kind", USUAL)
def test_rows_of_a_batch_are_those_of_each_alone(kind, target):
    """Sequences packed together, and rows asked for together, do not see each other."""
    drafter = _made(kind, target)
    sequences = texts([9, 30, 17], seed=5)
    together = _training_logits(drafter, batch_of(target, sequences, drafter.taps), [2, 9 + 3, 9 + 20, 39 + 11])
    for place, (sequence, row) in enumerate([(0, 2), (1, 3), (1, 20), (2, 11)]):
        alone = _training_logits(drafter, batch_of(target, [sequences[sequence]], drafter.taps), [row])
        _close(together[place], alone[0])


@pytest.mark.parametrize("kind", USUAL)
def test_ts_5_a_row_sees_features_up_to_itself_and_the_tokens_it_was_fed(kind, target):
    """TS-5: step t of row i is a function of features 0 .. i and tokens 1 .. i + 1 + t, of each of them and of nothing
    behind them.

    https://github.com/vllm-project/vllm/pull/56692
    """
    drafter = _made(kind, target)
    [text] = texts([24], seed=6)
    row = 10
    batch = batch_of(target, [text], drafter.taps)
    before = _training_logits(drafter, batch, [row])[0]
    for changed, step in itertools.product(range(24), range(STEPS)):
        features, tokens = batch.features.clone(), batch.tokens.clone()
        features[changed] += 1.0
        moved = _training_logits(drafter, TrainingBatch(tokens, [24], batch.loss_mask, features, batch.last), [row])
        assert ((moved[0, step] - before[step]).abs().max() > 1e-9) == (changed <= row), ("feature", changed, step)
        tokens[changed] = (tokens[changed] + 1) % 250
        moved = _training_logits(
            drafter, TrainingBatch(tokens, [24], batch.loss_mask, batch.features, batch.last), [row]
        )
        fed = 1 <= changed <= row + 1 + step
        assert ((moved[0, step] - before[step]).abs().max() > 1e-9) == fed, ("token", changed, step)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3-pruned"])
def test_nu_4_the_reported_law_is_the_one_drawn_from(kind, target):
    """Each row of `probs` is the processed law of the slot's logits, zero where the drafter keeps no id.

    https://github.com/deepseek-ai/DeepSpec/issues/31
    """
    drafter = _made(kind, target)
    [text] = texts([20], seed=2)
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    draft, seen = _drafting(drafter, text, 19, sampling=sampling)
    rows = [Row(sampling, text, 1, draft.tokens[:k]) for k in range(STEPS)]
    assert torch.equal(draft.probs, distribution(seen, rows))
    assert all(draft.probs[k, token] > 0 for k, token in enumerate(draft.tokens))
    if drafter.vocabulary.kept is not None:
        lost = torch.ones(VOCAB, dtype=torch.bool)
        lost[drafter.vocabulary.kept] = False
        assert (draft.probs[:, lost] == 0).all()


def test_a_cast_to_bfloat16_turns_by_the_same_angles(target):
    """TS-8: rotary frequencies keep their precision whatever the weights are cast to: a row at position 200 is turned
    as it was in training.

    https://github.com/vllm-project/vllm/issues/48894
    """
    drafter = _made("eagle3", target)
    positions = torch.tensor([1, 200])
    expected = drafter.network.rotary(positions, torch.float32)
    cast = drafter.for_decoding(torch.bfloat16).network
    assert cast.dtype == torch.bfloat16
    for one, other in zip(cast.rotary(positions, torch.float32), expected, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------------ rows and rounds


@pytest.mark.parametrize("kind", USUAL)
def test_cr_4_rows_added_in_pieces_are_rows_computed_anew(kind, target):
    """CR-4: rows that came in chunks, over rounds with drafts, without (K = 0), and after rejections give the draft of
    a fresh drafter that saw them at once; no more than a few stay unfused.

    https://github.com/vllm-project/vllm-metal/pull/716
    """
    drafter = _made(kind, target)
    [text] = texts([200], seed=8)
    copy = decoding(drafter)
    at = 9
    give(copy, text, 0, 4)
    give(copy, text, 4, at)
    rounds = [(1, True), (3, True), (1, False), (2, False), (4, True), (1, True), (80, False), (5, False), (2, True)]
    for step, drafts in [*rounds, (1, True)]:
        if drafts:
            [draft] = copy.propose([view_of(text[: at + 1], STEPS)], always)
            fresh, _ = _drafting(drafter, text, at)
            assert draft.tokens == fresh.tokens
            assert draft.confidence == pytest.approx(fresh.confidence, rel=1e-6)
        give(copy, text, at, at + step)
        at += step
        copy.audit()
        assert copy._rows._buffer.rows(1) <= chain_rows.WAITING_ROWS
    copy.release(1)
    copy.audit()
    assert copy._rows._cache.used == 0
    assert copy._rows._paired == {}


@pytest.mark.parametrize("kind", USUAL)
def test_rows_cut_back_are_computed_anew(kind, target):
    """A conversation that goes on from fewer rows: what was held beyond is void, and the row before the cut gets the
    token that now stands behind it, whether or not others came between.
    """
    drafter = _made(kind, target)
    first, second = texts([40, 40], seed=9)
    for cut, end in ((12, 25), (12, 12), (30, 33), (1, 1)):
        later = [*first[:cut], *second[cut:]]
        copy = decoding(drafter)
        give(copy, first, 0, 30)
        copy.propose([view_of(first[:31], 3)], always)
        copy.commit([Accepted(1, cut, cut, None)])
        if end > cut:
            give(copy, later, cut, end)
        [draft] = copy.propose([view_of(later[: end + 1], 3)], always)
        fresh, _ = _drafting(drafter, later, end, k=3)
        assert draft.tokens == fresh.tokens
        assert draft.confidence == pytest.approx(fresh.confidence, rel=1e-6)


def test_a_request_with_a_hole_in_its_rows_is_not_drafted_for(target):
    """State dropped half-way cannot be rebuilt without the features: nothing is proposed, and nothing piles up."""
    copy = decoding(_made("eagle3", target))
    [text] = texts([40], seed=9)
    give(copy, text, 0, 10)
    copy.release(1)
    give(copy, text, 10, 12)
    [draft] = copy.propose([view_of(text[:13], 4)], always)
    assert draft.tokens == []
    assert not draft.invalid
    assert copy._rows._buffer.rows(1) == 0


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3-pruned"])
def test_drafts_of_a_batch_are_those_of_each_alone(kind, target):
    """Different K, lengths and sampling in one call, one of them without rows."""
    drafter = _made(kind, target)
    sequences = texts([30, 8, 21], seed=4)
    samplings = [Sampling(temperature=0), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.0, top_k=5)]
    ks = [5, 1, 3]
    together = decoding(drafter)
    views = []
    for i, (tokens, sampling, k) in enumerate(zip(sequences, samplings, ks, strict=True)):
        give(together, tokens, 0, len(tokens) - 1, request_id=i)
        views.append(view_of(tokens, k, request_id=i, sampling=sampling))
    drafts = together.propose([view_of([1, 2], 4, request_id=9), *views], always)
    assert drafts[0].tokens == []
    for i, view in enumerate(views):
        alone = decoding(drafter)
        give(alone, sequences[i], 0, len(sequences[i]) - 1, request_id=i)
        [draft] = alone.propose([view], always)
        assert draft.tokens == drafts[i + 1].tokens
        assert len(draft.tokens) == ks[i]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_of_k_costs_one_row_and_k_minus_one_more(kind, target, monkeypatch):
    """The layer runs K times a round, on one row per request; rows that were only missed get keys and values in passes
    of bounded size, each once.
    """
    monkeypatch.setattr(chain_rows, "INGEST_ROWS", 16)
    copy = decoding(_made(kind, target))
    [text] = texts([50], seed=2)
    give(copy, text, 0, 40)
    layer, keys = [], []
    copy.network.register_forward_pre_hook(lambda _, args: layer.append(len(args[0])))
    copy.network.attention.k_proj.register_forward_pre_hook(lambda _, args: keys.append(len(args[0])))
    copy.propose([view_of(text[:41], 4)], always)
    assert layer == [1] * 4
    assert keys == [16, 16, 7, *[1] * 4]
    layer.clear()
    keys.clear()
    give(copy, text, 40, 43)
    copy.propose([view_of(text[:44], 2)], always)
    assert layer == [1, 1]
    assert keys == [2, 1, 1]  # two of three accepted rows, then the anchor's and one of the draft


def test_drafting_stops_where_it_is_told_to(target):
    """`keep_drafting` sees each slot's top probability before its token is drawn; where it declines, the draft ends."""
    drafter = _made("eagle3", target)
    [text] = texts([20], seed=2)
    copy = decoding(drafter)
    give(copy, text, 0, 19)
    asked = []

    def keep(view, k, confidence):
        asked.append((k, confidence))
        return k <= 2

    [draft], seen = _watched_with(copy, [view_of(text, 4)], keep)
    assert [k for k, _ in asked] == [1, 2, 3]
    assert len(draft.tokens) == 2
    tops = [float(torch.softmax(logits[0], -1).max()) for logits in seen]
    assert [c for _, c in asked] == pytest.approx(tops, rel=1e-5)
    assert draft.confidence == [c for _, c in asked][:2]


def _watched_with(copy, views, keep):
    seen, original = [], copy.vocabulary.to_target
    copy.vocabulary.to_target = lambda logits: seen.append(original(logits)) or seen[-1]
    try:
        return copy.propose(views, keep), seen
    finally:
        del copy.vocabulary.to_target


# ------------------------------------------------------------------------------------------------------------- training


def test_taught_rows_have_a_learned_token_to_predict(target):
    """Row i, step t is taught if token i + 2 + t is in the sequence and under the loss mask; the last row with a token
    behind it has none to predict.
    """
    batch = batch_of(target, texts([6, 4, 2], seed=1), (4,), learned_from=3)
    yes = {(i, t) for i, t in itertools.product(range(12), range(3)) if taught(batch, 3)[i, t]}
    # First text: tokens 3, 4, 5 are learned. Second: its token 3, packed row 9. Third: none.
    assert yes == {(i, t) for i in range(6) for t in range(3) if i + 2 + t in (3, 4, 5)} | {(7, 0), (6, 1)}


@torch.no_grad()
def _naive_losses(drafter, batch, steps) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Soft cross entropy, acceptance and hard cross entropy of every taught (row, step), one at a time."""
    out = {}
    mask = taught(batch, steps)
    for i, t in mask.nonzero().tolist():
        logits = _training_logits(drafter, batch, [i], t + 1)[0, t]
        teacher = drafter.target.logits(drafter.target.final_norm(batch.last[i + 1 + t])).softmax(-1)
        log_draft = logits.log_softmax(-1)
        ids = torch.arange(VOCAB) if drafter.vocabulary.kept is None else drafter.vocabulary.kept
        label = int(batch.tokens[i + 2 + t])
        out[i, t] = (
            -float((teacher[ids] * log_draft[ids]).sum()),
            float(torch.minimum(teacher, log_draft.exp()).sum()),
            -float(log_draft[label]) if label in ids else 0.0,
        )
    return out


@pytest.mark.parametrize("kind", ["eagle", "eagle-bias-pruned", "eagle3", "eagle3-pruned"])
@pytest.mark.parametrize("ce", ["soft", "hard"])
def test_the_objective_is_the_plain_sum_over_taught_rows(kind, ce, target):
    """Against a loop over rows and steps: value and metrics. The teacher's law at the kept ids is not renormalised."""
    drafter = _made(kind, target)
    drafter.settings = drafter.settings.model_copy(update={"ce": ce, "feature_noise": 0.0})
    batch = batch_of(target, texts([12, 8], seed=6), drafter.taps, learned_from=4)
    steps = 1 if isinstance(drafter, Eagle) else 3
    naive = _naive_losses(drafter, batch, steps)
    exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
    losses = drafter.losses(batch, exercise, 0.5)
    column = 0 if ce == "soft" else 2
    expected = sum(0.8**t * values[column] for (_, t), values in naive.items())
    if isinstance(drafter, Eagle):
        assert exercise.weight == len(naive)
        normed = target.final_norm(batch.last)
        hidden = _unroll(drafter, batch).hidden(torch.tensor([i for i, _ in naive]), 1)[:, 0]
        difference = (hidden - normed[[i + 1 for i, _ in naive]]).abs()
        smooth = torch.where(difference < 1, difference.square() / 2, difference - 0.5)
        expected = 0.1 * expected + float(smooth.mean(-1).sum().detach())
    else:
        assert exercise.weight == 20
    assert float(losses.total.detach()) == pytest.approx(expected, rel=1e-4)
    for t in range(steps):
        mine = [values for (_, step), values in naive.items() if step == t]
        assert losses.metrics[f"teacher_forced_acceptance@{t + 1}"] == (
            pytest.approx(sum(a for _, a, _ in mine), rel=1e-4),
            len(mine),
        )
        assert losses.metrics[f"soft_ce@{t + 1}"][0] == pytest.approx(sum(s for s, _, _ in mine), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_neither_value_nor_gradients(kind, target, monkeypatch):
    """Rows computed 3 at a time, and again in the backward pass, against all at once."""
    drafter = _made(kind, target)
    batch = batch_of(target, texts([25, 14], seed=6), drafter.taps, learned_from=2)
    results = []
    for rows in (3, 1000):
        monkeypatch.setattr("forerun.drafters.chain.lesson.rows_per_chunk", lambda *_, rows=rows: rows)
        drafter.network.zero_grad()
        exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
        total = drafter.losses(batch, exercise, 0.5).total
        total.backward()
        results.append([total.detach(), *[p.grad.clone() for p in drafter.network.parameters()]])
    for chunked, dense in zip(*results, strict=True):
        torch.testing.assert_close(chunked, dense, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        evaluated = drafter.losses(batch, drafter.prepare(batch, torch.Generator().manual_seed(0)), 0.5)
    assert torch.equal(evaluated.total, results[1][0])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_mixed_precision_learns_nearly_the_same(kind, target):
    """Under autocast to bfloat16 the loss is within a percent of float32's, and every gradient is finite."""
    drafter = _made(kind, target)
    drafter.network.float()
    batch = batch_of(target, texts([25, 14], seed=6), drafter.taps, learned_from=2)
    totals = []
    for mixed in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            total = drafter.losses(batch, drafter.prepare(batch, torch.Generator().manual_seed(0)), 0.5).total
        totals.append(float(total.detach()))
    total.backward()
    assert totals[1] == pytest.approx(totals[0], rel=0.01)
    assert totals[1] != totals[0]
    assert all(p.grad.isfinite().all() for p in drafter.network.parameters())


def test_a_chunk_is_as_large_as_its_logits_and_scores_allow(target):
    """Rows of a chunk shrink with steps, ids and the rows they are scored against, which are held for every step: those
    of all sequences that the chunk lies in, and of the untaught rows between its own."""
    from forerun.drafters.chain.unroll import rows_per_chunk

    drafter = _made("eagle3-pruned", target)

    def rows(steps, lengths, known=None, kept=slice(None)):
        total = sum(lengths)
        empty = torch.zeros(total, 1)
        batch = TrainingBatch(empty[:, 0].long(), lengths, empty[:, 0] > 0, empty, empty, known)
        return rows_per_chunk(drafter, batch, torch.arange(total)[kept], steps)

    budget = (256 << 20) / 16
    assert rows(7, [500, 100]) == int(budget / (7 * (60 + 2 * 600) + VOCAB))
    assert rows(7, [500, 100], torch.zeros(600)) == int(budget / (7 * (60 + 2 * 600) + 60))
    assert rows(7, [500, 100], kept=slice(500, None)) == int(budget / (7 * (60 + 2 * 100) + VOCAB))
    assert rows(1, [500, 100]) > 3 * rows(7, [500, 100])
    for kept in (slice(None), slice(None, None, 4)):
        short = rows(7, [10] * 5000, kept=kept)
        span = short * (kept.step or 1)
        assert short * (7 * (60 + 2 * span) + VOCAB) == pytest.approx(budget, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind, target):
    """One step reaches every weight of the network, from the start as it is designed."""
    cls, settings = KINDS[kind]
    drafter = cls.design(target, settings, plan_for(target))
    batch = batch_of(target, texts([40, 30], seed=6), drafter.taps)
    drafter.network.double()
    drafter.losses(batch, drafter.prepare(batch, torch.Generator().manual_seed(0)), 0.9).total.backward()
    silent = {n for n, p in drafter.network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    # These start before weights that are zero: the embedding's half of queries, keys and values; all taps but the last.
    assert silent <= {"layers.0.input_layernorm.weight", "fc_norm.0.weight", "fc_norm.1.weight"}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_batch_with_nothing_to_teach_weighs_in_without_harm(kind, target):
    """Texts too short or wholly outside the loss mask: a loss of 0 whose gradients are 0."""
    drafter = _made(kind, target)
    batch = batch_of(target, texts([2, 8], seed=6), drafter.taps, learned_from=50)
    losses = drafter.losses(batch, drafter.prepare(batch, torch.Generator().manual_seed(0)), 0.0)
    losses.total.backward()
    assert float(losses.total.detach()) == 0
    assert all(p.grad is None or float(p.grad.abs().sum()) == 0 for p in drafter.network.parameters())


# --------------------------------------------------------------------------------------------------------------- start


def test_the_head_is_read_off_by_applying_it(target):
    """`head_rows` are the rows of the target's head, of all ids and of the kept ones."""
    weight = target.model.lm_head.weight
    torch.testing.assert_close(head_rows(target, DraftVocabulary(VOCAB)), weight.float())
    kept = torch.tensor([3, 7, 200])
    torch.testing.assert_close(head_rows(target, DraftVocabulary(VOCAB, kept)), weight[kept].float())


def test_a_layer_takes_over_what_fits(target):
    """By name and shape; twice the columns take the weight on the feature's half; without head norms no queries and
    keys of a family that has them.
    """

    class Layer(torch.nn.Module):
        def __init__(self, model_type, input_size=None):
            super().__init__()
            self.self_attn = Attention(like_target(target, model_type, 1, None), input_size)

    given = {
        "self_attn.q_proj.weight": torch.randn(32, 32), "self_attn.v_proj.weight": torch.randn(16, 32),
        "self_attn.o_proj.weight": torch.randn(9, 9), "mlp.up_proj.weight": torch.randn(2, 2),
        "self_attn.q_norm.weight": torch.randn(16),
    }  # fmt: skip
    layer = Layer("qwen3", 64)
    start = layer.self_attn.o_proj.weight.clone()
    take_over(layer, given)
    assert torch.equal(layer.self_attn.q_proj.weight[:, 32:], given["self_attn.q_proj.weight"])
    assert (layer.self_attn.q_proj.weight[:, :32] == 0).all()
    assert torch.equal(layer.self_attn.q_norm.weight, given["self_attn.q_norm.weight"])
    assert torch.equal(layer.self_attn.o_proj.weight, start)
    plain = Layer("llama")
    start = plain.self_attn.q_proj.weight.clone()
    take_over(plain, given)
    assert torch.equal(plain.self_attn.q_proj.weight, start)
    assert torch.equal(plain.self_attn.v_proj.weight, given["self_attn.v_proj.weight"])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_start_is_a_function_of_seed_and_target(kind, target):
    """The same twice; another seed is another start; a table has no layers to give and starts at random."""
    cls, settings = KINDS[kind]

    def weights(seed, target=target, **options):
        drafter = cls.design(target, type(settings)(**options), plan_for(target, seed))
        return torch.cat([p.detach().flatten() for p in drafter.network.parameters()])

    for init in ("fitted", "target", "random"):
        assert torch.equal(weights(1, init=init), weights(1, init=init))
    assert not torch.equal(weights(1, init="random"), weights(2, init="random"))
    assert not torch.equal(weights(1, init="target"), weights(1, init="random"))
    table = history_model(7)
    assert torch.equal(weights(1, table, init="target"), weights(1, table, init="random"))
    assert weights(1, table).isfinite().all()


def test_features_of_any_chunks_are_one_features(target):
    """Fusing in pieces is fusing at once: the store of a request holds what one pass over its features gives."""
    drafter = _made("eagle3", target)
    [text] = texts([90], seed=4)
    copy = decoding(drafter)
    for start, end in ((0, 3), (3, 70), (70, 89)):
        give(copy, text, start, end)
    copy.propose([view_of(text, 1)], always)
    slots = copy._rows._cache.reserve(1, 89)
    held = torch.cat([copy._rows._features[block * 16 : block * 16 + 16] for block in slots])[:89]
    whole = copy.fuse(features_of(target, text[:89], drafter.taps))
    _close(held, whole)
