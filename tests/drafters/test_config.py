"""`--speculative-config`: what is accepted, what each key does, and what an unusable one is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.conftest import engine_of
from forerun.drafters import ALIASES, DRAFTERS, drafter_class
from forerun.drafters.base import LoadContext
from forerun.drafters.config import FOREIGN, NOT_BUILT, SpeculativeConfig, parse_config, parse_configs
from forerun.drafters.fake import Never
from forerun.drafters.ngram import Ngram
from forerun.engine import EngineOptions
from forerun.engine.intake import Ask
from forerun.engine.load import load_drafters
from forerun.errors import ModelError, OptionError
from forerun.target.table import history_model

TARGET = history_model(7)
CONTEXT = LoadContext(TARGET)
[REQUEST] = engine_of(TARGET).intake.requests([1], None, Ask())


def _load(given, **options):
    return load_drafters(given, TARGET, EngineOptions.of(options))


# ------------------------------------------------------------------------------------------------------- ways to say it


@pytest.mark.parametrize(
    "given",
    [
        "ngram",
        "NGRAM",
        "ngram_gpu",
        '{"method": "ngram"}',
        "method: ngram",
        {"method": "ngram"},
        {"--method": "ngram"},
        "forerun.drafters.ngram:Ngram",
        SpeculativeConfig(method="ngram"),
        Ngram(),
        [{"method": "ngram"}],
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_one_drafter_in_every_spelling(given):
    """A name, JSON, YAML, a mapping, a config, a drafter or a list of these all load the same thing."""
    [entry] = _load(given)
    assert (entry.name, entry.config.draft_length(entry.drafter.default_draft, 1)) == ("ngram", 6)


def test_a_file_is_read(tmp_path):
    """A path to JSON or YAML is read; one that is not there, or holds no mapping, is an error naming it."""
    for name, text in (("a.json", json.dumps({"method": "ngram"})), ("b.yaml", "method: ngram\n")):
        path = tmp_path / name
        path.write_text(text)
        assert parse_config(str(path)).method == "ngram"
    with pytest.raises(OptionError, match=r"nowhere\.json"):
        parse_config(str(tmp_path / "nowhere.json"))
    for text in ("[1, 2]", "{", "a: [", "7"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(OptionError, match="--speculative-config"):
            parse_config(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize("given", [None, "vanilla", "none", {"method": "vanilla"}, []])
def test_no_drafter_at_all(given):
    """Plain decoding is K = 0, however it is said."""
    assert all(entry.draft_length(REQUEST, 1) == 0 for entry in _load(given))


def test_several_drafters_keep_their_order():
    """A comma-separated list and a list of anything; the same kind twice is refused."""
    names = [config.name for config in parse_configs("ngram,small")]
    assert names == ["ngram", "small"]
    assert [entry.name for entry in _load([Never({}, 7), "ngram"])] == ["never", "ngram"]
    with pytest.raises(OptionError, match="once"):
        _load(["ngram", Ngram()])


def test_a_class_of_ones_own():
    """`module:Class` is a drafter; a miss, and something that is no drafter, are told apart."""
    assert drafter_class("forerun.drafters.ngram:Ngram") is Ngram
    for bad in ("forerun.drafters.ngram:Nothing", "no.such.module:Class", "forerun.drafters.ngram:_BORDER"):
        with pytest.raises(OptionError, match="method"):
            drafter_class(bad)


@pytest.mark.parametrize("name", [".a:B", "..a.b:C", ".:B", ":B", "a\0b:C", "broken_drafter:Drafts"], ids=repr)
def test_a_class_that_cannot_be_imported_whatever_python_says_of_it(name, tmp_path, monkeypatch):
    """A relative module, none at all, a name that is none, and a module whose own code raises: one line that names the
    option, however the config is given."""
    (tmp_path / "broken_drafter.py").write_text("raise ZeroDivisionError('its own mistake')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=r"must be module:Class|cannot be imported") as caught:
        parse_config({"method": name}).build(CONTEXT)
    assert caught.value.option == "method"


# -------------------------------------------------------------------------------------------------- unknown and unused


@pytest.mark.parametrize("name", [*NOT_BUILT, *(name.upper() for name in NOT_BUILT)])
def test_methods_that_are_not_built_are_refused_with_the_reason(name):
    """A method other engines have, in any case, is refused by name with the reason, not as a typing error."""
    if name.lower() in DRAFTERS:
        pytest.skip("built meanwhile")
    with pytest.raises(OptionError, match=NOT_BUILT[name.lower()][:20]):
        SpeculativeConfig(method=name).build(CONTEXT)


@pytest.mark.parametrize(("wrong", "right"), [("n-gram", "ngram"), ("smal", "small"), ("vanila", "vanilla")])
def test_a_misspelt_method_gets_the_nearest_name(wrong, right):
    """`did you mean` names the drafter."""
    with pytest.raises(OptionError, match=f"did you mean '{right}'"):
        drafter_class(wrong)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("num_speculativ_tokens", "num_speculative_tokens"),
        ("prompt_lokup_max", "prompt_lookup_max"),
        ("metod", "method"),
        ("--draft-sample-methd", "draft_sample_method"),
    ],
)
def test_a_misspelt_key_gets_the_nearest_name(wrong, right):
    """An unknown key is an error that prints the nearest own spelling."""
    with pytest.raises(OptionError, match=f"did you mean '{right}'"):
        parse_config({"method": "ngram", wrong: 3})


@pytest.mark.parametrize("foreign", sorted(FOREIGN))
def test_a_foreign_spelling_is_answered_with_ours(foreign):
    """Spellings of other engines are refused with the right key, so that nobody has to look for it."""
    ours = FOREIGN[foreign].split()[0]
    assert ours in SpeculativeConfig.model_fields
    with pytest.raises(OptionError, match=ours) as caught:
        parse_config({"method": "ngram", f"--{foreign.replace('_', '-')}": 3})
    assert caught.value.option == foreign


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.9),
        ("speculative_eagle_topk", 4),
        ("use_heterogeneous_vocab", True),
        ("parallel_drafting", True),
        ("draft_tensor_parallel_size", 2),
        ("synthetic_acceptance_length", 3),
        ("assistant_early_exit", 3),
    ],
)
def test_what_cannot_be_honoured_is_refused(key, value):
    """Keys of other engines that would change the law, or ask for what is not there, are never dropped in silence."""
    with pytest.raises(OptionError, match=key):
        parse_config({"method": "ngram", key: value})


def test_lookup_behind_a_name_or_model_lets_it_copy(tmp_path):
    """Alone and in lists; what has no law of its own is refused; a folder that is really called so is that folder."""
    copying = {"prompt_lookup_min": 2, "prompt_lookup_max": 6}
    given = [config.model_dump(exclude_unset=True) for config in parse_configs("dspark+lookup,./draft+lookup,eagle3")]
    assert given == [{"method": "dspark"} | copying, {"model": "./draft"} | copying, {"method": "eagle3"}]
    assert parse_configs("eagle3+lookup,small+lookup")[1].prompt_lookup_max == 6
    for name in ("ngram", "vanilla"):
        with pytest.raises(OptionError, match=name):
            parse_config(f"{name}+lookup")
    (tmp_path / "my+lookup").mkdir()
    assert parse_config(str(tmp_path / "my+lookup")).prompt_lookup_max is None


@pytest.mark.parametrize(
    ("config", "unused"),
    [
        ({"method": "ngram", "model": "x"}, "model"),
        ({"method": "small", "model": "x", "allow_target_mismatch": True}, "allow_target_mismatch"),
        ({"method": "ngram", "max_model_len": 9}, "max_model_len"),
        ({"method": "vanilla", "revision": "main"}, "revision"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max"),
    ],
)
def test_a_key_the_drafter_does_not_read_is_an_error(config, unused):
    """A key that would have no effect is named, with what the drafter does read."""
    with pytest.raises(OptionError, match=unused):
        parse_config(config).build(CONTEXT)


@pytest.mark.parametrize(
    "config",
    [
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": "many"},
        {"num_speculative_tokens": 2.5},
        {"draft_sample_method": "sometimes"},
        {"rejection_sample_method": "synthetic"},
        {"policy": "best"},
        {"min_predicted_gain": -0.1},
        {"min_predicted_gain": float("inf")},
        {"confidence_threshold": 1.5},
        {"confidence_threshold": "high"},
        {"confidence_threshold": float("nan")},
        {"min_predicted_gain": float("nan")},
        {"verify_mode": "typical"},
        {"min_draft": -2},
        {"prompt_lookup_max": 0},
        {"num_speculative_tokens_per_batch_size": [[4, 1, 2]]},
        {"num_speculative_tokens_per_batch_size": [[1, 4, -1]]},
        {"num_speculative_tokens_per_batch_size": [[0, 4, 1]]},
        {"num_speculative_tokens_per_batch_size": [[1, 4, 2], [3, 8, 1]]},
        {"num_speculative_tokens_per_batch_size": [[1, 4]]},
        {"num_speculative_tokens_per_batch_size": {"few": 3}},
        {"num_speculative_tokens_per_batch_size": {"8-2": 3}},
        {"num_speculative_tokens_per_batch_size": 3},
        {"num_speculative_tokens_per_batch_size": []},
        {"num_speculative_tokens": 2, "min_draft": 3},
    ],
    ids=str,
)
def test_values_out_of_range_name_their_key(config):
    """A value that cannot be used is an OptionError naming the key and what was given."""
    with pytest.raises(OptionError) as caught:
        parse_config({"method": "ngram", **config})
    assert caught.value.option in config


def test_a_drafter_that_cannot_draft_that_far_says_so():
    """K above the drafter's longest draft is refused when it is loaded; at it, it is fine."""
    with pytest.raises(OptionError, match="num_speculative_tokens"):
        SpeculativeConfig(method="vanilla", num_speculative_tokens=1).build(CONTEXT)
    SpeculativeConfig(method="vanilla", num_speculative_tokens=0).build(CONTEXT)

    class Trained(Never):
        max_draft = 4

    assert _load(Trained({}, 7), num_speculative_tokens=4)[0].draft_length(REQUEST, 1) == 4
    with pytest.raises(OptionError, match=r"num_speculative_tokens: 5 is more than 'never' can draft \(4\)"):
        _load(Trained({}, 7), num_speculative_tokens=5)
    table = parse_config({"num_speculative_tokens_per_batch_size": {"1": 5}})
    with pytest.raises(OptionError, match="num_speculative_tokens_per_batch_size"):
        table.check_length(Trained({}, 7))


