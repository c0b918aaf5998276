"""Which scheduler an engine gets, from options, configurations and files; and what it says about it."""

from __future__ import annotations

import logging
import shutil

import pytest

from budget.world import BFLOAT16, profile, serial
from engine.conftest import PROMPTS
from forerun import Engine, Sampling
from forerun.budget.calibration import Calibration, CalibrationKey, Table
from forerun.budget.profile import Profile
from forerun.budget.stored import calibration_path, write_profile
from forerun.drafters.config import parse_configs
from forerun.drafters.fake import Never
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import EngineOptions
from forerun.engine.load import load_drafters
from forerun.engine.profile_key import engine_key, model_of
from forerun.engine.tuning import scheduling_of
from forerun.errors import OptionError
from forerun.target.table import history_model

TARGET = history_model(7, seed=3)
FREE = serial(1e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of one's own."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path


def tuned(given, look_up=True, target=TARGET, **options):
    chosen = EngineOptions.of(options)
    return scheduling_of(target, load_drafters(given, target, chosen), chosen, look_up=look_up)


def measured(*drafters: str, key=None, models=None) -> Profile:
    costs = profile(BFLOAT16, dict.fromkeys(drafters, FREE))
    return Profile(key or engine_key(TARGET), costs.verify, costs.drafts, models or {})


def policy_of(scheduling) -> str:
    return scheduling.scheduler.options.policy


# ----------------------------------------------------------------------------------------------------- which policy


def test_without_measured_costs_everything_is_as_configured(caplog):
    """Said once, with the command that measures."""
    with caplog.at_level(logging.INFO, logger="forerun"):
        scheduling = tuned("ngram")
    assert policy_of(scheduling) == "fixed"
    assert not scheduling.scheduler.adapts
    [line] = [record.getMessage() for record in caplog.records]
    assert "`forerun profile`" in line


def test_with_measured_costs_the_default_is_delayed(caplog):
    write_profile(measured("ngram"))
    with caplog.at_level(logging.INFO, logger="forerun"):
        scheduling = tuned("ngram")
    assert policy_of(scheduling) == "delayed"
    assert scheduling.scheduler.adapts
    assert caplog.records == []


def test_a_drafter_that_was_not_measured_is_named(caplog):
    """A profile that lacks one of the drafters is not used at all."""
    write_profile(measured("ngram"))
    with caplog.at_level(logging.INFO, logger="forerun"):
        scheduling = tuned(["ngram", Never({}, 7)])
    assert policy_of(scheduling) == "fixed"
    assert "lack never" in caplog.text
    assert "`forerun profile`" in caplog.text


def test_a_drafter_of_another_model_was_not_measured(tmp_path, caplog):
    """The same kind with another model costs something else."""
    loaded = load_drafters("ngram", TARGET, EngineOptions())
    write_profile(measured("ngram", models={"ngram": "another"}))
    with caplog.at_level(logging.INFO, logger="forerun"):
        assert policy_of(scheduling_of(TARGET, loaded, EngineOptions(), look_up=True)) == "fixed"
    assert "lack ngram" in caplog.text
    assert model_of(loaded[0].config) == ""


def test_vanilla_needs_no_costs(caplog):
    """Nothing drafts, so nothing is looked for and nothing is said."""
    with caplog.at_level(logging.INFO, logger="forerun"):
        for given in (None, "vanilla"):
            assert policy_of(tuned(given)) == "fixed"
    assert caplog.records == []


def test_the_constructor_looks_for_nothing_unless_a_policy_asks(caplog):
    """`Engine(...)` drafts as configured beside any profile, `Engine.load` by it; both honour a given policy."""
    write_profile(measured("ngram"))
    loaded = load_drafters("ngram", TARGET, EngineOptions())
    assert policy_of(Engine(TARGET, loaded).core.schedule.scheduling) == "fixed"
    assert policy_of(Engine.load(TARGET, "ngram").core.schedule.scheduling) == "delayed"
    for policy in ("prefix", "delayed"):
        asked = load_drafters({"method": "ngram", "policy": policy}, TARGET, EngineOptions())
        engine = Engine(TARGET, asked)
        assert policy_of(engine.core.schedule.scheduling) == policy
        assert engine.core.schedule.scheduler.adapts


@pytest.mark.parametrize("asked", [{"policy": "prefix"}, {"policy": "delayed"}, {"min_predicted_gain": 0.1}])
def test_asking_for_what_needs_costs_without_any_is_a_warning(asked, caplog):
    """Not to be had: said loudly, with what helps, and everything is drafted as configured."""
    for cache, help_ in ((None, "`forerun profile`"), ("off", "calibration_cache is 'off'")):
        with caplog.at_level(logging.WARNING, logger="forerun"):
            scheduling = tuned({"method": "ngram", **asked}, calibration_cache=cache)
        assert policy_of(scheduling) == asked.get("policy", "fixed")
        assert not scheduling.scheduler.adapts
        assert help_ in caplog.text
        assert cache is None or "forerun profile" not in caplog.text
        caplog.clear()


def test_a_damaged_profile_stops_only_who_asked_for_it(caplog, tmp_path):
    path = write_profile(measured("ngram"))
    path.write_text("{")
    with caplog.at_level(logging.WARNING, logger="forerun"):
        assert policy_of(tuned("ngram")) == "fixed"
    assert "cannot be used" in caplog.text
    with pytest.raises(OptionError, match="forerun profile"):
        tuned({"method": "ngram", "policy": "delayed"})


def test_costs_can_be_left_out_of_account(tmp_path):
    """`calibration_cache`: off, or another folder."""
    write_profile(measured("ngram"), tmp_path / "elsewhere")
    assert policy_of(tuned("ngram")) == "fixed"
    assert policy_of(tuned("ngram", calibration_cache=str(tmp_path / "elsewhere"))) == "delayed"
    write_profile(measured("ngram"))
    assert policy_of(tuned("ngram", calibration_cache="off")) == "fixed"


# ------------------------------------------------------------------------------------------------ one for all drafters


def test_values_are_given_once_or_agree():
    """Of several drafters one may say it for all; a contradiction is named, also one with the engine's own option."""
    both = [{"method": "ngram", "policy": "threshold", "confidence_threshold": 0.3}, {"method": "vanilla"}]
    scheduling = tuned(both)
    assert (policy_of(scheduling), scheduling.confidence_threshold) == ("threshold", 0.3)
    assert (
        policy_of(tuned([{"method": "ngram", "policy": "fixed"}, {"method": "vanilla", "policy": "fixed"}])) == "fixed"
    )
    for key, one, two in (
        ("policy", "fixed", "delayed"), ("confidence_threshold", 0.1, 0.2), ("min_predicted_gain", 0.1, 0.2),
        ("confidence_cost_table_path", "a", "b"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=rf"{key}: drafters of one engine need the same one, got .* give it once"):
            tuned([{"method": "ngram", key: one}, {"method": "vanilla", key: two}])
    with pytest.raises(OptionError, match="policy"):
        tuned({"method": "ngram", "policy": "fixed"}, policy="prefix")
    with pytest.raises(OptionError, match="policy"):  # before any model is loaded
        parse_configs([{"method": "ngram", "policy": "fixed"}, {"model": "nowhere", "policy": "prefix"}])


def test_the_options_of_the_engine_say_it_as_well():
    write_profile(measured("ngram"))
    scheduling = tuned("ngram", policy="prefix", min_predicted_gain=0.2)
    assert (policy_of(scheduling), scheduling.scheduler.options.min_predicted_gain) == ("prefix", 0.2)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        ({"policy": "threshold"}, "confidence_threshold"),
        ({"policy": "fixed", "min_predicted_gain": 0.1}, "min_predicted_gain"),
        ({"policy": "fixed", "confidence_cost_table_path": "x.json"}, "confidence_cost_table_path"),
        ({"confidence_cost_table_path": "nowhere.json"}, "confidence_cost_table_path"),
        ({"confidence_calibration_path": "nowhere.json"}, "confidence_calibration_path"),
    ],
)
def test_what_would_have_no_effect_or_is_not_there_is_refused(config, option):
    with pytest.raises(OptionError) as caught:
        tuned({"method": "ngram", **config})
    assert caught.value.option == option


