"""The plan of a run is arithmetic: each line is what it says, and what a run really takes is near it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forerun.drafters.learned import Held
from forerun.drafters.losses import COPIES, chunk_rows
from forerun.target.packed import PackedLinear
from forerun.training.config import choose
from forerun.training.eight_billion import EIGHT_BILLION, FLOPS
from forerun.training.optimizer import moments, optimizer_tensors, optimizers
from forerun.training.plan import Measured, Workload, flops_per_token, plan, target_weights

WORK = Workload(
    target_parameters=1000, target_itemsize=2, drafter_parameters=100, saved_itemsize=2, hidden_size=8, states=3,
    vocab_size=50, draft_vocab_size=20, kv_bytes=64, kv_tokens=90, moments=150, data_tokens=900, steps=7,
    tokens_per_step=300, pass_tokens=100, ranks=2, keep=3,
    held=[Held("activations", 4000.0, "100 rows x 40 bytes"), Held("chunk of logits", 640.0, "8 x 4 rows x 20 bytes")],
)  # fmt: skip


def values(lines) -> dict[str, float]:
    return {line.name: line.value for line in lines}


def test_memory_is_the_sum_of_its_lines():
    """Weights, gradients, moments and average by parameters; features by the tokens of a pass; what its pass holds by
    the kind; the process itself."""
    found = plan(WORK, 1e6)
    assert values(found.memory) == {
        "target weights": 2000, "target KV": 90 * 64, "drafter weights": 400, "gradients": 400,
        "moments of the optimiser": 600, "features": 100 * 3 * 8 * 2, "activations": 4000, "chunk of logits": 640,
    }  # fmt: skip
    assert found.memory_bytes == sum(values(found.memory).values())
    more = plan(replace(WORK, average=True, half=True, process=Held("process", 5e5, "measured now")), 1e6)
    assert values(more.memory)["average of the weights"] == 400
    assert values(more.memory)["weights in half precision"] == 200
    assert values(more.memory)["process"] == 5e5
    assert more.memory_bytes == found.memory_bytes + 400 + 200 + 5e5
    gaps = plan(replace(WORK, gaps=0.5), 1e6)
    assert values(gaps.memory)["gaps in the heap"] == 0.5 * (400 + 4800 + 4000 + 640)  # of what comes and goes


def test_a_fitted_start_is_planned_where_it_takes_more_than_a_pass():
    """It is gone before the passes begin."""
    beside = plan(WORK, 1e6).memory_bytes
    a_pass = 400 + 4800 + 4000 + 640
    assert plan(replace(WORK, start=Held("fitted start", a_pass, "few")), 1e6).memory_bytes == beside
    more = plan(replace(WORK, start=Held("fitted start", a_pass + 70, "many")), 1e6)
    assert values(more.memory)["fitted start, more than a pass"] == 70
    assert more.memory_bytes == beside + 70


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_moments_are_those_that_the_optimisers_keep(optimizer):
    """Two of AdamW, one of Muon, counted before there are any and compared with what a step leaves."""
    network = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.LayerNorm(6))
    config = choose("eagle3", {"data": "d", "out": "o", "optimizer": optimizer}, {}).config
    moved_by = optimizers(network, config)
    network(torch.arange(3)).sum().backward()
    for one in moved_by:
        one.step()
    kept = optimizer_tensors(moved_by, dict(network.named_parameters()))
    assert moments(network, config) == sum(t.numel() for name, t in kept.items() if not name.startswith("step."))


def test_features_are_told_for_a_token_and_for_the_data():
    """They are no part of the disk's sum: a store is bounded by --store-gb."""
    found = plan(replace(WORK, feature_bytes=48), 1e6)
    assert values(found.features) == {"of a token": 48, "of the data": 900 * 48}
    assert found.disk_bytes == plan(WORK, 1e6).disk_bytes


def test_disk_holds_one_checkpoint_more_than_is_kept():
    """The new one is whole before the oldest goes."""
    found = plan(replace(WORK, average=True, store_bytes=5000), 1e6)
    assert values(found.disk) == {
        "checkpoints": 4 * (100 + 150 + 100) * 4, "best and last drafter": 400, "feature store": 5000,
    }  # fmt: skip
    assert values(plan(WORK, 1e6).disk) == {"checkpoints": 4 * (100 + 150) * 4, "best and last drafter": 400}


