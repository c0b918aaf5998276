"""A trained drafter on the command line: what `doctor` finds of it, and what is said where it does not fit its target.

Rates of the machine are scripted, as in `test_doctor`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.conftest import Run
from cli.test_doctor import found, quiet_machine  # noqa: F401 - a fixture
from forerun.budget.calibration import CalibrationKey, Table
from forerun.budget.stored import CALIBRATION, write_calibration
from forerun.cli.prompts import embedded_prompts
from forerun.target.load import load_target
from forerun.training.config import choose
from forerun.training.run import train
from tiny import qwen3, save_tokenizer
from training.runs import SMALL, Notes, random_samples, records, write_data

KEPT = 200
OK = (
    "fingerprint",
    "template",
    "features",
    "lengths",
    "taps",
    "conventions",
    "weights",
    "dtype",
    "card",
    "calibration",
)
DOCTOR = ("--json", "--probe", 0)


@pytest.fixture(scope="module")
def trained(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that took a second: a drafter for the tiny target that keeps most ids."""
    place = tmp_path_factory.mktemp("trained")
    data = write_data(place / "data", load_target(tiny_qwen3_dir).tokenizer, random_samples(20), held_out=0.2)
    flags = {**SMALL, "target": str(tiny_qwen3_dir), "data": str(data), "out": str(place / "run")}
    own = {"layers": 1, "block_size": 4, "markov_rank": 4, "draft_vocab_size": KEPT, "anchors": 8}
    assert train(choose("dspark", flags, own), Notes()) == 0
    return place / "run"


