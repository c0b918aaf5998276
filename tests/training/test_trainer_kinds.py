"""The drafters of the table under the trainer, which knows none of them: what it promises holds for every kind."""

from __future__ import annotations

import signal

import pytest
import torch

from forerun import Sampling
from forerun.drafters import drafter_class
from forerun.drafters.base import LoadContext
from forerun.engine import Engine
from forerun.training.config import choose, learned_kind, learned_kinds
from forerun.training.run import train
from training.runs import SMALL, Notes, records
from training.test_trainer_run import assert_same_run, stop_after

KINDS = learned_kinds()


@pytest.fixture
def begin(tiny_qwen3_dir, data, tmp_path, monkeypatch, target):
    """`begin(kind, "run", steps=4)`."""
    monkeypatch.setattr("forerun.training.run.open_target", lambda config: target)

    def call(kind, out, **changes):
        notes = Notes()
        small = {**SMALL, "steps": 4, "eval_every": 4, "eval_temperature": "1", **changes}
        flags = {**small, "target": str(tiny_qwen3_dir), "data": str(data), "out": str(tmp_path / out)}
        return train(choose(kind, flags, {}), notes), notes

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_depend_on_how_it_is_cut(begin, tmp_path, kind):
    """What a kind draws, and its objective, are the same in one pass and in many, to float32's rounding."""
    for out, most in (("one", 10_000), ("many", 30)):
        begin(kind, out, micro_batch_tokens=most, steps=2, eval_prompts=0)
    one, many = (records(tmp_path / out, "step") for out in ("one", "many"))
    for name in ("loss", "weight", "grad_norm"):
        assert [r[name] for r in one] == pytest.approx([r[name] for r in many], rel=2e-3), name
    assert one[0]["weight"] == pytest.approx(many[0]["weight"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_and_its_drafter_decodes(begin, tmp_path, monkeypatch, target, kind):
    """Stopped after one step and run again: the bits of a run that was not. Its best drafter loads and drafts."""
    begin(kind, "whole", ema=0.9)
    with monkeypatch.context() as patch:
        stop_after(patch, 1, signal.SIGTERM)
        assert begin(kind, "halves", ema=0.9)[0] == signal.SIGTERM
    code, notes = begin(kind, "halves", ema=0.9)
    assert code == 0
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    [(evaluation, best)] = notes.evaluations
    assert best
    assert evaluation.decoding[0].stats.drafter_faults == evaluation.decoding[0].stats.invalid_drafts == 0
    drafter = drafter_class(kind).load({"model": str(tmp_path / "halves" / "best")}, LoadContext(target))
    [done] = Engine.load(target, drafter).generate([[1, 2, 3]], Sampling(seed=1, max_tokens=8, ignore_eos=True))
    assert done.stats.drafted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_from_a_store(begin, data, tmp_path, kind):
    """With a pruned vocabulary where the kind can have one: with the normaliser from the store instead of the teacher's
    whole head the losses are the same, to bfloat16.
    """
    prunes = "draft_vocab_size" in learned_kind(kind).settings_class.model_fields
    losses = []
    for out, changes in (("plain", {}), ("stored", {"feature_store": str(tmp_path / "store"), "store_gb": 0.01})):
        notes = Notes()
        flags = {**SMALL, "steps": 2, "eval_prompts": 0, "target": "t", "data": str(data), **changes}
        chosen = choose(kind, {**flags, "out": str(tmp_path / out)}, {"draft_vocab_size": 100} if prunes else {})
        assert train(chosen, notes) == 0
        losses.append([r["loss"] for r in records(tmp_path / out, "step")])
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert torch.isfinite(torch.tensor(losses)).all()
