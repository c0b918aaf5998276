"""Whole runs in this process: what a run leaves, what it refuses, and that it goes on where it was."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forerun.drafters.base import LoadContext
from forerun.engine import Engine
from forerun.errors import DoesNotFit, ModelError, OptionError, TrainingFailed
from forerun.target.fingerprint import fingerprint
from forerun.training import checkpoints, trainer
from forerun.training.run import train
from forerun.training.trainer import Trainer, flat
from training.linear import Linear
from training.runs import KIND, Notes, configured, random_samples, records, sample, without_times, write_data


@dataclass(frozen=True)
class Finished:
    """A run that nobody disturbed, with `SMALL`: to be read, or copied and gone on with."""

    out: Path
    code: int
    notes: Notes

    def copy(self, out: Path) -> Path:
        """The same run in another place."""
        return Path(shutil.copytree(self.out, out))


@pytest.fixture(scope="module")
def whole(tiny_qwen3_dir, data, target, tmp_path_factory) -> Finished:
    out, notes = tmp_path_factory.mktemp("whole") / "run", Notes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.training.run.open_target", lambda config: target)
        code = train(configured(tiny_qwen3_dir, data, out), notes)
    return Finished(out, code, notes)


@pytest.fixture
def begin(tiny_qwen3_dir, data, tmp_path, monkeypatch, target):
    """`begin("run", steps=4)` -> (exit value, what the listener saw). The target is loaded once for all."""
    monkeypatch.setattr("forerun.training.run.open_target", lambda config: target)

    def call(out="run", restart=False, samples=None, draft=None, **changes):
        notes = Notes()
        chosen = configured(tiny_qwen3_dir, samples or data, tmp_path / out, draft, **changes)
        return train(chosen, notes, restart=restart), notes

    return call


def weights(out: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(out / name / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_a_drafter_that_can_be_used(whole, target):
    """best/ and last/ load strictly and decode; the card has data, compute, settings, target and the table by position;
    metrics.jsonl has each step and each evaluation once.
    """
    out, notes = whole.out, whole.notes
    assert whole.code == 0
    assert [(r["event"], r["step"]) for r in records(out)] == [
        *(("step", k) for k in (1, 2, 3)), ("evaluation", 3), *(("step", k) for k in (4, 5, 6)), ("evaluation", 6),
    ]  # fmt: skip
    for name in ("best", "last"):
        drafter = Linear.load({"model": str(out / name)}, LoadContext(target))
        [done] = Engine.load(target, drafter).generate([[1, 2, 3]], seed_of_4())
        assert done.stats.drafted > 0
        card = (out / name / "README.md").read_text()
        for text in ("## Data", "## Compute", "## Settings", "## Target", "tokenizer: `", "learning_rate: 0.01", KIND):
            assert text in card, text
        assert "| `acceptance_by_position` |" in card
        assert "| `teacher_forced_acceptance` |" in card
    best = max(notes.evaluations, key=lambda pair: pair[0].score)[0]
    assert [pair[0].step for pair in notes.evaluations if pair[1]][-1] == best.step
    assert f"step {best.step} of 6" in (out / "best" / "README.md").read_text()
    assert notes.ended
    assert {row[2] for row in notes.chosen.rows()} >= {"flag", "default", "derived: the longest sample"}


def seed_of_4():
    from forerun import Sampling

    return Sampling(temperature=1, seed=4, max_tokens=10)


def test_training_teaches(begin, tmp_path):
    """The held-out acceptance over given text rises well above that of the start, and so does the accepted length."""
    begin(
        steps=80,
        eval_every=80,
        save_every=80,
        eval_prompts=8,
        eval_tokens=40,
        learning_rate=0.02,
        draft={"skip": 0.0},
    )
    begin("none", steps=1, eval_prompts=8, eval_tokens=40, learning_rate=1e-9)
    [taught], [start] = (records(tmp_path / out, "evaluation") for out in ("run", "none"))
    accepted = [r["teacher_forced"]["teacher_forced_acceptance"][0] for r in (start, taught)]
    assert accepted[1] > accepted[0] + 0.1
    assert taught["score"] > start["score"]


def test_what_is_evaluated_and_saved_is_the_average(begin, tmp_path):
    """With `ema` last/ has the average of the weights, which is not the weights that training goes on from."""
    begin(ema=0.5, steps=2, save_every=1)
    begin("one", steps=2, save_every=1)
    state = load_file(tmp_path / "run" / "checkpoints" / "step-00000002" / "state.safetensors")
    own = load_file(tmp_path / "one" / "checkpoints" / "step-00000002" / "state.safetensors")
    saved = weights(tmp_path / "run")
    for name in saved:
        assert torch.equal(saved[name], state[f"average.{name}"])
        assert torch.equal(own[f"network.{name}"], state[f"network.{name}"])
    assert not all(torch.equal(saved[name], own[f"network.{name}"]) for name in saved)


def test_mixed_precision_is_near_full_precision(begin, tmp_path):
    """bfloat16 passes on float32 weights: losses differ in the third digit, and they do differ."""
    begin("full", steps=3)
    begin("half", steps=3, mixed_precision="bf16")
    full, half = ([r["loss"] for r in records(tmp_path / out, "step")] for out in ("full", "half"))
    assert half == pytest.approx(full, rel=0.01)
    assert half != full


def test_without_held_out_samples_best_is_the_last(begin, tmp_path):
    """It is said, the card says so too, and nothing is evaluated."""
    _, notes = begin(held_out=0.0, steps=2)
    assert any("nothing is held out" in text for text in notes.texts)
    assert notes.evaluations == []
    assert same(weights(tmp_path / "run", "best"), weights(tmp_path / "run"))
    assert "It was not evaluated" in (tmp_path / "run" / "best" / "README.md").read_text()


def test_a_pruned_vocabulary_and_a_feature_store(begin, tmp_path):
    """Ids are kept by how often they are learned; with a store the run is the same to bfloat16's rounding, and going
    through the data again reads it."""
    draft = {"draft_vocab_size": 100}
    begin("plain", steps=3, draft=draft)
    begin("stored", steps=3, draft=draft, feature_store=str(tmp_path / "store"), store_gb=0.01)
    one, other = records(tmp_path / "plain", "step"), records(tmp_path / "stored", "step")
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in other], rel=0.02)
    assert weights(tmp_path / "stored")["t2d"].sum() == 100
    assert any((tmp_path / "store").iterdir())


def test_long_samples_are_cut_and_said(begin, tmp_path):
    """`max_length` bounds every batch; a sample with nothing left to learn is left out and counted."""
    _, notes = begin(max_length=6, steps=2)
    assert any("were cut" in text for text in notes.texts)
    assert all(r["tokens"] <= 120 for r in records(tmp_path / "run", "step"))
    with pytest.raises(OptionError, match="--max-length: at 3 tokens no sample has anything left to learn"):
        begin("short", max_length=3)


# ----------------------------------------------------------------------------------------------------------- going on


def test_ck_2_a_stopped_run_goes_on_to_the_same_bits(begin, tmp_path, monkeypatch):
    """Ask to stop after 2 of 6 steps and run again: weights, optimiser, average, losses and metrics are those of a run
    that was never stopped. https://github.com/sgl-project/SpecForge/issues/243
    """
    begin("whole", ema=0.9, weight_decay=0.1)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        code, _ = begin("halves", ema=0.9, weight_decay=0.1)
    assert code == signal.SIGTERM
    assert [r["step"] for r in records(tmp_path / "halves", "step")] == [1, 2]
    code, notes = begin("halves", ema=0.9, weight_decay=0.1)
    assert code == 0
    assert any("step 2 of 6, going on from there" in text for text in notes.texts)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.parametrize("steps", [1, 3])
def test_a_stop_between_checkpoints_writes_one(begin, whole, tmp_path, monkeypatch, steps):
    """Also right where an evaluation is due: it is put off until the run goes on, and then made."""
    with monkeypatch.context() as patch:
        stop_after(patch, steps, signal.SIGINT)
        assert begin("halves")[0] == signal.SIGINT
    assert records(tmp_path / "halves", "evaluation") == []
    assert begin("halves")[0] == 0
    assert_same_run(whole.out, tmp_path / "halves")


def test_a_stop_during_an_evaluation_is_heard(begin, whole, tmp_path, monkeypatch):
    """The evaluation is void, the step is kept; the run goes on with the evaluation."""
    with monkeypatch.context() as patch:
        own = trainer.Evaluator.evaluate

        def evaluate(self, drafter, step):
            self.stopping.__closure__[0].cell_contents.ask(signal.SIGTERM)
            return own(self, drafter, step)

        patch.setattr(trainer.Evaluator, "evaluate", evaluate)
        assert begin("halves")[0] == signal.SIGTERM
    assert begin("halves")[0] == 0
    assert_same_run(whole.out, tmp_path / "halves")


def test_a_finished_run_is_left_alone(begin, whole, tmp_path):
    """Nothing is trained, evaluated or written again."""
    whole.copy(tmp_path / "run")
    state = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name[0] != "."}
    code, notes = begin()
    assert code == 0
    assert any("finished already" in text for text in notes.texts)
    assert notes.reports == notes.evaluations == []
    state.pop(tmp_path / "run" / "config.yaml")
    assert all(p.stat().st_mtime_ns == before for p, before in state.items())


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("best", [4, 6])
def test_drafters_of_a_finished_run_that_were_removed_are_written_again(begin, tmp_path, monkeypatch, ema, best):
    """last/ and best/ are what they were, from the checkpoints; training is not touched."""
    monkeypatch.setattr("forerun.training.evaluation.Evaluation.score", property(lambda self: -abs(self.step - best)))
    begin(eval_every=2, ema=ema)
    before = [weights(tmp_path / "run", name) for name in ("last", "best")]
    shutil.rmtree(tmp_path / "run" / "last")
    shutil.rmtree(tmp_path / "run" / "best")
    code, notes = begin(eval_every=2, ema=ema)
    assert code == 0
    assert notes.reports == []
    assert sum("gone and is written again" in text for text in notes.texts) == 2
    for name, old in zip(("last", "best"), before, strict=True):
        assert same(weights(tmp_path / "run", name), old), name


def test_a_best_drafter_that_cannot_be_written_again_is_said(begin, tmp_path, monkeypatch):
    """Its checkpoint is gone as well: nothing else is put in its place."""
    monkeypatch.setattr("forerun.training.evaluation.Evaluation.score", property(lambda self: -self.step))
    begin(eval_every=2, keep=1)
    shutil.rmtree(tmp_path / "run" / "best")
    _, notes = begin(eval_every=2, keep=1)
    assert any("best is gone, and so is the checkpoint of step 2" in text for text in notes.texts)
    assert not (tmp_path / "run" / "best").exists()


def test_a_stop_says_what_was_kept(begin, monkeypatch):
    """The signal, the step, and that the same command goes on."""
    stop_after(monkeypatch, 3, signal.SIGTERM)
    _, notes = begin()
    assert (
        notes.texts[-1] == "stopped by SIGTERM after step 3 of 6: its checkpoint is written; the same command goes on"
    )


def test_data_that_cannot_be_read_are_named(begin, tmp_path, monkeypatch, data):
    """The file and the reason, for records and for prepared samples."""
    text = tmp_path / "t.jsonl"
    text.write_text('{"text": "hello world"}')
    own = Path.open

    def locked(self, *rest, **options):
        if self == text:
            raise PermissionError(13, "Permission denied", str(self))
        return own(self, *rest, **options)

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(OptionError, match=r"--data: cannot read .*t.jsonl: Permission denied"):
        begin(samples=text)

    def refused(*_):
        raise PermissionError(13, "Permission denied", str(data / "tokens.bin"))

    monkeypatch.setattr("forerun.training.setup.open_inputs", refused)
    with pytest.raises(OptionError, match=r"--data: cannot read .*tokens.bin: Permission denied"):
        begin()


def test_a_strange_folder_among_the_checkpoints_is_no_checkpoint(begin, whole, tmp_path):
    """It is neither read nor counted nor removed."""
    whole.copy(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-abc").mkdir()
    code, notes = begin()
    assert code == 0
    assert any("finished already" in text for text in notes.texts)
    assert (tmp_path / "run" / "checkpoints" / "step-abc").is_dir()


def test_restart_begins_anew(begin, whole, tmp_path):
    """Checkpoints, metrics and drafters of the run before are gone."""
    whole.copy(tmp_path / "run")
    code, notes = begin(steps=2, restart=True)
    assert code == 0
    assert [r["step"] for r in records(tmp_path / "run", "step")] == [1, 2]
    assert notes.first == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, "--learning-rate: is 0.5, the run in .* was begun with 0.01"),
        ({"steps": 9}, "--steps: is 9"),
        ({"seed": 1}, "--seed: is 1"),
        ({"ema": 0.5}, "--ema: is 0.5, .* begun with None"),
        ({"draft": {"skip": 0.5}}, "--draft.skip: is 0.5"),
        ({"max_length": 30}, "--data: "),
        ({"held_out": 0.5}, "--data: "),
        ({"dtype": "bfloat16"}, "--dtype: "),
    ],
)
def test_a_change_that_would_change_the_result_is_refused(begin, whole, tmp_path, changes, message):
    """By the name of the setting, with the way out; the run in the folder stays as it was."""
    whole.copy(tmp_path / "run")
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(OptionError, match=message) as error:
        begin(**changes)
    assert "--restart begins anew" in str(error.value)
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    assert records(tmp_path / "run") == records(whole.out)


def test_what_is_only_watched_or_speed_may_change(begin, tmp_path, monkeypatch):
    """Evaluation, checkpoints and the size of micro-batches are free; so is where the data lies."""
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        begin()
    code, _ = begin(micro_batch_tokens=25, eval_every=2, save_every=1, keep=5, eval_temperature="0")
    assert code == 0
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 5


def test_another_target_is_refused(begin, whole, tmp_path, target):
    """The fingerprint's differing parts are named."""
    whole.copy(tmp_path / "run")
    with torch.no_grad():
        weight = next(target.model.parameters())
        weight.mul_(2)
        try:
            with pytest.raises(OptionError, match="--target: weights differ: it is not what the run in"):
                begin()
        finally:
            weight.div_(2)


