"""`forerun train` on the command line: help, flags and files, exit codes, plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.conftest import Run
from forerun.target.load import load_target
from training.runs import KIND, SMALL, random_samples, records, write_data

FAST = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def data(tiny_qwen3_dir, tmp_path_factory) -> Path:
    tokenizer = load_target(tiny_qwen3_dir).tokenizer
    return write_data(tmp_path_factory.mktemp("data") / "d", tokenizer, random_samples(20), held_out=0.2)


@pytest.fixture
def command(tiny_qwen3_dir, data, tmp_path) -> list[str]:
    """A run of a second, but for its kind."""
    return ["--target", str(tiny_qwen3_dir), "--data", str(data), "--out", str(tmp_path / "run"), *FAST]


def only(monkeypatch) -> None:
    """One drafter that is trained, `linear`, and one that is not."""
    table = {"ngram": "forerun.drafters.ngram:Ngram", "linear": KIND}
    monkeypatch.setattr("forerun.training.config.DRAFTERS", table)
    monkeypatch.setattr("forerun.drafters.DRAFTERS", table)


def words(text: str) -> str:
    """Help without its frame."""
    return " ".join(re.sub(r"[│╭╰─╮╯]", " ", text).split())


def test_help_shows_every_setting(run: Run):
    """With panels and defaults, and for a kind its own settings as well, in the spelling that is typed."""
    general = words(run("train", "--help").out)
    for flag in (
        "--learning-rate",
        "--tokens-per-step",
        "--eval-temperature",
        "--feature-store",
        "--plan",
        "--restart",
    ):
        assert flag in general
    assert "Default: 0.0006." in general
    assert "--draft" not in general
    own = words(run("train", KIND, "--help").out)
    assert "--draft.block-size" in own
    assert "Tokens it drafts. Default: 2." in own
    assert f"Settings of {KIND}" in own


def test_a_run_prints_its_settings_and_trains(run: Run, command, tmp_path):
    """Every value with its origin on stderr, nothing on stdout, exit code 0; both spellings of a kind's setting."""
    ran = run("train", KIND, *command, "--draft.block_size=1", "--draft.skip", "0.5")
    assert (ran.code, ran.out) == (0, "")
    rows = [line.split() for line in ran.err.splitlines()]
    assert ["learning-rate", "0.01", "flag"] in rows
    assert ["draft.block-size", "1", "flag"] in rows
    assert ["clip", "1.0", "default"] in rows
    assert any(row[:2] == ["max-length", "40"] and row[2] == "derived:" for row in rows)
    assert "teacher_forced_acceptance" in ran.err
    assert "decoding at T = 1: accepted length" in ran.err
    saved = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert (saved["method"], saved["block_size"]) == (KIND, 1)
    assert len(records(tmp_path / "run", "step")) == 6


def test_the_settings_of_a_run_make_it_again(run: Run, command, tmp_path):
    """`--config RUN/config.yaml` with another --out: the same steps; the kind is read from the file."""
    assert run("train", KIND, *command).code == 0
    ran = run("train", "--config", tmp_path / "run" / "config.yaml", "--out", tmp_path / "again")
    assert ran.code == 0
    losses = [[line["loss"] for line in records(tmp_path / out, "step")] for out in ("run", "again")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["ngram", "--data", "d", "--out", "o"], "KIND: 'ngram' is not trained"),
        ([KIND, "--out", "o"], "--data: "),
        ([KIND, "--data", "nowhere", "--out", "o"], "--data: nowhere does not exist"),
        ([KIND, "--data", "nowhere", "--out", "o", "--model", "embedded"], "--data: nowhere does not exist"),
        ([KIND, "--learning_rate", "1"], "--learning_rate: unknown option; did you mean '--learning-rate'?"),
        ([KIND, "--lerning-rate", "1"], "--lerning-rate: unknown option; did you mean '--learning-rate'?"),
        (
            [KIND, "--data", "d", "--out", "o", "--draft.blok-size", "1"],
            "--draft.blok-size: no such setting; did you mean 'block_size'?",
        ),
        ([KIND, "--data", "d", "--out", "o", "--draft.block-size", "9"], "--draft.block-size: input should be less"),
        ([KIND, "--data", "d", "--out", "o", "--draft.block-size"], "--draft.block-size: "),
        ([KIND, "--data", "d", "--out", "o", "--schedule", "cosin"], "--schedule: input should be 'cosine'"),
        ([KIND, "--data", "d", "--out", "o", "--steps", "x"], "--steps: "),
        ([KIND, "--data", "d", "--out", "o", "--json"], "--json: is for --plan"),
        ([KIND, "--data", "d", "--out", "o", "--config", "none.yaml"], "--config: cannot read none.yaml"),
    ],
)
def test_what_cannot_be_used_is_one_line(refused, args, line, monkeypatch):
    """Exit code 2, the flag and what is near."""
    only(monkeypatch)
    assert refused("train", *args).startswith(line)


def test_a_misspelt_kind_names_the_nearest(refused, monkeypatch):
    """Of those that can be trained, also with settings of the kind behind it."""
    only(monkeypatch)
    line = refused("train", "linaer", "--data", "d", "--out", "o", "--draft.block-size", "1")
    assert line == "KIND: no drafter is called 'linaer'; did you mean 'linear'?"
    assert refused("train", "--data", "d", "--out", "o") == "KIND: which drafter is to be trained? linear"


