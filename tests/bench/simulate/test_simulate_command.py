"""`forerun simulate`: JSON, a table, plots, predictions, and refusals that name the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulate.worlds import BFLOAT16, profile, serial
from forerun.bench.simulate.systems import system
from forerun.cli.main import main

QUICK = ["--prompt-tokens", "16-32", "--output-tokens", "20-40", "--effort", "0.1"]


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile(BFLOAT16, {"small": serial(0.1, 0.05)}).dumps())
    return str(path)


def test_the_command_simulates_and_repeats_itself(capsys, costs, tmp_path):
    """Rows of every cell in JSON; the same command prints the same; pictures where they are asked for."""
    args = ["simulate", "--profile", costs, "--drafter", "small:0.5/0.9:k=3", "--policy", "fixed:3,delayed", *QUICK]
    args += ["--concurrency", "1,4", "--json"]
    assert main([*args, "--plots", str(tmp_path / "plots")]) == 0
    first = capsys.readouterr().out
    report = json.loads(first)
    cells = [(row["label"], row["policy"], row["concurrency"]) for row in report["rows"]]
    drafters = ("small:0.5", "small:0.9")
    assert cells == [
        (label, policy, load)
        for load in (1, 4)
        for label, policy in [("plain", "plain"), *((d, p) for d in drafters for p in ("fixed:3", "delayed"))]
    ]
    assert report["system"]["modelled"] is False
    assert {entry["policy"] for entry in report["worst"]} == {"fixed:3", "delayed"}
    assert (tmp_path / "plots" / "gain-small-delayed.png").exists()
    assert main(args) == 0
    assert capsys.readouterr().out == first


def test_the_table_says_that_modelled_costs_are_modelled(tmp_path):
    out = tmp_path / "table.txt"
    args = ["simulate", "--profile", "h200-moe", "--drafter", "dspark:0.8", "--policy", "delayed", "--concurrency", "8"]
    assert main([*args, *QUICK, "--output", str(out)]) == 0
    text = out.read_text()
    assert "modelled, not measured" in text
    assert "Qwen3-235B-A22B" in text


def test_open_and_closed_loops_in_one_call(capsys, costs):
    args = ["simulate", "--profile", costs, "--drafter", "small:0.8", "--policy", "delayed", "--concurrency", "2"]
    assert main([*args, *QUICK, "--rate", "0.01", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["load"], row["concurrency"], row["rate"]) for row in rows[::2]] == [
        ("closed", 2, None),
        ("open", None, 0.01),
    ]


def test_a_benchmark_is_predicted_from_the_command_line(capsys, costs, tmp_path):
    """A row of `bench` with the acceptance it showed: plain and drafted, each beside what was measured, and by how
    much drafting is predicted to help: tokens of a round over its cost."""
    row = {
        "drafter": "small", "k": 2, "batch": 1, "tokens_per_second": 1.5, "plain_tokens_per_second": 1.0, "tokens": 60,
        "outputs": 2, "acceptance_by_position": [0.8, 0.7], "drafting_rounds": 20, "target_steps": 20,
    }  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [row], "options": {"max_num_seqs": 4, "max_num_batched_tokens": 64}}))
    args = ["simulate", "--profile", costs, "--predict", str(path), "--prompt-tokens", "12"]
    assert main([*args, "--json"]) == 0
    plain, drafted = json.loads(capsys.readouterr().out)["predictions"]
    assert (plain["policy"], drafted["policy"]) == ("plain", "fixed:2")
    tau, prefill = 1 + 0.8 + 0.8 * 0.7, 1.42  # seconds of 12 rows; 29 tokens come after the first
    expected = (prefill + 29) / (prefill + 29 / tau * ((1.04 + 1.09) / 2 + 0.15))
    found = drafted["predicted_tokens_per_second"] / plain["predicted_tokens_per_second"]
    assert found == pytest.approx(expected, rel=0.05)  # K is cut in the last rounds
    assert main(args) == 0
    assert "fixed:2" in capsys.readouterr().out


@pytest.fixture
def measured(tmp_path) -> dict:
    """What `bench load` leaves, with next to nothing in it."""
    rates = {"draft_tokens": 0, "tokens_per_second": 1.0, "acceptance_by_position": []}
    load = {"load": "closed", "concurrency": 1, "rate": None}
    row = {"drafter": "small", "draft_tokens": 2, **load, "requests": 1, "ways": {"plain": rates}}
    row["workload"] = {"lengths": [[4, 3]]}
    return {"rows": [row], "options": {"max_num_seqs": 4, "max_num_batched_tokens": 64}}


@pytest.mark.parametrize(
    ("more", "named", "words"),
    [
        (["--drafter", "small:0.5"], "--drafter", "no effect"),
        (["--concurrency", "4"], "--concurrency", "no effect"),
        (["--prompt-tokens", "9"], "--prompt-tokens", "has the lengths"),
        (["--profile", "h200-8b"], "--profile", "modelled"),
    ],
)
def test_what_a_prediction_would_ignore_is_refused(capsys, tmp_path, measured, costs, more, named, words):
    path = tmp_path / "load.json"
    path.write_text(json.dumps(measured))
    assert main(["simulate", "--predict", str(path), "--profile", costs, *more]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {named}:")
    assert words in line


@pytest.mark.parametrize(("part", "name", "other"), [("target", "dtype", "int4"), ("hardware", "threads", 77)])
def test_costs_of_other_conditions_predict_nothing(capsys, tmp_path, measured, costs, part, name, other):
    """Costs and benchmark must have been measured alike, as far as both say how."""
    path, key = tmp_path / "load.json", json.loads(Path(costs).read_text())["key"]
    args = ["simulate", "--predict", str(path), "--profile", costs, "--json"]
    for value, code in ((key[name], 0), (other, 2)):
        path.write_text(json.dumps(measured | {part: {name: value}}))
        assert main(args) == code
    assert f"{name} {key[name]}, the benchmark with {other}" in capsys.readouterr().err


def test_the_report_of_a_profile_is_read_like_the_profile(costs, tmp_path):
    """`forerun profile --json --output FILE` has the costs inside."""
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"profile": json.loads(Path(costs).read_text()), "path": None}))
    assert system(str(report)).profile == system(costs).profile


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--profile", "h200"], "--profile"),
        (["--drafter", "dspark"], "--drafter"),
        (["--drafter", "medusa:0.5"], "--profile"),
        (["--policy", "best"], "--policy"),
        (["--policy", "fixed:9"], "--policy"),
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "1.5"], "--concurrency"),
        (["--rate", "0"], "--rate"),
        (["--prompt-tokens", "9-3"], "--prompt-tokens"),
        (["--output-tokens", "x"], "--output-tokens"),
        (["--between", "0"], "--between"),
        (["--seeds", "a"], "--seeds"),
        (["--effort", "0"], "--effort"),
        (["--effort", "inf"], "--effort"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens"),
        (["--predict", "/no/such/file"], "--predict"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys, args, named):
    """Exit code 2 and one line that names the option."""
    assert main(["simulate", *args]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {named}:")