def test_the_engines_k_is_the_default_of_every_drafter():
    """`num_speculative_tokens` of the engine is K where the config has none, and is checked with the rest of it."""
    given = [{"method": "ngram", "num_speculative_tokens": 2}, Never({}, 7), "vanilla"]
    assert [entry.draft_length(REQUEST, 1) for entry in _load(given, num_speculative_tokens=5)] == [2, 5, 0]
    with pytest.raises(OptionError, match="min_draft"):
        _load({"method": "ngram", "min_draft": 6}, num_speculative_tokens=3)


def test_small_needs_a_model():
    """The draft model must be named, unless the target brings its own."""
    with pytest.raises(OptionError, match="model"):
        _load("small")


def test_unknown_engine_options_get_the_nearest_name():
    """`Engine.load` names the option meant."""
    with pytest.raises(OptionError, match="did you mean 'max_num_seqs'"):
        EngineOptions.of({"max_num_seq": 3})


# ----------------------------------------------------------------------------------------------------------- K by batch


TABLES = [
    [[1, 4, 3], [5, 16, 2], [20, 64, 0]],
    {"1-4": 3, "5-16": 2, "20-64": 0},
    [[20, 64, 0], [1, 4, 3], [5, 16, 2]],
]


@pytest.mark.parametrize("table", TABLES, ids=["list", "map", "unordered"])
def test_k_by_batch_size(table):
    """Both forms; ends are inclusive; gaps, and what lies behind the last range, take the K before them."""
    config = parse_config({"method": "ngram", "num_speculative_tokens_per_batch_size": table})
    lengths = {batch: config.draft_length(9, batch) for batch in (1, 4, 5, 16, 17, 19, 20, 64, 65, 500)}
    assert lengths == {1: 3, 4: 3, 5: 2, 16: 2, 17: 2, 19: 2, 20: 0, 64: 0, 65: 0, 500: 0}