def test_a_run_that_cannot_go_on_is_one_line_and_exit_code_1(run: Run, command, monkeypatch):
    """After what was shown of its settings and progress."""
    from forerun.drafters.learned import Losses
    from training.linear import Linear

    def broken(self, batch, exercise, progress):
        total = self.network.first.weight.sum() * float("nan")
        return Losses(total, {})

    monkeypatch.setattr(Linear, "losses", broken)
    ran = run("train", KIND, *command)
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith("error: step 1: the loss is nan")
    assert "Traceback" not in ran.err


def test_a_plan_trains_nothing_and_writes_nothing(run: Run, command, tmp_path):
    """Memory, disk and time with their arithmetic on stdout; as JSON too; measured if asked."""
    ran = run("train", KIND, *command, "--plan")
    assert ran.code == 0
    for text in ("memory of a device", "moments of the optimiser", "process", "checkpoints", "tokens/s", "6 steps x"):
        assert text in ran.out
    assert not (tmp_path / "run").exists()
    found = run("train", KIND, *command, "--plan-measure", "--json").json
    assert found["memory_bytes"] == sum(line["value"] for line in found["memory"])
    assert found["seconds"] > 0
    assert any("measured" in line["arithmetic"] for line in found["time"])
    assert not (tmp_path / "run").exists()


def test_the_embedded_small_model_is_distilled(run: Run, tmp_path):
    """From a name of the package to a folder that `generate` drafts with, and that says what it is."""
    tokenizer = load_target("embedded").tokenizer
    data = write_data(tmp_path / "data", tokenizer, random_samples(12, vocab_size=4096), held_out=0.2)
    args = ["--target", "embedded", "--data", data, "--out", tmp_path / "run", *FAST, "--steps", "2"]
    ran = run("train", "small", *args, "--draft.model", "embedded-small", "--learning-rate", "1e-4")
    assert ran.code == 0, ran.err
    assert "decoding at T = 1: accepted length" in ran.err
    best = tmp_path / "run" / "best"
    card = (best / "README.md").read_text()
    for text in ('base_model: "embedded-small"', 'library_name: "transformers"', "draft_model", "saved in bfloat16"):
        assert text in card
    flags = ["--max-tokens", 8, "--seed", 1, "--ignore-eos", "--prompt", "def f", "--json"]
    used = run("generate", "--target", "embedded", "--drafter", best, *flags)
    assert (used.json["stats"]["drafter"], used.json["stats"]["drafted"] > 0) == ("small", True)


def test_records_are_prepared_on_the_way(run: Run, command, tmp_path):
    """--data may name a file of conversations: it is prepared in the run's folder, and not again when it goes on.
    What of it is not learned is said."""
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It was said, and said again."}]
    lines = [
        *(json.dumps({"id": f"c{i}", "messages": chat}) for i in range(6)),
        '{"id": "asked", "prompt": "no answer"}',
    ]
    file.write_text("\n".join(lines))
    args = [str(file) if before == "--data" else arg for before, arg in zip(["", *command], command, strict=False)]
    plan = run("train", KIND, *args, "--plan", "--json")
    assert plan.code == 0
    assert not (tmp_path / "run").exists()
    ran = run("train", KIND, *args)
    assert ran.code == 0
    said = " ".join(ran.err.split())
    assert f"left out of the 7 records of --data: 5 duplicate (as {file} line 2), 1 no answer (as {file} line 7" in said
    manifest = tmp_path / "run" / "data" / "manifest.json"
    made = manifest.stat().st_mtime_ns
    assert "finished already" in run("train", KIND, *args).err
    assert manifest.stat().st_mtime_ns == made


def test_a_list_may_be_given_one_by_one(run: Run, command, tmp_path):
    """`--draft.taps 1 --draft.taps 3` are both of them, as 1,3 would be; a number given twice is refused by name."""
    twice = ["--draft.taps", "1", "--draft.taps", "3", "--eval-temperature", "0", "--eval-temperature", "0.5"]
    assert run("train", KIND, *command, *twice).code == 0
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "  taps: [1, 3]  # flag" in written
    assert "eval_temperature: [0.0, 0.5]  # flag" in written
    again = run("train", KIND, *command, "--draft.block-size", "1", "--draft.block-size", "2")
    assert again.code == 2
    assert "--draft.block-size: " in again.err


def test_a_plan_knows_the_rows_of_a_kind(run: Run, command, monkeypatch):
    """What the kind computes per token is in memory and time; features are told; nothing a run would refuse passes."""
    from training.linear import Linear

    one = run("train", KIND, *command, "--plan", "--json").json
    monkeypatch.setattr(Linear, "plan_rows_per_token", lambda self, lengths: 7.0)
    seven = run("train", KIND, *command, "--plan", "--json").json
    activations = [next(m["value"] for m in found["memory"] if m["name"] == "activations") for found in (one, seven)]
    assert activations[1] == 7 * activations[0]
    assert [line["name"] for line in seven["features"]] == ["of a token", "of the data"]
    assert "of the data" in run("train", KIND, *command, "--plan").out


def test_a_plan_refuses_what_a_run_would(run: Run, command, tmp_path):
    """The folder of something else."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    ran = run("train", KIND, *command, "--plan")
    assert ran.code == 2
    assert "is not empty and holds no run" in ran.err
