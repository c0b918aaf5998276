"""How many bytes features take, and what is lost in them."""

from __future__ import annotations

import itertools

import pytest
import torch

from forerun.training.features import estimate
from forerun.training.features.layout import GB, Layout, Parts

H = 64


def parts_of(rows: int, lower: int, seed: int = 0, outliers: float = 1.0) -> Parts:
    """Hidden states as a transformer has them: a few channels far larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, lower + 1, H, generator=generator)
    states[..., ::29] *= outliers
    last = states[:, -1].bfloat16()
    return Parts(states[:, :-1].reshape(rows, lower * H), last, torch.randn(rows, generator=generator))


@pytest.mark.parametrize(("hidden", "stated"), [(2560, 30_726), (4096, 49_158), (5120, 61_446)])
def test_da_3_bytes_per_token_are_the_known_ones(hidden, stated):
    """DA-3: five taps and the last state in bfloat16, plus ids and two masks (6 bytes, which our data set has).

    https://github.com/deepseek-ai/DeepSpec/issues/21 https://github.com/vllm-project/speculators/issues/335
    https://github.com/sgl-project/SpecForge/issues/426
    """
    per_token = estimate(1, hidden, (2, 10, 18, 26, 34)).bytes_per_token
    assert per_token + 6 == stated


def test_da_3_a_whole_data_set_is_estimated_before_it_is_captured():
    """DA-3: 1.24e9 tokens of a 4B model are the 38 TB of a public report; a bound says what it will do.

    https://github.com/deepseek-ai/DeepSpec/issues/21
    """
    whole = estimate(1_240_000_000, 2560, (2, 10, 18, 26, 34))
    assert round(whole.total / 1e12) == 38
    assert "30,720 bytes a token, 38.1 TB for 1,240,000,000 tokens" in whole.sentence(None)
    assert "computed anew in every epoch" in whole.sentence(None)
    assert whole.share(100) == pytest.approx(100 * GB / whole.total)
    assert "more than --store-gb 3810: the store evicts" in whole.sentence(3810)
    assert "about 10% of the tokens are read back" in whole.sentence(3810)
    small = estimate(1000, 2560, (2, 10))
    assert small.share(1) == 1
    assert "--store-gb 1 holds them all" in small.sentence(1)


@pytest.mark.parametrize(
    ("taps", "dtype", "normalizer", "expected"),
    [
        ((1, 2), "bfloat16", False, 2 * 3 * H),
        ((1, 2), "bfloat16", True, 2 * 3 * H + 4),
        ((1, 4), "bfloat16", False, 2 * 2 * H),  # h = n is `last`
        ((4,), "fp8", True, 2 * H + 4),
        ((1, 2), "fp8", False, 2 * (H + 4) + 2 * H),
        ((), "fp8", False, 2 * H),
    ],
)
def test_the_estimate_counts_each_array(taps, dtype, normalizer, expected):
    """By hand, for a target of four layers."""
    assert estimate(10, H, taps, dtype, normalizer, num_layers=4).total == 10 * expected


@pytest.mark.parametrize(
    ("dtype", "lower", "normalizer"), itertools.product(("bfloat16", "fp8"), (0, 1, 3), (False, True))
)
def test_a_payload_has_the_bytes_that_were_estimated_and_comes_back(dtype, lower, normalizer):
    """Whatever is stored, its size is the layout's; what is exact in bfloat16 comes back with the same bits."""
    layout = Layout(H, lower, dtype, normalizer)
    parts = parts_of(5, lower)
    payload = layout.encode(parts)
    assert payload.dtype == torch.uint8
    assert len(payload) == 5 * layout.bytes_per_token
    back = layout.decode(payload, 5)
    assert torch.equal(back.last, parts.last)
    assert back.lower.shape == parts.lower.shape
    if normalizer:
        assert torch.equal(back.log_normalizer, parts.log_normalizer)
    else:
        assert back.log_normalizer is None
    if dtype == "bfloat16":
        assert torch.equal(back.lower, parts.lower.bfloat16())


@pytest.mark.parametrize("outliers", [1.0, 1000.0])
def test_eight_bits_cost_three_percent_also_beside_huge_channels(outliers):
    """e4m3 has 3 bits of mantissa: at most 1/16 off a number above 1/28,000 of the row's largest, 3 % in the norm."""
    parts = parts_of(200, 2, outliers=outliers)
    layout = Layout(H, 2, "fp8", False)
    back = layout.decode(layout.encode(parts), 200).lower.view(200, 2, H)
    exact = parts.lower.view(200, 2, H)
    error = (back - exact).abs()
    normal = exact.abs() > exact.abs().amax(-1, keepdim=True) * 2**-6 / 448
    assert (error[normal] <= exact.abs()[normal] * (1 / 16 + 1e-5)).all()
    assert ((back - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.05
    ordinary = torch.ones(H, dtype=torch.bool)
    ordinary[::29] = False
    share = (back - exact)[..., ordinary].norm(dim=-1) / exact[..., ordinary].norm(dim=-1)
    assert 0.01 < share.mean() < 0.03


def test_eight_bits_keep_zeros_and_extremes_finite():
    """A state of zeros stays zero; the largest float32 does not become NaN."""
    layout = Layout(H, 1, "fp8", False)
    lower = torch.zeros(3, H)
    lower[1, 0], lower[2] = 3e38, 1e-44
    back = layout.decode(layout.encode(Parts(lower, torch.zeros(3, H).bfloat16(), None)), 3)
    assert back.finite
    assert back.lower[0].tolist() == [0.0] * H
    assert back.lower[1, 0] == pytest.approx(3e38, rel=1e-5)


def test_a_payload_of_another_length_is_a_bug_of_the_caller():
    """Rows are never shifted silently."""
    layout = Layout(H, 1, "bfloat16", False)
    with pytest.raises(AssertionError, match="tokens of"):
        layout.decode(torch.cat([layout.encode(parts_of(3, 1)), torch.zeros(2 * 2 * H, dtype=torch.uint8)]), 3)


@pytest.mark.parametrize("broken", ["lower", "last", "log_normalizer"])
def test_parts_know_whether_they_are_finite(broken):
    """NaN and infinity in any array."""
    parts = parts_of(3, 1)
    assert parts.finite
    for value in (float("nan"), float("inf")):
        bad = getattr(parts, broken).clone()
        bad.view(-1)[1] = value
        assert not parts._replace(**{broken: bad}).finite
