"""`Engine.load`: a folder, a loaded model or a target, with drafters in any form, up to the first tokens."""

from __future__ import annotations

import pytest

from engine.conftest import ids
from forerun import Engine, Sampling
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import EngineOptions
from forerun.engine.load import drafting_up_to, load_drafters
from forerun.errors import ModelError, OptionError
from forerun.target.table import history_model

GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
TEXTS = ["def area(radius):\n    return", "x = [1, 2, 3]\ny = [1, 2, 3]\n"]


@pytest.fixture(scope="module")
def want(tiny_qwen3_dir) -> list[list[int]]:
    return ids(Engine.load(str(tiny_qwen3_dir)).generate(TEXTS, GREEDY))


def test_a_folder_with_a_draft_model(tiny_qwen3_dir, tiny_small_dir, want):
    """Target and draft model from folders, an n-gram drafter in front: the text of plain decoding, with accepted
    drafts, and in `coupled` mode at T = 0.8 as well.
    """
    drafters = ["ngram", {"method": "small", "model": str(tiny_small_dir), "num_speculative_tokens": 3}]
    engine = Engine.load(str(tiny_qwen3_dir), drafters, num_speculative_tokens=5, kv_cache_memory_bytes=1 << 24)
    done = engine.generate(TEXTS, GREEDY)
    assert ids(done) == want
    assert sum(one.stats.accepted for one in done) > 0
    warm = Sampling(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)
    coupled = {"verify_mode": "coupled"}
    plainly = engine.generate(TEXTS, warm, speculative={**coupled, "method": "vanilla"})
    assert ids(engine.generate(TEXTS, warm, speculative=coupled)) == ids(plainly)
    engine.audit()


def test_a_loaded_model_needs_its_tokenizer(tiny_qwen3_dir, want):
    """A `PreTrainedModel` is served as it is; without its tokenizer the option is named."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir)
    with pytest.raises(OptionError, match="tokenizer"):
        Engine.load(model)
    engine = Engine.load(model, "ngram", tokenizer=AutoTokenizer.from_pretrained(tiny_qwen3_dir))
    assert ids(engine.generate(TEXTS, GREEDY)) == want


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float32"},
        {"device": "cuda"},
        {"revision": "main"},
        {"max_model_len": 4},
        {"tokenizer": object()},
        {"threads": 0},
    ],
    ids=lambda given: next(iter(given)),
)
def test_options_of_loading_are_refused_for_a_target_that_is_ready(given):
    """A `Target` keeps what it is; an option that asks for something else is named instead of dropped."""
    with pytest.raises(OptionError, match=rf"{next(iter(given))}: ") as caught:
        Engine.load(history_model(7), **given)
    assert caught.value.option.strip("-") in given


@pytest.mark.parametrize("given", [{"dtype": "float32"}, {"device": "cuda"}, {"max_model_len": 4}], ids=str)
def test_an_engine_made_by_hand_ignores_no_option_of_loading(given):
    """`EngineOptions` that the target does not agree with."""
    with pytest.raises(OptionError, match="has no effect on a"):
        Engine(history_model(7), options=EngineOptions(**given))


def test_options_of_loading_are_refused_before_drafters_are_loaded(tmp_path):
    """They may take minutes: here the folder without a drafter is not even looked at."""
    with pytest.raises(OptionError, match="dtype: 'float32' has no effect on a"):
        Engine.load(history_model(7), {"method": "small", "model": str(tmp_path)}, dtype="float32")


def test_a_ready_target_may_be_asked_for_what_it_has(monkeypatch):
    """Its own dtype, device and window; threads are the process's, and set whatever comes ready."""
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    target = history_model(7)
    engine = Engine.load(target, dtype="float64", device="cpu", max_model_len=target.window, threads=3)
    assert engine.target is target
    assert asked == [3]


def test_what_cannot_be_loaded_is_named(tmp_path):
    """A folder without a model, an unknown option, and a drafter that is none."""
    with pytest.raises(ModelError):
        Engine.load(str(tmp_path))
    with pytest.raises(OptionError, match="did you mean 'kv_cache_memory_bytes'"):
        Engine.load(history_model(7), kv_cache_memory_byte=3)
    with pytest.raises(OptionError, match="kv_cache_memory_bytes"):
        Engine.load(history_model(7), kv_cache_memory_bytes=3)
    with pytest.raises(OptionError, match="verify_mode"):
        Engine.load(history_model(7), verify_mode="typical")
    for limits in (
        {"max_num_seqs": 0},
        {"max_num_seqs": 2.5},
        {"max_num_seqs": "4"},
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": float("nan")},
        {"kv_cache_memory_bytes": 1e9},
        {"num_speculative_tokens": -1},
    ):
        with pytest.raises(OptionError, match=next(iter(limits))):
            Engine.load(history_model(7), **limits)


def test_more_kv_memory_than_there_is_is_refused_with_the_arithmetic(monkeypatch):
    """Zero pages cost nothing on a CPU until they are written: without this the process is killed under load."""
    monkeypatch.setattr("forerun.engine.memory.available_memory", lambda device: 10_000)
    with pytest.raises(OptionError, match=r"kv_cache_memory_bytes: \d+ KV blocks x \d+ bytes = .* are free on cpu"):
        Engine.load(history_model(7), kv_cache_memory_bytes=10**9)


def test_an_idle_engine_audits_its_books():
    """A block that nobody holds and that is not free either is found when the engine has nothing left to do."""
    engine = Engine.load(history_model(7))
    engine.submit([[1, 2]], GREEDY)
    engine.core.pool._free.pop()
    with pytest.raises(AssertionError):
        list(iter(engine.step, False))


def test_a_closed_engine_takes_no_calls():
    """As a context manager it closes at the end; whatever comes later is refused, also a stream made before."""
    from forerun.errors import EngineClosed

    with Engine.load(history_model(7), Ngram(1)) as engine:
        early = engine.stream([1, 2], GREEDY)
        assert engine.generate([1, 2], GREEDY)
    for call in (
        lambda: engine.generate([1, 2], GREEDY),
        lambda: engine.submit([1, 2], GREEDY),
        lambda: engine.stream([1, 2], GREEDY),
        lambda: next(early),
        engine.conversation,
    ):
        with pytest.raises(EngineClosed):
            call()
    assert not engine.core.busy


def test_k_up_to_is_what_a_drafter_can_make_unless_it_has_its_own():
    """For commands that try every K: a trained block bounds it, a configured K stays."""
    target = history_model(7)
    options = EngineOptions()
    block = Small(history_model(7), 7)
    block.max_draft = 5
    for k, expected in ((8, 5), (3, 3)):
        [entry] = drafting_up_to(load_drafters([block], target, options), k)
        assert entry.config.num_speculative_tokens == expected
    [own] = drafting_up_to(load_drafters([{"method": "ngram", "num_speculative_tokens": 2}], target, options), 8)
    assert own.config.num_speculative_tokens == 2
    [plain] = drafting_up_to(load_drafters(["vanilla"], target, options), 8)
    assert plain.config.num_speculative_tokens is None
