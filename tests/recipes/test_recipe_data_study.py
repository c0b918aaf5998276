"""The study of data: what each drafter learns from, and all of it on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forerun.training.data import Dataset

SMALL = {
    "tokens-per-step": 128, "mixed-precision": "no", "eval-tokens": 8, "draft.taps": "1,2", "draft.layers": 1,
    "draft.block-size": 4, "draft.anchors": 8, "draft.markov-rank": 4,
}  # fmt: skip
TEXT = "    return a + b\n\ndef other(x):\n    yield from x\n" * 8


@pytest.fixture
def words(study: ModuleType, tiny_qwen3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command on a tiny model, over prompts made beforehand, four of them held out."""
    monkeypatch.setattr(study, "HELD_OUT", 4)
    study.write_lines(
        tmp_path / "texts.jsonl",
        [{"id": f"p{i}", "prompt": f"def f{i}(a, b):\n", "text": "" if i == 2 else TEXT} for i in range(12)],
    )
    given = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    model = str(tiny_qwen3_dir)
    return ["run", "--work", str(tmp_path), "--target", model, "--tokenizer", model, "--samples", "3", "6",
            "--minutes", "0.02", *given]  # fmt: skip


@pytest.mark.slow
def test_da_2_foreign_and_own_answers_are_compared_on_equal_terms(
    study: ModuleType, words: list[str], tmp_path: Path, here: Callable[[ModuleType], list[list[str]]], capsys: Any
) -> None:
    """DA-2: the same prompts, as many tokens, steps and processor time, judged on the same held-out prompts; accepted
    length against the number of samples. A second call trains nothing.

    https://github.com/sgl-project/SpecForge/issues/306 https://github.com/sgl-project/SpecForge/issues/192
    https://github.com/vllm-project/speculators/issues/751
    """
    noted = here(study)
    assert study.main(words) == 0
    shown = capsys.readouterr().out
    result = study.results(tmp_path)
    assert [(row["answers"], row["samples"]) for row in result["rows"]] == [
        ("target", 3), ("target", 6), ("source", 6)
    ]  # fmt: skip
    own, foreign, held = (Dataset(tmp_path / "data" / name) for name in ("target-6", "source-6", "held_out"))
    assert own.ids == foreign.ids
    assert not set(own.ids) & set(held.ids)
    assert "p2" not in {*own.ids, *held.ids}, "a prompt with nothing behind it"
    assert Dataset(tmp_path / "data" / "target-3").ids == own.ids[:3]
    for mine, theirs in zip(own, foreign, strict=True):
        assert theirs.loss_mask.sum() == min(mine.loss_mask.sum(), len(TEXT))
    trained = [command for command in noted if "train" in command and "trial" not in command]
    assert len({command[command.index("--cpu-seconds") + 1] for command in trained}) == 1
    assert len({command[command.index("--steps") + 1] for command in trained}) == 1
    assert shown.count("| target |") == 2
    assert shown.count("| source |") == 1
    assert "With 6 samples of equal length, the target's own answers against the source text" in shown
    before = len(noted)
    assert study.main(words) == 0
    assert len(noted) == before
    assert study.main(["report", "--work", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    assert study.table(result) in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "page.json").read_text()) == result


def test_other_settings_do_not_go_on_in_its_folder(
    study: ModuleType, words: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Nor are too few answers made up for; nothing is reported before a run is finished."""
    (tmp_path / "plan.json").write_text(json.dumps({"asked": {"minutes": 9}}))
    assert study.main(words) == 2
    assert "--work: " in capsys.readouterr().err
    (tmp_path / "plan.json").unlink()
    answers = tmp_path / "given.jsonl"
    answers.write_text(json.dumps({"id": "p1", "prompt": "x", "completion": "y", "token_ids": [[1]]}) + '\n{"id": "p3')
    assert study.main([*words, "--answers", str(answers)]) == 2
    assert "--answers: 1 can be used, 10 are needed" in capsys.readouterr().err
    assert study.main(["report", "--work", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 2
    assert not (tmp_path / "page.md").exists()


def test_one_writer_alone_is_no_comparison(study: ModuleType) -> None:
    """Numbers come from finished runs, a temperature without a number is left out."""

    def row(writer: str, length: float | None) -> dict[str, Any]:
        decoding = [{"temperature": 0.0, "mean_accepted_length": 2.0}, {"temperature": 1.0}]
        decoding[1] |= {} if length is None else {"mean_accepted_length": length}
        return {"answers": writer, "samples": 5, "decoding": decoding}

    assert study.own_answers([row("target", 1.0)]) is None
    text = study.own_answers([row("target", None), row("source", 1.0)])
    assert "2.000 against 2.000 at T = 0 (" in text
