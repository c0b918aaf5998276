"""A model in training is the model that decodes: same logits, real gradients; and what is left of it when it is cut."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from target_families import BASE, EXPERTS, VOCAB, WINDOW, chunked_logits, scattered_tables, stock_model, texts

from forerun.errors import UnsupportedModel
from forerun.target.donor import last_telling_layers, layer_influence
from forerun.target.hf import HFTarget
from forerun.target.packed import pack_linears
from forerun.target.student import StudentModel, cut_student
from forerun.target.table import LetterTokenizer

LENGTHS = (5, 40, 1, 17)
"""One beyond the rows whose heads are folded, most beyond the sliding window, one of a single token."""
FAMILIES = ("llama", "qwen3", "gemma2")


def packed(ids) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    positions = torch.cat([torch.arange(len(one)) for one in ids])
    return torch.tensor([token for one in ids for token in one]), positions, [len(one) for one in ids]


def logits_of(student: StudentModel, ids) -> torch.Tensor:
    """[T, V]"""
    return student.logits(student(*packed(ids)))


def target_of(stock) -> HFTarget:
    return HFTarget(copy.deepcopy(stock), LetterTokenizer(VOCAB))


@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "gpt2"])
def test_training_and_decoding_have_the_same_logits(family):
    """Packed sequences of all lengths in one training pass, against the target that decodes with the same weights, in
    chunks over scattered blocks: within 1e-4 (windows, soft-caps and learned positions included).
    """
    stock, ids = stock_model(family), texts(LENGTHS)
    target = target_of(stock)
    target.allocate(16)
    decoded, _ = chunked_logits(target, ids, scattered_tables(LENGTHS, 16), chunks=(3, 7, 1, 12))
    trained = logits_of(StudentModel(copy.deepcopy(stock)), ids)
    assert torch.allclose(trained, torch.cat(decoded), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_stock_model(family):
    """Through the packed pass as through transformers' own eager forward of each sequence by itself, every parameter.

    The stock gemma2 caps its scores in eager attention alone, so a training pass through torch's own attention
    would fail here.
    """
    stock, ids = stock_model(family), texts(LENGTHS)
    student = StudentModel(copy.deepcopy(stock))
    weights = torch.randn(sum(LENGTHS), VOCAB, generator=torch.Generator().manual_seed(3))
    (logits_of(student, ids) * weights).sum().backward()
    expected = torch.cat([stock(torch.tensor([one]), use_cache=False).logits[0] for one in ids])
    (expected * weights).sum().backward()
    theirs = dict(stock.named_parameters())
    assert {name.removeprefix("model.") for name, _ in student.named_parameters()} == set(theirs)
    for name, parameter in student.named_parameters():
        other = theirs[name.removeprefix("model.")].grad
        assert torch.allclose(parameter.grad, other, rtol=1e-3, atol=1e-4 * float(other.abs().max())), name


def test_sequences_do_not_see_each_other():
    """Other tokens in one of them change no bit of the others' hidden states, but its own."""
    student, ids = StudentModel(stock_model("qwen3")), texts((9, 12, 6))
    before = student(*packed(ids)).split([9, 12, 6])
    after = student(*packed([ids[0], [token % 7 + 3 for token in ids[1]], ids[2]])).split([9, 12, 6])
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


def test_training_drops_nothing_out():
    """A family whose config drops out a tenth gives the same hidden states twice, whatever mode it is said to be in."""
    student, ids = StudentModel(stock_model("gpt2")), texts((8,))
    assert student.model.config.resid_pdrop > 0
    student.train()
    assert student.training
    assert torch.equal(student(*packed(ids)), student(*packed(ids)))
    student.eval()
    assert not student.training


# ----------------------------------------------------------------------------------------------------------------- cut


