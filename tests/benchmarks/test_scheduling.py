"""All that scheduling claims of one model: which commands are run and when again, and what their JSON amounts to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.budget.profile import Profile

RUN = ["--target", "embedded", "--threads", "1", "--drafter", "ngram", "--drafter", "dspark", "--wrong", "embedded"]
CURVE = {"counts": [1, 64], "seconds": [1.0, 1.0]}
CONTEXT = {"contexts": [0], "per_request": [0.0], "per_row": [0.0]}
DRAFT = {"by_length": {"1": CURVE}, "context": CONTEXT, "follow": 0.0}
COSTS = {
    "version": 1, "key": {"model": "m", "dtype": "float32", "device": "cpu", "threads": 1}, "models": {},
    "verify": {"tokens": CURVE, "context": CONTEXT}, "drafts": {"dspark": DRAFT},
}  # fmt: skip
DRAFTERS = ("dspark", "ngram", "eagle3", "ngram+dspark")
WOBBLE = (1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98, 1.0) * 2


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run, word by word; each leaves the file it is to leave."""
    import scheduling

    said: list[list[str]] = []

    def forerun(words: list[str]) -> int:
        said.append(list(words))
        option = next(one for one in ("--output", "--out") if one in words)
        place = Path(words[words.index(option) + 1])
        place = {"compare": place / "compare.json", "verify": place.with_suffix(".json")}.get(words[0], place)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"profile": COSTS}))
        return 0

    monkeypatch.setattr(scheduling, "forerun", forerun)
    return said


def test_a_command_is_run_once_and_again_with_other_words(tmp_path: Path, commands: list[list[str]], capsys) -> None:
    """The second call runs nothing; with other pairs what depends on them is measured again, and only that."""
    from scheduling import main

    run = ["run", *RUN, "--out", str(tmp_path)]
    assert main(run) == 0
    kinds = ["profile", "calibrate", "calibrate", "bench", "bench", "simulate", "compare", "profile", "bench", "verify"]
    assert [words[0] for words in commands] == kinds
    load = commands[3]
    assert load[load.index("--pairs") + 1] == "16"
    assert "--mixed" in load
    assert commands[4][commands[4].index("--bar") + 1] == "0.95"
    [eager] = (tmp_path / "eager").glob("*.json")
    assert Profile.loads(eager.read_text()).costs("dspark").verify.tokens(11) == pytest.approx(2)
    assert commands[-1][commands[-1].index("--calibration-cache") + 1] == str(eager.parent)
    commands.clear()
    assert main(run) == 0
    assert commands == []
    assert main([*run, "--pairs", "8"]) == 0
    assert [words[0] for words in commands] == ["bench", "bench", "compare"]
    commands.clear()
    assert main([*run, "--pairs", "8", "--prompts", "few.jsonl", "--calibration-prompts", "many.jsonl"]) == 0
    read = [(words[0], words[words.index("--prompts") + 1]) for words in commands if "--prompts" in words]
    assert {prompts for name, prompts in read if name == "calibrate"} == {"many.jsonl"}
    assert {(name, prompts) for name, prompts in read if name != "calibrate"} == {
        (name, "few.jsonl") for name in ("bench", "compare", "verify")
    }


def test_a_drafter_can_be_calibrated_on_prompts_of_its_own(tmp_path: Path, commands: list[list[str]], capsys) -> None:
    """The others on those that name none; a name that no drafter has is a mistake."""
    from scheduling import main

    run = ["run", *RUN, "--out", str(tmp_path), "--only", "calibrate", "--calibration-prompts", "held.jsonl"]
    assert main([*run, "--calibration-prompts", "ngram=many.jsonl"]) == 0
    read = {words[words.index("--drafter") + 1]: words[words.index("--prompts") + 1] for words in commands}
    assert read.pop("ngram") == "many.jsonl"
    assert set(read.values()) == {"held.jsonl"}
    assert main([*run, "--calibration-prompts", "ngrams=many.jsonl"]) == 2
    assert "--calibration-prompts: --drafter names no 'ngrams'" in capsys.readouterr().err
    file = tmp_path / "lr=1e-4" / "held.jsonl"  # a path may have such a sign of its own
    file.parent.mkdir()
    file.touch()
    commands.clear()
    again = ["run", *RUN, "--out", str(tmp_path / "again"), "--only", "calibrate", "--calibration-prompts", str(file)]
    assert main(again) == 0
    assert {words[words.index("--prompts") + 1] for words in commands} == {str(file)}