def test_a_broken_checkpoint_costs_only_its_steps(begin, whole, tmp_path):
    """The one before it is used, the broken one is told and goes, and the run ends as it would have."""
    whole.copy(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    code, notes = begin()
    assert code == 0
    assert any("step 6 is broken" in text for text in notes.texts)
    assert_same_run(whole.out, tmp_path / "run")


def stop_after(monkeypatch, steps: int, number: int) -> None:
    """A signal that arrives in the middle of a step."""
    own = Trainer._step

    def step(self):
        own(self)
        if self.progress.step == steps:
            self.stop.ask(number)

    monkeypatch.setattr(Trainer, "_step", step)


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit, but for times."""
    step = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert step == sorted(path.name for path in (other / "checkpoints").iterdir())
    for name in step:
        file = Path("checkpoints") / name / "state.safetensors"
        assert same(load_file(one / file), load_file(other / file))
    for name in ("best", "last"):
        assert same(weights(one, name), weights(other, name))
    assert without_times(records(one)) == without_times(records(other))


@pytest.mark.parametrize(
    ("template", "rendered", "remembered"),
    [("of-another", 3, "of-another"), ("of-another", 0, None), (None, 3, None)],
    ids=["another", "plain text", "its own"],
)
def test_ts_9_a_run_remembers_the_template_of_its_data(begin, tmp_path, target, template, rendered, remembered):
    """TS-9: the drafter's fingerprint has the template that rendered what it learned, the card too, and a run says at
    its start if that is not the target's. Plain text has none, whatever template its tokenizer came with.

    https://github.com/z-lab/dflash/issues/133, https://github.com/SafeAILab/EAGLE/issues/227
    """
    own = fingerprint(target).chat_template
    changes = {"rendered": rendered, **({"hash": template} if template else {})}
    data = write_data(tmp_path / "d", target.tokenizer, random_samples(8), 0.2, **changes)
    code, notes = begin(samples=data, steps=1)
    assert code == 0
    warned = [text for text in notes.texts if "another chat template (of-anoth)" in text and own[:8] in text]
    assert len(warned) == (remembered is not None)
    best = tmp_path / "run" / "best"
    saved = json.loads((best / "config.json").read_text())
    assert saved["target_fingerprint"]["chat_template"] == (remembered or own)
    assert f"- chat template: `{remembered or own}`" in (best / "README.md").read_text()
    options = {"model": str(best)}
    if remembered is None:
        assert Linear.load(options, LoadContext(target)).folder == best
    else:
        with pytest.raises(ModelError, match=r"differs in chat_template: .*allow_target_mismatch"):
            Linear.load(options, LoadContext(target))


# --------------------------------------------------------------------------------------------------------- clear stops


def test_a_loss_that_is_not_finite_ends_the_run_with_its_checkpoints(begin, tmp_path, monkeypatch):
    """Step and reason in one line; the last good checkpoint is there to go on from."""
    own = Linear.losses

    def losses(self, batch, exercise, progress):
        found = own(self, batch, exercise, progress)
        return type(found)(found.total * (float("nan") if progress >= 0.5 else 1), found.metrics)

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "losses", losses)
        with pytest.raises(TrainingFailed, match="step 4: the loss is nan"):
            begin()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert begin()[0] == 0


def test_weights_beyond_every_number_end_the_run_with_its_checkpoints(begin, tmp_path, monkeypatch):
    """A finite loss and gradient are not enough: nothing that is not finite is ever saved as a success."""
    monkeypatch.setattr("forerun.training.step.learning_rate", lambda step, *_: 1e38 if step == 3 else 1e-3)
    with pytest.raises(TrainingFailed, match="step 4: the weights are not finite"):
        begin()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    for file in (tmp_path / "run").rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_weights_that_the_saved_dtype_cannot_hold_end_the_run(begin, tmp_path):
    """float16 ends at 65,504: the weight, the dtype and the way out are named, and no infinity is written."""
    with pytest.raises(TrainingFailed, match=r"step 2: .*weight has weights that float16 cannot hold .*--dtype"):
        begin(dtype="float16", learning_rate=1e6, warmup_share=0.0, steps=2)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["learning_rate", "epochs", "store_gb", "clip", "weight_decay", "held_out"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_that_are_not_finite_are_refused(begin, name, value):
    """By their flag."""
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}: "):
        begin(**{name: value})


def test_a_sample_that_teaches_nothing_costs_its_step_alone(begin, tmp_path, target):
    """Alone in a step it is skipped, said once and recorded; the run goes on and goes on again where it was."""
    lone = sample("lone", range(60, 80), 20)
    data = write_data(tmp_path / "d", target.tokenizer, [lone, *random_samples(5)])
    code, notes = begin(samples=data, held_out=0.0, steps=12, tokens_per_step=20, save_every=3)
    assert code == 0
    steps = records(tmp_path / "run", "step")
    skipped = [r for r in steps if r.get("skipped")]
    assert len(steps) == 12
    assert 1 <= len(skipped) <= 3
    assert all(r["loss"] is None and r["weight"] == 0 for r in skipped)
    assert sum("is skipped: its samples teach nothing" in text for text in notes.texts) == 1
    assert any(f"{len(skipped)} of 12 steps were skipped" in text for text in notes.texts)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([sample("a", [1, 2], 1), sample("b", [3, 4], 0)], "too short, the longest has 2 tokens and this kind needs 3"),
        ([sample("a", range(9), 9), sample("b", range(9), 0)], "the loss masks leave no token after the first 2"),
    ],
)
def test_data_that_teach_nothing_are_refused_before_the_first_step(begin, tmp_path, target, samples, message):
    """Whatever the kind weighs: too short, or nothing marked where a drafter could predict it."""
    samples[-1].loss_mask[2:] = False
    data = write_data(tmp_path / "d", target.tokenizer, samples)
    with pytest.raises(OptionError, match=f"--data: .*{message}"):
        begin(samples=data, held_out=0.0)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_epoch_that_teaches_nothing_ends_the_run(begin, tmp_path, target, monkeypatch):
    """Where it shows only in the losses: after one epoch, not never."""
    data = write_data(tmp_path / "d", target.tokenizer, random_samples(6))
    zero = lambda self, *_: trainer_losses(self)  # noqa: E731
    monkeypatch.setattr(Linear, "losses", zero)
    with pytest.raises(TrainingFailed, match=r"step \d+: there was nothing to learn in \d samples one after the other"):
        begin(samples=data, held_out=0.0, steps=50, tokens_per_step=20, save_every=50)
    assert len(records(tmp_path / "run", "step")) <= 6


def trainer_losses(drafter):
    from forerun.drafters.learned import Losses

    return Losses(drafter.network.first.weight.sum() * 0, {})


def test_a_network_that_no_memory_holds_is_refused_in_one_line(begin, monkeypatch):
    """What the allocator says, and what to change; other errors of torch are not taken for it."""
    size = [10**12]
    monkeypatch.setattr(Linear, "network_of", classmethod(lambda *_: torch.empty(size[0], 10**4)))
    with pytest.raises(DoesNotFit, match=r"the drafter needs more memory than there is \(.*--draft"):
        begin()
    size[0] = -1
    with pytest.raises(RuntimeError, match="negative"):
        begin("other")


def test_a_step_that_no_memory_holds_ends_the_run(begin, monkeypatch):
    """With the setting that changes it."""

    def losses(self, *_):
        torch.empty(10**12, 10**4)

    monkeypatch.setattr(Linear, "losses", losses)
    with pytest.raises(TrainingFailed, match=r"step 1 needs more memory .*--micro-batch-tokens"):
        begin()


@pytest.mark.parametrize("what", ["checkpoint", "metrics", "drafter"])
def test_a_full_disk_ends_the_run_with_its_checkpoints(begin, whole, tmp_path, monkeypatch, what):
    """What could not be written is said, and how to go on; nothing half written is left; there is room again: it goes
    on to the same end."""
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        if what == "checkpoint":
            fail_from(patch, checkpoints, "save_file", 2, full)
        elif what == "metrics":
            fail_from(patch, trainer.MetricsLog, "write", 4, full)
        else:
            fail_from(patch, Linear, "save", 2, full)
        with pytest.raises(
            TrainingFailed, match=r"could not be written: the disk is full; .*run the same command again"
        ):
            begin()
    assert not list((tmp_path / "run" / "checkpoints").glob(".new*"))
    assert begin()[0] == 0
    assert_same_run(whole.out, tmp_path / "run")


def fail_from(patch, owner, name, call, error) -> None:
    """Raises from the given call on."""
    own, calls = getattr(owner, name), []

    def wrapped(*args, **options):
        calls.append(1)
        if len(calls) >= call:
            raise error
        return own(*args, **options)

    patch.setattr(owner, name, wrapped)


def test_data_that_does_not_fit_is_refused(begin, tmp_path, target):
    """Another tokenizer; an empty loss mask; no data; the same sample on both sides. Before anything is trained."""

    class Other:
        size = 3
        special_ids = frozenset()
        chat_template = None

        def encode(self, text, add_special_tokens=True):
            return [1]

        def vocabulary(self):
            return {"a": 1}

    some = random_samples(6)
    cases = {
        "other": (write_data(tmp_path / "other", Other(), some), {}, "--data: .*tokenizer"),
        "mute": (
            write_data(tmp_path / "mute", target.tokenizer, [sample("m", range(9), 9), sample("n", range(9), 9)]),
            {},
            "--data: nothing is to be learned",
        ),
        "overlap": (
            write_data(tmp_path / "one", target.tokenizer, some),
            {"held_out": str(write_data(tmp_path / "two", target.tokenizer, some[2:4]))},
            "--held-out: 2 of its samples are trained on as well, such as 's2'",
        ),
        "nowhere": (tmp_path / "nowhere", {}, "--data: .* does not exist"),
    }
    for name, (folder, changes, message) in cases.items():
        with pytest.raises(OptionError, match=message):
            begin(f"run of {name}", samples=folder, **changes)
        assert not (tmp_path / f"run of {name}" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"taps": [1, 9]}, "--draft.taps: must ascend strictly within 1 .. 3"),
        ({"draft_vocab_size": 10_000}, "--draft.draft-vocab-size: must be in 1 .. 264"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(begin, draft, message):
    """By the flag they have on the command line."""
    with pytest.raises(OptionError, match=message):
        begin(draft=draft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 1000}, "--max-length: .*at most 256"),
        ({"mixed_precision": "fp16"}, "--mixed-precision: fp16 needs a GPU"),
        ({"trackers": "trackio"}, "--trackers: trackio is not installed: pip install trackio"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(begin, changes, message, monkeypatch):
    """Before anything is trained, with the option."""
    import importlib.util

    own = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "trackio" else own(name, *rest)
    )
    with pytest.raises(OptionError, match=message):
        begin(**changes)


def test_a_folder_of_something_else_is_not_touched(begin, tmp_path):
    """And a folder in use by another run is refused."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"--out: .* is not empty and holds no run"):
        begin("other", restart=True)
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    from filelock import FileLock

    (tmp_path / "busy").mkdir()
    with FileLock(tmp_path / "busy" / ".lock"), pytest.raises(OptionError, match="is in use by another run"):
        begin("busy")


def listing(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text("utf-8", "replace") for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": "kind: mine", "notes.py": "x", "checkpoints/mine.bin": "precious"},
        {"checkpoints/mine.bin": "precious", "best/song.mp3": "a"},
        {"config.yaml": "site: blog", "checkpoints/mine.bin": "p", "metrics.jsonl": "{}", "src.py": ""},
        {"run.json": '{"name": "somebody else\'s"}'},
        {"run.json": "not json", "last/x": "y"},
    ],
)
def test_a_folder_without_the_marker_of_a_run_is_left_as_it_was(begin, tmp_path, files, restart):
    """Names that a run would use prove nothing: every file of the user is there afterwards, with --restart as well."""
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    with pytest.raises(OptionError, match=r"--out: .*mine is not empty and holds no run"):
        begin("mine", restart=restart)
    assert listing(tmp_path / "mine") == files