def test_k_by_batch_size_may_grow_and_is_bounded_by_num_speculative_tokens():
    """A later range may have a larger K; `num_speculative_tokens` bounds each of them, and is K before the first."""
    table = [[2, 4, 2], [5, 8, 6]]
    free = parse_config({"method": "ngram", "num_speculative_tokens_per_batch_size": table})
    assert [free.draft_length(4, batch) for batch in (1, 2, 5)] == [4, 2, 6]
    bounded = parse_config(
        {"method": "ngram", "num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": table}
    )
    assert [bounded.draft_length(4, batch) for batch in (1, 2, 5)] == [5, 2, 5]


def test_single_sizes_in_the_map_form():
    """{"8": 1} is the range from 8 to 8."""
    config = parse_config({"method": "ngram", "num_speculative_tokens_per_batch_size": {"1": 4, "8": 1}})
    assert [config.draft_length(9, batch) for batch in (1, 7, 8, 9)] == [4, 4, 1, 1]


def test_aliases_lead_to_drafters_of_the_table():
    """Every alias names a drafter that exists."""
    assert set(ALIASES.values()) <= set(DRAFTERS)


# -------------------------------------------------------------------------------------------------------- verify mode


def test_a_verify_mode_without_a_drafter_still_counts():
    """`vanilla` with a verify_mode decodes in that mode: the seed's text does not depend on whether anything drafts."""
    from forerun import Engine, Sampling

    sampling = Sampling(seed=3, max_tokens=20)
    texts = [
        Engine.load(history_model(7), given, **options).generate([1, 2], sampling)[0].token_ids
        for given, options in (
            ({"method": "vanilla", "verify_mode": "coupled"}, {}),
            ({"method": "ngram", "verify_mode": "coupled"}, {}),
            (None, {"verify_mode": "coupled"}),
        )
    ]
    assert texts[0] == texts[1] == texts[2]


