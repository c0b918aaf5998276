"""`forerun bench load`: JSON rows, resumption, claims, and refusals before anything is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forerun.budget.costs import DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.budget.profile import Profile, ProfileKey
from forerun.budget.stored import read_load_study
from forerun.cli.main import main

PROMPTS = '{"prompt": "def f(x):\\n"}\n{"prompt": "a b a b"}\n'


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_qwen3_dir) -> str:
    """A config of the n-gram drafter with costs that were "measured" for the tiny model."""
    from forerun.engine.profile_key import engine_key
    from forerun.target.load import load_target

    key = engine_key(load_target(str(tiny_qwen3_dir)))
    verify = VerifyCost(CostCurve.measured({1: 0.01, 64: 0.011}))
    costs = Profile(key, verify, {"ngram": DraftCost.measured({1: {1: 1e-5}})})
    path = tmp_path_factory.mktemp("costs") / "profile.json"
    path.write_text(costs.dumps())
    return json.dumps({"method": "ngram", "confidence_cost_table_path": str(path)})


def arguments(tiny_qwen3_dir, config: str, *more: str) -> list[str]:
    args = ["bench", "load", "--target", str(tiny_qwen3_dir), "--speculative-config", config, "--fixed", "1,3"]
    return [*args, "--pairs", "2", "--requests", "3", "--max-tokens", "6-8", "--ignore-eos", *more]


def key_of(config: str) -> ProfileKey:
    """The key of the costs that a config names."""
    costs = json.loads(Path(json.loads(config)["confidence_cost_table_path"]).read_text())
    return ProfileKey(**costs["key"])


def test_the_command_measures_and_goes_on(capsys, tmp_path, tiny_qwen3_dir, config):
    """One row per load with every way; the second call finds every row done; a bar that nothing misses in two pairs.
    The speeds are kept where the page of the server finds them."""
    rows, plots = tmp_path / "rows.jsonl", tmp_path / "plots"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    args = arguments(tiny_qwen3_dir, config, "--concurrency", "1,2", "--rate", "500", "--bar", "0.001", "--json")
    args += ["--prompts", str(prompts), "--rows", str(rows)]
    assert main([*args, "--plots", str(plots)]) == 0
    first = capsys.readouterr()
    report = json.loads(first.out)
    assert [(row["load"], row["concurrency"]) for row in report["rows"]] == [
        ("closed", 1),
        ("closed", 2),
        ("open", None),
    ]
    for row in report["rows"]:
        assert list(row["ways"]) == ["plain", "fixed:1", "fixed:3", "delayed"]
        assert all(way["outputs_identical"] == way["outputs"] == 6 for way in row["ways"].values())
    assert len(report["verdicts"]) == 2 * 3
    assert len(list(plots.glob("*.png"))) >= 3
    points = read_load_study(key_of(config))["points"]
    assert [(one["drafter"], one["policy"], one["load"]) for one in points][:2] == [
        ("ngram", "plain", "1"),
        ("ngram", "fixed:1", "1"),
    ]
    assert all(one["total"] > 0 for one in points)
    assert main(args) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert "3 finished rows are kept" in second.err


def test_speeds_that_cannot_be_kept_for_the_page_are_told_and_measured(
    capsys, tmp_path, monkeypatch, tiny_qwen3_dir, config
):
    """Costs that an administrator measured lie where others only read."""
    theirs, access = tmp_path / "theirs", os.access
    theirs.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != theirs and access(path, mode))
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    more = ["--concurrency", "1", "--bar", "0.001", "--prompts", str(tmp_path / "prompts.jsonl")]
    more += ["--calibration-cache", str(theirs)]
    assert main(arguments(tiny_qwen3_dir, config, *more)) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "not kept for the page of `forerun serve`: --calibration-cache: cannot write to " in told
    assert "kept in" not in told
    assert os.listdir(theirs) == []


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        (["a=nowhere.jsonl"], "error: --domain: cannot read nowhere.jsonl"),
        (["a"], "error: --domain: must be NAME=FILE"),
        (["a=@one", "a=@two"], "error: --domain: 'a' is given twice"),
    ],
)
def test_a_domain_that_cannot_be_read_is_told_before_anything_is_loaded(capsys, domains, message):
    words = [word for domain in domains for word in ("--domain", domain)]
    assert main(["bench", "load", "--target", "does-not-exist-anywhere", "--drafter", "ngram", *words]) == 2
    assert message in capsys.readouterr().err


def test_domains_are_mixed_and_the_table_has_its_verdicts(tmp_path, tiny_qwen3_dir, config):
    """Two files in turn; --output without --json."""
    code, chat, out = (tmp_path / name for name in ("code.jsonl", "chat.txt", "table.txt"))
    code.write_text(PROMPTS)
    chat.write_text("hello\n")
    args = arguments(tiny_qwen3_dir, config, "--concurrency", "2", "--bar", "0.001", "--output", str(out))
    assert main([*args, "--domain", f"code={code}", "--domain", f"chat={chat}"]) == 0
    text = out.read_text()
    assert "per user" in text.splitlines()[0]
    assert "not refuted" in text


def test_the_benchmark_of_old_is_still_there(capsys):
    """`bench` without the word is what it was; `bench load` is another command; another word is no command."""
    assert main(["bench", "--help"]) == 0
    assert "--rounds" in capsys.readouterr().out
    assert main(["bench", "load", "--help"]) == 0
    assert "--concurrency" in capsys.readouterr().out
    assert main(["bench", "laod"]) == 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "two"], "--concurrency"),
        (["--concurrency", "8", "--max-num-seqs", "4"], "--concurrency"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "x"], "--rate"),
        (["--fixed", "0"], "--fixed"),
        (["--pairs", "0"], "--pairs"),
        (["--requests", "0"], "--requests"),
        (["--concurrency", "1,8", "--requests", "4"], "--requests"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--max-tokens", "9-4"], "--max-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--bar", "2"], "--bar"),
        (["--drafter", "vanilla"], "--drafter"),
        (["--policy", "fixed"], "--policy"),
        (["--num-speculative-tokens", "3"], "--num-speculative-tokens"),
        (["--rows", "/no/such/folder/rows.jsonl"], "--rows"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_loading(capsys, args, named):
    """Exit code 2 and one line that names the option."""
    assert main(["bench", "load", "--target", "does-not-exist-anywhere", *args]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {named}:")


def test_a_fixed_length_that_is_not_drafted_is_refused(capsys, tiny_qwen3_dir, config):
    """K of a config, or of a trained block: a shorter draft must not go by the name of a longer one."""
    shorter = json.dumps({**json.loads(config), "num_speculative_tokens": 2})
    assert main(arguments(tiny_qwen3_dir, shorter, "--concurrency", "1")) == 2
    assert "error: --fixed: 3 is more than ngram drafts (2)" in capsys.readouterr().err


def test_without_measured_costs_there_is_nothing_to_compare(capsys, tmp_path, tiny_qwen3_dir, monkeypatch):
    """The command to run first is named."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    args = ["bench", "load", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", "--pairs", "1"]
    assert main(args) == 2
    assert "run `forerun profile` first" in capsys.readouterr().err
