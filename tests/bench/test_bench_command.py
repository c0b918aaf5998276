"""`forerun bench`: JSON rows, resumption from the command line, and refusals before anything is loaded."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main

PROMPTS = '{"prompt": "def f(x):\\n"}\n{"prompt": "a b a b"}\n'


def test_the_command_measures_and_goes_on(capsys, tmp_path, tiny_qwen3_dir):
    """One row per K with its baseline; the second call finds every row done and prints the same."""
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text(PROMPTS)
    args = ["bench", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", "--prompts", str(prompts), "--k", "1,3"]
    args += ["--max-tokens", "8", "--rounds", "1", "--rows", str(rows), "--json"]
    assert main([*args, "--plots", str(tmp_path / "plots")]) == 0
    first = capsys.readouterr()
    report = json.loads(first.out)
    assert [(row["drafter"], row["k"], row["batch"], row["temperature"]) for row in report["rows"]] == [
        ("ngram", 1, 1, 0.0),
        ("ngram", 3, 1, 0.0),
    ]
    for row in report["rows"]:
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert row["outputs_identical"] == row["outputs"] == 2
    assert report["target"]["fingerprint"]["weights"]
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    assert main(args) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert "2 finished rows are kept" in second.err


def test_a_larger_grid_goes_on_with_the_rows_of_a_smaller_one(capsys, tmp_path, tiny_qwen3_dir):
    """More values of K, batch and temperature are added to the file; what was measured is not measured again. Another
    setting of the drafter is another file."""
    rows = tmp_path / "rows.jsonl"
    args = ["bench", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", "--prompt", "a b a b", "--max-tokens", "4"]
    args += ["--rounds", "1", "--rows", str(rows), "--json"]
    assert main([*args, "--k", "1"]) == 0
    [first] = json.loads(capsys.readouterr().out)["rows"]
    assert main([*args, "--k", "1,3", "--batch", "1,2", "--temperature", "0,1"]) == 0
    ran = capsys.readouterr()
    assert "1 finished rows are kept" in ran.err
    more = json.loads(ran.out)["rows"]
    assert len(more) == 2 * 2 * 2
    assert more[0] == first
    assert main([*args, "--k", "1", "--speculative-config.prompt_lookup_max", "2"]) == 0
    assert "rows of another model" in capsys.readouterr().err


def test_the_table_goes_to_a_file(tmp_path, tiny_qwen3_dir):
    """--output without --json: the table, with its baseline column."""
    out = tmp_path / "table.txt"
    args = ["bench", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", "--prompt", "a b a b"]
    assert main([*args, "--k", "2", "--max-tokens", "6", "--rounds", "1", "--output", str(out)]) == 0
    assert "plain" in out.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--k", "0"], "--k"),
        (["--k", "two"], "--k"),
        (["--k", "2", "--num-speculative-tokens", "3"], "--k"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens"),
        (["--batch", "0"], "--batch"),
        (["--batch", "8", "--max-num-seqs", "4"], "--batch"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--rounds", "0"], "--rounds"),
        (["--seed", str(2**63)], "--seed"),
        (["--limit", "0"], "--limit"),
        (["--drafter", "vanilla"], "--drafter"),
        (["--rows", "/no/such/folder/rows.jsonl"], "--rows"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_loading(capsys, args, named):
    """Exit code 2 and one line that names the option."""
    assert main(["bench", "--target", "does-not-exist-anywhere", *args]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {named}:")


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(capsys, tmp_path, tiny_qwen3_dir):
    """With its line; no file of rows is begun."""
    (tmp_path / "prompts.txt").write_text("short\n" + "x" * 300 + "\n")
    args = ["--prompts", str(tmp_path / "prompts.txt"), "--rows", str(tmp_path / "rows.jsonl")]
    assert main(["bench", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", *args]) == 2
    assert capsys.readouterr().err.startswith("error: --prompts: line 2: has 300 tokens; ")
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_a_place_where_no_plot_can_be_is_refused_before_anything_is_measured(capsys, tmp_path, place):
    """A file, and a folder below one."""
    (tmp_path / "taken").write_text("")
    assert main(["bench", "--target", "does-not-exist-anywhere", "--plots", str(tmp_path / place)]) == 2
    asked, there = tmp_path / place, tmp_path / "taken"
    assert capsys.readouterr().err.startswith(f"error: --plots: cannot write to {asked}: {there} is no folder")


def test_without_matplotlib_plots_are_refused_before_anything_is_measured(monkeypatch, capsys):
    """The message says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--target", "does-not-exist-anywhere", "--plots", "plots"]) == 2
    assert "--plots: needs matplotlib: pip install 'forerun[bench]'" in capsys.readouterr().err