def test_time_is_operations_over_their_rate():
    """2 per target parameter; per row of the drafter its forward and backward, its head and the teacher's."""
    flops, text = flops_per_token(WORK)
    assert flops == 2 * 1000 + 1 * (2 * 8 * 50 + 6 * 100 + 4 * 8 * 20)
    assert "2 x 1,000 + 1 rows x (2 x 8 x 50 + 6 x 100 + 4 x 8 x 20)" in text
    found = plan(WORK, 1e6)
    assert found.seconds == pytest.approx(7 * 300 * flops / (2 * 1e6))
    assert flops_per_token(replace(WORK, rows_per_token=3.0))[0] == 2000 + 3 * (flops - 2000)


def test_a_drafters_own_tables_are_counted_once():
    """Its embedding is looked up and its head is as wide as itself; both take memory as all parameters do."""
    own = replace(WORK, table_parameters=60, head_width=3)
    assert flops_per_token(own)[0] == 2 * 1000 + 1 * (2 * 8 * 50 + 6 * 40 + 6 * 3 * 20)
    assert plan(own, 1e6).memory == plan(WORK, 1e6).memory


class Packed(nn.Module):
    """A target's model of 48 numbers without its head of 28, which is packed; on a machine that need not pack."""

    def __init__(self, tied: bool):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.embedding, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(self.head)
        self.head.in_features, self.head.out_features, self.head.bias = 4, 7, None

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize(("tied", "expected"), [(True, (48, 28, 2 * 76)), (False, (76, 0, 2 * 76))])
def test_a_packed_head_that_is_the_embedding_is_no_further_parameter(tied, expected):
    """Its copy takes memory: (parameters, copied, bytes). A table has no weights."""
    assert target_weights(SimpleNamespace(model=Packed(tied).bfloat16())) == expected
    assert target_weights(object()) == (0, 0, 0)


def test_a_packed_copy_takes_memory_and_no_work():
    """A line of its own beside the target's weights; the operations of a token are those without it."""
    copied, known = plan(replace(WORK, target_copied=500), 1e6), plan(WORK, 1e6)
    memory = values(copied.memory)
    assert (memory["target weights"], memory["packed copy of its head"]) == (2000, 1000)
    assert copied.memory_bytes == known.memory_bytes + 1000
    assert copied.time == known.time
    lines = [line.name for line in plan(replace(WORK, target_copied=500, process=Held("process", 5.0, "")), 1e6).memory]
    assert lines[:3] == ["process", "target weights", "packed copy of its head"]


def test_a_measurement_replaces_the_estimate():
    """Tokens over the seconds of target and drafter, on all devices."""
    found = plan(WORK, 1e6, Measured(tokens=100, capture_seconds=1.5, learn_seconds=0.5))
    assert values(found.time)["speed"] == 100
    assert found.seconds == 21.0
    assert "measured" in next(line.arithmetic for line in found.time if line.name == "speed")


def test_the_arithmetic_of_every_line_can_be_followed():
    """`a x b bytes` multiplies to the value that stands before it, here and in the example of the documentation."""
    followed = 0
    for found in (plan(WORK, 1e6), plan(EIGHT_BILLION, FLOPS)):
        for line in [*found.memory, *found.disk]:
            if not line.arithmetic[0].isdigit():
                continue
            product = 1.0
            for factor in line.arithmetic.split(" x "):
                product *= float(factor.split()[0].replace(",", ""))
            assert product == line.value, line
            followed += 1
    assert followed > 20


def test_the_example_of_the_documentation():
    """A five-layer drafter for an 8B target on eight GPUs: it fits a device of 80 GB and takes most of a day. Rows
    follow from anchors and lengths."""
    found = plan(EIGHT_BILLION, FLOPS)
    memory = values(found.memory)
    assert memory["target weights"] == 16_380_000_000
    assert memory["drafter weights"] + memory["gradients"] + memory["moments of the optimiser"] == 16 * 1_130_000_000
    assert 30e9 < found.memory_bytes < 80e9
    assert EIGHT_BILLION.rows_per_token == 512 * 7 / 4096
    assert EIGHT_BILLION.steps * EIGHT_BILLION.tokens_per_step == pytest.approx(6 * EIGHT_BILLION.data_tokens, rel=1e-3)
    assert 12 * 3600 < found.seconds < 24 * 3600
    assert found.as_dict()["memory_bytes"] == found.memory_bytes


def test_a_chunk_of_logits_has_one_home():
    """All its copies are within the budget that `chunk_rows` plans with."""
    assert COPIES * 4 * 1000 * chunk_rows(1000) <= 384 << 20 < COPIES * 4 * 1000 * (chunk_rows(1000) + 1)
