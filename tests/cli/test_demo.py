"""`forerun demo`: it compares token by token, measures beside plain decoding, and fails when a token differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Run
from forerun.bench.race import Course, race
from forerun.cli import load
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.load import load_drafters
from forerun.sampling import Sampling
from forerun.target.base import Target
from forerun.target.table import history_model
from tiny import qwen3, save_tokenizer

FAST = ("--limit", 2, "--max-tokens", 8, "--prompts", "-")
PROMPTS = b'{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n{"prompt": "not run"}\n'


def test_every_drafter_of_the_table(run: Run, tiny_qwen3_dir: Path) -> None:
    """In both modes, with rates of plain decoding beside; one that cannot be loaded is named with the reason."""
    ran = run("demo", "--target", tiny_qwen3_dir, *FAST, "--json", stdin=PROMPTS)
    assert ran.code == 0, ran.err
    report = ran.json
    rows = {(row["drafter"], row["mode"]): row for row in report["results"]}
    assert set(rows) == {(name, mode) for name in ("vanilla", "ngram") for mode in ("greedy", "sampled")}
    assert "small" in report["left_out"]
    assert (report["same_tokens"], report["prompts"], report["dtype"]) == (True, 2, "float32")
    for row in rows.values():
        for name in ("plain_tokens_per_second", "tokens_per_second", "speedup"):
            assert 0 < row[name]["low"] <= row[name]["median"] <= row[name]["high"]
    assert rows["vanilla", "greedy"]["mean_accepted_length"] is None


def test_the_table(run: Run, tiny_qwen3_dir: Path, tiny_small_dir: Path, tmp_path: Path) -> None:
    """One row per drafter and mode, then what was proven and what was not; the same in a file."""
    flags = ("demo", "--target", tiny_qwen3_dir, "--drafter", tiny_small_dir, *FAST)
    ran = run(*flags, stdin=PROMPTS)
    assert ran.code == 0
    rows = [line for line in ran.out.splitlines() if line.startswith("│ small")]
    assert len(rows) == 2
    assert all(row.split("│")[-2].strip() == "yes" for row in rows)
    assert ran.out.count("; same tokens: yes") == 1
    assert "Proven here: on 2 prompts" in ran.out
    assert ran.out.count("Not proven: ") == 3
    assert "end of sequence ignored, one request at a time" in " ".join(ran.out.split())
    one = run(*flags[:-2], "--prompt", "def f(x):", "--output", tmp_path / "demo.txt")
    assert (one.code, one.out) == (0, "")
    assert "Proven here: on 1 prompt," in (tmp_path / "demo.txt").read_text()


def test_a_token_that_differs_fails_the_demo(
    run: Run, tiny_qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters that run over another model than plain decoding: exit code 1, the place and the top-2 margin."""
    other = tmp_path / "other"
    qwen3(3, seed=1).save_pretrained(other)
    save_tokenizer(other)
    original = load.load_with
    import dataclasses

    def swapped(flags, configs):
        return original(dataclasses.replace(flags, target=str(other)) if configs else flags, configs)

    monkeypatch.setattr(load, "load_with", swapped)
    flags = ("demo", "--target", tiny_qwen3_dir, "--drafter", "ngram", *FAST)
    ran = run(*flags, stdin=PROMPTS)
    assert ran.code == 1
    assert "DIFFERS: ngram, greedy: prompt 1, output token 1:" in ran.out
    assert "top-2 margin of plain decoding there: " in ran.out
    assert "; same tokens: NO" in ran.out
    assert "Proven here" not in ran.out
    report = run(*flags, "--json", stdin=PROMPTS).json
    assert report["same_tokens"] is False
    assert report["results"][0]["differences"][0]["top_margin"] > 0


