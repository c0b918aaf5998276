"""The loop: evaluate, save, step; and what it needs to go on where it was."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.errors import TrainingFailed
from forerun.target.dtypes import dtype_name
from forerun.training.card import write_card
from forerun.training.checkpoints import Checkpoint, Checkpoints, Progress, give_weights, named, under, weights_of
from forerun.training.config import Chosen
from forerun.training.evaluation import Evaluation, Evaluator, Interrupted
from forerun.training.folder import RunFolder, refuse_changes
from forerun.training.inputs import chosen_for_evaluation
from forerun.training.metrics import Meter, MetricsLog, Usage
from forerun.training.optimizer import optimizer_tensors, restore_optimizer, unsavable
from forerun.training.setup import Job, same_everywhere
from forerun.training.step import Stepper, StepReport, check_lesson
from forerun.training.stops import StopRequest, fitting, writing


class Listener(Protocol):
    """Who watches a run. Called in the main process alone."""

    def settings(self, chosen: Chosen) -> None: ...
    def note(self, text: str) -> None: ...
    def begin(self, step: int, steps: int) -> None:
        """The loop begins after `step` steps of `steps`."""

    def stepped(self, report: StepReport, used: Usage) -> None: ...
    def evaluated(self, evaluation: Evaluation, best: bool) -> None: ...
    def end(self) -> None: ...


class Trainer:
    """One run, from where its folder stands to its end or to a signal.

    Args:
        job: what is trained, on what.
        folder: open.
        listener: is told what happens.
        stop: signals end the run after the step they came in.
    """

    def __init__(self, job: Job, folder: RunFolder, listener: Listener, stop: StopRequest):
        self.job, self.folder, self.listener, self.stop = job, folder, listener, stop
        self.stepper = Stepper(job.drafter, job.source, job.config, job.accelerator)
        assert job.config.steps is not None
        self.steps = job.config.steps
        self.checkpoints = Checkpoints(folder.checkpoints, job.config.keep)
        self.progress = Progress(loss_scale=self.stepper.scale.value)
        samples = chosen_for_evaluation(job.inputs.held_out, job.config.eval_prompts)
        self.evaluator = (
            Evaluator(samples, job.source, job.config, job.accelerator, lambda: bool(stop)) if samples else None
        )
        self._saved = (0, -1)  # step and evaluation of the newest checkpoint

    def run(self) -> int:
        """Number of the signal that ended it, 0 if it is finished.

        Raises:
            TrainingFailed: it cannot go on; the last checkpoint is as it was.
        """
        self._tell("settings", self.job.chosen)
        for text in self.job.notes:
            self._say(text)
        self._resume()
        self.meter = Meter(self.progress.used, self.job.target.device, self.job.accelerator.num_processes)
        if self.progress.step == 0:
            check_lesson(self.job.drafter, self.job.inputs.train)
            self._fit_start()
        if self.job.is_main:
            self.folder.write_settings(self.job.chosen)
        self.log = MetricsLog(self.folder.metrics, self.progress.metrics_bytes) if self.job.is_main else None
        if self.log is not None and self.log.lost:
            self._say(f"{self.log.path} is {self.log.lost} bytes shorter than it was: some of its lines are gone")
        self._start_trackers()
        self._write_lost()
        try:
            self._tell("begin", self.progress.step, self.steps)
            with self.stop.listening():
                return self._loop()
        finally:
            self._tell("end")
            if self.log is not None:
                self.log.close()
            self.job.accelerator.end_training()

    def _fit_start(self) -> None:
        """Before the first step, for kinds that can: it counts as time of the run, and is done again if that is stopped
        before its first checkpoint."""
        with fitting("the fitted start", "begin with --draft.init random"):
            self.job.drafter.fit_start(self.job.material(self._say))
        # Also where this process has nothing fitted: its numbers alone may have failed, and the others wait for it.
        if self.job.accelerator.num_processes > 1:
            same_everywhere(self.job.drafter)
        if self.stepper.average is not None:
            self.stepper.average.restart()

    def _loop(self) -> int:
        while True:
            stopped = self._asked()
            if not stopped and self._evaluation_due():
                self._evaluate()
                stopped = self._asked()
            finished = self.progress.step >= self.steps and not self._evaluation_due()
            if stopped or finished or self._save_due():
                self._save()
            if finished or stopped:
                self._tell_end(stopped)
                return 0 if finished else stopped
            self._step()

    def _tell_end(self, stopped: int) -> None:
        progress = self.progress
        if progress.skipped:
            self._say(f"{progress.skipped} of {progress.step} steps were skipped: their samples teach nothing")
        if stopped and progress.step < self.steps:
            kept = "its checkpoint is written" if progress.step else "there was nothing to keep yet"
            name = signal.Signals(stopped).name
            self._say(f"stopped by {name} after step {progress.step} of {self.steps}: {kept}; the same command goes on")

    # ------------------------------------------------------------------------------------------------------------ steps

    def _step(self) -> None:
        before = self.meter.read().seconds
        indices, place = self.job.order.step(self.progress.place)
        samples = [self.job.inputs.train[i] for i in indices]
        with fitting(f"step {self.progress.step + 1}", "lower --micro-batch-tokens and run the same command again"):
            report = self.stepper.step(self.progress.step, samples)
        self.progress.step, self.progress.place = report.step, place
        self.progress.used.tokens += report.tokens
        self._count_skipped(report, len(indices))
        used = self.meter.read()
        seconds = used.seconds - before
        speed = {"seconds": seconds, "tokens_per_second": report.tokens / seconds, "peak_memory": used.peak_memory}
        epoch = place / len(self.job.order.lengths)
        self._record({**report.as_dict(), "epoch": epoch, **speed}, report.step)
        self._tell("stepped", report, used)
        self._keep_to_budget()

    def _keep_to_budget(self) -> None:
        """Where --cpu-seconds are used up, the step just taken becomes the last one: what ends a run then follows."""
        limit, used = self.job.config.cpu_seconds, self.progress.used.cpu_seconds
        if limit is None or not 0 < self.progress.step < self.steps:
            return
        if self.job.accelerator.num_processes > 1:  # all processes end with the same step
            used = float(self.job.accelerator.reduce(torch.tensor(used, device=self.job.accelerator.device), "max"))
        if used >= limit:
            self._say(f"--cpu-seconds {limit:g} are used up after step {self.progress.step} of {self.steps}")
            self.steps = self.progress.step

    def _count_skipped(self, report: StepReport, samples: int) -> None:
        """TrainingFailed where a whole epoch, or a whole run, has taught nothing."""
        progress = self.progress
        progress.skipped += report.skipped
        progress.idle = progress.idle + samples if report.skipped else 0
        if progress.idle >= len(self.job.order.lengths) or progress.skipped >= self.steps:
            raise TrainingFailed(
                f"step {report.step}: there was nothing to learn in {progress.idle:,} samples one after the other: "
                "they are too short or their loss masks leave nothing; look at them with `forerun data prepare --show`"
            )
        if report.skipped and progress.skipped == 1:
            self._say(f"step {report.step} is skipped: its samples teach nothing; more such steps are only counted")

    def _asked(self) -> int:
        """Number of the signal that asked to stop, as all processes see it."""
        if self.job.accelerator.num_processes == 1:
            return self.stop.number
        asked = torch.tensor(self.stop.number, device=self.job.accelerator.device)
        return int(self.job.accelerator.reduce(asked, "max"))

    # ------------------------------------------------------------------------------------------------------- evaluation

    def _evaluation_due(self) -> bool:
        step, every = self.progress.step, self.job.config.eval_every
        assert every is not None
        due = step > 0 and (step % every == 0 or step >= self.steps)
        return self.evaluator is not None and due and self.progress.evaluated < step

    def _evaluate(self) -> None:
        assert self.evaluator is not None
        try:
            with self._averaged():
                found = self.evaluator.evaluate(self.job.drafter, self.progress.step)
        except Interrupted:
            return
        progress, score = self.progress, found.score
        progress.evaluated, progress.evaluation = progress.step, finite(found.as_dict())
        best = score is not None and (progress.best_score is None or score > progress.best_score)
        self._record(progress.evaluation, progress.step)
        if best:
            progress.best_score, progress.best_step = score, progress.step
            self._save_drafter(self.folder.best)
        self._tell("evaluated", found, best)

    def _averaged(self) -> Any:
        """Within, the network has the weights that are evaluated and saved: the average, if there is one."""
        average = self.stepper.average
        return nullcontext() if average is None else average.in_place()

    # ---------------------------------------------------------------------------------------------------------- saving

    def _save_due(self) -> bool:
        every = self.job.config.save_every
        assert every is not None
        return self.progress.step % every == 0

    def _save(self) -> None:
        """A checkpoint, and the drafter as it is now; nothing if that is there already."""
        now = self.progress.step, self.progress.evaluated
        if self.progress.step == 0 or now == self._saved:
            return
        self._saved = now
        self.meter.read()
        self.progress.loss_scale, self.progress.calm_steps = self.stepper.scale.value, self.stepper.scale.calm
        if self.log is not None:
            # Drafters first: once there is a checkpoint of the last step, a run is not taken up before it.
            self._save_drafter(self.folder.last)
            if self.progress.step >= self.steps and self.progress.best_step is None:
                self._save_drafter(self.folder.best)
            with self._writing(f"the checkpoint of step {self.progress.step}"):
                self.progress.metrics_bytes = self.log.length()
                self.checkpoints.save(self.progress, self.job.identity, self._tensors())
        self.job.accelerator.wait_for_everyone()

    def _save_drafter(self, where: Path) -> None:
        if self.job.is_main:
            with self._writing(f"the drafter in {where}"), self._averaged():
                self._refuse_unsavable()
                self.job.drafter.save(where)
                self.meter.read()
                write_card(where, self.job, self.progress)

    def _refuse_unsavable(self) -> None:
        """TrainingFailed if a weight would not be finite in the files."""
        dtype = self.job.drafter.saved_dtype
        bad = unsavable(self.job.drafter.network, dtype)
        if bad is not None:
            raise TrainingFailed(
                f"step {self.progress.step}: {bad} has weights that {dtype_name(dtype)} cannot hold (at most "
                f"{torch.finfo(dtype).max:,.6g}); choose another --dtype, or lower --learning-rate"
            )

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        saved = self.checkpoints.steps()
        kept = f"the last good checkpoint is that of step {saved[-1]}" if saved else "there is no checkpoint yet"
        with writing(what, f"{kept}; free some space and run the same command again to go on"):
            yield

    def _tensors(self) -> dict[str, Tensor]:
        stepper = self.stepper
        average = {} if stepper.average is None else stepper.average.weights
        return {
            **named("network", weights_of(self.job.drafter.network)),
            **named("optimizer", optimizer_tensors(stepper.optimizers, stepper.parameters)),
            **named("average", average),
            **named("vocabulary", self.job.drafter.vocabulary.tensors()),
        }

    # -------------------------------------------------------------------------------------------------------- resuming

    def _resume(self) -> None:
        """Takes up the newest whole checkpoint of the folder, if there is one."""
        if self.job.is_main:
            self.checkpoints.tidy()
        self.job.accelerator.wait_for_everyone()
        found, broken = self.checkpoints.newest()
        for problem in broken:
            self._say(f"{problem}; the one before it is used")
        if found is not None:
            refuse_changes(found.run, self.job.identity, self.folder.path)
            self._restore(found)
            self._keep_to_budget()
            done = "finished already" if self.progress.step >= self.steps else "going on from there"
            self._say(f"{found.folder}: step {self.progress.step} of {self.steps}, {done}; --restart begins anew")
        self.job.accelerator.wait_for_everyone()
        if self.job.is_main:
            self.checkpoints.drop_after(self.progress.step)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.progress = checkpoint.progress
        self._saved = self.progress.step, self.progress.evaluated
        stepper, tensors = self.stepper, checkpoint.tensors
        same = under("vocabulary", tensors), self.job.drafter.vocabulary.tensors()
        if same[0].keys() != same[1].keys() or not all(torch.equal(same[0][name], same[1][name]) for name in same[1]):
            raise TrainingFailed(f"{checkpoint.folder} was made for other ids than this version of forerun would keep")
        try:
            self._take(tensors)
        except ValueError as error:
            raise TrainingFailed(f"{checkpoint.folder} holds another network; it differs in {error}") from error
        restore_optimizer(stepper.optimizers, stepper.parameters, under("optimizer", tensors))
        if stepper.scale.needed:
            stepper.scale.value, stepper.scale.calm = self.progress.loss_scale, self.progress.calm_steps

    def _write_lost(self) -> None:
        """Writes drafters again that a finished run had written and that somebody has removed."""
        if not self.job.is_main or self.progress.step < self.steps:
            return
        last, best, step = self.folder.last, self.folder.best, self.progress.best_step
        if not last.exists():
            self._save_drafter(last)
            self._say(f"{last} was gone and is written again")
        if best.exists():
            return
        if step in (None, self.progress.step):
            self._save_drafter(best)
            self._say(f"{best} was gone and is written again")
            return
        assert step is not None
        found = self.checkpoints.of_step(step)
        if found is None:
            self._say(f"{best} is gone, and so is the checkpoint of step {step} that it was made from; {last} is left")
            return
        now = self._whole()
        self._take(found.tensors)
        self._save_drafter(best)
        self._take(now)
        self._say(f"{best} was gone and is written again, from {found.folder}")

    def _whole(self) -> dict[str, Tensor]:
        """A copy of the weights and their average."""
        average = {} if self.stepper.average is None else self.stepper.average.weights
        own = {**named("network", weights_of(self.job.drafter.network)), **named("average", average)}
        return {name: tensor.clone() for name, tensor in own.items()}

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Weights and average of a checkpoint. ValueError names a weight that is not the same in both."""
        give_weights(self.job.drafter.network, under("network", tensors))
        if self.stepper.average is not None:
            for name, weight in under("average", tensors).items():
                self.stepper.average.weights[name].copy_(weight)

    # ---------------------------------------------------------------------------------------------------------- telling

    def _record(self, record: Mapping[str, Any], step: int) -> None:
        if self.log is not None:
            with self._writing(str(self.log.path)):
                self.log.write(finite(record))
        if self.job.accelerator.trackers:
            self.job.accelerator.log(flat(record), step=step)

    def _start_trackers(self) -> None:
        if self.job.config.trackers:
            settings = {name: str(value) for name, value, _ in self.job.chosen.rows()}
            self.job.accelerator.init_trackers("forerun", config=settings)

    def _say(self, text: str) -> None:
        self._tell("note", text)

    def _tell(self, event: str, *what: Any) -> None:
        if self.job.is_main:
            getattr(self.listener, event)(*what)


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record for a tracker, as `a/b/1`; lists count from 1."""
    out: dict[str, float] = {}
    for name, value in record.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            out |= flat(value, f"{key}/")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            out |= flat({str(i): item for i, item in enumerate(value, 1)}, f"{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            out[key] = float(value)
    return out


def finite(value: Any) -> Any:
    """JSON has no infinity: a metric that is not finite is null."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["Listener", "Trainer", "flat"]
