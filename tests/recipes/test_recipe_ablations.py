"""The ablations: what counts as a difference, what is run, and a page that is made of finished runs alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from forerun.training.checkpoints import Checkpoints, Progress
from forerun.training.metrics import Usage


def finished(
    work: Path, name: str, length: float, *, steps: int = 40, evaluated: bool = True, error: float | None = 0.1
) -> None:
    """A run's last checkpoint, as `forerun train` writes it."""
    rates = [0.6, 0.5, 0.4, 0.3]
    decoding: list[dict[str, Any]] = [
        {"temperature": t, "prompts": 8, "mean_accepted_length": length, "acceptance_by_position": rates}
        for t in (0.0, 1.0)
    ]
    for one in decoding if error is not None else []:
        one["confidence_ece"] = error
    forced = {"loss": 3.0, "soft_ce": 2.5, "teacher_forced_acceptance": [0.55, 0.5]}
    evaluation = {"step": steps, "score": length, "teacher_forced": forced, "decoding": decoding}
    progress = Progress(step=steps, used=Usage(1000 * steps, 9.0, 8.0, 0.0, 10**9))
    if evaluated:
        progress.evaluated, progress.evaluation = steps, evaluation
    checkpoints = Checkpoints(work / "runs" / name / "checkpoints", keep=1)
    checkpoints.tidy()
    checkpoints.save(progress, {"settings": {"steps": 40}}, {"nothing": torch.zeros(1)})


@pytest.fixture
def work(tmp_path: Path) -> Path:
    plan = {"asked": {"minutes": 8, "target": "embedded", "set": []}, "cpu_seconds": 480, "step": 1.0, "steps": 40}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for seed, length in enumerate((2.0, 2.1, 2.2)):
        finished(tmp_path, f"base-seed-{seed}", length)
    return tmp_path


def test_variants_are_one_change_each(ablations: ModuleType) -> None:
    """Every variant but the seeds changes something; names are distinct; each changed setting is one of the base's (or
    a loss schedule), so that a misspelt one cannot pass for a change; the drafter takes all of them.
    """
    names = [variant.name for variant in ablations.VARIANTS]
    assert len(set(names)) == len(names)
    for variant in ablations.CHANGES:
        changed = {name: value for name, value in variant.change.items() if ablations.BASE.get(name) != value}
        assert changed
        assert set(variant.change) <= set(ablations.BASE) | {"draft.ce-first"}
    from forerun.drafters.dspark.config import DSparkSettings

    for variant in ablations.VARIANTS:
        given = {
            n.removeprefix("draft.").replace("-", "_"): v for n, v in variant.settings({}).items() if "draft." in n
        }
        taps = [int(tap) for tap in str(given.pop("taps")).split(",")]
        DSparkSettings(taps=taps, **given)


def test_below_two_spreads_nothing_is_resolved(ablations: ModuleType, work: Path) -> None:
    """Seeds of 2.0, 2.1, 2.2: a mean of 2.1, a spread of 0.2. 2.45 is not resolved, 2.55 and 1.65 are."""
    for name, length in (("depth-1", 2.45), ("depth-3", 2.55), ("start-random", 1.65)):
        finished(work, name, length)
    found = ablations.results(work)
    resolved = {
        name: found["runs"][name]["metrics"]["accepted length, T = 1"]["resolved"]
        for name in ("base-seed-0", "depth-1", "depth-3", "start-random")
    }
    assert resolved == {"base-seed-0": False, "depth-1": False, "depth-3": True, "start-random": True}
    assert found["base"]["accepted length, T = 0"] == {"mean": pytest.approx(2.1), "spread": pytest.approx(0.2)}


def test_equal_seeds_resolve_no_equal_variant(ablations: ModuleType) -> None:
    """A spread of nothing does not make a difference of nothing one; one seed alone has no spread at all."""
    column = ablations.Column.of([2.0, 2.0, None])
    assert column.spread == 0
    assert not column.resolved(2.0)
    assert column.resolved(2.001)
    assert ablations.Column.of([2.0, None]) is None


def test_unfinished_runs_are_named_not_shown(ablations: ModuleType, work: Path) -> None:
    """A run not evaluated after its last step is missing; one that its budget ended says after how many steps."""
    finished(work, "depth-1", 2.0, evaluated=False)
    finished(work, "block-16", 2.3, steps=30)
    page = work / "page" / "ablations.md"
    assert ablations.main(["report", "--work", str(work), "--page", str(page)]) == 0
    text, data = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert "depth-1" in data["missing"]
    assert "depth-1" not in data["runs"]
    assert "| block | 16 (30 steps) |" in text
    assert "Not run yet: " in text
    assert "| base | mean | 2.100 |" in text
    assert "$" not in text
    assert str(work) not in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_nothing_is_refused(
    ablations: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run, no page."""
    page = tmp_path / "page.md"
    assert ablations.main(["report", "--work", str(tmp_path), "--page", str(page)]) == 2
    assert "no run in" in capsys.readouterr().err
    assert not page.exists()


def test_runs_are_made_once(
    ablations: ModuleType,
    here: Callable[[ModuleType], list[list[str]]],
    tiny_qwen3_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trial, then what was asked for, planned alike and below --minutes; what is finished is not run again; another
    plan or other samples in the same folder are refused.
    """
    from forerun.target.load import load_target
    from training.runs import random_samples, write_data

    data = write_data(tmp_path / "data", load_target(tiny_qwen3_dir).tokenizer, random_samples(40), held_out=0.2)
    noted, work = here(ablations), tmp_path / "work"
    tiny = {"tokens-per-step": 120, "mixed-precision": "no", "eval-prompts": 2, "eval-tokens": 6, "draft.taps": "1,2"}
    given = [word for name, value in tiny.items() for word in ("--set", f"{name}={value}")]
    begin = ["run", "--target", str(tiny_qwen3_dir), "--data", str(data), "--work", str(work), *given]
    few = ["--minutes", "0.01", "--variants", "base-seed-[01]", "block-4"]
    assert ablations.main([*begin, *few]) == 0
    assert len(noted) == 4
    assert ablations.main([*begin, *few]) == 0
    assert len(noted) == 4
    assert ablations.main([*begin, *few, "markov-rank-0"]) == 0
    assert len(noted) == 5
    found = ablations.results(work)
    assert set(found["runs"]) == {"base-seed-0", "base-seed-1", "block-4", "markov-rank-0"}
    for name, run in found["runs"].items():
        assert run["steps"] <= run["planned_steps"] == found["plan"]["steps"], name
        assert run["decoding"][1]["drafting_rounds"] > 0
    assert found["runs"]["base-seed-0"]["soft_ce"] != found["runs"]["base-seed-1"]["soft_ce"]

    assert ablations.main([*begin, "--minutes", "1"]) == 2
    other = write_data(tmp_path / "other", load_target(tiny_qwen3_dir).tokenizer, random_samples(20, seed=1))
    assert ablations.main([*begin, "--data", str(other), *few]) == 2
    assert "other samples" in capsys.readouterr().err
