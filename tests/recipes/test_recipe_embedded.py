"""The recipe of the embedded drafters: on the embedded target itself, for a step or two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_a_kind_is_trained_and_published(
    embedded: ModuleType,
    here: Callable[[ModuleType], list[list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an unfinished file of answers to a drafter in the package, whose card names no place of this machine and
    whose target has the name users type; the second time nothing is prepared and no step is taken.
    """
    answers, work, out = tmp_path / "given.jsonl", tmp_path / "work", tmp_path / "package"
    lines = [{"id": str(n), "prompt": f"def f{n}(x):\n", "completion": f"    return x + {n}\n"} for n in range(12)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": ')
    short = {"epochs": 1, "tokens-per-step": 64, "eval-prompts": 1, "eval-tokens": 4, "mixed-precision": "no"}
    monkeypatch.setattr(embedded, "SHARED", short)
    monkeypatch.setattr(embedded, "HELD_OUT", 0.3)
    noted = here(embedded)
    words = ["drafters.py", "--out", out, "--work", work, "--answers", answers, "--kinds", "eagle", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    out.mkdir()
    for _ in range(2):
        assert embedded.main() == 0
    assert [words[2:4] for words in noted] == [["data", "prepare"], ["train", "eagle"], ["train", "eagle"]]
    card, config = (out / "eagle" / "README.md").read_text(), json.loads((out / "eagle" / "config.json").read_text())
    assert str(tmp_path) not in card
    assert config["target_name"] == "embedded"
    monkeypatch.setattr(embedded, "LIMIT_MB", 0.001)
    assert embedded.main() == 2


def test_the_page_asks_for_what_the_package_has(
    evaluate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that is not shipped is named; the flags of the page are flags of the benchmark."""
    import learned

    monkeypatch.setattr(evaluate, "PACKAGE", tmp_path)
    with pytest.raises(ValueError, match="has no eagle, dspark"):
        evaluate.measuring(tmp_path, ["eagle", "dspark"], [])
    for kind in evaluate.KINDS:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "model.safetensors").touch()
    run = [str(word) for word in evaluate.measuring(tmp_path / "rows", evaluate.KINDS, ["--minutes", "20"])]
    assert Path(run[1]).is_file()
    asked = learned._parser().parse_args(run[2:])
    assert asked.drafter == ["ngram", "small", "eagle", "eagle3", "dflash", "dspark"]
    assert (asked.minutes, asked.threads) == (20, 1)
    page = evaluate.reporting(tmp_path / "rows", tmp_path / "p.md", tmp_path, None, evaluate.KINDS)
    wanted = learned._parser().parse_args([str(word) for word in page[2:]])
    assert wanted.trained == [f"{kind}={tmp_path / kind}" for kind in evaluate.KINDS]
