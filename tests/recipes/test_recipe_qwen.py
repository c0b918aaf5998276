"""The recipe for a chat model: the size of what it makes, and all of its stages on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters.learning import plan_for, tiny_target
from forerun.drafters.dspark import DSpark
from forerun.training.data import open_split

SETTINGS: list[dict[str, Any]] = [
    {"layers": 2, "taps": (1, 2), "markov_rank": 4, "intermediate_size": 24, "draft_vocab_size": 100},
    {"layers": 1, "taps": (3,), "markov_rank": 3, "markov_head_type": "gated"},
    {"layers": 3, "taps": (1, 2, 4), "markov_rank": 5, "markov_head_type": "rnn", "draft_vocab_size": 50},
    {"layers": 1, "taps": (1, 2), "markov_rank": 0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(value) for value in s.values()))
def test_the_size_is_known_before_training(qwen: ModuleType, settings: dict[str, Any], tmp_path: Path) -> None:
    """What the arithmetic gives is, byte for byte, what the saved drafter's tensors take."""
    import sizes

    target = tiny_target(4)
    plan = replace(plan_for(target), dtype="bfloat16")
    drafter = DSpark.design(target, DSpark.settings_class(**settings), plan)
    drafter.save(tmp_path)
    saved = sum(t.numel() * t.itemsize for t in load_file(tmp_path / "model.safetensors").values())
    flags = {f"draft.{name.replace('_', '-')}": value for name, value in settings.items()}
    flags["draft.taps"] = ",".join(map(str, settings["taps"]))
    measures = sizes.Measures.of(target.model.config)
    assert sum(sizes.dspark_bytes(measures, flags).values()) == saved


def test_the_recipe_keeps_to_its_own_limit(qwen: ModuleType) -> None:
    """With Qwen2.5-Coder 0.5B's measures the settings of the recipe give 59.5 MB; a limit below that is refused, with
    the largest parts and the settings that make them smaller.
    """
    import sizes

    target = sizes.Measures(hidden=896, heads=14, kv_heads=2, head_dim=64, feed_forward=4864, vocab=151_936)
    settings = qwen.SHARED | qwen.KINDS["dspark"]
    assert round(sizes.check_size(target, settings, 60e6) / 1e6, 1) == 59.5
    with pytest.raises(ValueError, match=r"59\.5 MB.*feed-forward 29\.4 MB \(lower draft\.intermediate-size\)"):
        sizes.check_size(target, settings, 50e6)


