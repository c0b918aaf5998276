"""Modelled hardware: the arithmetic of the docstrings, worked out again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bench.simulate.worlds import BFLOAT16, profile, serial
from forerun.bench.simulate.roofline import BANDWIDTH_SHARE, CAPTURED, H200, RATE_SHARE, Placement, padded, ridge
from forerun.bench.simulate.systems import LLAMA_8B, LLAMA_70B, MODELLED, QWEN_MOE, system
from forerun.errors import OptionError


@pytest.mark.parametrize(
    ("shape", "billions", "active", "kv"),
    [(LLAMA_8B, 8.03, 7.5, 131_072), (LLAMA_70B, 70.55, 69.5, 327_680), (QWEN_MOE, 235.1, 21.5, 192_512)],
    ids=lambda value: getattr(value, "name", None),
)
def test_sizes_are_those_of_the_models(shape, billions, active, kv):
    """Parameters as published, those that a row multiplies (the embedding is looked up), bytes of a token's KV."""
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.001)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.005)
    assert shape.kv_bytes == kv


def test_one_row_of_the_8b_reads_its_weights_once():
    """15.0 GB at .8 of 4.8 TB/s are 3.91 ms, and half a millisecond of overhead."""
    placed = Placement(LLAMA_8B, H200)
    read = 2 * (LLAMA_8B.dense + LLAMA_8B.head)
    assert read == pytest.approx(15.0e9, rel=0.002)
    assert placed.seconds(1) == pytest.approx(read / (BANDWIDTH_SHARE * 4.8e12) + 0.5e-3)
    assert ridge(placed) == 155


def test_beyond_the_ridge_a_row_costs_its_operations():
    """4,096 rows of 15.0 GFLOP each at .6 of 989 TFLOP/s."""
    placed = Placement(LLAMA_8B, H200)
    made = 2 * (LLAMA_8B.dense + LLAMA_8B.head) * 4096
    assert placed.seconds(4096) == pytest.approx(made / (RATE_SHARE * 989e12) + 0.5e-3)


def test_rows_are_padded_to_captured_sizes():
    """A stair at every captured size, its edges kept by the cost curve; beyond the last one none."""
    assert [padded(n) for n in (1, 2, 3, 5, 8, 9, 250, 257, 512, 513)] == [1, 2, 4, 8, 8, 16, 256, 272, 512, 513]
    curve = Placement(LLAMA_8B, H200).verify().tokens
    for size, following in pairwise(CAPTURED[30:41]):
        assert curve(size + 1) == curve(following) > curve(size)


def test_experts_are_covered_as_rows_grow():
    """E (1 - (1 - k / E)^n): 8 experts for one row, 52 for eight, nearly all for 64; a dense model has none."""
    assert QWEN_MOE.covered(1) == pytest.approx(8)
    assert QWEN_MOE.covered(8) == pytest.approx(51.6, abs=0.1)
    assert QWEN_MOE.covered(64) == pytest.approx(125.9, abs=0.1)
    assert LLAMA_8B.covered(64) == 0
    costs = Placement(QWEN_MOE, H200, 4).verify().tokens
    assert costs(8) / costs(1) > 2  # one request's drafts read other experts
    assert costs(264) / costs(128) < 1.2  # a hundred requests have read nearly all of them anyway


def test_tensor_parallel_splits_reading_and_adds_all_reduces():
    """Four GPUs: a quarter of the bytes each, and 160 all-reduces of 8 us that one GPU does not need."""
    alone, split = Placement(LLAMA_70B, H200, 1), Placement(LLAMA_70B, H200, 4)
    reduces = split._reduces(1)
    assert reduces == pytest.approx(160 * 8e-6, rel=0.05)
    assert split.seconds(1) - 0.5e-3 - reduces == pytest.approx((alone.seconds(1) - 0.5e-3) / 4)


def test_a_context_costs_reading_its_keys_and_values():
    """8,192 tokens of the 8B: 1.07 GB once a request; each row multiplies them."""
    extra = Placement(LLAMA_8B, H200).context().at([8192])
    assert extra.request[0] == pytest.approx(8192 * 131_072 / (BANDWIDTH_SHARE * 4.8e12))
    assert 0 < extra.row[0] < extra.request[0] / 10


@pytest.mark.parametrize("name", MODELLED)
def test_modelled_systems_say_so_and_drafts_are_cheap_in_order(name):
    """A look-up costs less than any model, one EAGLE-3 pass less than a block of five layers, and all less than a plain
    step; a longer draft never costs less."""
    found = system(name)
    assert found.modelled
    assert "modelled, not measured" in found.profile.key.device
    assert found.kv_tokens > 2000 * 400
    one = {drafter: cost(1, 1) for drafter, cost in found.profile.drafts.items()}
    assert one["ngram"] < one["eagle3"] < one["dflash"] < one["dspark"] < found.profile.verify(1, 1)
    for cost in found.profile.drafts.values():
        assert np.all(np.diff(cost.table(64, 16), axis=0) >= 0)
        assert np.all(np.diff(cost.table(64, 16), axis=1) >= 0)


def test_a_measured_profile_is_read_from_its_file(tmp_path):
    made = profile(BFLOAT16, {"small": serial(0.1)})
    path = tmp_path / "profile.json"
    path.write_text(made.dumps())
    found = system(str(path))
    assert not found.modelled
    assert found.profile == made


def test_what_is_no_system_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"--profile.*did you mean 'h200-8b'"):
        system("h200-8")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(OptionError, match="profile"):
        system(str(broken))