def test_what_was_stopped_is_no_result(tmp_path: Path, commands: list[list[str]], monkeypatch, capsys) -> None:
    """A command that ends with an error: no further one is begun, what an older one left is gone, and it is begun again
    by the next call. Exit code 1, a claim that has failed, is a result."""
    import scheduling

    run = ["run", *RUN, "--out", str(tmp_path), "--only", "load,wrong"]
    assert scheduling.main(run) == 0
    real = scheduling.forerun
    monkeypatch.setattr(scheduling, "forerun", lambda words: 130)
    assert scheduling.main([*run, "--pairs", "9"]) == 2
    assert not (tmp_path / "load.json").exists()
    assert "goes on from here" in capsys.readouterr().err
    monkeypatch.setattr(scheduling, "forerun", lambda words: real(words) or 1)
    assert scheduling.main([*run, "--pairs", "9"]) == 0
    assert (tmp_path / "load.json").exists()


def test_the_plan_says_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: five ways, 17 turns, three subjects; 8 requests of 64 tokens, one by one and by four, 1 s a step."""
    from scheduling import main

    (tmp_path / "profile.json").write_text(json.dumps({"profile": COSTS}))
    assert main(["plan", *RUN, "--out", str(tmp_path), "--concurrency", "1,4", "--only", "load"]) == 0
    hours = 5 * 17 * 3 * (8 * 64 + 2 * 64) / 3600
    assert f"load: to do, about {hours:.1f} h" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------- judge


def row(drafter: str, load: int, own: float, identical: int = 4) -> dict[str, Any]:
    costs = {"plain": WOBBLE, "fixed:2": [0.9] * 16, "fixed:4": [2.0] * 16, "delayed": [own] * 16}
    ways = {way: {"outputs": 4, "outputs_identical": identical} for way in costs}
    place = {"drafter": drafter, "load": "closed", "concurrency": load, "rate": None}
    return place | {"seconds_per_token": costs, "ways": ways}


def measured() -> dict[str, Any]:
    """Everything in order, file by file."""
    quality = {"ece": 0.021, "ece_interval_95": [0.01, 0.03], "floor": 0.005, "excess": 0.016}
    position = {"position": 1, "after": quality}
    table = {"drafter": "dspark", "table": {"key": {"temperature": "greedy"}}, "held_out_rounds": 10_000}
    error = {"drafter": "dspark", "policy": "delayed", "error": -0.09}
    return {
        "load.json": {"rows": [row(drafter, n, 0.9) for drafter in DRAFTERS for n in (1, 4, 16, 32)]},
        "wrong.json": {"rows": [row("wrong", n, 1.04) for n in (1, 4, 16, 32)]},
        "calibrate-0.json": {
            "calibrations": [table | {"positions": [position | {"after": dict(quality)} for _ in range(7)]}]
        },
        "predict.json": {"predictions": [error | {"concurrency": n} for n in (1, 4, 16)]},
        "compare/compare.json": {"lossless": True},
        "compare/compare.md": "",
        "compare/compare.html": "",
        "coupled.json": {"rows": [row("dspark", 1, 1.0)]},
        "verify.json": {"lossless": True},
    }


def code_of(folder: Path, files: dict[str, Any], *more: str) -> int:
    from scheduling import main

    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return main(["judge", "--out", str(folder), *more])


def test_everything_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An always-wrong drafter at .96 of plain decoding has a bar of its own."""
    page = tmp_path / "docs" / "page.md"
    assert code_of(tmp_path / "one", measured(), "--page", str(page)) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == ["holds"] * 6
    assert "20 cells: 0 with a mean below the bar, 0 failed" in out
    assert page.read_text().count("**holds**") == 6