def test_only_data_that_a_run_prepared_is_replaced(begin, whole, tmp_path, target):
    """A dataset of the user's in the folder of a run is refused by name; what the run made of a file is made anew."""
    text = tmp_path / "t.jsonl"
    text.write_text("".join(f'{{"text": "hello world number {i}, this is text"}}\n' for i in range(9)))
    whole.copy(tmp_path / "run")
    mine = write_data(tmp_path / "run" / "data", target.tokenizer, random_samples(5))
    before = listing(mine)
    with pytest.raises(OptionError, match=r"--out: .*data was not made by this run and would be replaced"):
        begin("run", samples=text, restart=True, steps=1)
    assert listing(mine) == before
    assert begin("other", samples=text, steps=1)[0] == 0
    made = listing(tmp_path / "other" / "data")
    text.write_text(text.read_text() + '{"text": "one more line for it"}\n')
    assert begin("other", samples=text, restart=True, steps=1)[0] == 0
    assert listing(tmp_path / "other" / "data") != made


def test_an_empty_name_of_a_folder_is_refused(begin, tiny_qwen3_dir, data):
    """`--out ""` would be the folder the command is started in."""
    with pytest.raises(OptionError, match="--out: must name a folder"):
        configured(tiny_qwen3_dir, data, "")


# ------------------------------------------------------------------------------------------------------------ trackers