def test_two_drafters_of_different_verify_modes_are_refused():
    """One engine has one default mode; a contradiction is named."""
    from forerun import Engine

    given = [{"method": "ngram", "verify_mode": "coupled"}, {"method": "vanilla", "verify_mode": "rejection"}]
    with pytest.raises(OptionError, match="verify_mode"):
        Engine.load(history_model(7), given)


def test_a_misspelt_method_is_not_looked_for_on_the_hub():
    """A bare word near a method's name is answered with that name."""
    with pytest.raises(OptionError, match="--drafter: no drafter is called 'nggram'; did you mean 'ngram'"):
        parse_config("nggram")
    assert parse_config("some-model").model == "some-model"


def test_a_class_is_not_an_object():
    """What is neither a name nor a Drafter is named, not stumbled over."""
    with pytest.raises(OptionError, match="--drafter: expected a name"):
        _load(Ngram)


@pytest.mark.parametrize("more", [{}, {"method": "eagle"}, {"method": "small"}])
def test_the_folder_of_a_run_names_the_drafter_in_it(more, tmp_path):
    """`--drafter RUN` for what `forerun train` wrote to --out: the drafter is in RUN/best."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"\A--drafter: .* its drafter is {tmp_path / 'best'}\Z"):
        parse_config({"model": str(tmp_path), **more}).build(LoadContext(history_model(8, 0)))


def _ours(method: object) -> bytes:
    return json.dumps({"forerun_format": 1, "method": method}).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 10**6, "cannot be read"),
        (b'{"forerun_format": ' + b"9" * 5000 + b"}", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"{", "cannot be read"),
        (_ours(["eagle"]), r"method: \['eagle'\] is none of"),
        (_ours(None), "method: None is none of"),
        (_ours("eagle2"), "method: 'eagle2' is none of"),
        (_ours(".eagle:Eagle"), "method: '.eagle:Eagle' is none of"),
        (_ours("e" * 400), "method: 'e{1,20}.{3}e{1,20}' is none of"),
    ],
    ids=["nested", "digits", "bytes", "no JSON", "list", "null", "unknown", "relative", "endless"],
)
def test_a_drafters_config_that_says_no_kind_is_refused_by_its_file(content, said, tmp_path):
    """Whoever wrote it, what cannot be read, or names no method, ends in one line with the file's name."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"\A--drafter: {tmp_path}/config\.json:? {said}"):
        _ = parse_config({"model": str(tmp_path)}).name


