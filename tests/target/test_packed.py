"""Packed bfloat16 layers give the very numbers of plain ones, or are not used."""

from __future__ import annotations

import pytest
import torch
from target_families import VOCAB, stock_model
from torch import nn

from forerun.target import packed
from forerun.target.base import Batch, Segment
from forerun.target.hf import HFTarget
from forerun.target.table import LetterTokenizer


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 160), nn.SiLU(), nn.Linear(160, 64, bias=False)).bfloat16()


@pytest.fixture
def packable() -> None:
    if not packed._can_pack():
        pytest.skip("this CPU or torch has no bfloat16 packing; pack_linears then leaves the model as it is")


@pytest.mark.usefixtures("packable")
def test_packed_layers_are_bit_equal_to_plain_ones():
    """For the row counts of verification and prefill."""
    stock, model = _model(), _model()
    assert packed.pack_linears(model).startswith("2 linear layers packed")
    for rows in (2, 3, 4, 5, 7, 8, 16, 65):
        x = torch.randn(1, rows, 96).bfloat16()
        with torch.inference_mode():
            assert torch.equal(model(x), stock(x))


@pytest.mark.usefixtures("packable")
def test_a_row_of_a_packed_layer_does_not_depend_on_its_neighbours():
    """A row alone and inside a verify block has the same bits, so plain decoding and verification agree (EQ-3)."""
    model = _model()
    packed.pack_linears(model)
    x = torch.randn(1, 9, 96).bfloat16()
    with torch.inference_mode():
        together = model(x)
        for k in range(9):
            assert torch.equal(model(x[:, k : k + 1]), together[:, k : k + 1])


@pytest.mark.usefixtures("packable")
def test_a_packed_layer_shows_its_weight_and_passes_gradients_through():
    """What reads weights (a fingerprint) sees the plain ones; a loss behind the head reaches its input."""
    stock, model = _model(), _model()
    packed.pack_linears(model)
    assert torch.equal(model[0].weight, stock[0].weight)
    x = torch.randn(1, 3, 96).bfloat16().requires_grad_()
    model(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_layers_that_packing_is_not_for_are_left_alone():
    """float32 layers stay what they are, and the reason says so."""
    model = _model().float()
    assert "packing is for bfloat16" in packed.pack_linears(model)
    assert all(type(layer) is not packed.PackedLinear for layer in model)


def test_layers_whose_packed_form_differs_are_left_alone(monkeypatch):
    """Where the check on the model's own layers fails, nothing is packed."""
    monkeypatch.setattr(packed, "_can_pack", lambda: True)
    monkeypatch.setattr(packed, "_same", lambda layer: False)
    model = _model()
    assert "same numbers" in packed.pack_linears(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.usefixtures("packable")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2"])
def test_eq_5_in_bfloat16_a_verify_block_has_the_bits_of_single_rows(family):
    """Logits of K + 1 rows in one pass equal those of K + 1 passes of one row, bit by bit, also beside other requests.

    https://github.com/lightseekorg/tokenspeed/issues/904, https://github.com/ml-explore/mlx-lm/issues/1423
    """
    target = HFTarget(stock_model(family, dtype=torch.bfloat16), LetterTokenizer(VOCAB))
    packed.pack_linears(target.model)
    target.allocate(16)
    tokens, start = [5, 9, 2, 31, 7, 7, 12, 3], 21
    prompt = [(7 * i) % 50 for i in range(start)]
    blocks, others = [3, 1, 4, 5], [7, 8]
    target.forward(Batch([Segment(prompt, 0, blocks, 0), Segment(prompt[:9], 0, others, 0)]))
    single = [target.forward(Batch([Segment([t], start + i, blocks, 1)])).logits for i, t in enumerate(tokens)]
    for k in (1, 3, 7):
        together = target.forward(Batch([Segment([1], 9, others, 1), Segment(tokens[: k + 1], start, blocks, k + 1)]))
        assert torch.equal(together.logits[1:], torch.cat(single[: k + 1]))
