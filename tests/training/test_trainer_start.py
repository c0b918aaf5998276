"""Starts that are fitted, as the trainer makes them: when, with what, and what is done where they cannot be."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from forerun.drafters.dflash import DFlash
from forerun.drafters.learned.fitting import Regression
from forerun.training import metrics, trainer
from forerun.training.config import choose
from forerun.training.run import plan_run, train
from forerun.training.step import Stepper
from forerun.training.trainer import Trainer
from training.runs import SMALL, Notes, records
from training.test_trainer_run import assert_same_run, stop_after

DRAFT = {"layers": 1, "taps": "1,2", "block_size": 3}


@pytest.fixture
def begin(tiny_qwen3_dir, data, tmp_path, monkeypatch, target):
    """`begin("run", steps=4)` trains a DFlash drafter -> (exit value, what the listener saw)."""
    monkeypatch.setattr("forerun.training.run.open_target", lambda config: target)

    def call(out, init="fitted", run=train, **changes):
        notes = Notes()
        flags = {**SMALL, "steps": 3, "eval_prompts": 0, "save_every": 1, **changes}
        flags |= {"target": str(tiny_qwen3_dir), "data": str(data), "out": str(tmp_path / out)}
        chosen = choose("dflash", flags, {**DRAFT, "init": init})
        return (run(chosen, notes) if run is train else run(chosen)), notes

    return call


def state(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Of a checkpoint."""
    return load_file(out / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def starts(notes: Notes) -> list[str]:
    return [text for text in notes.texts if text.startswith("start:")]


def test_a_run_is_fitted_once_and_says_so_once(begin, tmp_path, monkeypatch):
    """A run that goes on is not fitted again, and ends in the bits of one that was not stopped."""
    _, notes = begin("whole", ema=0.9)
    assert len(starts(notes)) == 1
    with monkeypatch.context() as patch:
        stop_after(patch, 1, signal.SIGTERM)
        begin("halves", ema=0.9)
    _, notes = begin("halves", ema=0.9)
    assert starts(notes) == []
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_that_died_before_its_first_checkpoint_begins_alike(begin, tmp_path, monkeypatch, stored):
    """It is fitted again, to the same bits, with features computed again or found in the store."""

    def store(name):
        return {"feature_store": str(tmp_path / name), "store_gb": 0.01} if stored else {}

    def dies(*_):
        raise KeyboardInterrupt

    begin("whole", **store("one"))
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            begin("again", **store("two"))
    _, notes = begin("again", **store("two"))
    assert len(starts(notes)) == 1
    one, other = (state(tmp_path / out, 3) for out in ("whole", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_average_begins_with_what_was_fitted(begin, tmp_path):
    """And keeps nothing of the random ones: after a step that moves nothing it is the weights."""
    begin("run", steps=1, learning_rate=1e-12, ema=0.999999)
    saved = state(tmp_path / "run", 1)
    for name in (name.removeprefix("average.") for name in saved if name.startswith("average.")):
        torch.testing.assert_close(saved[f"average.{name}"], saved[f"network.{name}"], rtol=1e-6, atol=1e-9)


def test_the_time_of_the_fit_is_time_of_the_run(begin, tmp_path, monkeypatch):
    """Where it has used up --cpu-seconds there is one step, which a run has at least."""

    clock = [0.0]

    def long(*_):
        clock[0] += 10
        return False

    monkeypatch.setattr(metrics.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(DFlash, "fit_start", long)
    begin("run", steps=50, cpu_seconds=5.0, save_every=50)
    assert [r["step"] for r in records(tmp_path / "run", "step")] == [1]


@pytest.mark.parametrize("init", ["random", "target"])
def test_other_starts_are_not_fitted(begin, init):
    _, notes = begin(init, init=init, steps=1)
    assert starts(notes) == []


def test_a_plan_fits_nothing(begin, monkeypatch):
    monkeypatch.setattr(DFlash, "fit_start", lambda *_: pytest.fail("fitted"))
    (chosen, _), _ = begin("plan", run=plan_run)
    assert chosen.config.steps == 3


def test_a_fit_whose_numbers_fail_ends_no_run(begin, tmp_path, monkeypatch):
    """It is said, and the run is the one from random weights."""

    def fails(_):
        raise torch.linalg.LinAlgError("solve: the input matrix is singular")

    begin("random", init="random")
    monkeypatch.setattr(Regression, "slopes", fails)
    code, notes = begin("failed")
    assert code == 0
    assert "random weights after all" in starts(notes)[-1]
    one, other = (state(tmp_path / out, 3) for out in ("random", "failed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fitted", [True, False])
def test_all_processes_meet_after_the_fit(monkeypatch, fitted):
    """Also one whose numbers failed while those of the others did not: it takes the first one's weights."""
    met = []
    monkeypatch.setattr(trainer, "same_everywhere", met.append)
    drafter = SimpleNamespace(fit_start=lambda _: fitted)
    job = SimpleNamespace(drafter=drafter, material=lambda _: None, accelerator=SimpleNamespace(num_processes=2))
    Trainer._fit_start(SimpleNamespace(job=job, stepper=SimpleNamespace(average=None), _say=print))
    assert met == [drafter]
