"""The schema of a training run: flags, YAML, derived values and defaults, and what each is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from forerun.errors import OptionError
from forerun.training.config import (
    TrainingConfig,
    as_yaml,
    choose,
    is_free,
    learned_kind,
    learned_kinds,
    value_of,
)
from training.linear import Linear
from training.runs import KIND, configured

GIVEN = {"data": "d", "out": "o"}


def written(folder: Path, **content: object) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def refusal(flags: dict[str, object], draft: dict[str, object] | None = None, file: Path | None = None) -> str:
    with pytest.raises(OptionError) as error:
        choose(KIND, {**GIVEN, **flags}, draft or {}, file)
    return str(error.value)


def test_a_flag_goes_before_the_file_and_that_before_the_default(tmp_path):
    """Each value has the source it was taken from, also the kind's own."""
    file = written(tmp_path, learning_rate=0.5, steps=7, draft={"block_size": 1, "skip": 0.5})
    chosen = choose(KIND, {**GIVEN, "learning_rate": "0.25"}, {"block_size": 2}, file)
    assert (chosen.config.learning_rate, chosen.config.steps, chosen.config.clip) == (0.25, 7, 1.0)
    assert (chosen.settings.block_size, chosen.settings.skip) == (2, 0.5)
    origins = {name: origin for name, _, origin in chosen.rows()}
    assert origins["learning_rate"] == origins["draft.block_size"] == "flag"
    assert origins["steps"] == origins["draft.skip"] == str(file)
    assert origins["clip"] == origins["draft.taps"] == "default"
    assert chosen.kind is Linear


def test_a_derived_value_fills_only_what_was_left_open():
    """And travels with its reason."""
    chosen = choose(KIND, {**GIVEN, "steps": 5}, {})
    derived = chosen.derive("steps", 9, "nine").derive("max_length", 64, "the longest")
    assert (derived.config.steps, derived.config.max_length) == (5, 64)
    assert (derived.origins["steps"], derived.origins["max_length"]) == ("flag", "the longest")


def test_the_saved_file_says_the_same_again(tmp_path):
    """`config.yaml` of a run is a `--config`: all values come back, whatever their type."""
    draft = {"taps": "1,3", "draft_vocab_size": 50}
    flags = {"ema": "0.99", "eval_temperature": "0,0.7", "trackers": "wandb,tensorboard", "mixed_precision": "no"}
    first = choose(KIND, {**GIVEN, **flags, "held_out": "0.1"}, draft)
    file = tmp_path / "config.yaml"
    file.write_text(as_yaml(first))
    second = choose(None, {}, {}, file)
    assert second.config == first.config
    assert second.settings == first.settings
    assert first.settings.taps == (1, 3)
    assert first.config.eval_temperature == (0.0, 0.7)
    assert first.config.held_out == 0.1


@pytest.mark.parametrize(("text", "value"), [("off", None), ("0.9", 0.9)])
def test_an_average_can_be_switched_off_by_word(tmp_path, text, value):
    """As a flag, and in YAML, where a bare `off` is false and a bare `no` too."""
    assert choose(KIND, {**GIVEN, "ema": text}, {}).config.ema == value
    file = tmp_path / "run.yaml"
    file.write_text(f"ema: {text}\nmixed_precision: no\n")
    config = choose(KIND, GIVEN, {}, file).config
    assert (config.ema, config.mixed_precision) == (value, "no")


@pytest.mark.parametrize(
    ("flags", "draft", "message"),
    [
        ({"learning_rat": 1}, {}, "--learning-rat: no such setting; did you mean 'learning_rate'?"),
        ({}, {"blok_size": 2}, "--draft.blok-size: no such setting; did you mean 'block_size'?"),
        ({"learning_rate": "fast"}, {}, "--learning-rate: input should be a valid number"),
        ({"learning_rate": -1}, {}, "--learning-rate: input should be greater than 0"),
        ({"schedule": "cosin"}, {}, "--schedule: input should be 'cosine', 'linear' or 'constant'"),
        ({"trackers": "wandb,mlflow"}, {}, "--trackers: "),
        ({"eval_temperature": "-1"}, {}, "--eval-temperature: needs temperatures of at least 0"),
        ({"held_out": "1.5"}, {}, "--held-out: a share must be in [0, 1)"),
        ({"betas": "0.9,1"}, {}, "--betas: must both be in [0, 1)"),
        ({"ema": "1.5"}, {}, "--ema: "),
        ({}, {"block_size": 3}, "--draft.block-size: input should be less than or equal to 2"),
        ({"steps": 3, "epochs": 1}, {}, "--steps: give either this (3) or --epochs (1)"),
        ({"store_gb": 3}, {}, "--store-gb: needs --feature-store"),
        ({"feature_store": "here"}, {}, "--store-gb: is required with --feature-store"),
        ({"data": None, "out": "o"}, {}, "--data: "),
    ],
)
def test_what_cannot_be_used_is_refused_by_the_name_of_its_flag(flags, draft, message):
    """Unknown names with the nearest one."""
    assert refusal(flags, draft).startswith(message)


