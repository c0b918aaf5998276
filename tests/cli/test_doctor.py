"""`forerun doctor`: what it looks at, and its exit codes. Rates are scripted: they are not what is tested."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from cli.conftest import Run
from forerun.bench import machine
from forerun.bench.machine import Spread
from forerun.cli.checks.check import Check
from forerun.target.table import history_model
from tiny import qwen3, save_tokenizer


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing else to do, whose passes cost the same whatever their rows."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(machine, "read_bandwidth", lambda device: Spread(30, 29, 31, "GB/s"))
    monkeypatch.setattr(machine, "matrix_rate", lambda dtype, device: Spread(100, 90, 110, "GFLOP/s"))
    flat = {rows: Spread(2.0, 1.9, 2.1, "ms") for rows in (1, 2, 3, 5, 9, 17)}
    monkeypatch.setattr(machine, "verify_cost", lambda *args, **options: flat)


def found(ran: object) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in ran.json["checks"]}  # type: ignore[attr-defined]


def test_the_machine_alone(run: Run) -> None:
    """Without a target: versions, cores, memory, rates. Exit code 0."""
    ran = run("doctor", "--json")
    assert (ran.code, ran.json["status"], ran.err) == (0, "ok", "")
    names = {"forerun", "python", "torch", "transformers", "cpu", "threads", "load", "memory", "read bandwidth"}
    assert names | {"float32 GEMM", "bfloat16 GEMM"} <= set(found(ran))
    assert found(ran)["torch"]["found"] == torch.__version__


def test_the_same_as_text(run: Run, tmp_path: Path) -> None:
    """One line per finding, on the screen and in a file."""
    ran = run("doctor")
    assert [line.split()[1] for line in ran.out.splitlines()][:3] == ["forerun", "python", "torch"]
    assert run("doctor", "--output", tmp_path / "report").code == 0
    assert (tmp_path / "report").read_text().splitlines()[0] == ran.out.splitlines()[0]


def test_warnings_are_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many threads, other work, slow bfloat16: each says what was expected and what to do."""
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    rates = {torch.float32: 100.0, torch.bfloat16: 10.0}
    monkeypatch.setattr(machine, "matrix_rate", lambda dtype, device: Spread(rates[dtype], 1, 200, "GFLOP/s"))
    ran = run("doctor", "--json")
    assert (ran.code, ran.json["status"]) == (1, "warning")
    for name in ("threads", "load", "bfloat16 GEMM"):
        check = found(ran)[name]
        assert check["status"] == "warning"
        assert check["expected"]
        assert check["advice"]
    assert found(ran)["threads"]["advice"] == f"--threads {machine.usable_cores()}"


def test_a_target(run: Run, tiny_qwen3_dir: Path) -> None:
    """Window, vocabulary, template, weights, noise of passes, cost of verifying."""
    ran = run("doctor", tiny_qwen3_dir, "--json")
    checks = found(ran)
    assert ran.code == 0, ran.out
    assert checks["window"]["found"].startswith("256 positions")
    assert checks["vocabulary"]["found"].startswith("264 logits, 259 tokens")
    assert checks["end of sequence"]["found"] == "256 '<|end|>'"
    assert checks["attention"]["found"].startswith("3 x full")
    assert checks["linear layers"]["found"] == "plain linear layers: packing is for bfloat16 on a CPU"
    assert checks["kv storage"]["found"] == f"{3 * 2 * 16 * 4} bytes a token"
    assert checks["weights"]["found"] == "finite"
    assert "characters" in checks["chat template"]["found"]
    assert "0 of" in checks["pass noise"]["found"]
    assert "times as long with rows 2: 1.00, 3: 1.00" in checks["verify cost"]["found"]


@pytest.mark.parametrize("window", [2, 3, 8, 40])
def test_a_short_window(run: Run, tiny_qwen3_dir: Path, window: int) -> None:
    """What is measured is cut to the window; nothing breaks."""
    ran = run("doctor", tiny_qwen3_dir, "ngram", "--max-model-len", window, "--probe", 2, "--json")
    assert ran.code in (0, 1), ran
    assert found(ran)["window"]["found"].startswith(f"{window} positions")
    assert ("not measured" in found(ran)["pass noise"]["found"]) == (window == 2)
    assert "ngram acceptance" in found(ran)