def test_a_verdict_is_one_line_however_long_its_numbers(
    run: Run, tiny_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script looks for is in one line, also where three digits more would not fit the table's width."""
    verdict = "ngram: " + "1.23e+03 tokens/s, " * 20 + "; same tokens: yes"
    monkeypatch.setattr("forerun.cli.race_report.Report._verdict", lambda self, drafter: verdict)
    ran = run("demo", "--target", tiny_qwen3_dir, "--drafter", "ngram", *FAST, stdin=PROMPTS)
    assert verdict in ran.out.splitlines()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--limit", 0), "--limit"),
        (("--max-tokens", 0), "--max-tokens"),
        (("--time-limit", -1), "--time-limit"),
        (("--time-limit", "nan"), "--time-limit"),
        (("--prompt", "x", "--prompts", "y"), "--prompt"),
        (("--temperature", -1), "--temperature"),
        (("--seed", 2**63), "--seed"),
        (("--verify-mode", "coupled"), "--verify-mode"),
        (("--drafter", "mtp"), "--drafter"),
        (("--prompts", "missing.jsonl"), "--prompts"),
        (("--num-speculative-tokens", -1), "--num-speculative-tokens"),
    ],
)
def test_bad_input(refused, tiny_qwen3_dir: Path, flags: tuple[object, ...], named: str) -> None:
    """One line that names the option."""
    assert refused("demo", "--target", tiny_qwen3_dir, *flags).startswith(f"{named}: ")


def test_a_prompt_that_is_too_long_is_refused_before_the_race(refused, tiny_qwen3_dir: Path) -> None:
    """With its line."""
    line = refused("demo", "--target", tiny_qwen3_dir, "--prompts", "-", stdin=b"short\n" + b"x" * 300)
    assert line.startswith("--prompts: line 2: has 300 tokens")


# ----------------------------------------------------------------------------------------------------------- the race


def engine(target: Target, *drafters: object) -> Engine:
    options = EngineOptions(max_num_seqs=1)
    return Engine(target, load_drafters(list(drafters), target, options), options)


MODES = {"greedy": Sampling(temperature=0, max_tokens=9), "sampled": Sampling(seed=4, max_tokens=9)}


def test_exact_targets_race_with_equal_tokens() -> None:
    """On targets whose logits are equal by construction no token can differ, whatever drafts."""
    small = Small(history_model(7, seed=9), 7)
    rivals = {"ngram": engine(history_model(7), Ngram()), "small": engine(history_model(7), small)}
    calls: list[int] = []
    standings = race(engine(history_model(7)), rivals, Course([[1, 2], [3]], MODES), lambda: calls.append(1))
    assert len(calls) == 2 * 2 * 3
    assert [(s.drafter, s.mode, len(s.laps)) for s in standings] == [
        (drafter, mode, 2) for drafter in rivals for mode in MODES
    ]
    assert not any(standing.partings for standing in standings)
    assert all(len(lap.plain.token_ids) == 9 for standing in standings for lap in standing.laps)


def test_a_parting_carries_the_margin_of_plain_decoding() -> None:
    """Levels of a history model lie at least 1.0 apart: so does the top-2 margin where the outputs part."""
    wrong = {"wrong": engine(history_model(7, seed=1), Ngram())}
    standings = race(engine(history_model(7)), wrong, Course([[1, 2]], {"greedy": MODES["greedy"]}))
    [parting] = standings[0].partings
    assert parting.expected != parting.emitted
    assert parting.top_margin == 1.0
    lap = standings[0].laps[0]
    assert lap.plain.token_ids[: parting.position] == lap.drafted.token_ids[: parting.position]


def test_sampled_prompts_have_seeds_of_their_own() -> None:
    """Two equal prompts are not the same experiment twice."""
    standings = race(engine(history_model(7)), {}, Course([[1], [1]], MODES))
    assert standings == []
    course = Course([[1], [1]], MODES)
    assert course.sampling("sampled", 0).seed != course.sampling("sampled", 1).seed


def test_the_time_limit_ends_the_race_after_a_prompt() -> None:
    """At least one prompt is run, and what was run is what is reported."""
    rivals = {"ngram": engine(history_model(7), Ngram())}
    standings = race(engine(history_model(7)), rivals, Course([[1], [2], [3]], MODES, seconds=0))
    assert [len(standing.laps) for standing in standings] == [1, 1]