@pytest.mark.parametrize(
    "options",
    [{"policy": "best"}, {"min_predicted_gain": -0.1}, {"min_predicted_gain": float("nan")}, {"calibration_cache": ""}],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(OptionError) as caught:
        EngineOptions.of(options)
    assert caught.value.option in options


# ----------------------------------------------------------------------------------------------------- files by name


def test_a_cost_table_is_read_and_checked(tmp_path):
    """The file named is used instead of the cache's; one of another model, or without a drafter, is refused by name."""
    path = tmp_path / "costs.json"
    path.write_text(measured("ngram").dumps())
    named = {"method": "ngram", "confidence_cost_table_path": str(path)}
    assert policy_of(tuned(named, look_up=False)) == "delayed"
    with pytest.raises(OptionError, match=r"confidence_cost_table_path: .* has no costs of the drafter 'never'"):
        tuned([named, Never({}, 7)])
    other = engine_key(history_model(7, name="another"))
    path.write_text(measured("ngram", key=other).dumps())
    with pytest.raises(OptionError, match=r"confidence_cost_table_path: .*model 'another'"):
        tuned(named)


def _table(temperature: float, method: str = "probabilistic") -> Calibration:
    key = CalibrationKey("rejection", method, "greedy")
    return Calibration([Table(key, (temperature,), "test", 1000)])


def _scaled(scheduling) -> float:
    """What becomes of a confidence of .9 at the first position of a greedy request."""
    method = scheduling.calibrated_for
    key = CalibrationKey("rejection", method, "greedy") if method else None
    return scheduling.scheduler._confidences.calibrated("ngram", key, 1, 0.9)


def test_calibrations_are_found_and_overridden(tmp_path):
    """In the drafter's own folder or beside the profile; a path overrides both; without one nothing is scaled."""
    assert _scaled(tuned("ngram")) == 0.9
    write_profile(measured("ngram"))
    calibration_path(engine_key(TARGET), "ngram").write_text(_table(2.0).dumps())
    assert _scaled(tuned("ngram")) == pytest.approx(0.75)
    named = tmp_path / "mine.json"
    named.write_text(_table(4.0).dumps())
    override = {"method": "ngram", "confidence_calibration_path": str(named)}
    assert _scaled(tuned(override)) == pytest.approx(1 / (1 + 9 ** (-1 / 4)))
    named.write_text("[]")
    with pytest.raises(OptionError, match=r"mine\.json is damaged.*run `forerun calibrate` again") as caught:
        tuned(override)
    assert caught.value.option == "confidence_calibration_path"


@pytest.mark.parametrize("text", ["{", '{"version": 1, "tables": []}'])
def test_a_calibration_that_lies_there_and_cannot_be_used_is_told_and_done_without(
    text, caplog, tmp_path, tiny_small_dir, tiny_qwen3_dir
):
    """Nobody asked for it and it changes no output: an older one must not keep its drafter from being loaded, nor from
    being calibrated anew."""
    write_profile(measured("ngram"))
    calibration_path(engine_key(TARGET), "ngram").write_text(text)
    with caplog.at_level(logging.WARNING, logger="forerun"):
        assert _scaled(tuned("ngram")) == 0.9
    assert "confidences are taken as they come" in caplog.text
    assert "forerun calibrate" in caplog.text
    caplog.clear()
    folder = tmp_path / "drafter"
    shutil.copytree(tiny_small_dir, folder)
    (folder / "calibration.json").write_text(text)
    with caplog.at_level(logging.WARNING, logger="forerun"):
        engine = Engine.load(str(tiny_qwen3_dir), {"model": str(folder), "confidence_threshold": 0.1})
    assert engine.core.schedule.scheduling.calibrated_for is None
    assert "calibration.json" in caplog.text


def test_a_calibration_in_the_drafters_folder_is_loaded(tmp_path, tiny_small_dir, tiny_qwen3_dir):
    """`calibration.json` beside the weights, also without measured costs."""
    folder = tmp_path / "drafter"
    shutil.copytree(tiny_small_dir, folder)
    (folder / "calibration.json").write_text(_table(2.0).dumps())
    engine = Engine.load(str(tiny_qwen3_dir), {"model": str(folder), "confidence_threshold": 0.1})
    scheduling = engine.core.schedule.scheduling
    assert scheduling.calibrated_for == "probabilistic"
    assert "small" in scheduling.scheduler._confidences._fitted
    copying = {"model": str(folder), "confidence_threshold": 0.1, "prompt_lookup_max": 4}
    engine = Engine.load(str(tiny_qwen3_dir), copying)
    assert engine.core.schedule.scheduling.calibrated_for is None


def test_drafters_that_draw_differently_share_one_key(tmp_path):
    """A request has one key for all its drafters. A table made for greedy drafting belongs to a drafter that drafts
    greedily, whatever the others do."""
    path = tmp_path / "greedy.json"
    path.write_text(_table(2.0, "greedy").dumps())
    greedy = {"method": "ngram", "draft_sample_method": "greedy", "confidence_calibration_path": str(path)}
    drawn = {"method": "ngram", "confidence_calibration_path": str(path)}
    assert _scaled(tuned([{"method": "vanilla"}, greedy])) == pytest.approx(0.75)
    assert _scaled(tuned(drawn)) == 0.9


# --------------------------------------------------------------------------------------------------- global is refused


def _small() -> Small:
    return Small(history_model(7, seed=4), 7)


def test_sp_1_global_is_refused_where_it_would_bias():
    """https://github.com/NVIDIA/TensorRT-LLM/pull/17056: sampled drafts with confidences that know earlier ones, in
    rejection mode: refused when the engine is made, naming what to use instead. Point masses, blind confidences and
    coupled mode are free."""
    with pytest.raises(OptionError, match=r"policy: 'global' would change the output of small.*delayed.*coupled"):
        tuned(_small(), policy="global")
    assert policy_of(tuned(_small(), policy="global", verify_mode="coupled")) == "global"
    assert policy_of(tuned(Ngram(), policy="global")) == "global"
    blind = _small()
    blind.blind = True
    assert policy_of(tuned(blind, policy="global")) == "global"
    with pytest.raises(OptionError, match="policy"):
        tuned([Ngram(), _small()], policy="global")


def test_sp_1_global_is_refused_for_a_request_that_chooses_rejection():
    """A coupled engine serves sampled requests in rejection mode only without the drafters it would bias."""
    engine = Engine.load(TARGET, _small(), policy="global", verify_mode="coupled")
    ask = {"verify_mode": "rejection"}
    with pytest.raises(OptionError, match=r"speculative.verify_mode: .*'global'"):
        engine.generate(PROMPTS[0], Sampling(max_tokens=3), speculative=ask)
    for sampling, more in ((Sampling(temperature=0, max_tokens=3), {}), (Sampling(max_tokens=3), {"max_draft": 0})):
        [done] = engine.generate(PROMPTS[0], sampling, speculative={**ask, **more})
        assert len(done.token_ids) == 3


# ------------------------------------------------------------------------------------------------------ of one request


@pytest.mark.parametrize("value", [-0.1, 1.1, "high", True, float("nan")])
def test_a_threshold_of_a_request_lies_within_0_and_1(value):
    engine = Engine.load(TARGET, "ngram")
    with pytest.raises(OptionError, match=r"speculative.confidence_threshold"):
        engine.generate([1], Sampling(max_tokens=2), speculative={"confidence_threshold": value})


def test_the_key_of_a_target_is_the_model_and_the_machine():
    """Tables go by their name; torch's threads count on a CPU."""
    import torch

    key = engine_key(history_model(7, name="a table"))
    assert (key.model, key.dtype, key.threads) == ("a table", "float64", torch.get_num_threads())
    assert key.device.startswith("cpu ")


def test_a_copy_of_a_model_in_another_folder_is_the_same_model(tiny_qwen3_dir, tmp_path):
    """Config and weights are compared, not where they lie; another model has another key."""
    import shutil

    from forerun.target.load import load_target

    shutil.copytree(tiny_qwen3_dir, tmp_path / "copy")
    one, two = (engine_key(load_target(str(folder))) for folder in (tiny_qwen3_dir, tmp_path / "copy"))
    assert one == two
    assert one != engine_key(load_target("embedded"))
