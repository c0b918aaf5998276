"""A whole run: from a configuration to a trained drafter in its folder, or to a plan of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from forerun.training.config import Chosen
from forerun.training.folder import RunFolder
from forerun.training.metrics import resident_memory
from forerun.training.plan import UTILISATION, Plan, matrix_rate, measure, plan, process_of, workload_of
from forerun.training.prepared import check_data, is_prepared, prepare
from forerun.training.setup import assemble, open_target, start
from forerun.training.step import check_lesson
from forerun.training.stops import StopRequest, reading
from forerun.training.trainer import Listener, Trainer

if TYPE_CHECKING:
    from accelerate import Accelerator

    from forerun.target.base import Target


def train(chosen: Chosen, listener: Listener, *, restart: bool = False) -> int:
    """Trains, or goes on where the folder's last checkpoint is.

    Args:
        chosen: what to do.
        listener: is told what happens.
        restart: begin anew in a folder that has checkpoints.

    Returns:
        0 if the run is finished, else the number of the signal that stopped it, after a checkpoint.

    Raises:
        OptionError: a setting that cannot be used, or that differs from the run in the folder.
        TrainingFailed: it cannot go on; its last checkpoint is as it was.
        ModelError: the target cannot be used.
    """
    check_data(chosen.config)
    chosen, accelerator = start(chosen)
    folder = RunFolder(Path(chosen.config.out))
    try:
        if accelerator.is_main_process:
            folder.open(restart)
        accelerator.wait_for_everyone()
        target = open_target(chosen.config)
        job = assemble(chosen, accelerator, target, _samples(chosen, accelerator, target, folder))
        trainer = Trainer(job, folder, listener, StopRequest())
        return trainer.run()
    finally:
        if accelerator.is_main_process:
            folder.close()


def plan_run(chosen: Chosen, measured: bool = False) -> tuple[Chosen, Plan]:
    """What a run would need, and its complete configuration. Nothing is trained or written.

    Args:
        chosen: what to do.
        measured: time a few micro-batches instead of counting operations.
    """
    check_data(chosen.config)
    RunFolder(Path(chosen.config.out)).check()
    chosen, accelerator = start(chosen)
    before = resident_memory()
    target = open_target(chosen.config)
    with TemporaryDirectory() as aside:
        data = _samples(chosen, accelerator, target, RunFolder(Path(aside)))
        job = assemble(chosen, accelerator, target, data, dry=True)
        check_lesson(job.drafter, job.inputs.train)
        half = job.config.mixed_precision != "no"
        rate = matrix_rate(target.device, torch.bfloat16 if half else torch.float32) * UTILISATION
        work = workload_of(job, process_of(job, before))
        return job.chosen, plan(work, rate, measure(job) if measured else None)


def _samples(chosen: Chosen, accelerator: Accelerator, target: Target, folder: RunFolder) -> Path:
    """The prepared folder; where --data names records, one in the run's, prepared by the main process."""
    data = Path(chosen.config.data)
    with reading("--data"):
        if data.is_dir() and is_prepared(data):
            return data
    if accelerator.is_main_process:
        place = folder.claim_data()
        with reading("--data"):
            prepare(chosen.config, target, place)
    accelerator.wait_for_everyone()
    return folder.data
