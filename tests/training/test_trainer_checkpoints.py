"""Checkpoints are whole or not there, metrics go on where they were, and a full disk costs no checkpoint."""

from __future__ import annotations

import errno
import json
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from forerun.errors import TrainingFailed
from forerun.training import checkpoints
from forerun.training.checkpoints import Checkpoints, Progress, give_weights, named, under, weights_of
from forerun.training.metrics import MetricsLog, Sums, Usage
from forerun.training.stops import INSIST, StopRequest, writing


def made(folder: Path, keep: int = 2) -> Checkpoints:
    found = Checkpoints(folder / "checkpoints", keep)
    found.tidy()
    return found


def save(kept: Checkpoints, step: int, value: float = 0.0) -> None:
    progress = Progress(step=step, place=10 * step, used=Usage(tokens=step), evaluation={"step": step})
    kept.save(progress, {"settings": {"seed": 0}}, {"network.w": torch.full((2, 3), value + step)})


def test_what_was_saved_comes_back(tmp_path):
    """Tensors, numbers and what the run is; the newest, and only as many as are to be kept."""
    kept = made(tmp_path)
    assert kept.newest() == (None, [])
    for step in (1, 2, 3):
        save(kept, step)
    found, broken = kept.newest()
    assert broken == []
    assert kept.steps() == [2, 3]
    assert found.progress == Progress(step=3, place=30, used=Usage(tokens=3), evaluation={"step": 3})
    assert found.run == {"settings": {"seed": 0}}
    assert torch.equal(under("network", found.tensors)["w"], torch.full((2, 3), 3.0))


def test_a_tensor_with_two_names_is_kept_once():
    """A head that is the embedding: one tensor is saved, both names have it afterwards. Another network is refused by
    the name that differs.
    """

    def tied(width: int = 3, value: float = 0.0) -> torch.nn.Module:
        network = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, width), "head": torch.nn.Linear(width, 5, False)})
        network["head"].weight = network["embed"].weight
        torch.nn.init.constant_(network["embed"].weight, value)
        return network

    saved = weights_of(tied(value=2.0))
    assert saved.keys() == {"embed.weight"}
    network = tied()
    give_weights(network, saved)
    assert torch.equal(network["head"].weight, torch.full((5, 3), 2.0))
    assert network["head"].weight is network["embed"].weight
    with pytest.raises(ValueError, match=r"^embed.weight$"):
        give_weights(tied(width=4), saved)
    with pytest.raises(ValueError, match=r"^more$"):
        give_weights(network, {**saved, "more": torch.zeros(1)})


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "state.safetensors").write_bytes(b"x" + (f / "state.safetensors").read_bytes()[1:]),
        lambda f: (f / "state.safetensors").write_bytes((f / "state.safetensors").read_bytes()[:-1]),
        lambda f: (f / "state.safetensors").unlink(),
        lambda f: (f / "state.json").write_text("{"),
        lambda f: (f / "state.json").unlink(),
    ],
)
def test_a_broken_checkpoint_is_told_and_the_one_before_it_used(tmp_path, damage):
    """Flipped, cut and missing files; with none left there is an error, not a silent fresh start."""
    kept = made(tmp_path)
    save(kept, 1)
    save(kept, 2)
    damage(kept.folder / "step-00000002")
    found, broken = kept.newest()
    assert found.progress.step == 1
    assert "step 2 is broken" in broken[0]
    damage(kept.folder / "step-00000001")
    with pytest.raises(TrainingFailed, match="--restart begins anew"):
        kept.newest()


class Killed(BaseException):
    """As if the process ended here."""


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("again", [False, True], ids=["another step", "the same step"])
def test_death_at_any_point_of_writing_leaves_a_whole_checkpoint(tmp_path, monkeypatch, call, again):
    """Before each change of the folder in turn nothing more happens: after `tidy` the newest is the old one or the new
    one, whole, also with keep = 1 and when the same step is written once more."""
    kept = made(tmp_path, keep=1)
    save(kept, 4)
    step, calls = (4 if again else 5), 0

    def fatal(original):
        def wrapped(*args, **options):
            nonlocal calls
            calls += 1
            if calls >= call:
                raise Killed
            return original(*args, **options)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", fatal(checkpoints.save_file))
        patch.setattr(checkpoints, "_to_disk", fatal(checkpoints._to_disk))
        patch.setattr(checkpoints.shutil, "rmtree", fatal(checkpoints.shutil.rmtree))
        for name in ("mkdir", "rename", "write_text"):
            patch.setattr(Path, name, fatal(getattr(Path, name)))
        with suppress(Killed):
            save(kept, step, value=100.0)
    later = made(tmp_path, keep=1)
    found, broken = later.newest()
    assert broken == []
    value = float(found.tensors["network.w"][0, 0])
    assert value in ((4.0, 104.0) if again else (4.0, 105.0))
    assert not list(later.folder.glob(".*"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error")])
def test_a_disk_that_fails_leaves_the_others(tmp_path, monkeypatch, error):
    """Nothing half written stays, and the message has the reason."""
    kept = made(tmp_path)
    save(kept, 1)

    def full(*_):
        raise error

    monkeypatch.setattr(checkpoints, "_to_disk", full)
    with (
        pytest.raises(TrainingFailed, match=r"step 2 could not be written: (the disk is full|I/O error)"),
        writing("step 2"),
    ):
        save(kept, 2)
    assert [path.name for path in kept.folder.iterdir()] == ["step-00000001"]


def test_names_of_tensors_go_there_and_back():
    """Under a prefix, which is not confused with one that begins alike."""
    tensors = {**named("a", {"x.y": torch.ones(1)}), **named("ab", {"z": torch.zeros(1)})}
    assert set(under("a", tensors)) == {"x.y"}
    assert set(under("ab", tensors)) == {"z"}


# ------------------------------------------------------------------------------------------------------------- metrics


def test_metrics_go_on_where_a_checkpoint_was(tmp_path):
    """Lines after it, and a torn one, are cut off; those before it stay; a file that was shortened is told."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1})
    length = log.length()
    log.write({"step": 2})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    log = MetricsLog(path, length)
    log.write({"step": 2, "again": True})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "again": True}]
    log = MetricsLog(path, 1000)
    assert log.lost == 1000 - path.stat().st_size
    assert log.length() == path.stat().st_size
    log.close()


def test_sums_become_means_by_position():
    """Numerators and denominators add up over micro-batches; a gap or weight 0 has no mean; one name per metric."""
    sums = Sums()
    sums.add(3.0, 2.0, {"ce": (3.0, 2.0), "teacher_forced_acceptance@1": (1.0, 2.0)})
    sums.add(
        1.0, 2.0, {"ce": (5.0, 2.0), "teacher_forced_acceptance@1": (1.0, 2.0), "teacher_forced_acceptance@3": (0, 0)}
    )
    assert Sums.of([sums, Sums()]).as_dict() == {
        "loss": 1.0, "ce": 2.0, "teacher_forced_acceptance": [0.5, None, None],
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- stops


def test_a_signal_is_a_request_and_insisting_ends_the_process():
    """The first one is remembered, handlers come back afterwards; after the third there is no waiting."""
    before = signal.getsignal(signal.SIGTERM)
    # A suite in the background of a shell inherits SIGINT as ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest()
    assert not stop
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop
        assert stop.number == signal.SIGTERM
        assert INSIST == 3
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGINT, interrupt)
