"""Starts that are fitted to the data: the regression, what it makes of a backbone, and the Markov head's pairs."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from drafters.learning import VOCAB, batch_of, plan_for, texts, tiny_target
from forerun.drafters.dflash import DFlash
from forerun.drafters.dflash.blocks import Blocks
from forerun.drafters.dflash.config import DFlashSettings
from forerun.drafters.dspark import DSpark
from forerun.drafters.dspark.bigrams import as_states, fit_bigrams
from forerun.drafters.dspark.config import DSparkSettings
from forerun.drafters.dspark.network import MarkovHead
from forerun.drafters.eagle import Eagle
from forerun.drafters.eagle.config import EagleSettings
from forerun.drafters.eagle3 import Eagle3
from forerun.drafters.eagle3.config import Eagle3Settings
from forerun.drafters.layers import Attention, LayerConfig, Rotary
from forerun.drafters.learned import LearnedDrafter, Material, TrainingBatch
from forerun.drafters.learned.aim import look_back
from forerun.drafters.learned.fitting import SHARES, Metric, Regression, reduced, rows_to_fit
from forerun.drafters.learned.head import head_rows
from forerun.drafters.vocabulary import DraftVocabulary
from forerun.target.base import Target
from forerun.target.hf import HFTarget
from forerun.target.table import ByteTokenizer
from tiny import qwen3_config

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

TAPS = (1, 3)
DSPARK = {"layers": 2, "taps": TAPS, "block_size": 4, "markov_rank": 8, "anchors": 16}
DFLASH = {"layers": 2, "taps": TAPS, "block_size": 4, "anchors": 16}


@dataclass
class Text:
    token_ids: np.ndarray
    loss_mask: np.ndarray


def cycles(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    """Texts that count upwards in steps of their own, round and round: the past says what comes."""
    generator = torch.Generator().manual_seed(seed)
    starts, steps = (
        torch.randint(0, 240, (count,), generator=generator),
        torch.randint(1, 6, (count,), generator=generator),
    )
    return [[int((start + i * step) % 240) for i in range(length)] for start, step in zip(starts, steps, strict=True)]


def model_like_real_ones() -> Qwen3ForCausalLM:
    """Random, but for what training brings about: states have much in common, and laws are far from uniform."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(4)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(torch.linspace(-1, 1, 32))
        model.lm_head.weight.mul_(3)
    return model


def spoken(count: int, seed: int) -> list[list[int]]:
    """Texts of its own, drawn from its laws."""
    torch.manual_seed(seed)
    begin = torch.randint(0, 250, (count, 4))
    options = {"do_sample": True, "max_new_tokens": 36, "min_new_tokens": 36, "top_k": 0, "pad_token_id": 263}
    texts: list[list[int]] = model_like_real_ones().generate(begin, **options).tolist()
    return texts


def own_target() -> Target:
    target = HFTarget(model_like_real_ones(), ByteTokenizer())
    target.allocate(64)
    return target


def material_of(
    target: Target, sequences: list[list[int]], said: list[str] | None = None, taps: tuple[int, ...] = TAPS
) -> Material:
    own = [Text(np.array(tokens, np.int32), np.arange(len(tokens)) >= 4) for tokens in sequences]
    batches = (batch_of(target, sequences[i : i + 4], taps, 4) for i in range(0, len(sequences), 4))
    return Material(own, batches, 0, (said if said is not None else []).append)