# --------------------------------------------------------------------------------------------------- the whole of it


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Answers of another program, the last of which is still being written."""
    path = tmp_path / "given.jsonl"
    chats = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n}, {n + 1} and {n + 2}"}]
        for n in range(40)
    ]
    lines = [json.dumps({"id": f"c{n}", "messages": chat}) for n, chat in enumerate(chats)]
    path.write_text("\n".join(lines) + '\n{"id": "c40", "mess')
    return path


TINY = {
    "tokens-per-step": 120, "learning-rate": 1e-3, "mixed-precision": "no", "eval-prompts": 1, "eval-tokens": 4,
    "draft.taps": "1,2", "draft.draft-vocab-size": 200, "draft.intermediate-size": 16, "draft.layers": 1,
    "draft.anchors": 4,
}  # fmt: skip


def begin(qwen: ModuleType, target: Path, work: Path, answers: Path, *more: str) -> int:
    given = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    places = ["--target", str(target), "--work", str(work), "--answers", str(answers), "--artefact", str(work / "out")]
    limits = ["--least", "40", "--threads", "1", "--store-gb", "0.05", "--kinds", "dspark", "--cpu-minutes", "0.025"]
    return int(qwen.main([*places, *limits, *given, *more]))


def test_all_stages_and_on_again(
    qwen: ModuleType,
    here: Callable[[ModuleType], list[list[str]]],
    tiny_qwen3_dir: Path,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an unfinished file of answers to an artefact of bfloat16 that names no place of this machine; the run ends
    by its budget, with an evaluation after its last step. Begun again, finished stages compute nothing; another budget
    for the same runs is refused.
    """
    noted, work = here(qwen), tmp_path / "work"
    monkeypatch.setattr(qwen, "MAX_LENGTH", 200)  # its window is shorter
    assert begin(qwen, tiny_qwen3_dir, work, answers) == 0
    assert [words[2] for words in noted if words[0] == "-m"] == ["data", "train", "train"]
    assert sum(len(part) for part in open_split(work / "data") if part is not None) == 40
    asked = [json.loads(line) for line in (work / "held_out.jsonl").read_text().splitlines()]
    kept = [json.loads(line) for line in (work / "data" / "held_out" / "ids.jsonl").read_text().splitlines()]
    assert kept
    assert sorted(one["id"] for one in asked) == sorted(kept)
    assert all([message["role"] for message in one["messages"]] == ["user"] for one in asked)
    [filled] = [json.loads(line) for line in (work / "features" / "h1-2.jsonl").read_text().splitlines()]
    assert (filled["samples"], filled["computed"], filled["declined"]) == (40, 40, 0)
    weights = load_file(work / "out" / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights if tensor.is_floating_point()} == {torch.bfloat16}
    progress = qwen_progress(work / "runs" / "dspark")
    planned = json.loads((work / "trials" / "dspark.json").read_text())
    assert progress["evaluated"] == progress["step"] <= planned["steps"]
    card = (work / "out" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "cpu_seconds: 1.5" in card

    before, written = len(noted), (work / "held_out.jsonl").stat()
    assert begin(qwen, tiny_qwen3_dir, work, answers) == 0
    assert (work / "held_out.jsonl").stat().st_mtime_ns == written.st_mtime_ns
    (work / "held_out.jsonl").write_text("of another split\n")
    assert begin(qwen, tiny_qwen3_dir, work, answers, "--stages", "held-out") == 0
    assert (work / "held_out.jsonl").stat().st_size == written.st_size
    assert [words[2:4] for words in noted[before:]] == [["train", "dspark"]]  # it finds that it is finished
    assert qwen_progress(work / "runs" / "dspark")["used"]["tokens"] == progress["used"]["tokens"]
    assert begin(qwen, tiny_qwen3_dir, work, answers, "--cpu-minutes", "0.1") == 2


def test_what_starts_are_worth(
    qwen: ModuleType,
    here: Callable[[ModuleType], list[list[str]]],
    tiny_qwen3_dir: Path,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run for each, evaluated as its start is: the one step moves nothing that could be seen."""
    here(qwen)
    monkeypatch.setattr(qwen, "MAX_LENGTH", 200)
    assert begin(qwen, tiny_qwen3_dir, tmp_path, answers, "--stages", "data,features,starts") == 0
    runs = {run.name: run for run in (tmp_path / "starts").iterdir()}
    assert runs.keys() == {"dspark-fitted", "dspark-target", "dspark-random"}
    weights = load_file(runs["dspark-target"] / "best" / "model.safetensors")
    donor = load_file(tiny_qwen3_dir / "model.safetensors")["model.norm.weight"]
    torch.testing.assert_close(weights["norm.weight"].float(), donor.float(), rtol=1e-2, atol=1e-2)


def qwen_progress(run: Path) -> dict[str, Any]:
    [newest] = sorted((run / "checkpoints").glob("step-*"))[-1:]
    found: dict[str, Any] = json.loads((newest / "state.json").read_text())["progress"]
    return found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kinds", "dspark,medusa"), "medusa"),
        (("--stages", "train,deploy"), "deploy"),
        (("--limit-mb", "0.001"), "--limit-mb"),
        (("--least", "50"), "there are 40 answers"),
        (("--set", "layers"), "NAME=VALUE"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    qwen: ModuleType,
    here: Callable[[ModuleType], list[list[str]]],
    tiny_qwen3_dir: Path,
    answers: Path,
    tmp_path: Path,
    more: tuple[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that names the option, before anything is computed."""
    noted = here(qwen)
    assert begin(qwen, tiny_qwen3_dir, tmp_path / "work", answers, *more) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert noted == []