def test_trackers_get_the_numbers(begin, monkeypatch):
    """Through accelerate: settings once, then every step and evaluation as flat numbers."""
    from accelerate.tracking import GeneralTracker

    class Remember(GeneralTracker):
        name = "remember"
        requires_logging_directory = False
        main_process_only = True
        seen: ClassVar[list] = []

        @property
        def tracker(self):
            return self

        def store_init_configuration(self, values):
            self.seen.append(("settings", values))

        def log(self, values, step=None, **kwargs):
            self.seen.append((step, values))

    import accelerate

    own = accelerate.Accelerator
    monkeypatch.setattr(accelerate, "Accelerator", lambda log_with, **rest: own(log_with=Remember(), **rest))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: True)
    begin(steps=3, trackers="wandb")
    kinds = [entry[0] for entry in Remember.seen]
    assert kinds == ["settings", 1, 2, 3, 3]
    assert Remember.seen[1][1]["teacher_forced_acceptance/1"] > 0
    assert "decoding/1/mean_accepted_length" in Remember.seen[-1][1]


def test_records_are_flattened_for_trackers():
    """Nested names with slashes, lists from 1, no texts and no missing values."""
    assert flat({"a": 1, "b": {"c": [2, None]}, "event": "step", "d": True}) == {"a": 1.0, "b/c/1": 2.0}


def test_metrics_are_json_whatever_they_are(tmp_path):
    """A metric that is not finite is null: JSON has no NaN."""
    found = trainer.finite({"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": np.inf}})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": None, "b": [1.0, None], "c": {"d": None}}
