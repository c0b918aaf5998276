"""What a plan says of memory, against what torch's allocator and the operating system count."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from drafters.kinds import SETTINGS
from drafters.learning import batch_of, plan_for, texts
from forerun.drafters import drafter_class
from forerun.drafters.learned import Material
from forerun.drafters.small.config import SmallSettings
from forerun.drafters.small.learn import Beginning, SmallLearner
from forerun.target.hf import HFTarget
from forerun.target.student import cut_student
from forerun.target.table import ByteTokenizer
from forerun.training.features.passes import log_normalizer
from training.runs import random_samples, records, write_data

KINDS = ["eagle", "eagle3", "eagle3-pruned", "dflash", "dspark", "dspark-rnn", "dspark-pruned", "small"]
NEAR = 0.25
"""How far a plan may be from what is counted."""
CASES = {
    "long texts": (264, [180] * 3),
    "short texts": (264, [40] * 6),
    "many ids": (4096, [60] * 3),
}
"""name -> (V, lengths of the samples): activations, masks and inputs lead in the first two, logits in the last."""


def target_of(vocab_size: int, dtype: torch.dtype) -> HFTarget:
    """Four layers, 64 columns, four heads over two."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, max_position_embeddings=512, eos_token_id=256,
        bos_token_id=None, pad_token_id=None, dtype="float32",
    )  # fmt: skip
    return HFTarget(Qwen3ForCausalLM(config).to(dtype), ByteTokenizer())


def learner_of(name: str, target: HFTarget) -> Any:
    if name == "small":
        begun = Beginning(cut_student(target, [0, 1]), target.tokenizer, "cut")  # type: ignore[arg-type]
        return SmallLearner(begun, target, torch.float32, SmallSettings())
    kind = drafter_class(name.partition("-")[0]).learner()
    assert kind is not None
    own = dict(SETTINGS[name])
    if "draft_vocab_size" in own:
        own["draft_vocab_size"] = target.vocab_size // 4
    return kind.design(target, kind.settings_class(**own), plan_for(target))


def peak_of(call: Any) -> int:
    """Bytes that tensors took at the height of a call, beyond those that were there before: torch's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as done:
        call()
    events = [e for e in done.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert most > 0
    return most


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab_size", "lengths"), CASES.values(), ids=CASES)
def test_a_pass_takes_what_its_kind_plans(name, half, vocab_size, lengths, monkeypatch):
    """Forward and backward over some samples, features given: within a quarter of layers, inputs, masks, one chunk of
    the losses, gradients, and with bfloat16 the weights' copies. The target runs in that precision too.
    """
    monkeypatch.setattr("forerun.drafters.small.learn.shared_vocabulary", lambda *_: vocab_size)
    target = target_of(vocab_size, torch.bfloat16 if half else torch.float32)
    learner = learner_of(name, target)
    batch = batch_of(target, texts(lengths), learner.taps or (target.num_layers,))
    if learner.needs_normalizer:
        batch = replace(batch, log_normalizer=log_normalizer(target, batch.last))

    def step():
        learner.network.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            exercise = learner.prepare(batch, torch.Generator().manual_seed(0))
            total = learner.losses(batch, exercise, 0.5).total
        total.backward()

    step()  # whatever is made once
    learner.network.zero_grad(set_to_none=True)
    parameters = sum(p.numel() for p in learner.network.parameters())
    planned = sum(one.size for one in learner.plan_memory(lengths, half)) + (6 if half else 4) * parameters
    counted = peak_of(step)
    assert planned == pytest.approx(counted, rel=NEAR), learner.plan_memory(lengths, half)


@pytest.mark.parametrize("rows", [9, 18], ids=["two chunks", "one chunk"])
def test_gradients_of_chunks_are_planned_beside_those_of_the_pass(rows, monkeypatch):
    """A chain of many weights and few tokens, whose gradients add up to those of the pass before."""
    monkeypatch.setattr("forerun.drafters.chain.lesson.rows_per_chunk", lambda *_: rows)
    target = target_of(264, torch.float32)
    kind = drafter_class("eagle")
    learner = kind.design(target, kind.settings_class(intermediate_size=4096), plan_for(target))
    batch = batch_of(target, texts([20]), learner.taps)

    def step():
        exercise = learner.prepare(batch, torch.Generator().manual_seed(0))
        learner.losses(batch, exercise, 0.5).total.backward()

    step()
    gradients = 4 * sum(p.numel() for p in learner.network.parameters())
    counted = gradients + peak_of(step)
    planned = gradients + sum(one.size for one in learner.plan_memory([20], False))
    assert planned > 1.6 * gradients
    assert planned == pytest.approx(
        counted, rel=0.4
    )  # where the sums of all chunks are handed on, they are twice there


@pytest.mark.parametrize(
    ("name", "own", "vocab_size"),
    [
        ("dflash", {"taps": (1, 2, 3, 4)}, 264),
        ("dflash", {"taps": (1,)}, 264),
        ("eagle3", {}, 264),
        ("eagle", {}, 4096),
    ],
)
def test_a_fitted_start_takes_what_its_kind_plans(name, own, vocab_size, monkeypatch):
    """Matrices of what is known lead with many taps, of the states with few, the head with many ids; beside them a pass
    over some blocks is small on real targets, and made so here."""
    monkeypatch.setattr("forerun.drafters.dflash.start.ANCHORS", 1)
    target = target_of(vocab_size, torch.float32)
    kind = drafter_class(name).learner()
    learner = kind.design(target, kind.settings_class(init="fitted", **own), plan_for(target))
    batch = batch_of(target, texts([20, 20]), learner.taps)
    counted = peak_of(lambda: learner.fit_start(Material([], [batch], 0, lambda _: None)))
    assert learner.plan_start().size == pytest.approx(counted, rel=0.4)
    learner.settings = kind.settings_class(init="random")
    assert learner.plan_start() is None


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tiny", "embedded"])
def test_a_run_takes_what_its_plan_says(target, tiny_qwen3_dir, tmp_path):
    """Two processes, as a user starts them: the plan is within a quarter of the largest memory that the run has had."""
    from forerun.target.load import load_target

    model = str(tiny_qwen3_dir) if target == "tiny" else target
    loaded = load_target(model)
    longest, count = (60, 60) if target == "tiny" else (250, 40)
    samples = random_samples(count, min(250, loaded.vocab_size), longest=longest)
    data = write_data(tmp_path / "data", loaded.tokenizer, samples, held_out=0.1)
    settings = ["--target", model, "--data", data, "--out", tmp_path / "run", "--steps", 4, "--eval-prompts", 2,
                "--eval-tokens", 8, "--threads", 1, "--tokens-per-step", 2048]  # fmt: skip

    def forerun(*more: object) -> str:
        words = [sys.executable, "-m", "forerun", "train", "dspark", *map(str, [*settings, *more])]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=600).stdout

    planned = json.loads(forerun("--plan", "--json"))["memory_bytes"]
    forerun()
    measured = max(line["peak_memory"] for line in records(Path(tmp_path / "run"), "step"))
    assert planned == pytest.approx(measured, rel=NEAR)