def test_the_regression_finds_what_the_states_follow() -> None:
    """States that follow two directions of the features: two numbers foresee them, the louder one first."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(12, 12, generator=generator)
    features = torch.randn(4000, 12, generator=generator) @ mix + 3
    ways = torch.randn(2, 6, generator=generator) * torch.tensor([[5.0], [1.0]])
    states = (features[:, :2] @ ways)[:, None].expand(-1, len(SHARES), -1) + 7
    seen = Regression()
    for part, wanted in zip(features.split(1000), states.split(1000), strict=True):
        seen.add(part, wanted)
    metric = Metric.of(torch.randn(50, 6, generator=generator), torch.ones(6))
    code = reduced(seen.slopes(), seen.covariance, metric, 5)
    numbers = (features - seen.mean) @ code.read
    assert code.write.shape[0] == 2
    torch.testing.assert_close(numbers.var(0), torch.ones(2), rtol=0.01, atol=0.01)
    assert code.write[0].norm() > code.write[1].norm()
    error = (numbers @ code.write + seen.base[0] - states[:, 0]).square().mean() / states[:, 0].var()
    assert error < 1e-4


def test_rows_are_fitted_within_a_sample() -> None:
    """No row looks before the first token or past the last one of its own sample."""
    target = tiny_target()
    batch = batch_of(target, texts([6, 3, 7]), TAPS, 2)
    assert rows_to_fit(batch).tolist() == [2, 3, 11, 12, 13]


@pytest.mark.parametrize("from_anchor", [True, False])
def test_the_first_slot_that_predicts_looks_at_the_newest_row(from_anchor: bool) -> None:
    target = own_target()
    settings = DFlashSettings(**DFLASH, sample_from_anchor=from_anchor)
    drafter = DFlash.design(target, settings, plan_for(target))
    assert drafter.fit_start(material_of(target, cycles(12)))
    batch = batch_of(target, cycles(1, seed=3), TAPS)
    backbone, anchors = drafter.backbone, torch.arange(4, 30)
    blocks = Blocks([anchors], [0], 4)
    slots = torch.full((len(anchors), 4), drafter.config.mask_token_id)
    slots[:, 0] = batch.tokens[anchors]
    layer = backbone.layers[0]
    normed = layer.input_layernorm(target.embed(slots.flatten()).float())
    turned = backbone.rotary(blocks.positions, torch.float32)
    first = drafter.config.first_slot
    query = layer.self_attn.query(normed, turned).unflatten(0, (-1, 4))[:, first]  # [A, heads, dim]
    inside, _ = layer.self_attn.keys_values(normed, turned)
    outside, _ = layer.self_attn.keys_values(
        backbone.fuse(batch.features), backbone.rotary(batch.positions, torch.float32)
    )
    for row, anchor in enumerate(anchors.tolist()):
        keys = torch.cat([outside[:anchor], inside.unflatten(0, (-1, 4))[row]])
        scores = torch.einsum("hd,khd->hk", query[row], keys.repeat_interleave(query.shape[1] // keys.shape[1], 1))
        assert set(scores.argmax(-1).tolist()) == {anchor - 1}


KINDS = {
    "dflash": (DFlash, DFlashSettings(**DFLASH)),
    "dspark": (DSpark, DSparkSettings(**DSPARK)),
    "eagle": (Eagle, EagleSettings(feature_noise=0.0)),
    "eagle with a bias": (Eagle, EagleSettings(feature_noise=0.0, bias=True)),
    "eagle3": (Eagle3, Eagle3Settings(taps=TAPS, ttt_steps=2)),
    "eagle3 with norms": (Eagle3, Eagle3Settings(taps=TAPS, ttt_steps=2, fc_norm=True, norm_before_residual=True)),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_fitted_start_foresees_other_texts(name: str) -> None:
    """Before any step, on texts it was not fitted to: more is accepted than from other starts."""
    target = own_target()
    kind, settings = KINDS[name]
    own, others, accepted = spoken(100, 1), spoken(8, 2), {}
    for init in ("fitted", "target", "random"):
        drafter = kind.design(target, settings.model_copy(update={"init": init}), plan_for(target))
        assert drafter.fit_start(material_of(target, own, taps=drafter.taps)) == (init == "fitted")
        batch = batch_of(target, others, drafter.taps, 4)
        exercise = drafter.prepare(batch, torch.Generator().manual_seed(0))
        total, weight = drafter.losses(batch, exercise, 0.0).metrics["teacher_forced_acceptance@1"]
        accepted[init] = total / weight
    assert accepted["fitted"] > 1.5 * accepted["random"]
    if drafter.name != "eagle3":  # whose values have room for half of what the token says, here
        assert accepted["fitted"] > 1.1 * accepted["target"]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_head_learns_the_pairs_of_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.drafters.dspark.bigrams.STEPS", 150)
    torch.manual_seed(0)
    head, kept = MarkovHead(50, 40, 16, 12, kind), torch.arange(5, 45)
    follow = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    chain = [0]
    for _ in range(400):
        chain.append(int(follow[chain[-1]]) if len(chain) % 25 else (chain[-1] + 7) % 50)
    said: list[str] = []
    text = Text(np.array(chain, np.int32), np.ones(len(chain), bool))
    assert fit_bigrams(head, Material([text], [], 0, said.append), DraftVocabulary(50, kept))
    before = torch.tensor([t for t in set(chain[:-1]) if int(follow[t]) in kept.tolist()])
    best = head.bias(head.along(before[:, None], torch.zeros(len(before), 1, 16))[:, 0]).argmax(-1)
    assert (kept[best] == follow[before]).float().mean() > 0.9
    assert all(parameter.grad is None for parameter in head.parameters())
    assert "Markov head" in said[0]


def test_without_pairs_the_markov_head_stays_as_it_is() -> None:
    head = MarkovHead(10, 10, 4, 2, "vanilla")
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    text = Text(np.array([1, 2, 3], np.int32), np.zeros(3, bool))
    assert not fit_bigrams(head, Material([text], [], 0, [].append), DraftVocabulary(10))
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())


def test_what_the_markov_head_says_as_states() -> None:
    """Where its logits are those of some state, that state is found."""
    target = tiny_target()
    rows = head_rows(target, DraftVocabulary(VOCAB))
    head = MarkovHead(VOCAB, VOCAB, 32, 4, "vanilla")
    states = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.markov_w2.weight.copy_(rows @ states)
    ids = torch.tensor([3, 9])
    found = as_states(head, rows)(ids)
    torch.testing.assert_close(found, head.markov_w1(ids).detach() @ states.T, rtol=0.02, atol=0.02)


def test_a_target_without_such_a_norm_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr("forerun.drafters.learned.fitting.final_norm_weight", lambda _: None)
    drafter = DFlash.design(target, DFlashSettings(**DFLASH), plan_for(target))
    before = {name: weight.clone() for name, weight in drafter.backbone.state_dict().items()}
    said: list[str] = []
    assert not drafter.fit_start(material_of(target, cycles(4), said))
    assert "random layers" in said[0]
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.backbone.state_dict().items())


@pytest.mark.parametrize(("length", "rows"), [(5, 0), (7, 4)])
def test_samples_that_are_too_short_are_told_of(length: int, rows: int) -> None:
    """From a handful of rows chance decides: weights come out large and worse than random ones."""
    target = tiny_target()
    drafter = DFlash.design(target, DFlashSettings(**DFLASH), plan_for(target))
    said: list[str] = []
    assert not drafter.fit_start(material_of(target, cycles(4, length), said))
    assert f"long enough to fit them to have {rows} rows" in said[-1]


# ------------------------------------------------------------------------------------------------- what it can meet


def finite(drafter: LearnedDrafter) -> bool:
    return all(bool(weight.isfinite().all()) for weight in drafter.network.state_dict().values())


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_batch_without_a_place_for_a_block_will_do(kind: str) -> None:
    """The first one has rows to fit and no two learned tokens in a row, which training would need for an anchor."""
    target = own_target()
    design, settings = KINDS[kind]
    drafter = design.design(target, settings, plan_for(target))
    material = material_of(target, cycles(8))
    first, *others = material.batches
    lonely = replace(first, loss_mask=first.positions % 6 == 5)
    assert drafter.fit_start(replace(material, batches=[lonely, *others]))
    assert finite(drafter)


@pytest.mark.parametrize("name", KINDS)
def test_numbers_that_fail_leave_the_random_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that cannot be factored ends no run: the weights are as they were, and the user is told."""

    def fails(*_: object) -> None:
        raise torch.linalg.LinAlgError("solve: the input matrix is singular\nsee the manual")

    target = own_target()
    kind, settings = KINDS[name]
    drafter = kind.design(target, settings, plan_for(target))
    before = copy.deepcopy(drafter.network.state_dict())
    monkeypatch.setattr(Regression, "slopes", fails)
    said: list[str] = []
    drafter.fit_start(material_of(target, cycles(4), said, drafter.taps))
    assert "fitting them failed (solve: the input matrix is singular)" in said[-1]
    after = drafter.network.state_dict()
    assert all(torch.equal(after[n], before[n]) for n in before if not n.startswith("markov_head"))


