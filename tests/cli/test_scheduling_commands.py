"""`forerun profile`, `calibrate` and `recommend`, from the command line to what decoding finds afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.conftest import Run
from forerun import Engine
from forerun.budget.calibration import CalibrationKey, Table
from forerun.budget.stored import read_calibration, read_profile
from forerun.cli import calibrate
from forerun.engine.profile_key import engine_key
from forerun.target.load import load_target

QUICK = ("--seconds", 1, "--rows", 6, "--requests", 2)
REPETITIVE = [f"a{i} b c a{i} b c a{i} b c" for i in range(6)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(REPETITIVE))
    return path


# ------------------------------------------------------------------------------------------------------------- profile


def test_a_profile_is_kept_and_decoding_goes_by_it(run: Run, tiny_qwen3_dir: Path) -> None:
    """Found by its key, with the drafters measured before: from then on an engine schedules."""
    assert not _adapts(tiny_qwen3_dir)
    ran = run("profile", tiny_qwen3_dir, *QUICK, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["profile"]["drafts"] == {}
    assert [point["rows"] for point in ran.json["steps"] if point["requests"] == 1][:6] == [1, 2, 3, 4, 5, 6]
    assert ran.json["target"]["fingerprint"]["weights"]
    assert not _adapts(tiny_qwen3_dir)
    assert run("profile", tiny_qwen3_dir, *QUICK, "--drafter", "ngram").code == 0
    profile = read_profile(engine_key(load_target(tiny_qwen3_dir)))
    assert profile is not None
    assert set(profile.drafts) == {"ngram"}
    assert _adapts(tiny_qwen3_dir)


def _adapts(folder: Path) -> bool:
    with Engine.load(str(folder), drafter="ngram") as engine:
        return engine.core.schedule.scheduler.adapts


def test_a_profile_is_shown_and_drawn(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, tmp_path: Path) -> None:
    """Table on the screen, pictures with their data; where it is kept is said on stderr."""
    plots = tmp_path / "plots"
    pair = ("--drafter", "ngram", "--drafter", tiny_small_dir)
    ran = run("profile", tiny_qwen3_dir, *pair, *QUICK, "--plots", plots, "--threads", 1)
    assert ran.code == 0, ran.err
    assert "rows in a step" in ran.out
    assert "small" in ran.out
    assert "kept in" in ran.err
    assert {path.name for path in plots.iterdir()} >= {"target.png", "target.csv", "drafters.png"}


def test_a_profile_may_be_kept_elsewhere_or_nowhere(
    run: Run, tiny_qwen3_dir: Path, tmp_path: Path, cache: Path
) -> None:
    """`--calibration-cache DIR` and `off`."""
    assert run("profile", tiny_qwen3_dir, *QUICK, "--calibration-cache", "off", "--output", tmp_path / "t").code == 0
    assert not cache.exists()
    assert "rows in a step" in (tmp_path / "t").read_text()
    assert run("profile", tiny_qwen3_dir, *QUICK, "--calibration-cache", tmp_path / "mine").code == 0
    assert len(list((tmp_path / "mine").glob("*.json"))) == 1
    assert not cache.exists()


# ----------------------------------------------------------------------------------------------------------- calibrate


def test_calibration_from_the_command_line(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, tmp_path: Path
) -> None:
    """Rounds of two temperatures, tables with held-out numbers, a page; a second run decodes nothing again."""
    rows, plots = tmp_path / "rounds.jsonl", tmp_path / "plots"
    many = tmp_path / "many.txt"
    many.write_text("\n".join(REPETITIVE * 2))
    args = ["calibrate", "--target", tiny_qwen3_dir, "--drafter", tiny_small_dir, "--prompts", many]
    args += ["--num-speculative-tokens", 2, "--max-tokens", 60, "--temperature", "0.7,1", "--rows", rows, "--json"]
    ran = run(*args, "--plots", plots)
    assert ran.code == 0, ran.err
    tables = [one["table"] for one in ran.json["calibrations"]]
    assert [table["key"]["temperature"] for table in tables] == ["medium", "one"]
    assert all(len(table["temperatures"]) == 2 and table["num_samples"] >= 100 for table in tables)
    assert (plots / "calibration.html").is_file()
    again = run(*args)
    assert again.json["calibrations"] == ran.json["calibrations"]
    assert "24 finished prompts are kept" in again.err
    found = read_calibration(Path(ran.json["files"]["small"]))
    assert found is not None
    assert len(found.keys) == 2


def test_calibration_goes_where_it_is_told(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """--out: one temperature; the table as text."""
    args = ["calibrate", tiny_qwen3_dir, "--drafter", tiny_small_dir, "--prompts", prompts]
    args += ["--temperature", 0, "--max-tokens", 72]
    ran = run(*args, "--num-speculative-tokens", 2, "--out", tmp_path, "--threads", 1)
    assert ran.code == 0, ran.err
    assert "small: rejection, probabilistic, temperature greedy, filters none" in ran.out
    assert "floor: the ECE of a perfect predictor" in ran.out
    assert (tmp_path / "calibration.json").is_file()


def test_tables_are_exported_one_a_file_named_after_their_conditions(tmp_path: Path) -> None:
    """In SGLang's form, which has no place for them; one that makes things worse is not."""
    key = CalibrationKey("rejection", "probabilistic", "one", "top_p=0.9, min_p=0.1")
    table, sts = Table(key, (1.5, 2.0), "held out", 100), {"temperatures": [1.2, 3.0]}
    made = [
        SimpleNamespace(drafter="dspark", holds=not holds, temperatures_hold=holds, table=table, sglang=lambda: sts)
        for holds in (True, False)
    ]
    calibrate._export(made, tmp_path)
    [file] = tmp_path.iterdir()
    assert file.name == "dspark-rejection-probabilistic-one-top_p=0.9-min_p=0.1.sglang.json"
    assert json.loads(file.read_text()) == sts


