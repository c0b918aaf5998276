"""`forerun compare`: from the command line to a report, resumed, and refusals before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from cli.conftest import Run
from forerun.bench.comparing.study import CONFIDENCE
from forerun.bench.measurement import Cell
from forerun.cli import bench_load, demo, lineup, load
from forerun.cli.bench_load import LoadFlags
from forerun.cli.compare import CompareFlags
from forerun.cli.measuring import labels_of
from forerun.cli.options import EngineFlags
from forerun.drafters.config import methods_of, parse_config
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine.propose import LoadedDrafter
from forerun.errors import OptionError
from forerun.target.table import history_model
from tiny import qwen3, save_tokenizer

PROMPTS = '{"prompt": "def f(x):\\n"}\n{"prompt": "a b a b a b"}\n'
QUICK = ("--pairs", 2, "--requests", 2, "--max-tokens", 8, "--ignore-eos", "--threads", 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


def test_what_bench_load_takes_too_is_declared_once() -> None:
    """Six flags that read alike in both and stand in the same order there."""
    shared = ["pairs", "requests", "max_tokens", "temperature", "seed", "ignore_eos"]
    load, own = (get_type_hints(kind, include_extras=True) for kind in (LoadFlags, CompareFlags))
    assert {name: load[name] for name in shared} == {name: own[name] for name in shared}
    assert [name for name in load if name in shared] == [name for name in own if name in shared] == shared


def test_two_drafters_beside_plain_decoding(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Rows for each load, facts, what is absent and how to get it; three files; a second run measures nothing again."""
    out = tmp_path / "made" / "compared"
    args = ["compare", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--drafter", tiny_small_dir]
    args += ["--prompts", prompts, "--concurrency", "2,1", *QUICK, "--out", out, "--json"]
    ran = run(*args)
    assert ran.code == 0, ran.err
    report = ran.json
    speeds = [(row["drafter"], row["concurrency"]) for row in report["rows"] if row["what"] != CONFIDENCE]
    assert speeds == [("ngram", 1), ("ngram", 2), ("small", 1), ("small", 2)]
    assert report["lossless"] is True
    ngram, small = report["drafters"]
    assert (ngram["draft_passes"], ngram["parameters"], ngram["kv_bytes_per_token"]) == (0, 0, 0)
    assert (small["draft_passes"], small["draft_tokens"]) == (4, 4)
    assert small["parameters"] > 10_000
    assert small["command"].endswith(f"--drafter {tiny_small_dir}")
    for one in report["drafters"]:
        assert [(s["way"], s["concurrency"]) for s in one["speeds"]] == [
            (f"fixed:{one['draft_tokens']}", n) for n in "12"
        ]
        assert all(s["plain_tokens_per_second"] > 0 for s in one["speeds"])
    assert {"eagle", "eagle3", "dflash", "dspark"} <= set(report["absent"])
    train = f"forerun train dspark --target {tiny_qwen3_dir} --data DATA --out runs/dspark"
    assert train in report["absent"]["dspark"]
    assert "`forerun profile --target" in report["absent"]["scheduling of small"]
    assert "`forerun calibrate --target" in report["absent"]["calibration of small"]
    assert {path.name for path in out.iterdir()} == {"rows.jsonl", "compare.md", "compare.html", "compare.json"}
    assert json.loads((out / "compare.json").read_text()) == report
    assert "# Drafters beside plain decoding" in (out / "compare.md").read_text()
    again = run(*args)
    assert again.out == ran.out
    assert "6 finished rows are kept" in again.err


def test_the_scheduler_takes_part_where_costs_are_known(
    run: Run, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """A second way beside fixed K; `--policy fixed` leaves it out; text on the screen and in a file."""
    quick = ("--seconds", 1, "--rows", 8, "--requests", 2)
    assert run("profile", tiny_qwen3_dir, *quick, "--drafter", "ngram", "--threads", 1).code == 0
    args = ["compare", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--prompts", prompts, "--concurrency", 1]
    ran = run(*args, *QUICK, "--json")
    assert ran.code == 0, ran.err
    [row] = [row for row in ran.json["rows"] if row["what"] != CONFIDENCE]
    assert list(row["ways"]) == ["plain", "fixed:6", "delayed"]
    assert "scheduling of ngram" not in ran.json["absent"]
    fixed = run(*args, *QUICK, "--policy", "fixed", "--output", tmp_path / "report.txt")
    assert (fixed.code, fixed.out) == (0, "")
    text = (tmp_path / "report.txt").read_text()
    assert "LOSSLESS here" in text
    assert "delayed" not in text
    assert "Which one here?" in text


def test_two_models_of_a_kind_are_told_apart(
    run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, prompts: Path
) -> None:
    """By what was given of them."""
    pair = ["--drafter", tiny_small_dir, "--drafter", tiny_qwen3_dir]
    ran = run("compare", "--target", tiny_qwen3_dir, *pair, "--prompts", prompts, "--concurrency", 1, *QUICK, "--json")
    assert ran.code == 0, ran.err
    labels = [one["drafter"] for one in ran.json["drafters"]]
    assert labels == [f"small ({tiny_small_dir})", f"small ({tiny_qwen3_dir})"]
    best = ran.json["drafters"][1]
    assert best["mean_accepted_length"] > ran.json["drafters"][0]["mean_accepted_length"]


def test_a_drafter_that_copies_is_another_one() -> None:
    """It can be compared with itself as it is without, and no two that are the same."""
    one, copying, first, second = map(parse_config, ("dspark", "dspark+lookup", "./a+lookup", "./b+lookup"))
    assert labels_of([one, copying]) == ["dspark", "dspark+lookup"]
    assert labels_of([first, second]) == ["small+lookup (./a)", "small+lookup (./b)"]
    assert methods_of("ngram+dspark+lookup") == ["ngram", "dspark"]
    with pytest.raises(OptionError, match=r"dspark\+lookup .* is given twice"):
        labels_of([copying, copying])


def test_benchmarks_and_the_demo_tell_it_apart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its label in rows and tables; its requests still name the method. In the demo neither takes the other's
    place."""
    small = LoadedDrafter(Small(history_model(7), 7), parse_config("small+lookup"))
    entries = [LoadedDrafter(Ngram(), parse_config("ngram")), small]
    engine = SimpleNamespace(core=SimpleNamespace(loaded=entries))
    monkeypatch.setattr(bench_load, "_ways", lambda engines, run, names: names)
    subjects = bench_load._subjects({"fixed": engine}, LoadFlags(mixed=True))
    assert {one.drafter: one.ways for one in subjects} == {
        "ngram": ["ngram"], "small+lookup": ["small"], "ngram+small+lookup": ["ngram", "small"],
    }  # fmt: skip
    assert Cell(small.label, 2, 1, 0.0).speculative == {"method": ["small"], "max_draft": 2}
    monkeypatch.setattr(load, "load_with", lambda flags, configs: configs)
    _, rivals, _ = demo._engines(EngineFlags(drafter=["dspark,dspark+lookup"]))
    assert list(rivals) == ["dspark", "dspark+lookup"]


def test_another_text_is_exit_code_1_and_the_first_line(
    run: Run, tiny_qwen3_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting over another model than plain decoding."""
    other = tmp_path / "other"
    qwen3(3, seed=7).save_pretrained(other)
    save_tokenizer(other)
    real, loads = lineup.load_target_of, []

    def load_target_of(flags):
        loads.append(flags)
        return real(flags if len(loads) != 1 else lineup.dataclasses.replace(flags, target=str(other)))

    monkeypatch.setattr(lineup, "load_target_of", load_target_of)
    args = ["compare", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--prompts", prompts, "--concurrency", 1]
    ran = run(*args, *QUICK)
    assert ran.code == 1
    assert ran.out.splitlines()[1].startswith("NOT LOSSLESS: 4 of 4 outputs")


def test_drafters_that_come_with_the_target_are_taken_by_default(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that this package has; the others are absent, with the reason and the command."""
    from forerun.target import load

    monkeypatch.setitem(load.EMBEDDED, "embedded-dspark", "there-is-none")
    ran = run("compare", "--prompts", prompts, "--concurrency", 1, *QUICK, "--json")
    assert ran.code == 0, ran.err
    assert {"ngram", "small"} <= {one["kind"] for one in ran.json["drafters"]}
    assert ran.json["absent"]["dspark"].startswith("this installation of forerun has no model 'embedded-dspark'")
    assert "forerun train dspark --target embedded" in ran.json["absent"]["dspark"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "two"], "--concurrency"),
        (["--concurrency", "8", "--max-num-seqs", "4"], "--concurrency"),
        (["--pairs", "1"], "--pairs"),
        (["--requests", "0"], "--requests"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--max-tokens", "9-4"], "--max-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--drafter", "vanilla"], "--drafter"),
        (["--drafter", "ngram,ngram"], "--drafter"),
        (["--drafter", "ngran"], "--drafter"),
        (["--limit", "0"], "--limit"),
        (["--prompts", "nowhere.jsonl"], "--prompts"),
        (["--out", "/dev/null"], "--out"),
        (["--output", "/no/such/folder/report.txt"], "--output"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_loading(
    refused: Callable[..., str], args: list[str], named: str
) -> None:
    """One line that names the option; the target does not even exist."""
    assert refused("compare", "--target", "./does/not/exist", *args).startswith(f"{named}: ")


def test_a_drafter_that_cannot_be_loaded_is_refused_and_leaves_nothing(
    refused: Callable[..., str], tiny_qwen3_dir: Path, tmp_path: Path
) -> None:
    """It was asked for, so its absence is an error; no folder is made for a report that will not be."""
    args = ["compare", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--drafter", "./no/such/folder"]
    assert refused(*args, "--out", tmp_path / "out").startswith("--drafter: ./no/such/folder does not exist")
    assert not (tmp_path / "out").exists()


def test_a_policy_without_costs_is_refused(refused: Callable[..., str], tiny_qwen3_dir: Path) -> None:
    """What was asked for cannot be measured: the command to run first is named."""
    args = ["compare", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--policy", "prefix"]
    assert "run `forerun profile` first" in refused(*args)


def test_a_prompt_beyond_the_window_is_refused(refused: Callable[..., str], tiny_qwen3_dir: Path) -> None:
    """Before anything is measured, with its line."""
    args = ["compare", "--target", tiny_qwen3_dir, "--drafter", "ngram", "--prompts", "-"]
    assert refused(*args, stdin=b"short\n" + b"x" * 300).startswith("--prompts: line 2: has 300 tokens")