def test_weights_that_are_not_finite_leave_the_random_start(monkeypatch: pytest.MonkeyPatch) -> None:
    target = own_target()
    drafter = DFlash.design(target, DFlashSettings(**DFLASH), plan_for(target))
    before = copy.deepcopy(drafter.network.state_dict())
    monkeypatch.setattr("forerun.drafters.dflash.start.CONSTANT", float("nan"))
    said: list[str] = []
    assert not drafter.fit_start(material_of(target, cycles(4), said))
    assert "not finite" in said[-1]
    assert all(torch.equal(weight, before[name]) for name, weight in drafter.network.state_dict().items())


@pytest.mark.parametrize("name", ["dflash", "dspark", "eagle3"])
def test_features_without_a_mean_are_told_of(name: str) -> None:
    """Attention finds rows by what all of them have in common."""
    target = own_target()
    kind, settings = KINDS[name]
    drafter = kind.design(target, settings, plan_for(target))
    said: list[str] = []
    material = material_of(target, cycles(4), said, drafter.taps)

    def centred(batch: TrainingBatch) -> TrainingBatch:
        known = batch.features[rows_to_fit(batch) - 1]
        return replace(batch, features=(batch.features - known.mean(0)) / known.std(0).clamp(min=1e-3))

    nothing = torch.zeros_like(target.embed(torch.arange(VOCAB)))
    target.embed = lambda ids: nothing[ids]  # type: ignore[method-assign]
    drafter.fit_start(replace(material, batches=[centred(batch) for batch in material.batches]))
    assert "no mean" in said[-1]
    assert finite(drafter)