def spoiled(name: str) -> dict[str, Any]:
    """The same with one thing that must not be."""
    files = measured()
    if name == "slower":
        files["load.json"]["rows"][2] = row("dspark", 16, 1.2)
    elif name == "wrong":
        files["wrong.json"]["rows"][0] = row("wrong", 1, 1.08)
    elif name == "fixed":
        files["load.json"]["rows"][0] = row("dspark", 1, 0.99)
    elif name == "ece":
        files["calibrate-0.json"]["calibrations"][0]["positions"][4]["after"]["excess"] = 0.021
    elif name == "prediction":
        files["predict.json"]["predictions"][1]["error"] = 0.11
    elif name == "ids":
        files["coupled.json"]["rows"][0] = row("dspark", 1, 1.0, identical=3)
    else:
        files[name] = {"lossless": False}
    return files


SPOILED = ("slower", "wrong", "fixed", "ece", "prediction", "ids", "compare/compare.json", "verify.json")


@pytest.mark.parametrize("name", SPOILED)
def test_one_thing_that_is_not_so_fails(tmp_path: Path, name: str) -> None:
    assert code_of(tmp_path, spoiled(name)) == 1


@pytest.mark.parametrize("name", list(measured()))
def test_what_was_not_measured_does_not_hold(tmp_path: Path, name: str) -> None:
    files = measured()
    del files[name]
    assert code_of(tmp_path, files) == 3


def test_a_certificate_of_nothing_does_not_hold(tmp_path: Path) -> None:
    files = measured() | {"verify.json": {"lossless": False, "verdict": "not proven"}}
    assert code_of(tmp_path, files) == 3


@pytest.mark.parametrize("what", ["rounds", "pairs", "load", "drafter"])
def test_too_little_does_not_hold(tmp_path: Path, what: str) -> None:
    """Fewer rounds, pairs, loads or drafters than a claim asks for: neither does anything fail by them."""
    files = measured()
    if what == "rounds":
        files = spoiled("ece")
        files["calibrate-0.json"]["calibrations"][0]["held_out_rounds"] = 9_999
    elif what == "drafter":
        files["load.json"]["rows"] = [one for one in files["load.json"]["rows"] if "+" not in one["drafter"]]
    elif what == "load":
        del files["load.json"]["rows"][3]
    else:
        files = spoiled("fixed")
        costs = files["load.json"]["rows"][0]["seconds_per_token"]
        files["load.json"]["rows"][0]["seconds_per_token"] = {way: each[:7] for way, each in costs.items()}
    assert code_of(tmp_path, files) == 3


def test_cells_of_several_models_are_corrected_together(tmp_path: Path) -> None:
    """A cell whose data speak against it at 2 % fails alone, and not among those of two models."""
    from scheduling_judge import Cell, _never_slower

    ratios = [0.94, 0.975, 0.95, 0.92, 0.97, 0.94, 0.98, 0.93]
    fine = Cell("fine", 0.97, [1.1, 1.2] * 4)
    assert _never_slower("", [Cell("low", 0.97, ratios)], [], 8).state == "FAILED"
    several = _never_slower("", [Cell("low", 0.97, ratios), *[fine] * 15], [], 8)
    assert several.state == "holds"
    assert any("below, not refuted: low" in line for line in several.details)


def test_a_drafter_that_is_always_wrong_and_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as the drafter it is made of, all of them the last id, point masses; it asks with what it says."""
    from wrong import SURE, Wrong

    from forerun.drafters.base import Draft
    from forerun.drafters.dspark import DSpark

    asked = []

    def propose(self: DSpark, views: Any, keep_drafting: Any) -> list[Draft]:
        return [Draft([3, 4][: 1 + keep_drafting(view, 2, 0.1)], "law", [0.1, 0.1]) for view in views]

    monkeypatch.setattr(DSpark, "propose", propose)
    made = object.__new__(Wrong)
    made.target = SimpleNamespace(vocab_size=9)
    [draft] = made.propose(["view"], lambda view, k, c: asked.append((view, k, c)) or True)
    assert (draft.tokens, draft.probs, draft.confidence) == ([8, 8], None, [SURE, SURE])
    assert asked == [("view", 2, SURE)]
