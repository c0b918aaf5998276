"""What the recipes share: processes that are stopped as they should be, budgets, files that are still being written."""

from __future__ import annotations

import lzma
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

SLOW_TO_STOP = """
import signal, sys, time
def stop(number, frame):
    open(sys.argv[1] + ".stopped", "w").write(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(60)
"""

MEET = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
for _ in range(500):
    if pathlib.Path(sys.argv[2]).exists():
        print("met")
        sys.exit(0)
    time.sleep(0.02)
sys.exit(1)
"""


def python(commands: ModuleType, code: str, cwd: Path, *words: object, log: Path | None = None) -> object:
    return commands.Command([sys.executable, "-c", code, *words], cwd, log)


def test_all_commands_run_side_by_side(commands: ModuleType, tmp_path: Path) -> None:
    """Two that wait for each other's file both end: they ran at the same time. What they say is in their logs."""
    pair = [
        python(commands, MEET, tmp_path, one, other, log=tmp_path / "logs" / f"{one}.log")
        for one, other in (("a", "b"), ("b", "a"))
    ]
    assert commands.Runner().run(pair, at_once=2) == 0
    assert [(tmp_path / "logs" / f"{name}.log").read_text() for name in "ab"] == ["met\n", "met\n"]


def test_nothing_is_started_after_a_failure(commands: ModuleType, tmp_path: Path) -> None:
    """The exit code is that of the command that failed; the next one does not run."""
    codes = [python(commands, f"open('{n}', 'w'); raise SystemExit({n})", tmp_path) for n in (0, 3, 0)]
    assert commands.Runner().run([codes[0], codes[1], python(commands, "open('last', 'w')", tmp_path)]) == 3
    assert not (tmp_path / "last").exists()


def test_a_signal_is_passed_on_and_waited_for(commands: ModuleType, tmp_path: Path) -> None:
    """SIGTERM reaches what runs, whose own end decides; the exit code says why, and the next command is not started."""
    running = python(commands, SLOW_TO_STOP, tmp_path, tmp_path / "child")
    after = python(commands, "open('after', 'w')", tmp_path)

    def send() -> None:
        for _ in range(1000):
            if (tmp_path / "child.ready").exists():
                break
            time.sleep(0.02)
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=send).start()
    assert commands.Runner().run([running, after]) == 128 + signal.SIGTERM
    assert (tmp_path / "child.stopped").read_text() == str(int(signal.SIGTERM))
    assert not (tmp_path / "after").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_steps_of_a_budget(commands: ModuleType) -> None:
    """1,000 CPU-seconds, 2 a step, 50 an evaluation of which three come before the end: 425 steps and 3 % more, so that
    the budget ends the run. A budget that evaluations alone use up is refused.
    """
    pace = commands.Pace(2.0, 50.0)
    assert pace.steps(1000, 4) == 438
    with pytest.raises(ValueError, match="evaluations of 50"):
        pace.steps(150, 4)


def test_a_setting_of_a_flag(commands: ModuleType) -> None:
    """Names as users may write them; what is no setting is refused."""
    assert commands.setting("draft.block_size=4") == ("draft.block-size", "4")
    assert commands.setting("--eval-prompts=8") == ("eval-prompts", "8")
    for text in ("layers", "=3", "layers="):
        with pytest.raises(ValueError, match="NAME=VALUE"):
            commands.setting(text)


def test_a_torn_last_line_is_left_out(commands: ModuleType, tmp_path: Path) -> None:
    """A file that is still being written is used as far as it is whole; the original is not touched."""
    source = tmp_path / "answers.jsonl"
    source.write_bytes(b'{"id": 1}\n{"id": 2}\n{"id": ')
    assert commands.whole_lines(source, tmp_path / "copy.jsonl") == 2
    assert (tmp_path / "copy.jsonl").read_bytes() == b'{"id": 1}\n{"id": 2}\n'
    assert source.stat().st_size == 27


def test_packed_answers_are_unpacked(commands: ModuleType, tmp_path: Path) -> None:
    packed = tmp_path / "answers.jsonl.xz"
    packed.write_bytes(lzma.compress(b'{"id": 1}\n{"id": 2}\n'))
    assert commands.whole_lines(packed, tmp_path / "copy.jsonl") == 2
    assert (tmp_path / "copy.jsonl").read_bytes() == b'{"id": 1}\n{"id": 2}\n'


def test_what_names_a_place_of_this_machine_is_not_published(commands: ModuleType, tmp_path: Path) -> None:
    """A card or config with a private path is refused by name, and nothing is copied; a clean one is copied whole, and
    nothing of the drafter before it is left.
    """
    best, shipped = tmp_path / "best", tmp_path / "shipped"
    best.mkdir()
    for name in ("config.json", "README.md"):
        (best / name).write_text("fine")
    (best / "model.safetensors").write_bytes(b"12345")
    shipped.mkdir()
    (shipped / "calibration.json").write_text("of another one")
    assert commands.publish(best, shipped, [tmp_path, Path("/")]) == 5
    assert sorted(path.name for path in shipped.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    (best / "README.md").write_text(f"data: {tmp_path}/data")
    with pytest.raises(ValueError, match=r"README\.md names"):
        commands.publish(best, tmp_path / "other", [tmp_path])
    assert not (tmp_path / "other").exists()