# ----------------------------------------------------------------------------------------------------------- recommend


def test_a_recommendation_measures_what_is_missing_once(run: Run, tiny_qwen3_dir: Path, prompts: Path) -> None:
    """Costs are measured by the first run and read by the second; acceptance is that of the prompts."""
    args = ["recommend", tiny_qwen3_dir, "--drafter", "ngram", "--prompts", prompts, "--concurrency", "1,4"]
    args += ["--seconds", 0.3, "--max-tokens", 12, "--max-num-seqs", 4, "--json"]
    first = run(*args)
    assert first.code == 0, first.err
    assert "measuring" in first.err
    assert [(one["drafter"], one["concurrency"]) for one in first.json["verdicts"]] == [("ngram", 1), ("ngram", 4)]
    assert set(first.json["best"]) == {"1", "4"}
    [choice] = first.json["choices"]
    assert choice["acceptance"]["prompts"] == 6
    assert choice["num_speculative_tokens_per_batch_size"][0][0] == 1
    second = run(*args)
    assert "measuring" not in second.err
    assert second.json == first.json


def test_two_models_of_a_kind_are_compared(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path) -> None:
    """An engine holds one `small`; a comparison of two loads them one after the other."""
    pair = ["--drafter", tiny_small_dir, "--drafter", tiny_qwen3_dir]
    args = ["recommend", "--target", tiny_qwen3_dir, *pair, "--prompt", "a b c", "--seconds", 0.3, "--max-tokens", 8]
    ran = run(*args, "--max-num-seqs", 2, "--json")
    assert ran.code == 0, ran.err
    labels = [one["drafter"] for one in ran.json["verdicts"]]
    assert labels == [f"small ({tiny_small_dir})", f"small ({tiny_qwen3_dir})"]


