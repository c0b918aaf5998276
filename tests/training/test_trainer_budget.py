"""`--cpu-seconds`: a run of so much processor time, whatever its steps cost."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from forerun.training import metrics
from forerun.training.checkpoints import Checkpoints, Progress
from forerun.training.run import train
from training.runs import Notes, configured, records


@pytest.fixture
def begin(tiny_qwen3_dir, target, data, tmp_path, monkeypatch):
    """`begin(steps=..)` in a process whose clock goes on by a second whenever it is read: twice in a step."""
    ticks = itertools.count()
    monkeypatch.setattr("forerun.training.run.open_target", lambda config: target)
    monkeypatch.setattr(metrics.time, "process_time", lambda: float(next(ticks)))

    def call(**changes):
        notes = Notes()
        return train(configured(tiny_qwen3_dir, data, tmp_path / "run", **changes), notes), notes

    return call


def progress(out: Path) -> Progress:
    found, _ = Checkpoints(out / "checkpoints", keep=2).newest()
    assert found is not None
    return found.progress


def test_the_step_that_uses_it_up_is_the_last(begin, tmp_path):
    """Not at --steps, but at the first step that has used so much: it is evaluated, kept as best/ and last/, and both
    have a card; the listener is told why.
    """
    code, notes = begin(steps=50, cpu_seconds=20.0, eval_every=50, save_every=50)
    done = progress(tmp_path / "run")
    assert code == 0
    assert 3 < done.step < 20
    assert [r["step"] for r in records(tmp_path / "run", "evaluation")] == [done.step]
    assert done.best_step == done.step
    for name in ("best", "last"):
        assert f"step {done.step} of 50" in (tmp_path / "run" / name / "README.md").read_text()
    assert any(f"--cpu-seconds 20 are used up after step {done.step} of 50" in text for text in notes.texts)


def test_what_was_used_before_a_stop_counts(begin, tmp_path):
    """A run that was stopped half-way ends where one that was not stopped would, give or take what a start costs."""
    begin(steps=50, cpu_seconds=10.0, eval_every=50, save_every=50)
    half = progress(tmp_path / "run")
    begin(steps=50, cpu_seconds=20.0, eval_every=50, save_every=50)  # more is allowed now: it goes on
    done = progress(tmp_path / "run")
    assert half.step < done.step <= 2 * half.step + 2
    assert done.used.cpu_seconds >= 20
    assert done.used.tokens > half.used.tokens


def test_a_run_that_has_used_it_up_is_finished(begin, tmp_path):
    """The same command once more takes no step and changes nothing."""
    begin(steps=50, cpu_seconds=20.0, eval_every=50, save_every=50)
    before = progress(tmp_path / "run")
    code, notes = begin(steps=50, cpu_seconds=20.0, eval_every=50, save_every=50)
    assert code == 0
    assert notes.reports == []
    assert progress(tmp_path / "run") == before
    assert any("finished already" in text for text in notes.texts)


def test_steps_end_a_run_before_its_budget(begin, tmp_path):
    """A budget is a bound: with fewer steps the run ends by them."""
    begin(steps=3, cpu_seconds=1e6)
    assert progress(tmp_path / "run").step == 3