def test_a_config_that_no_model_has_is_not_read(tmp_path, monkeypatch):
    """A file of any size costs no more memory than the largest config."""
    monkeypatch.setattr("forerun.drafters.config.LARGEST_CONFIG", 50)
    (tmp_path / "config.json").write_bytes(b" " * 51)
    with pytest.raises(ModelError, match=r"\A--drafter: .*/config\.json is no config of a model: .* over 50 bytes"):
        _ = parse_config({"model": str(tmp_path)}).name


@pytest.mark.parametrize("method", ["eagle3", "my.drafters:Own"])
def test_the_kind_of_a_trained_drafter_is_read_from_its_folder(method, tmp_path):
    """One of the table, or a class of one's own. Without a config, or with somebody else's, it is a small model."""
    config = parse_config({"model": str(tmp_path)})
    assert config.name == "small"
    (tmp_path / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    assert config.name == "small"
    (tmp_path / "config.json").write_bytes(_ours(method))
    assert config.name == method


@pytest.mark.parametrize("text", ["ngram,./small-model", "some/model,ngram"])
def test_a_list_may_name_methods_and_models(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--drafter ngram,./small-model` is two drafters; a folder with a comma in its name is one."""
    first, second = parse_configs(text)
    assert {first.method or first.model, second.method or second.model} == set(text.split(","))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngram,other").mkdir()
    [one] = parse_configs("ngram,other")
    assert one.model == "ngram,other"


def test_a_list_may_name_paths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trained drafters, one with look-ups; what is not all there is one path, whose name has a comma."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert [one.model for one in parse_configs("./a,./b+lookup")] == ["./a", "./b"]
    assert [one.model for one in parse_configs("./a,./c")] == ["./a,./c"]
    (tmp_path / "a,b").mkdir()
    assert [one.model for one in parse_configs("./a,b")] == ["./a,b"]


@pytest.mark.parametrize("content", ['{"method": ' + "[" * 100_000, '{"min_draft": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("ending", ["json", "yaml", None])
def test_a_config_that_python_cannot_read_is_refused(content: str, ending: str | None, tmp_path: Path) -> None:
    """Nested too deep, or with a number of too many digits; a file is named."""
    file = tmp_path / f"config.{ending}"
    file.write_text(content)
    name = "" if ending is None else f"{file} is "
    with pytest.raises(OptionError, match=rf"\A--speculative-config: {name}neither JSON nor YAML: "):
        parse_config(content if ending is None else str(file))