def test_two_drafters_in_turn_are_a_choice_too(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path
) -> None:
    """An n-gram that does not always match before a model; both are decoded together once."""
    args = ["recommend", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--drafter", tiny_small_dir]
    ran = run(*args, "--prompts", prompts, "--seconds", 0.3, "--max-tokens", 16, "--max-num-seqs", 2, "--json")
    assert ran.code == 0, ran.err
    small = f"small ({tiny_small_dir})"
    assert [one["drafter"] for one in ran.json["verdicts"]] == ["ngram", small, f"ngram, else {small}"]
    found = ran.json["choices"][2]["acceptance"]
    assert found[small]["rounds"] > 0
    assert found["ngram"]["match_rate"] == pytest.approx(ran.json["choices"][0]["acceptance"]["match_rate"], abs=0.3)


def test_a_card_stands_in_for_decoding(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """--cards: what is told of this temperature, not of another; a drafter without a card is decoded with."""
    model = Path(shutil.copytree(tiny_small_dir, tmp_path / "model"))
    (model / "README.md").write_text(
        "Decoding at temperature 0, 8 prompts: mean accepted length 2.5.\n\n| position | 1 | 2 |\n|---|---|---|\n"
        "| `acceptance_by_position` | 0.900 | 0.500 |\n"
    )
    args = ["recommend", "--target", tiny_qwen3_dir, "--drafter", model, "--prompts", prompts, "--seconds", 0.3]
    args += ["--max-tokens", 8, "--max-num-seqs", 2, "--cards", "--json"]
    [choice] = run(*args).json["choices"]
    assert choice["acceptance"] == {
        "prompts": 0, "rounds": 0, "match_rate": 1.0, "survival": [0.9, pytest.approx(0.45)], "card": True,
    }  # fmt: skip
    sampled = run(*args, "--temperature", 1)
    assert sampled.json["choices"][0]["acceptance"]["rounds"] > 0
    assert "has no card for temperature 1" in sampled.err


def test_drafters_are_named_one_by_one_or_together() -> None:
    """`--drafter` may be repeated, with any command; each may be a list."""
    from forerun.cli.options import EngineFlags

    flags = EngineFlags(drafter=["ngram,small", "some/folder"])
    assert [(config.method, config.model) for config in flags.drafters()] == [
        ("ngram", None),
        ("small", None),
        (None, "some/folder"),
    ]
    assert EngineFlags(drafter=[]).drafters() == []


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["profile", "--seconds", "0"], "--seconds"),
        (["profile", "--rows", "0"], "--rows"),
        (["profile", "--requests", "0"], "--requests"),
        (["profile", "--temperature", "-1"], "--temperature"),
        (["profile", "--policy", "delayed"], "--policy"),
        (["profile", "--min-predicted-gain", "0.1"], "--min-predicted-gain"),
        (
            ["profile", "--speculative-config", '{"method": "ngram", "confidence_threshold": 0.5}'],
            "confidence_threshold",
        ),
        (["calibrate", "--temperature", "hot"], "--temperature"),
        (["calibrate", "--temperature", "1,0.9"], "--temperature"),
        (["calibrate", "--held-out", "1"], "--held-out"),
        (["calibrate", "--max-tokens", "1"], "--max-tokens"),
        (["calibrate", "--batch", "0"], "--batch"),
        (["calibrate", "--top-p", "2"], "--top-p"),
        (["calibrate", "--out", "/no/such/folder"], "--out"),
        (["calibrate", "--rows", "/no/such/folder/rows.jsonl"], "--rows"),
        (["calibrate", "--drafter", "ngram,small", "--out", "."], "--out"),
        (["calibrate", "--drafter", "dspark", "--export-sglang", "/no/such/folder"], "--export-sglang"),
        (["calibrate", "--drafter", "dspark+lookup", "--export-sglang", "."], "--export-sglang"),
        (["recommend", "--concurrency", "0"], "--concurrency"),
        (["recommend", "--concurrency", "many"], "--concurrency"),
        (["recommend", "--max-tokens", "1"], "--max-tokens"),
        (["recommend", "--context", "-1"], "--context"),
        (["recommend", "--drafter", "vanilla"], "--drafter"),
        (["recommend", "--seconds", "0"], "--seconds"),
    ],
)
def test_what_cannot_be_used_is_refused_before_loading(
    refused: Callable[..., str], args: list[str], named: str
) -> None:
    """One line that names the option; the target does not even exist."""
    assert named in refused(*args, "--target", "does-not-exist-anywhere").partition(":")[0]


def test_a_target_given_twice_is_refused(refused: Callable[..., str]) -> None:
    """TARGET and --target contradict each other, also where the second is the default."""
    for command in ("profile", "recommend", "calibrate", "serve", "doctor"):
        for named in ("two", "embedded"):
            said = refused(command, "one", "--target", named)
            assert said == f"--target: is given twice: one and {named}"


def test_an_empty_target_is_told_wherever_it_is_given(refused: Callable[..., str]) -> None:
    """An empty name was given; it is not the default."""
    for args in (["recommend", ""], ["recommend", "--target", ""], ["doctor", ""], ["doctor", "--target", ""]):
        assert refused(*args) == "--target: is empty; name a model"
