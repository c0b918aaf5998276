"""The benchmark of trained drafters: which rows there are, what is said of them, and the whole of it on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PLAIN = "forerun-plain-k0-t0-b1"


def _row(prompt: int, config: str, seconds: float, accepted: int = 0, rounds: int = 0, k: int = 2) -> dict[str, Any]:
    """A row of 12 tokens; each of `rounds` drafted k, `accepted` of all were kept."""
    from dataclasses import asdict

    from forerun.engine.stats import DecodingStats

    stats, left = DecodingStats(), accepted
    for _ in range(rounds):
        stats.record(k, k, min(k, left))
        left -= min(k, left)
    for _ in range(0 if rounds else 11):
        stats.record(0, 0, 0)
    return {
        "prompts": [prompt], "config": config, "trial": 0, "seconds": seconds, "cpu_seconds": seconds,
        "ids": [list(range(12))], "arrivals": [0.1, 0.2, 0.5], "target_passes": 3, "draft_passes": None,
        "counters": asdict(stats) if config.startswith("forerun") else None, "margins": [], "load_average": 0.0,
        "at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------- what is measured


def test_a_drafter_is_not_asked_for_more_than_it_was_trained_for() -> None:
    """K up to a block's drafts, any K of the others, plain decoding of both engines, at every temperature; no row
    twice.
    """
    from learned import configurations

    found = configurations({"ngram": None, "dspark": 3}, (1, 3, 5), (0.0, 1.0), transformers=True)
    names = [config.name for config in found]
    assert len(set(names)) == len(names) == 2 * (1 + 3 + 2 + 1 + 3)
    assert "forerun-ngram-k5-t1-b1" in names
    assert not any("dspark-k5" in name for name in names)
    assert len(configurations({}, (1, 3), (0.0,), transformers=False)) == 1


def test_a_set_of_prompts_is_a_file_with_a_count(tmp_path: Path) -> None:
    """40 prompts if nothing is said; what is neither, or not there, is refused."""
    from learned import PromptSet

    file = tmp_path / "a.jsonl"
    file.touch()
    assert PromptSet.of(f"code={file}:7") == PromptSet("code", file, 7)
    assert PromptSet.of(f"code={file}").count == 40
    for text in ("code", f"={file}", f"code={file}:many", f"code={file}:0", f"code={tmp_path / 'b.jsonl'}"):
        with pytest.raises(ValueError, match="--set"):
            PromptSet.of(text)


# ----------------------------------------------------------------------------------------------------------- arithmetic


def test_leads_are_taken_prompt_by_prompt() -> None:
    """Accepted lengths of 2 and 3 against 1.5 and 1 on the same prompts: 1.25 on average, resolved; a prompt that only
    one of them has is left out, and so is one on which nothing was drafted.
    """
    from learned_page import verdict
    from summary import lead, rates

    mine = [_row(0, "forerun-dspark-k2-t0-b1", 1, accepted=4, rounds=4), _row(1, "forerun-dspark-k2-t0-b1", 1, 8, 4)]
    other = [_row(0, "forerun-ngram-k2-t0-b1", 1, 2, 4), _row(1, "forerun-ngram-k2-t0-b1", 1, 0, 4)]
    other += [_row(2, "forerun-ngram-k2-t0-b1", 1, 1, 1), _row(3, "forerun-ngram-k2-t0-b1", 1)]
    assert rates(mine, "mean_accepted_length") == {(0,): 2.0, (1,): 3.0}
    found = lead(mine, other, "mean_accepted_length")
    assert found is not None
    assert (found["mean"], found["low"], found["high"], found["prompts"]) == (1.25, 0.5, 2.0, 2)
    assert verdict(found) == "yes"
    assert verdict(lead(other, mine, "mean_accepted_length")) == "**no**"
    assert verdict({"mean": 0.1, "low": -0.1, "high": 0.3, "prompts": 9}) == "not resolved"


def test_pairs_meet_at_the_longest_k_both_have() -> None:
    """dspark beside ngram at K = 3, beside dflash at K = 2, with lookup beside itself without; an untrained drafter is
    nobody's question."""
    from learned_page import _leads

    rows = [
        _row(prompt, f"forerun-{method}-k{k}-t0-b1", 1, accepted=2, rounds=4, k=k)
        for prompt in (0, 1)
        for method, k in (
            ("dspark", 2),
            ("dspark", 3),
            ("dflash", 2),
            ("dspark+lookup", 2),
            ("ngram", 2),
            ("ngram", 3),
            ("ngram", 5),
        )
    ]
    found = {(one["first"], one["second"]): one["k"] for one in _leads([*rows, _row(0, PLAIN, 1)])}
    assert found == {
        ("dspark", "ngram"): 3, ("dflash", "ngram"): 2, ("dspark+lookup", "ngram"): 2, ("dspark", "dflash"): 2,
        ("dspark+lookup", "dspark"): 2,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the whole


@pytest.fixture(scope="module")
def drafters(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained ones, saved as trained ones are: they begin as the target's last layers."""
    import torch

    from forerun.drafters import drafter_class
    from forerun.drafters.learned import DesignPlan
    from forerun.target.load import load_target

    target = load_target(tiny_qwen3_dir)
    plan = DesignPlan(training_length=64, token_counts=torch.ones(target.vocab_size), dtype="float32", seed=0)
    out = {}
    for kind, settings in (("eagle3", {"taps": (1, 2)}), ("dspark", {"block_size": 3, "layers": 1, "markov_rank": 4})):
        out[kind] = tmp_path_factory.mktemp(kind)
        cls = drafter_class(kind)
        cls.design(target, cls.settings_class(**settings, init="target"), plan).save(out[kind])  # type: ignore[attr-defined]
    return out


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A set of chats and one of plain texts."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "chat.jsonl").write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in ("abcabcabc", "one two")))
    (folder / "text.jsonl").write_text(json.dumps({"prompt": "zz top"}) + "\n")
    return ["--set", f"chat={folder / 'chat.jsonl'}:2", "--set", f"text={folder / 'text.jsonl'}:1"]


def _run(target: Path, drafters: dict[str, Path], sets: list[str], out: Path, *more: str) -> int:
    from learned import main

    named = [word for kind, folder in drafters.items() for word in ("--drafter", f"{kind}={folder}")]
    fixed = ["--threads", "1", "--max-tokens", "6", "--dtype", "float32", "--lengths", "1", "3", "5"]
    return main(["run", "--target", str(target), "--drafter", "ngram", *named, *sets, *fixed, "--out", str(out), *more])


def test_a_run_goes_on_and_ends_in_a_page(
    tiny_qwen3_dir: Path, drafters: dict[str, Path], sets: list[str], tmp_path: Path
) -> None:
    """A drafter at a time, then all, each row once; at temperature 0 every id is plain decoding's; the page names no
    place of this machine; other drafters are refused in the same folder.
    """
    from learned import SET_SIZE, main
    from rows import Rows

    out, drafters = tmp_path / "results", drafters | {"dspark+lookup": drafters["dspark"]}
    assert _run(tiny_qwen3_dir, drafters, sets, out, "--configs", "*-plain-*", "--minutes", "0") == 3
    assert _run(tiny_qwen3_dir, drafters, sets, out, "--configs", "*-plain-*", "*-eagle3-*") == 0
    assert _run(tiny_qwen3_dir, drafters, sets, out, "--transformers") == 0
    rows = list(Rows(out))
    assert {row["prompts"][0] for row in rows} == {0, 1, SET_SIZE}
    assert len(rows) == 3 * 2 * (1 + 3 + 3 + 2 + 2 + 1 + 3)
    plain = {row["prompts"][0]: row["ids"] for row in rows if row["config"] == PLAIN}
    for row in rows:
        if "-t0-" in row["config"] and row["config"].startswith("forerun"):
            assert row["ids"] == plain[row["prompts"][0]], row["config"]
    drafted = [row for row in rows if row["config"] == "forerun-dspark-k3-t1-b1"]
    assert all(row["counters"]["drafting_rounds"] > 0 for row in drafted)
    before = (out / "rows.jsonl").read_bytes()
    assert _run(tiny_qwen3_dir, drafters, sets, out, "--transformers") == 0
    assert (out / "rows.jsonl").read_bytes() == before
    assert _run(tiny_qwen3_dir, {"dspark": drafters["dspark"]}, sets, out) == 2

    page, remarks = tmp_path / "docs" / "learned.md", tmp_path / "remarks.md"
    remarks.write_text("Untrained, hence no better.\n")
    assert main(["report", "--out", str(out), "--page", str(page), "--title", "Tiny", "--remarks", str(remarks)]) == 0
    _check_page(page, tmp_path)


def _check_page(page: Path, place: Path) -> None:
    """Every part is there, no placeholder is left, and no path of this machine."""
    text, data = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert "$" not in text
    for private in (str(place), str(Path.home()), str(place.parent)):
        assert private not in text + json.dumps(data)
    for part in ("# Tiny", "Which drafts longer", "Untrained, hence", "Speed on text at temperature 1", "Conditions"):
        assert part in text
    assert "| `dspark` | `ngram` |" in text
    assert "| `dspark+lookup` | `dspark` |" in text
    assert "What training took" not in text
    assert "prompt_lookup_num_tokens" in text
    for name in ("speed", "acceptance"):
        assert page.with_name(f"learned-{name}.png").read_bytes().startswith(b"\x89PNG")
    entries = sum(len(one["configs"]) for one in data["sets"].values())
    assert len(page.with_suffix(".csv").read_text().splitlines()) == 1 + entries
    assert {lead["k"] for lead in data["sets"]["chat"]["leads"]} == {3, 5}


def test_training_is_read_off_its_folder(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """Tokens, processor time and evaluations of a run are those that the run itself counted."""
    from trained import training

    from forerun.target.load import load_target
    from forerun.training.run import train
    from training.runs import Notes, configured, random_samples, write_data

    data = write_data(tmp_path / "d", load_target(tiny_qwen3_dir).tokenizer, random_samples(20), held_out=0.2)
    notes = Notes()
    assert train(configured(tiny_qwen3_dir, data, tmp_path / "run"), notes) == 0
    found = training(tmp_path / "run")
    assert (found["steps"], found["planned_steps"]) == (6, 6)
    assert found["tokens"] == sum(report.tokens for report in notes.reports)
    assert [(e["step"], e["tokens"]) for e in found["evaluations"]] == [
        (step, sum(report.tokens for report in notes.reports[:step])) for step in (3, 6)
    ]
    assert found["cpu_seconds"] > 0
    assert (found["threads"], found["device"], found["cpu_seconds_allowed"]) == (1, "cpu", None)
    assert found["settings"]["learning_rate"] == 0.01
    with pytest.raises(ValueError, match="holds no checkpoint"):
        training(tmp_path / "d")


def test_calls_that_filled_a_store_add_up(tmp_path: Path) -> None:
    """A store that was filled in two calls cost what both took; an empty report is refused."""
    from trained import features_cost

    report = tmp_path / "features.jsonl"
    calls = [{"samples": 7, "tokens": 900, "cpu_seconds": s, "bytes_per_token": 10_756} for s in (100.0, 23.4)]
    report.write_text("".join(json.dumps(call) + "\n" for call in calls))
    said = features_cost(report)
    assert "all 7 samples, 900 tokens" in said
    assert "in 123 CPU-seconds; 10,756 bytes" in said
    report.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        features_cost(report)


def test_runs_side_by_side(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """The page says what is different in a run, gives the numbers of the checkpoint that was kept, and names no place
    of this machine.
    """
    from trained import best_evaluation, changes, main, training

    from forerun.target.load import load_target
    from forerun.training.run import train
    from training.runs import Notes, configured, random_samples, write_data

    data = write_data(tmp_path / "d", load_target(tiny_qwen3_dir).tokenizer, random_samples(20), held_out=0.2)
    for name, draft in (("base", {}), ("other", {"skip": 0.0})):
        assert train(configured(tiny_qwen3_dir, data, tmp_path / name, draft), Notes()) == 0
    runs = {name: training(tmp_path / name) for name in ("base", "other")}
    assert changes(runs) == {"base": {}, "other": {"draft.skip": 0.0}}
    kept = best_evaluation(runs["other"])
    assert kept is not None
    assert kept["score"] == max(one["score"] for one in runs["other"]["evaluations"])
    page = tmp_path / "page" / "study.md"
    assert main([str(tmp_path / "base"), str(tmp_path / "other"), "--page", str(page)]) == 0
    text = page.read_text()
    assert "| `other` | skip 0.0 |" in text
    assert "all on the same samples" in text
    assert str(tmp_path) not in text + page.with_suffix(".json").read_text()
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main([str(tmp_path / "d"), "--page", str(page)]) == 2
    from trained import run_of, together, write

    made, later = page.with_suffix(".json"), tmp_path / "later.md"
    assert main([str(made), "--page", str(later)]) == 0  # the folders are not needed any more
    assert later.read_text() == text.replace("study.png", "later.png")
    assert run_of(made, "other") == run_of(tmp_path / "other", "anything") == runs["other"]
    with pytest.raises(ValueError, match="has no run third, but base, other"):
        run_of(made, "third")
    for odd in ("[]", "{}", '{"trained": {}}'):
        (tmp_path / "odd.json").write_text(odd)
        assert main([str(tmp_path / "odd.json"), "--page", str(later)]) == 2
    with pytest.raises(ValueError, match="there is a run other already"):
        together([made, tmp_path / "other"])

    for one in runs.values():
        del one["evaluations"][:-1]  # points are no curve
    write(runs, tmp_path / "points.md", "Points", "")
    assert "png" not in (tmp_path / "points.md").read_text()
    assert not (tmp_path / "points.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafter", "medusa"], "no drafter is called 'medusa'"),
        (["--drafter", "ngram", "--drafter", "ngram"], "every name once"),
        (["--target", "nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: list[str], message: str, sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no folder of rows."""
    from learned import main

    out = tmp_path / "results"
    assert main(["run", "--target", "embedded", *sets, "--out", str(out), *words]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