def test_what_is_constant_says_nothing() -> None:
    """Up to the rounding of sums in float32, which a division by its variance would make the loudest of all."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5000, 6, generator=generator) + 1
    features[:, 3:] = torch.tensor([1e3, 7.3, 0.0])
    states = features[:, :1, None].expand(-1, len(SHARES), 4) * 2
    seen = Regression()
    for known, wanted in zip(features.split(700), states.split(700), strict=True):
        seen.add(known, wanted)
    slopes = seen.slopes()
    assert slopes[3:].abs().max() == 0
    torch.testing.assert_close(slopes[0], torch.full((len(SHARES), 4), 2.0), rtol=0.01, atol=0.01)


def test_a_final_norm_of_zeros_divides_by_none() -> None:
    weight = torch.tensor([0.0, 2.0, 0.0, -3.0, 0.0])
    held = Metric.of(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), weight).weight
    assert held.abs().min() > 1e-3
    assert held[1] == 2
    assert held[3] == -3


def test_the_markov_head_is_no_worse_than_at_its_beginning() -> None:
    """Pairs that say nothing of others are soon known by heart: then the head stays at how frequent tokens are."""
    torch.manual_seed(0)
    head, said = MarkovHead(VOCAB, VOCAB, 8, 16, "vanilla"), []
    tokens = np.random.default_rng(0).integers(0, VOCAB, 600).astype(np.int32)
    assert fit_bigrams(head, Material([Text(tokens, np.ones(600, bool))], [], 0, said.append), DraftVocabulary(VOCAB))
    learned = head.markov_w2.weight[:, 1:].detach().norm()
    assert learned < MarkovHead(VOCAB, VOCAB, 8, 16, "vanilla").markov_w2.weight[:, 1:].detach().norm() * 1.5
    assert "nats" in said[-1]


def test_a_head_of_zeros_says_nothing_as_states() -> None:
    head = MarkovHead(VOCAB, VOCAB, 32, 4, "vanilla")
    assert as_states(head, torch.zeros(VOCAB, 32))(torch.tensor([1, 2])).abs().max() == 0


@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_a_look_back_has_its_peak_where_rotation_has_a_factor(factor: float) -> None:
    """YaRN and longrope lengthen queries and keys."""
    config = LayerConfig(
        model_type="qwen3", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=64,
    )  # fmt: skip
    attention, rotary = Attention(config), Rotary(config)
    rotary.factor = factor
    rows = torch.ones(20, 16)
    with torch.no_grad():
        look_back(attention, rotary, 2, [rows], [rows], peak=9.0)
        turned = rotary(torch.arange(20), torch.float32)
        query, (keys, _) = attention.query(rows, turned), attention.keys_values(rows, turned)
    scores = (query[10, 0] @ keys[:11, 0].T) * attention.scaling
    assert scores.argmax() == 8
    assert float(scores[8]) == pytest.approx(9, rel=1e-3)