def test_a_refusal_names_the_file_a_value_is_from(tmp_path):
    """Unknown keys of YAML are refused, nested ones too."""
    assert "run.yaml" in refusal({}, file=written(tmp_path, schedule="cosin"))
    assert refusal({}, file=written(tmp_path, step=3)).endswith("run.yaml); did you mean 'steps'?")
    assert "did you mean 'skip'?" in refusal({}, file=written(tmp_path, draft={"skipp": 3}))
    assert refusal({}, file=tmp_path / "none.yaml").startswith("--config: cannot read")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    assert refusal({}, file=broken).startswith("--config: ")
    broken.write_text("- 1\n")
    assert "must hold names and values" in refusal({}, file=broken)


@pytest.mark.parametrize("name", ["ngram", "vanilla", "training.linear:LinearConfig", "no.such:Thing", None])
def test_a_kind_that_cannot_be_trained_is_refused(name, monkeypatch):
    """With those there are."""
    monkeypatch.setattr("forerun.training.config.DRAFTERS", {"ngram": "forerun.drafters.ngram:Ngram", "linear": KIND})
    monkeypatch.setattr("forerun.drafters.DRAFTERS", {"ngram": "forerun.drafters.ngram:Ngram", "linear": KIND})
    with pytest.raises(OptionError) as error:
        choose(name, GIVEN, {})
    assert str(error.value).startswith("KIND: ")
    assert "linear" in str(error.value)
    with pytest.raises(OptionError, match="did you mean 'linear'"):
        choose("linaer", GIVEN, {})


def test_values_of_flags_are_json_where_they_are():
    """A word like `no` stays a word: YAML would make it false."""
    assert [value_of(text) for text in ("8", "true", "null", "[1, 2]", "no", "1,2", "target")] == [
        8, True, None, [1, 2], "no", "1,2", "target",
    ]  # fmt: skip


def test_settings_that_may_change_are_marked():
    """What decides the weights a run ends with is not free to change; how it is watched is."""
    fixed = {"learning_rate", "steps", "tokens_per_step", "seed", "ema", "schedule", "max_length", "mixed_precision"}
    free = {"eval_every", "save_every", "keep", "trackers", "micro_batch_tokens", "threads", "out"}
    assert not any(is_free(name) for name in fixed)
    assert all(is_free(name) for name in free)


def test_every_setting_is_described_and_in_a_panel():
    """`forerun train --help` has no blank line."""
    for name, field in TrainingConfig.model_fields.items():
        if name not in ("kind", "draft"):
            assert field.description, name
            assert field.json_schema_extra["panel"], name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2**64}, "--seed: input should be less than 18446744073709551616"),
        ({"betas": "0.9"}, r"--betas: needs two numbers, such as 0.9,0.95, got '0.9'"),
        ({"betas": (0.9, 0.9, 0.9)}, "--betas: needs two numbers"),
        ({"store_gb": 1e300, "feature_store": "x"}, "--store-gb: input should be less than or equal"),
        ({"threads": 10**30}, "--threads: "),
        ({"threads": 1025}, "--threads: .* less than or equal to 1024"),
        ({"eval_tokens": 2}, "--eval-tokens: input should be greater than or equal to 3"),
        ({"draft": {"skip": float("-inf")}}, "--draft.skip: "),
    ],
)
def test_numbers_no_run_can_use_are_refused(tmp_path, changes, message):
    """In one line that names the flag."""
    with pytest.raises(OptionError, match=message):
        configured("t", tmp_path, tmp_path, **changes)


def numbers_of(kind: str, wanted: type) -> list[str]:
    """Settings of a kind that hold such a number."""
    fields = learned_kind(kind).settings_class.model_fields
    return [name for name, f in fields.items() if wanted in (f.annotation, *get_args(f.annotation))]


@pytest.mark.parametrize("kind", learned_kinds())
def test_settings_of_a_kind_that_no_number_can_be_are_refused_by_name(kind):
    """Infinite, not a number, or beyond every memory: for every number of every kind, before anything is built."""
    floats, integers = numbers_of(kind, float), numbers_of(kind, int)
    assert floats
    assert integers
    given = [(name, value) for name in floats for value in ("inf", "-inf", "nan")]
    given += [(name, value) for name in integers for value in (10**12, 10**400)]
    given += [("taps", [1, 10**12])] if "taps" in learned_kind(kind).settings_class.model_fields else []
    for name, value in given:
        with pytest.raises(OptionError) as error:
            choose(kind, GIVEN, {name: value_of(value) if isinstance(value, str) else value})
        assert str(error.value).startswith(f"--draft.{name.replace('_', '-')}: "), (name, value)
        assert len(str(error.value)) < 1000


def test_a_number_of_five_thousand_digits_is_a_text():
    """Python refuses to read it as a number; the schema then refuses it by the name of its flag."""
    digits = "9" * 5000
    assert value_of(digits) == digits
    assert refusal({}, {"block_size": value_of(digits)}).startswith("--draft.block-size: ")


def test_a_file_with_a_number_of_five_thousand_digits_is_refused(tmp_path):
    """As no YAML that could be read."""
    file = tmp_path / "run.yaml"
    file.write_text(f"steps: {'9' * 5000}\n")
    assert refusal({}, file=file).startswith(f"--config: {file} is not YAML: ")
