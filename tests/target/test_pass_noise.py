"""The measured bound behind claims of equality in floating point."""

from __future__ import annotations

import pytest
import torch
from target_families import pair, stock_model, texts

from forerun.target.hf import HFTarget
from forerun.target.noise import measure_noise
from forerun.target.table import TableTarget, history_model


def test_eq_3_exact_targets_have_no_noise():
    """EQ-3: where logits are equal by construction nothing differs.

    https://github.com/ml-explore/mlx-lm/issues/1423 https://github.com/ml-explore/mlx-lm/issues/1470
    """
    noise = measure_noise(history_model(11), [i % 11 for i in range(40)], block=5)
    assert (noise.rows, noise.max_difference, noise.argmax_flips, noise.smallest_margin) == (20, 0.0, 0, 1.0)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
def test_eq_3_noise_of_a_transformer_is_measured(dtype, bound):
    """EQ-3: differences between 1-row and (K + 1)-row passes are small in float32, larger in bfloat16, never flips with
    a margin beyond twice the measured difference."""
    target = HFTarget(stock_model("llama", dtype=dtype), None)
    noise = measure_noise(target, texts((60,))[0], block=9)
    assert noise.rows == 30
    assert noise.max_difference < bound
    assert noise.argmax_flips == 0 or noise.smallest_margin <= 2 * noise.max_difference


def test_eq_3_a_target_whose_logits_follow_the_row_count_is_found():
    """Negative control: logits that depend on how many rows a pass has show as difference and as flips."""

    class Uneven(TableTarget):
        def forward(self, batch, taps=()):
            out = super().forward(batch, taps)
            return out._replace(logits=out.logits.flip(-1) if len(batch.token_ids) > 1 else out.logits)

    target = Uneven(lambda prefix: [0.0, 1.0, 3.0], 3)
    noise = measure_noise(target, [0, 1, 2] * 8, block=4)
    assert noise.max_difference == 3.0
    assert noise.argmax_flips == noise.rows == 12


def test_a_text_too_short_to_measure_is_a_bug_of_the_caller():
    """Instead of a report about nothing."""
    with pytest.raises(AssertionError, match="too few"):
        measure_noise(pair("llama")[1], [3] * 8, block=9)