@pytest.mark.parametrize("family", [*FAMILIES, "phi3", "qwen3_moe", "deepseek_v3"])
def test_a_target_that_keeps_all_layers_keeps_its_function(family):
    """The cut model's logits are the stock model's, and those of the target, which goes on as before."""
    stock, ids = stock_model(family), texts(LENGTHS)
    target = target_of(stock)
    whole = cut_student(target, range(target.num_layers))
    expected = logits_of(StudentModel(stock), ids)
    assert torch.allclose(logits_of(whole, ids), expected, rtol=0, atol=1e-5)
    assert all(parameter.requires_grad for parameter in whole.parameters())
    target.allocate(16)
    decoded, _ = chunked_logits(target, ids, scattered_tables(LENGTHS, 16), chunks=(7,))
    assert torch.allclose(torch.cat(decoded), expected, rtol=0, atol=1e-4)


def test_a_cut_model_has_the_layers_that_were_kept():
    """Layers 1 and 2 of gemma2's four, one full and one sliding: weights, windows and config follow, and transformers
    makes the same model of the config and the state.
    """
    target, ids = target_of(stock_model("gemma2")), texts(LENGTHS)
    student = cut_student(target, [1, 2])
    assert [attention.window for attention in student.anatomy.attentions] == [None, WINDOW]
    assert student.model.config.num_hidden_layers == 2
    assert student.model.config.layer_types == ["full_attention", "sliding_attention"]
    for place, layer in enumerate((1, 2)):
        theirs = dict(target.anatomy.layers[layer].named_parameters())
        for name, parameter in student.anatomy.layers[place].named_parameters():
            assert torch.equal(parameter, theirs[name]), name
    config = copy.deepcopy(student.model.config)
    again = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    again.load_state_dict(student.model.state_dict())
    assert torch.allclose(logits_of(StudentModel(again), ids), logits_of(student, ids), atol=1e-6)


def test_packed_weights_are_cut_as_well():
    """Of a bfloat16 target whose linear layers are packed: the very numbers, in float32."""
    stock = stock_model("llama", dtype=torch.bfloat16)
    target = target_of(stock)
    pack_linears(target.model)
    student = cut_student(target, range(target.num_layers))
    expected = stock.state_dict()
    state = student.model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].float()), name


def test_a_family_whose_layers_have_fixed_places_is_refused():
    """Every second layer has experts: layers 0 and 2, dense both, cannot be the first two of such a model."""
    config = tf.Qwen3MoeConfig(**BASE, **EXPERTS, decoder_sparse_step=2)
    target = HFTarget(tf.Qwen3MoeForCausalLM(config), LetterTokenizer(VOCAB))
    with pytest.raises(UnsupportedModel, match="layers 0, 2 has other weights"):
        cut_student(target, [0, 2])
    assert cut_student(target, [0, 3]).model.config.num_hidden_layers == 2


def test_the_influence_of_a_layer_that_does_nothing_is_nothing():
    """Layer 1 adds zeros: its influence is 0, that of the others is not."""
    stock = stock_model("qwen3")
    with torch.no_grad():
        for part in (stock.model.layers[1].self_attn.o_proj, stock.model.layers[1].mlp.down_proj):
            part.weight.zero_()
    influence = layer_influence(target_of(stock), texts((30,))[0])
    assert influence[1] == pytest.approx(0, abs=1e-6)
    assert all(influence[layer] > 0.01 for layer in (0, 2, 3))


def test_layers_that_do_nothing_are_no_donors():
    """The last layers that change anything; where there are too few, the last ones."""
    stock = stock_model("qwen3")
    with torch.no_grad():
        for number in (2, 3):
            for part in (stock.model.layers[number].self_attn.o_proj, stock.model.layers[number].mlp.down_proj):
                part.weight.zero_()
    target, counts = target_of(stock), torch.ones(VOCAB)
    assert last_telling_layers(target, 1, counts, 0) == [1]
    assert last_telling_layers(target, 2, counts, 0) == [0, 1]
    assert last_telling_layers(target, 3, counts, 0) == [0, 1, 3]
    assert last_telling_layers(target, 4, counts, 0) == [0, 1, 2, 3]
    assert last_telling_layers(target_of(stock_model("qwen3")), 2, counts, 0) == [2, 3]
