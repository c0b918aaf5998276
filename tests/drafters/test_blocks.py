"""DFlash and DSpark: training and decoding are one function, and a block sees what it may see and nothing else."""

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
from forerun.drafters.dflash import DFlash
from forerun.drafters.dflash.blocks import Blocks, draw_anchors, draw_lengths, position_weights, taught
from forerun.drafters.dflash.config import DFlashSettings
from forerun.drafters.dflash.loss import hidden_states
from forerun.drafters.dspark import DSpark
from forerun.drafters.dspark.config import DSparkSettings
from forerun.drafters.dspark.decode import previous_tokens
from forerun.errors import OptionError
from forerun.sampling import Row, distribution

TAPS = (1, 2, 3)
KINDS = {
    "dflash": (DFlash, DFlashSettings(block_size=5, layers=2, taps=TAPS)),
    "dflash-from-anchor": (DFlash, DFlashSettings(block_size=4, layers=2, taps=TAPS, sample_from_anchor=True)),
    "dspark": (DSpark, DSparkSettings(block_size=4, layers=2, taps=TAPS, markov_rank=8)),
    "dspark-gated": (
        DSpark, DSparkSettings(block_size=4, layers=2, taps=TAPS, markov_rank=8, markov_head_type="gated")
    ),
    "dspark-rnn": (DSpark, DSparkSettings(block_size=4, layers=1, taps=TAPS, markov_rank=8, markov_head_type="rnn")),
    "dspark-fill-in": (
        DSpark, DSparkSettings(block_size=5, layers=2, taps=TAPS, markov_rank=8, sample_from_anchor=False)
    ),
    "dspark-bare": (
        DSpark, DSparkSettings(block_size=4, layers=2, taps=TAPS, markov_rank=0, enable_confidence_head=False)
    ),
    "dspark-pruned": (DSpark, DSparkSettings(block_size=4, layers=2, taps=TAPS, markov_rank=8, draft_vocab_size=50)),
    "dspark-plain-confidence": (
        DSpark,
        DSparkSettings(block_size=4, layers=2, taps=TAPS, markov_rank=8, confidence_head_with_markov=False),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def _made(kind, target, seed=0):
    cls, settings = KINDS[kind]
    return shaken(cls.design(target, settings, plan_for(target, seed)))


def _training_logits(drafter, batch, anchors, lengths=None):
    """[B, K, V] logits of the training forward at these anchors (one list per sequence), teacher forced."""
    cut = None if lengths is None else torch.tensor(lengths)
    blocks = Blocks([torch.tensor(own) for own in anchors], batch.starts, drafter.config.block_size, cut)
    backbone = drafter.backbone if isinstance(drafter, DFlash) else drafter.net.backbone
    hidden = hidden_states(backbone, batch, blocks, drafter.config, drafter.target.embed)
    logits, confidence = drafter.target_head(hidden), None
    if isinstance(drafter, DSpark):
        previous = previous_tokens(batch, blocks, hidden.shape[1])
        if drafter.net.markov_head is not None:
            logits = logits + drafter.net.markov_head.bias(drafter.net.markov_head.along(previous, hidden))
        if drafter.net.confidence_head is not None:
            confidence = drafter.net.confidence(hidden, previous).sigmoid()
    return drafter.vocabulary.to_target(logits), confidence


def _drafting(drafter, tokens, anchor, k=None):
    """Greedy draft at an anchor from a fresh drafter, with logits of every slot as it was drawn."""
    copy = decoding(drafter)
    give(copy, tokens, 0, anchor)
    seen = []
    original = copy.vocabulary.to_target

    def keep(logits):
        out = original(logits)
        seen.append(out)
        return out

    copy.vocabulary.to_target = keep
    try:
        [draft] = copy.propose([view_of(tokens[: anchor + 1], k or drafter.max_draft)], always)
    finally:
        del copy.vocabulary.to_target
    return draft, torch.cat(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_of_a_block_are_the_inference_logits_where_the_context_ends(kind, target):
    """At anchor i the training forward and the drafter see the same: same logits, same confidences."""
    drafter = _made(kind, target)
    [text] = texts([40], seed=3)
    for anchor in (1, 7, 22):
        draft, seen = _drafting(drafter, text, anchor)
        path = [*text[: anchor + 1], *draft.tokens]
        batch = batch_of(target, [[*path, *[0] * 4]], TAPS)  # teacher forcing along the draft's own tokens
        logits, confidence = _training_logits(drafter, batch, [[anchor]])
        assert len(draft.tokens) == drafter.max_draft
        torch.testing.assert_close(seen, logits[0], rtol=1e-4, atol=1e-4)
        if confidence is not None:
            torch.testing.assert_close(torch.tensor(draft.confidence), confidence[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark-rnn"])
def test_a_shorter_block_is_trained_as_it_decodes(kind, target):
    """Cut to the slots of a smaller K, the training forward gives the inference logits of that K."""
    drafter = _made(kind, target)
    [text] = texts([40], seed=3)
    for k in (1, 2, drafter.max_draft):
        draft, seen = _drafting(drafter, text, 12, k)
        batch = batch_of(target, [[*text[:13], *draft.tokens, *[0] * 6]], TAPS)
        slots = k + drafter.config.first_slot
        logits, _ = _training_logits(drafter, batch, [[12, 13]], lengths=[slots, drafter.config.block_size])
        torch.testing.assert_close(seen, logits[0, :k], rtol=1e-4, atol=1e-4)
        weights = taught(batch, Blocks([torch.tensor([12])], [0], drafter.config.block_size, torch.tensor([slots])), 4)
        assert weights[0].tolist() == [i < k for i in range(4)]


def test_lengths_of_blocks_are_drawn_as_asked():
    """Whole blocks but for a share, whose lengths are uniform from the least that drafts something."""
    generator = torch.Generator().manual_seed(0)
    lengths = draw_lengths(4000, 5, 2, 0.4, generator)
    counts = torch.bincount(lengths, minlength=6)
    assert counts[:2].sum() == 0
    # 400 short blocks of each length expected, standard deviation about 19
    assert (counts[2:5] - 400).abs().max() < 100
    assert (draw_lengths(100, 5, 2, 0.0, generator) == 5).all()


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark-rnn"])
def test_a_block_sees_the_context_before_its_anchor_and_itself_only(kind, target):
    """Other anchors beside it, other sequences packed with it, another order and other tokens behind change nothing."""
    drafter = _made(kind, target)
    one, two, three = texts([30, 17, 9], seed=5)
    alone, _ = _training_logits(drafter, batch_of(target, [one], TAPS), [[11]])
    crowd, _ = _training_logits(
        drafter, batch_of(target, [two, one, three], TAPS), [[2, 3], [0, 5, 10, 11, 12, 20], [4]]
    )
    torch.testing.assert_close(crowd[5], alone[0], rtol=1e-4, atol=1e-5)
    known = 11 + 1 + (drafter.max_draft - 1 if kind.startswith("dspark") else 0)  # the Markov head is shown x_<k
    other = [*one[:known], *reversed(one[known:])]
    changed, _ = _training_logits(drafter, batch_of(target, [other], TAPS), [[11]])
    torch.testing.assert_close(changed[0], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_every_context_row_counts(kind, target):
    """The control of the test above: a feature before the anchor changed, and the block changes."""
    drafter = _made(kind, target)
    [text] = texts([30], seed=5)
    batch = batch_of(target, [text], TAPS)
    logits, _ = _training_logits(drafter, batch, [[11]])
    for row in (0, 5, 10):
        batch.features[row] += 1.0
        moved, _ = _training_logits(drafter, batch, [[11]])
        assert (moved - logits).abs().max() > 1e-4
        batch.features[row] -= 1.0


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark-fill-in"])
def test_context_added_in_pieces_is_context_computed_anew(kind, target):
    """Rows that came in chunks, over rounds with drafts, without (K = 0), and after rejections give the draft of a
    fresh drafter that saw them at once (CR-4: no hole).
    """
    drafter = _made(kind, target)
    [text] = texts([60], seed=8)
    copy = decoding(drafter)
    at = 9
    give(copy, text, 0, 4)
    give(copy, text, 4, at)
    for step, drafts in ((1, True), (3, True), (1, False), (2, False), (4, True), (1, True), (5, False), (2, True)):
        if drafts:
            [draft] = copy.propose([view_of(text[: at + 1], drafter.max_draft)], always)
            fresh, _ = _drafting(drafter, text, at)
            assert draft.tokens == fresh.tokens
            assert draft.confidence == pytest.approx(fresh.confidence, rel=1e-4)
        give(copy, text, at, at + step)
        at += step
        copy.audit()
    copy.release(1)
    copy.audit()


def test_rows_cut_back_are_computed_anew(target):
    """A conversation that goes on from fewer rows: what was held beyond is void."""
    drafter = _made("dspark", target)
    first, second = texts([40, 40], seed=9)
    second[:12] = first[:12]
    copy = decoding(drafter)
    give(copy, first, 0, 30)
    copy.propose([view_of(first[:31], 4)], always)
    copy.commit([Accepted(1, 12, 12, None)])
    give(copy, second, 12, 25)
    [draft] = copy.propose([view_of(second[:26], 4)], always)
    fresh, _ = _drafting(drafter, second, 25)
    assert draft.tokens == fresh.tokens


def test_a_request_with_a_hole_in_its_context_is_not_drafted_for(target):
    """State dropped half-way cannot be rebuilt without the features: nothing is proposed, and nothing piles up."""
    copy = decoding(_made("dspark", target))
    [text] = texts([40], seed=9)
    give(copy, text, 0, 10)
    copy.release(1)
    give(copy, text, 10, 12)
    [draft] = copy.propose([view_of(text[:13], 4)], always)
    assert draft.tokens == []
    assert copy.context._buffer.rows(1) == 0


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark-rnn", "dspark-pruned"])
def test_drafts_of_a_batch_are_those_of_each_alone(kind, target):
    """Different K, lengths and sampling in one call."""
    drafter = _made(kind, target)
    sequences = texts([30, 8, 21], seed=4)
    samplings = [Sampling(temperature=0), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.0, top_k=5)]
    ks = [drafter.max_draft, 1, 2]
    together = decoding(drafter)
    views = []
    for i, (tokens, sampling, k) in enumerate(zip(sequences, samplings, ks, strict=True)):
        give(together, tokens, 0, len(tokens) - 1, request_id=i)
        views.append(view_of(tokens, k, request_id=i, sampling=sampling))
    drafts = together.propose(views, always)
    for i, view in enumerate(views):
        alone = decoding(drafter)
        give(alone, sequences[i], 0, len(sequences[i]) - 1, request_id=i)
        [draft] = alone.propose([view], always)
        assert draft.tokens == drafts[i].tokens
        assert len(draft.tokens) == ks[i]


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark-pruned"])
def test_nu_4_the_reported_law_is_the_one_drawn_from(kind, target):
    """Each row of `probs` is the processed law of the slot's logits, zero where the drafter keeps no id.

    https://github.com/deepseek-ai/DeepSpec/issues/31
    """
    drafter = _made(kind, target)
    [text] = texts([20], seed=2)
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    copy = decoding(drafter)
    give(copy, text, 0, 19)
    [draft] = copy.propose([view_of(text, 4, sampling=sampling)], always)
    batch = batch_of(target, [[*text, *draft.tokens, 0, 0]], TAPS)
    logits, _ = _training_logits(drafter, batch, [[19]])
    rows = [Row(sampling, text, 1, draft.tokens[:k]) for k in range(4)]
    torch.testing.assert_close(draft.probs, distribution(logits[0, :4], rows), rtol=1e-4, atol=1e-6)
    if drafter.vocabulary.kept is not None:
        lost = torch.ones(VOCAB, dtype=torch.bool)
        lost[drafter.vocabulary.kept] = False
        assert (draft.probs[:, lost] == 0).all()


def test_ts_4_a_smaller_k_runs_fewer_slots(target):
    """TS-4: K of a plan is the number of slots that run (and one more where the anchor's is not used); the law is that
    of the shorter block; no more than the block can be asked for.

    https://github.com/vllm-project/vllm/issues/56792
    """
    [text] = texts([20], seed=2)
    for kind, extra in (("dspark", 0), ("dflash", 1)):
        copy = decoding(_made(kind, target))
        give(copy, text, 0, 19)
        backbone = copy.network.backbone if kind == "dspark" else copy.network
        rows = []
        handle = backbone.norm.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(len(args[0])))
        for k in (1, 3):
            copy.propose([view_of(text, k)], always)
        handle.remove()
        assert rows == [1 + extra, 3 + extra]
        assert copy.max_draft == 4


def test_ts_6_the_markov_head_is_given_the_token_before(target):
    """TS-6: slot j sees the token of slot j - 1, slot 0 the anchor: with W2 W1 a permutation table, drafts follow it.

    https://github.com/vllm-project/vllm/issues/51009
    """
    drafter = _made("dspark", target)
    settings = DSparkSettings(block_size=4, layers=1, taps=TAPS, markov_rank=VOCAB)
    drafter = DSpark.design(target, settings, plan_for(target))
    follows = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        drafter.net.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.net.markov_head.markov_w2.weight.zero_()
        drafter.net.markov_head.markov_w2.weight[follows, torch.arange(VOCAB)] = 1e4
    [text] = texts([12], seed=2)
    draft, _ = _drafting(drafter, text, 11)
    expected = [text[11]]
    for _ in range(4):
        expected.append(int(follows[expected[-1]]))
    assert draft.tokens == expected[1:]


def test_ts_5_slots_of_a_block_see_each_other_both_ways(target):
    """TS-5: full attention within a block: the first slot's hidden state depends on how many slots follow it, in
    training and in decoding alike.

    https://github.com/vllm-project/vllm/pull/56692
    """
    drafter = _made("dspark-bare", target)
    [text] = texts([20], seed=2)
    _, short = _drafting(drafter, text, 15, k=1)
    _, long = _drafting(drafter, text, 15)
    assert (short[0] - long[0]).abs().max() > 1e-3


def test_dspark_with_everything_off_is_dflash(target):
    """TS-4: heads off, `sample_from_anchor` false and cross entropy alone: parameters, block logits and loss are those
    of dflash, tensor by tensor.
    """
    shared = {
        "block_size": 5,
        "layers": 2,
        "taps": TAPS,
        "sample_from_anchor": False,
        "ce_weight": 1.0,
        "l1_weight": 0.0,
    }
    spark = DSparkSettings(**shared, markov_rank=0, enable_confidence_head=False)
    flash = DFlashSettings(**shared)
    pair = [DSpark.design(target, spark, plan_for(target)), DFlash.design(target, flash, plan_for(target))]
    states = [{n.removeprefix("backbone."): p for n, p in d.network.named_parameters()} for d in pair]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    batch = batch_of(target, texts([30, 20], seed=6), TAPS)
    losses = []
    for drafter in pair:
        exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
        losses.append((exercise.weight, drafter.losses(batch, exercise, 0.5)))
    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1].total, losses[1][1].total)
    logits = [_training_logits(drafter, batch, [[3, 9], [2]])[0] for drafter in pair]
    assert torch.equal(*logits)


# ------------------------------------------------------------------------------------------------------------- anchors


def test_anchors_are_drawn_uniformly_under_the_mask_and_anew_each_time(target):
    """Token i and i + 1 under the mask, no anchor twice, every candidate equally often."""
    batch = batch_of(target, texts([20, 7], seed=1), TAPS, learned_from=5)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(20)
    for _ in range(600):
        first, second = draw_anchors(batch, 3, generator)
        assert first.tolist() == sorted(set(first.tolist()))
        assert second.tolist() == [5]  # 5 and 6 are learned; 6 has nothing behind it
        counts[first] += 1
    assert counts[:5].sum() == 0
    assert counts[19] == 0
    # 14 candidates, 3 of them 600 times: 128.6 each, standard deviation about 10; 5 of those are never seen.
    assert (counts[5:19] - 600 * 3 / 14).abs().max() < 50


def test_a_block_never_teaches_across_a_turn(target):
    """Taught positions are the run of learned tokens behind the anchor, within the sequence."""
    batch = batch_of(target, texts([10, 6], seed=1), TAPS)
    batch.loss_mask[6] = False
    blocks = Blocks([torch.tensor([2, 4, 8]), torch.tensor([1, 4])], batch.starts, 4)
    assert taught(batch, blocks, 4).tolist() == [
        [True, True, True, False], [True, False, False, False], [True, False, False, False],
        [True, True, True, True], [True, False, False, False],
    ]  # fmt: skip
    weights = position_weights(taught(batch, blocks, 4), gamma=2.0)
    torch.testing.assert_close(weights[0], torch.tensor([1, 0.6065307, 0.3678794, 0.0]))


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark-rnn"])
@pytest.mark.parametrize("lengths", [[30, 2, 20], [1, 30], [2, 1]])
def test_sequences_without_an_anchor_teach_nothing_and_break_nothing(kind, lengths, target):
    """Nothing under the mask, or too short for one draft token: the others teach what they teach alone."""
    drafter = _made(kind, target)
    batch = batch_of(target, texts(lengths, seed=6), TAPS, learned_from=1)
    exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
    losses = drafter.losses(batch, exercise, 0.5)
    losses.total.backward()
    assert losses.total.isfinite()
    assert (exercise.weight > 0) == any(length > 2 for length in lengths)


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"taps": (2, 1)}, "taps"),
        ({"taps": (0, 1)}, "taps"),
        ({"taps": (1, 9)}, "taps"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_named(settings, option, target):
    """An OptionError with the option's name, before anything is trained."""
    with pytest.raises(OptionError, match=option):
        DSpark.design(target, DSparkSettings(**settings), plan_for(target))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"block_size": 1, "sample_from_anchor": False}, "block_size"),
        ({"ce_weight": 0, "l1_weight": 0}, "ce_weight"),
    ],
)
def test_settings_that_teach_nothing_are_named(settings, option):
    """Refused where they are made, with the option's name (pydantic's error has ours for its cause)."""
    with pytest.raises(ValueError, match=option) as caught:
        DSparkSettings(**settings)
    assert isinstance(caught.value.errors()[0]["ctx"]["error"], OptionError)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind, target):
    """One step reaches every weight of the network."""
    drafter = _made(kind, target)
    batch = batch_of(target, texts([40, 30], seed=6), TAPS)
    exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
    drafter.losses(batch, exercise, 0.9).total.backward()
    silent = [n for n, p in drafter.network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


def test_the_teachers_law_is_the_targets_own(target):
    """The teacher of position k is the target's law after token s + k - 1."""
    drafter = _made("dspark", target)
    [text] = texts([30], seed=6)
    batch = batch_of(target, [text], TAPS)
    for anchor, k in itertools.product((3, 10), (1, 4)):
        target.allocate(8)
        from forerun.target.base import Batch, Segment

        logits = target.forward(Batch([Segment(text[: anchor + k], 0, [0, 1], 1)])).logits
        probs = drafter.target_probs(batch.last[anchor + k - 1 : anchor + k])
        torch.testing.assert_close(probs, torch.softmax(logits, -1), rtol=1e-4, atol=1e-6)


def test_a_known_normalizer_spares_the_full_head(target):
    """A pruned vocabulary's teacher is the same with the stored log-sum-exp as with the full head."""
    drafter = _made("dspark-pruned", target)
    last = features_of(target, texts([12])[0], (target.num_layers,))
    full = drafter.target_probs(last)
    known = target.logits(target.final_norm(last)).float().logsumexp(-1)
    torch.testing.assert_close(drafter.target_probs(last, known), full)
    assert (full.sum(-1) < 1).all()
