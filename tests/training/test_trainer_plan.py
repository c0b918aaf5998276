"""The plan of a run is arithmetic: each line is what it says, and what a run really takes is near it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.drafters.losses import chunk_rows
from forerun.training.plan import (
    EIGHT_BILLION,
    EIGHT_BILLION_FLOPS,
    LOSS_CHUNK_BYTES,
    Measured,
    Workload,
    flops_per_token,
    plan,
)

WORK = Workload(
    target_parameters=1000, target_itemsize=2, drafter_parameters=100, saved_itemsize=2, hidden_size=8, states=3,
    vocab_size=50, draft_vocab_size=20, kv_bytes=64, activations=40, data_tokens=900, steps=7, tokens_per_step=300,
    micro_batch_tokens=100, ranks=2, keep=3,
)  # fmt: skip


def values(lines) -> dict[str, float]:
    return {line.name: line.value for line in lines}


def test_memory_is_the_sum_of_its_lines():
    """Weights, gradients, moments and average by parameters; features and activations by the rows of a micro-batch."""
    found = plan(WORK, 1e6)
    assert values(found.memory) == {
        "target weights": 2000, "target KV": 6400, "drafter weights": 400, "gradients": 400, "moments of AdamW": 800,
        "features": 100 * 3 * 8 * 2, "activations": 2 * 100 * 40 * 4, "chunk of logits": LOSS_CHUNK_BYTES,
        "teacher's laws": LOSS_CHUNK_BYTES,
    }  # fmt: skip
    assert found.memory_bytes == sum(values(found.memory).values())
    more = plan(replace(WORK, average=True, half=True, rows_per_token=2.5), 1e6)
    assert values(more.memory)["average of the weights"] == 400
    assert values(more.memory)["activations"] == 2 * 250 * 40 * 2
    attended = plan(replace(WORK, rows_per_token=2.5, keys=30, groups=3), 1e6)
    assert values(attended.memory)["attention masks"] == 250 * 30 * 3 * 4


def test_features_are_told_for_a_token_and_for_the_data():
    """They are no part of the disk's sum: a store is bounded by --store-gb."""
    found = plan(replace(WORK, feature_bytes=48), 1e6)
    assert values(found.features) == {"of a token": 48, "of the data": 900 * 48}
    assert found.disk_bytes == plan(WORK, 1e6).disk_bytes


def test_disk_holds_one_checkpoint_more_than_is_kept():
    """The new one is whole before the oldest goes."""
    found = plan(replace(WORK, average=True, store_bytes=5000), 1e6)
    assert values(found.disk) == {
        "checkpoints": 4 * 100 * 16, "best and last drafter": 400, "feature store": 5000,
    }  # fmt: skip
    assert values(plan(WORK, 1e6).disk) == {"checkpoints": 4 * 100 * 12, "best and last drafter": 400}


def test_time_is_operations_over_their_rate():
    """2 per target parameter; per row of the drafter its forward and backward, its head and the teacher's."""
    flops, text = flops_per_token(WORK)
    assert flops == 2 * 1000 + 1 * (2 * 8 * 50 + 6 * 100 + 6 * 8 * 20)
    assert "2 x 1,000 + 1 rows x (2 x 8 x 50 + 6 x 100 + 6 x 8 x 20)" in text
    found = plan(WORK, 1e6)
    assert found.seconds == pytest.approx(7 * 300 * flops / (2 * 1e6))
    assert flops_per_token(replace(WORK, rows_per_token=3.0))[0] == 2000 + 3 * (flops - 2000)


def test_a_drafters_own_tables_are_counted_once():
    """Its embedding is looked up and its head is as wide as itself; both take memory as all parameters do."""
    own = replace(WORK, table_parameters=60, head_width=3)
    assert flops_per_token(own)[0] == 2 * 1000 + 1 * (2 * 8 * 50 + 6 * 40 + 6 * 3 * 20)
    assert plan(own, 1e6).memory == plan(WORK, 1e6).memory


def test_a_measurement_replaces_the_estimate():
    """Tokens over the seconds of target and drafter, on all devices."""
    found = plan(WORK, 1e6, Measured(tokens=100, capture_seconds=1.5, learn_seconds=0.5))
    assert values(found.time)["speed"] == 100
    assert found.seconds == 21.0
    assert "measured" in next(line.arithmetic for line in found.time if line.name == "speed")


def test_the_arithmetic_of_every_line_can_be_followed():
    """`a x b bytes` multiplies to the value that stands before it."""
    found = plan(WORK, 1e6)
    for line in [*found.memory, *found.disk]:
        if "(" in line.arithmetic:
            continue
        product = 1
        for factor in line.arithmetic.split(" x "):
            product *= int(factor.split()[0].replace(",", ""))
        assert product == line.value, line


def test_the_example_of_the_documentation():
    """A five-layer drafter for an 8B target on eight GPUs: it fits a device of 80 GB and takes most of a day."""
    found = plan(EIGHT_BILLION, EIGHT_BILLION_FLOPS)
    memory = values(found.memory)
    assert memory["target weights"] == 16_380_000_000
    assert memory["drafter weights"] + memory["gradients"] + memory["moments of AdamW"] == 16 * 1_130_000_000
    assert 30e9 < found.memory_bytes < 80e9
    assert EIGHT_BILLION.steps * EIGHT_BILLION.tokens_per_step == pytest.approx(6 * EIGHT_BILLION.data_tokens, rel=1e-3)
    assert 12 * 3600 < found.seconds < 24 * 3600
    assert found.as_dict()["memory_bytes"] == found.memory_bytes


def test_the_chunk_of_logits_is_the_losses_own():
    """Its size has one home: that many bytes are what `chunk_rows` plans with."""
    assert chunk_rows(1000) == LOSS_CHUNK_BYTES // (16 * 1000)
