"""Profiles and calibrations on the disk: found by their key, merged, never half written, never misread."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from budget.world import BFLOAT16, profile, serial
from forerun.budget import stored
from forerun.budget.calibration import CalibrationKey, Table
from forerun.budget.profile import VERSION, ProfileKey
from forerun.budget.stored import (
    calibration_path,
    load_study_path,
    profile_path,
    profiles_folder,
    read_calibration,
    read_load_study,
    read_profile,
    write_calibration,
    write_load_study,
    write_profile,
)
from forerun.errors import OptionError

KEY = ProfileKey("some/model of mine", "bfloat16", "cpu Some CPU", 2)
NGRAM = replace(profile(BFLOAT16, {"ngram": serial(0.1)}), key=KEY)
TABLE = Table(CalibrationKey("rejection", "probabilistic", "greedy"), (1.5, 2.0), "prompts", 1000)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_profile_is_found_again_by_its_key(cache):
    """Written under FORERUN_CACHE in a file that is named after the model; nothing for a key that was never written."""
    assert read_profile(KEY) is None
    path = write_profile(NGRAM)
    assert path == profile_path(KEY)
    assert path.parent == cache / "profiles"
    assert path.name.startswith("some-model-of-mine-")
    assert read_profile(KEY) == NGRAM


@pytest.mark.parametrize("field", ["model", "dtype", "device", "threads"])
def test_another_machine_or_model_has_a_file_of_its_own(field):
    """Costs are never used for what they were not measured with."""
    write_profile(NGRAM)
    other = replace(KEY, **{field: 3 if field == "threads" else "another"})
    assert profile_path(other) != profile_path(KEY)
    assert read_profile(other) is None


def test_drafters_measured_before_stay():
    """A second profile under the same key adds its drafters; the target's costs are the newer ones."""
    write_profile(replace(NGRAM, models={"ngram": "old"}))
    small = replace(profile({1: 2.0, 8: 3.0}, {"small": serial(0.4)}), key=KEY, models={"small": "a/model"})
    write_profile(small)
    both = read_profile(KEY)
    assert both.verify == small.verify
    assert both.drafts == {**NGRAM.drafts, **small.drafts}
    assert both.models == {"ngram": "old", "small": "a/model"}


def test_a_drafter_measured_again_is_replaced_with_its_model():
    """Also where it has no model any more."""
    write_profile(replace(NGRAM, models={"ngram": "old"}))
    again = replace(profile(BFLOAT16, {"ngram": serial(0.7)}), key=KEY)
    write_profile(again)
    assert read_profile(KEY) == again


def test_without_merging_only_what_is_written_stays():
    """`merge=False`."""
    write_profile(NGRAM)
    small = replace(profile(BFLOAT16, {"small": serial(0.4)}), key=KEY)
    write_profile(small, merge=False)
    assert read_profile(KEY) == small


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        json.dumps({"version": VERSION}),
        json.dumps({"version": VERSION - 1}),
        NGRAM.dumps().replace('"counts"', '"count"'),
        NGRAM.dumps().replace('"seconds": [', '"seconds": ["fast", '),
        NGRAM.dumps()[:-40],
        NGRAM.dumps().replace("bfloat16", "float32"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_command_that_mends_it(text):
    """Damaged, cut short, of another version or another key: the file, the reason, `forerun profile`."""
    path = write_profile(NGRAM)
    path.write_text(text)
    with pytest.raises(OptionError, match="forerun profile") as caught:
        read_profile(KEY)
    assert str(path) in str(caught.value)
    assert caught.value.option == "--calibration-cache"


def test_a_damaged_profile_is_replaced_by_the_next():
    """Measuring again is what its message asks for."""
    write_profile(NGRAM).write_text("{")
    write_profile(NGRAM)
    assert read_profile(KEY) == NGRAM


def test_a_file_is_replaced_whole_or_not_at_all(monkeypatch):
    """Interrupted before the last act: the old profile is still there and readable."""
    write_profile(NGRAM)
    with monkeypatch.context() as patched:
        patched.setattr(stored.os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_profile(replace(NGRAM, drafts={"small": serial(9.0)}))
    assert read_profile(KEY) == NGRAM


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    """One line that names option and file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="--calibration-cache: cannot write"):
        write_profile(NGRAM, tmp_path / "file" / "profiles")


def test_the_option_says_where(tmp_path, cache):
    """A folder, `off`, or the cache."""
    assert profiles_folder(None) == cache / "profiles"
    assert profiles_folder("off") is None
    assert profiles_folder(str(tmp_path)) == tmp_path
    path = write_profile(NGRAM, tmp_path)
    assert path.parent == tmp_path
    assert read_profile(KEY) is None
    assert read_profile(KEY, tmp_path) == NGRAM


def test_calibrations_gather_by_key():
    """Another temperature adds a table, the same one replaces it."""
    path = calibration_path(KEY, "ngram")
    assert read_calibration(path) is None
    hot = replace(TABLE, key=replace(TABLE.key, temperature="one"))
    write_calibration(path, [TABLE])
    write_calibration(path, [hot, replace(TABLE, num_samples=7)])
    found = read_calibration(path)
    assert found.table(hot.key) == hot
    assert found.table(TABLE.key).num_samples == 7


def test_a_calibration_does_not_depend_on_the_machine():
    """Confidences come from models and dtype: the same file on another device and with other threads."""
    other = replace(KEY, device="cpu Another", threads=64)
    assert calibration_path(other, "ngram") == calibration_path(KEY, "ngram")
    assert calibration_path(KEY, "small") != calibration_path(KEY, "ngram")
    assert calibration_path(replace(KEY, dtype="float32"), "ngram") != calibration_path(KEY, "ngram")


def test_a_damaged_calibration_names_the_command_and_is_replaced(tmp_path):
    """`forerun calibrate`; writing mends it."""
    path = tmp_path / "calibration.json"
    path.write_text('{"version": 0}')
    with pytest.raises(OptionError, match="forerun calibrate"):
        read_calibration(path)
    write_calibration(path, [TABLE])
    assert read_calibration(path).table(TABLE.key) == TABLE


def test_a_load_study_lies_beside_its_profile(tmp_path):
    """Found by the profile's key; a newer one takes its place; the profile is still found; a damaged one is named."""
    points = [{"drafter": "ngram", "policy": "plain", "load": "4", "per_user": 3.0, "total": 12.0}]
    assert read_load_study(KEY) is None
    write_load_study(KEY, [], {"made": "before"})
    path = write_load_study(KEY, points, {"made": "now"})
    write_profile(NGRAM)
    assert path == load_study_path(KEY) != profile_path(KEY)
    assert read_load_study(KEY) == {"version": 1, "points": points, "made_with": {"made": "now"}}
    assert read_profile(KEY) == NGRAM
    assert read_load_study(replace(KEY, threads=3)) is None
    assert read_load_study(KEY, tmp_path) is None
    for damaged in ("[]", "{", '{"version": 2, "points": []}', '{"version": 1, "points": 3}', "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(OptionError, match="forerun bench load"):
            read_load_study(KEY)