def test_a_pair(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path) -> None:
    """A drafter of the same family: nothing to complain of, and its acceptance on the package's prompts."""
    flags = ("--json", "--probe", 2)
    ran = run("doctor", tiny_qwen3_dir, tiny_small_dir, *flags)
    checks = found(ran)
    assert checks["small tokenizer"]["status"] == "ok"
    assert checks["small window"]["found"] == "256 positions"
    assert "tokens a drafting round; by position 0." in checks["small acceptance"]["found"]
    by_flags = found(run("doctor", "--target", tiny_qwen3_dir, "--drafter", tiny_small_dir, *flags))
    assert by_flags["small acceptance"] == checks["small acceptance"]


def test_a_pair_that_does_not_fit_well(run: Run, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A drafter of other weights, window and template: warnings, exit code 1, each with what to do."""
    other = tmp_path / "other"
    qwen3(1, seed=5, window=128).save_pretrained(other)
    save_tokenizer(other, chat_template="{{ messages }}")
    ran = run("doctor", tiny_qwen3_dir, other, "--json", "--probe", 2)
    checks = found(ran)
    assert (ran.code, ran.json["status"]) == (1, "warning")
    assert checks["small window"]["advice"] == "nothing is drafted beyond position 128"
    for name in ("small window", "small template", "small acceptance"):
        assert checks[name]["status"] == "warning", checks[name]


def test_errors_are_exit_code_2(run: Run, tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A model that cannot be loaded is a finding; so are weights that are not numbers."""
    ran = run("doctor", tmp_path / "missing", "--json")
    assert (ran.code, found(ran)["target"]["status"]) == (2, "error")
    ran = run("doctor", tiny_qwen3_dir, tmp_path / "missing", "--json")
    assert (ran.code, found(ran)["drafter"]["status"]) == (2, "error")
    broken = Path(shutil.copytree(tiny_qwen3_dir, tmp_path / "broken"))
    model = qwen3(3)
    with torch.no_grad():
        model.model.embed_tokens.weight[200, 0] = torch.nan  # of a token that nothing has met yet
    model.save_pretrained(broken)
    ran = run("doctor", broken, "--json")
    assert ran.code == 2
    assert "embed_tokens.weight" in found(ran)["weights"]["found"]


def test_contradictions_are_refused(refused, tiny_qwen3_dir: Path) -> None:
    """A drafter without a target, a target given twice, a negative probe, an unknown drafter key."""
    assert refused("doctor", "--drafter", "ngram").startswith("--target: ")
    assert refused("doctor", tiny_qwen3_dir, "--target", "embedded").startswith("--target: is given twice")
    assert refused("doctor", "--probe", -1).startswith("--probe: ")
    line = refused("doctor", tiny_qwen3_dir, "--speculative-config.methd", "ngram")
    assert line.startswith("--speculative-config.methd: ")
    assert "'method'" in line


def test_a_check_says_what_to_do() -> None:
    """Only where something is not as expected."""
    assert len(Check.of("x", True, "1", "2", "do").lines()) == 1
    assert [line.strip() for line in Check.of("x", False, "1", "2", "it").lines()][1:] == ["expected: 2", "do: it"]


# --------------------------------------------------------------------------------------------------- the measurements


def test_spread() -> None:
    """Median, lowest and highest."""
    assert Spread.of([3, 1, 2, 10], "ms") == Spread(2.5, 1, 10, "ms")
    assert str(Spread(2.5, 1, 10, "ms")) == "2.5 ms [1 .. 10]"


def test_usable_cores_respect_a_container(tmp_path: Path) -> None:
    """A quota of one and a half cores is two; none is all of them."""
    quota = tmp_path / "cpu.max"
    assert machine._quota(quota, 8) == 8
    quota.write_text("max 100000\n")
    assert machine._quota(quota, 8) == 8
    quota.write_text("150000 100000\n")
    assert machine._quota(quota, 8) == 2


def test_verify_cost_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows behind the context, in turns, the first turn not counted; only what fits the window."""
    monkeypatch.undo()
    target = history_model(5, window=48)
    cost = machine.verify_cost(target, rows=(1, 3, 30), context=64, repeats=2)
    assert list(cost) == [1, 3]
    assert target.passes == [24, *[1, 3] * 3]
    assert all(0 < spread.low <= spread.median <= spread.high for spread in cost.values())


def test_rates_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small buffer: the unit and the order of the numbers."""
    monkeypatch.undo()
    monkeypatch.setattr(machine, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "MATRIX", {"cpu": 32})
    cpu = torch.device("cpu")
    for spread in (machine.read_bandwidth(cpu, 2), machine.matrix_rate(torch.float32, cpu, 2)):
        assert 0 < spread.low <= spread.median <= spread.high
    assert json.dumps(spread.as_dict())