@pytest.fixture
def best(trained: Path, tmp_path: Path) -> Path:
    """A copy to be changed; its weights are the older files."""
    return Path(shutil.copytree(trained / "best", tmp_path / "best"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's shape and tokenizer, with other weights."""
    folder = tmp_path_factory.mktemp("other")
    qwen3(3, seed=5).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target itself, with another chat template."""
    folder = tmp_path_factory.mktemp("templated")
    qwen3(3).save_pretrained(folder)
    save_tokenizer(folder, chat_template="{{ messages[0].content }}<|end|>")
    return folder


def test_a_trained_drafter(run: Run, tiny_qwen3_dir: Path, trained: Path) -> None:
    """Its target, template, lengths, taps, conventions, vocabulary, weights, dtype, card and calibration; and what it
    can propose of a text, counted here once more."""
    ran = run("doctor", tiny_qwen3_dir, trained / "best", *DOCTOR)
    checks = found(ran)
    assert [checks[f"dspark {name}"]["status"] for name in OK] == ["ok"] * len(OK), ran.out
    config = json.loads((trained / "best" / "config.json").read_text())
    assert checks["dspark fingerprint"]["found"] == "config, weights and tokenizer are the target's"
    assert f"up to {config['training_length']} tokens" in checks["dspark lengths"]["found"]
    taps = ", ".join(map(str, config["aux_hidden_state_layer_ids"]))
    assert checks["dspark taps"]["found"].startswith(f"h = {taps} of 3 ")
    for convention in ("block_size 4", f"mask_token_id {config['mask_token_id']}", "sample_from_anchor true"):
        assert convention in checks["dspark conventions"]["found"]
    assert checks["dspark dtype"]["found"] == "saved in float32, used in float32"
    last = [line for line in records(trained, "evaluation") if line["score"] is not None]
    scored = max(last, key=lambda line: line["score"])
    for one in scored["decoding"]:
        told = f"{one['mean_accepted_length']:.2f} at T = {one['temperature']:g}"
        assert told in checks["dspark card"]["found"]
    assert checks["dspark calibration"]["found"].startswith("none")
    kept = set((load_file(trained / "best" / "model.safetensors")["d2t"] + torch.arange(KEPT)).tolist())
    ids = [token for text in embedded_prompts(16) for token in load_target(tiny_qwen3_dir).tokenizer.encode(text)]
    share = sum(token in kept for token in ids) / len(ids)
    assert f"{KEPT} of 264 ids, {share:.1%} of the tokens" in checks["dspark vocabulary"]["found"]
    assert checks["dspark vocabulary"]["status"] == ("ok" if share >= 0.8 else "warning")


def test_its_acceptance_is_compared_with_its_card(
    run: Run, tiny_qwen3_dir: Path, best: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below half of what the card tells of greedy decoding is worth a warning; no card, no comparison."""
    card = (best / "README.md").read_text()
    start = card.index("mean accepted length", card.index("Decoding at temperature 0,"))
    (best / "README.md").write_text(f"{card[:start]}mean accepted length 9.000{card[start + 26 :]}")
    check = found(run("doctor", tiny_qwen3_dir, best, "--json", "--probe", 2))["dspark acceptance"]
    assert (check["status"], check["expected"]) == ("warning", "about the 9.00 of its card")
    (best / "README.md").unlink()
    check = found(run("doctor", tiny_qwen3_dir, best, "--json", "--probe", 2))["dspark acceptance"]
    assert "card" not in check["expected"]


def test_another_target_is_an_error_that_names_the_difference(run: Run, other: Path, trained: Path) -> None:
    """The other findings are there all the same; a user who allows it is only warned."""
    ran = run("doctor", other, trained / "best", *DOCTOR)
    check = found(ran)["dspark fingerprint"]
    assert (ran.code, check["status"]) == (2, "error")
    assert check["found"].startswith("weights ")
    assert "config" not in check["found"]
    assert "allow_target_mismatch" in check["advice"]
    assert {f"dspark {name}" for name in OK} <= found(ran).keys()
    allowed = json.dumps({"model": str(trained / "best"), "allow_target_mismatch": True})
    ran = run("doctor", other, "--speculative-config", allowed, *DOCTOR)
    assert (ran.code, found(ran)["dspark fingerprint"]["status"]) == (1, "warning")


def test_ts_9_another_chat_template_is_told_by_itself(
    run: Run, refused, templated: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TS-9: `doctor` says so beside a fingerprint that fits; commands that decode refuse the drafter by name, and where
    that is allowed warn once.

    https://github.com/z-lab/dflash/issues/133, https://github.com/SafeAILab/EAGLE/issues/227
    """
    said = "differs in chat_template: it learned answers in another chat format"
    ran = run("doctor", templated, trained / "best", *DOCTOR)
    checks = found(ran)
    assert (ran.code, checks["dspark template"]["status"]) == (2, "error")
    assert checks["dspark fingerprint"]["status"] == "ok"
    assert said not in caplog.text
    ask = ("--target", templated, "--prompt", "x", "--max-tokens", 4)
    line = refused("generate", *ask, "--drafter", trained / "best")
    assert said in line
    assert "allow_target_mismatch" in line
    config = json.dumps({"model": str(trained / "best"), "allow_target_mismatch": True})
    ran = run("generate", *ask, "--speculative-config", config)
    assert ran.code == 0, ran.err
    assert caplog.text.count(said) == 1


def test_what_is_missing_in_its_folder_is_found(run: Run, tiny_qwen3_dir: Path, best: Path) -> None:
    """A card, and numbers in it; a calibration that was measured on these weights and can be read."""

    def check(name: str) -> dict[str, str]:
        return found(run("doctor", tiny_qwen3_dir, best, *DOCTOR))[f"dspark {name}"]

    card = best / "README.md"
    text = card.read_text()
    card.write_text(text.replace("Decoding at", "Nothing at"))
    assert check("card")["status"] == "warning"
    assert "of no decoding" in check("card")["found"]
    card.unlink()
    assert (check("card")["status"], check("card")["found"]) == ("warning", "no README.md")
    card.write_text(text)
    key = CalibrationKey("rejection", "probabilistic", "one")
    write_calibration(best / CALIBRATION, [Table(key, (1.0, 1.5), "tests", 100)])
    assert check("calibration")["status"] == "ok"
    assert str(key) in check("calibration")["found"]
    weights = (best / "model.safetensors").stat().st_mtime
    os.utime(best / CALIBRATION, (weights - 60, weights - 60))
    stale = check("calibration")
    assert (stale["status"], stale["advice"]) == ("warning", "run `forerun calibrate` again")
    (best / CALIBRATION).write_text("{")
    assert "damaged" in check("calibration")["found"]
    copying = found(run("doctor", tiny_qwen3_dir, f"{best}+lookup", *DOCTOR))["dspark calibration"]
    assert copying["found"].startswith("none"), "that of the drafter as it is without is none of its own"


def test_a_folder_that_cannot_be_loaded_is_an_error_by_name(run: Run, tiny_qwen3_dir: Path, best: Path) -> None:
    """Weights that are not finite, then taps that the target does not have."""
    tensors = load_file(best / "model.safetensors")
    config = json.loads((best / "config.json").read_text())
    broken = torch.full_like(tensors["fc.weight"], torch.nan)
    save_file({**tensors, "fc.weight": broken}, best / "model.safetensors")
    ran = run("doctor", tiny_qwen3_dir, best, *DOCTOR)
    assert (ran.code, found(ran)["drafter"]["status"]) == (2, "error")
    assert "fc.weight is not finite" in found(ran)["drafter"]["found"]
    save_file(tensors, best / "model.safetensors")
    (best / "config.json").write_text(json.dumps({**config, "aux_hidden_state_layer_ids": [1, 7]}))
    ran = run("doctor", tiny_qwen3_dir, best, *DOCTOR)
    assert ran.code == 2
    assert "aux_hidden_state_layer_ids" in found(ran)["drafter"]["found"]


def test_a_distilled_model_says_whose_law_it_learned(
    run: Run, tiny_qwen3_dir: Path, other: Path, tmp_path: Path
) -> None:
    """Beside its teacher and beside another target, where it may be used and is warned of."""
    data = write_data(tmp_path / "data", load_target(tiny_qwen3_dir).tokenizer, random_samples(12), held_out=0.2)
    flags = {**SMALL, "steps": 2, "target": str(tiny_qwen3_dir), "data": str(data), "out": str(tmp_path / "run")}
    assert train(choose("small", flags, {"layers": 1}), Notes()) == 0
    best = tmp_path / "run" / "best"
    for target, status in ((tiny_qwen3_dir, "ok"), (other, "warning")):
        checks = found(run("doctor", target, best, *DOCTOR))
        assert checks["small fingerprint"]["status"] == status
        assert f"distilled from {tiny_qwen3_dir}" in checks["small fingerprint"]["found"]
        assert checks["small card"]["status"] == "ok"
    assert "weights differ" in checks["small fingerprint"]["found"]


def test_it_is_found_in_text_too(run: Run, tiny_qwen3_dir: Path, trained: Path) -> None:
    """One line a finding."""
    out = run("doctor", tiny_qwen3_dir, trained / "best", "--probe", 0).out
    assert any(line.split()[1:3] == ["dspark", "fingerprint"] for line in out.splitlines())
