"""Real processes, really killed: whatever is run again ends in the very bits of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.target.load import load_target
from training.killing import FAILURES, PLACES
from training.runs import random_samples, write_data
from training.test_trainer_run import assert_same_run

TESTS = Path(__file__).parent.parent
SIGNALS = {"SIGTERM": 143, "SIGINT": 130}
PLACES_AND_MORE = [*PLACES, *SIGNALS, *FAILURES]


@pytest.fixture(scope="module")
def ended(tiny_qwen3_dir, tmp_path_factory):
    """(folder of the runs, place -> exit codes of the process that was killed there and of the one that went on)."""
    folder = tmp_path_factory.mktemp("killed")
    data = write_data(folder / "data", load_target(tiny_qwen3_dir).tokenizer, random_samples(30), held_out=0.1)
    job = {"target": str(tiny_qwen3_dir), "data": str(data), "out": str(folder), "places": PLACES_AND_MORE}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killing.py")), json.dumps(job)],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes["whole"] == [0], done.stderr
    return folder, codes


@pytest.mark.parametrize("place", PLACES)
def test_ck_2_a_killed_run_goes_on_to_the_same_bits(ended, place):
    """kill -9 at any place, amid a checkpoint and amid a line of metrics among them; then the same command again.
    Weights, optimiser, average, best, last and metrics are those of the undisturbed run.
    https://github.com/sgl-project/SpecForge/issues/243
    """
    folder, codes = ended
    assert codes[place] == [-9, 0]
    assert_same_run(folder / "whole", folder / f"run{PLACES_AND_MORE.index(place)}")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_ends_a_run_with_a_checkpoint_and_its_code(ended, name):
    """SIGTERM: 143, Ctrl-C: 130, both after the step they came in; what goes on ends in the same bits."""
    folder, codes = ended
    assert codes[name] == [SIGNALS[name], 0]
    assert_same_run(folder / "whole", folder / f"run{PLACES_AND_MORE.index(name)}")


@pytest.mark.parametrize("name", FAILURES)
def test_a_file_that_cannot_grow_ends_a_run_cleanly(ended, name):
    """The system refuses to write: exit code 1, and with room again the run goes on to the same bits."""
    folder, codes = ended
    assert codes[name] == [FAILURES[name][1], 0]
    assert_same_run(folder / "whole", folder / f"run{PLACES_AND_MORE.index(name)}")
