"""What is asked for is checked before anything is computed."""

from __future__ import annotations

import pytest

from engine.conftest import engine_of, same
from forerun import Engine, Sampling
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.errors import OptionError, PromptError
from forerun.target.table import history_model

PROMPT = [1, 2, 3]
GREEDY = Sampling(temperature=0, max_tokens=30)


def test_prompts_that_cannot_be_used():
    """Empty, outside the vocabulary, longer than the window, not text: a PromptError before anything is computed."""
    engine = engine_of(history_model(7, seed=3, window=10))
    for bad in ([], [[]], [[1, 7]], [[-1]], [[1] * 10], "xyz", [None], [1.5], [[1.5]], 7, [[1], 2]):
        with pytest.raises(PromptError):
            engine.generate(bad, GREEDY)
    assert engine.target.passes == []


def test_options_that_cannot_be_used():
    """Ids beyond the vocabulary, and options of `speculative` that are unknown or out of range, are named."""
    engine = engine_of(history_model(7, seed=3), Ngram())
    for field in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(OptionError, match=field):
            engine.generate([PROMPT], Sampling(**{field: [7]}))
    with pytest.raises(OptionError, match="logit_bias"):
        engine.generate([PROMPT], Sampling(logit_bias={7: 1}))
    with pytest.raises(OptionError, match="bad_words"):
        engine.generate([PROMPT], Sampling(bad_words=[[1, 9]]))
    for bad, name in (
        ({"method": "smal"}, "method"),
        ({"method": 3}, "method"),
        ({"max_draft": -1}, "max_draft"),
        ({"max_draft": 1.5}, "max_draft"),
        ({"max_draft": True}, "max_draft"),
        ({"verify_mode": "typical"}, "verify_mode"),
        ({"temperature": 1}, "temperature"),
        ("ngram", "speculative"),
        (3, "speculative"),
    ):
        with pytest.raises(OptionError, match=name):
            engine.generate([PROMPT], GREEDY, speculative=bad)
    with pytest.raises(OptionError, match="sampling"):
        engine.generate([PROMPT], [GREEDY, GREEDY])
    with pytest.raises(OptionError, match="prediction"):
        engine.generate([PROMPT], Sampling(n=2), prediction="abc")
    assert not engine.core.busy


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("num_speculative_tokens", "4", "must be a whole number, got '4'"),
        ("num_speculative_tokens", True, "must be a whole number, got True"),
        ("min_predicted_gain", [1], r"must be a number of at least 0, got \[1\]"),
        ("threads", "2", "must be a whole number, got '2'"),
        ("threads", 1.5, "must be a whole number, got 1.5"),
        ("max_model_len", "10", "must be a whole number, got '10'"),
        ("max_num_seqs", "4", "must be a whole number, got '4'"),
        ("revision", [1], r"must be the name of a branch, tag or commit, got \[1\]"),
        ("target", None, "must be a hub id, .* or a loaded model, got None"),
        ("speculative_config", {"method": "ngram"}, "did you mean 'drafter'"),
        ("stop", 5, "must be a non-empty string or a list of them, got 5"),
        ("logit_bias", [1], r"must be {token id: number in \[-100, 100\]}, got \[1\]"),
        ("prompts", b"hi", "prompt: must be text, token ids or a list of these, got b'hi'"),
        ("prompts", [b"hi"], "prompt: must be text, token ids or a list of these, got b'hi'"),
        ("prompts", {"prompt": "hi"}, "prompt: must be text, token ids or a list of these, got {"),
        ("prompts", [[True]], r"prompt: token ids must be integers, got \[True\]"),
        ("sampling", {"temperature": 0}, r"pass forerun.Sampling\(temperature=0\)"),
        ("sampling", [{"temperature": 0}], r"pass forerun.Sampling\(temperature=0\)"),
        ("sampling", 5, "must be a forerun.Sampling or a list of them, got 5"),
        ("prediction", 5, "must be a text, got 5"),
        ("prediction", 0, "must be a text, got 0"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(option, value, reason):
    """Wherever a Python caller passes them: an OptionError with the argument's name, before anything is computed."""
    target = history_model(7, seed=3)
    call, given = Engine.load, {"target": target}
    if option in ("prompts", "sampling", "prediction"):
        call, given = engine_of(target, Ngram()).generate, {"prompts": [PROMPT], "sampling": GREEDY}
    elif option in ("stop", "logit_bias"):
        call, given = Sampling, {}
    with pytest.raises(OptionError, match=reason) as caught:
        call(**{**given, option: value})
    assert caught.value.option == ("prompt" if option == "prompts" else option)
    assert target.passes == []


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"stop": ["ab"] * 2049}, "stop", "4098 characters in all; at most 4096"),
        ({"stop": "a" * 4097}, "stop", "4097 characters in all; at most 4096"),
        ({"bad_words": [[1, 2]] * 1025}, "bad_words", "1025 of them; at most 1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1025 of them; at most 1024"),
        ({"allowed_token_ids": [1] * 8}, "allowed_token_ids", "8 of them; at most 7, the vocabulary"),
        ({"prediction": "a" * 51}, "prediction", "51 tokens; the window is 50"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_every_step_would_pay_for_is_bounded(options, name, reason):
    """Lists that are gone through at every token, and a predicted text that no answer can hold: everybody in the batch
    waits for the request that brings them. At the bound they are taken.
    """
    engine = engine_of(history_model(7, seed=3, window=50), Ngram(1))
    given = {key: value for key, value in options.items() if key != "prediction"}
    with pytest.raises(OptionError, match=reason) as caught:
        engine.generate([PROMPT], Sampling(max_tokens=1, **given), prediction=options.get("prediction"))
    assert caught.value.option == name
    cut = {key: value[:-1] for key, value in options.items()}
    predicted = cut.pop("prediction", None)
    assert engine.generate([PROMPT], Sampling(max_tokens=1, **cut), prediction=predicted)


def test_one_bad_word_is_not_a_list_of_letters():
    """A bare string is refused: taken as a list it would ban each of its letters."""
    with pytest.raises(OptionError, match="bad_words"):
        Sampling(bad_words="abc")


def test_numpy_ids_are_ids():
    """Ids as numpy integers, alone and in arrays, are prompts like any other."""
    import numpy as np

    engine = engine_of(history_model(7, seed=3))
    want = engine.generate([PROMPT], GREEDY)[0]
    for prompt in (np.array(PROMPT), list(np.array(PROMPT)), [np.array(PROMPT)], tuple(PROMPT)):
        assert same(engine.generate(prompt, GREEDY)[0], want)
    assert same(engine.generate(np.array([PROMPT, PROMPT]), GREEDY)[1], want)


def test_speculative_in_every_spelling():
    """A request may name drafters as they are loaded, by an alias or in capitals, several of them, and lower K."""
    from forerun.drafters.small import Small

    make = lambda: engine_of(  # noqa: E731
        history_model(7, seed=3), Ngram(1), Small(history_model(7, seed=3), 7), num_speculative_tokens=4
    )
    sampling = Sampling(temperature=0, max_tokens=20)
    want = make().generate([PROMPT], sampling)[0].token_ids

    def run(speculative):
        [done] = make().generate([PROMPT], sampling, speculative=speculative)
        assert done.token_ids == want
        return done

    assert run({"method": "small"}).drafter == run({"method": "DRAFT_MODEL"}).drafter == "small"
    assert run({"method": ["small", "ngram"]}).drafter == run(None).drafter == run(True).drafter
    assert "small" not in run({"method": "ngram"}).drafter
    for plainly in (False, {"method": "vanilla"}, {"method": []}, {"max_draft": 0}):
        done = run(plainly)
        assert (done.drafter, done.stats.drafted) == ("vanilla", 0)
    assert len(run({"method": "small", "max_draft": 2}).stats.verified_by_position) == 2
    assert len(run({"method": "small", "max_draft": 9}).stats.verified_by_position) == 4  # it never raises K


def test_a_request_chooses_its_own_verify_mode():
    """In one batch, one row coupled and one in rejection mode: each as in an engine of that mode."""
    from engine.conftest import drafter_of

    sampling = Sampling(temperature=0.9, seed=3, max_tokens=20)
    make = lambda mode: engine_of(history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode=mode)  # noqa: E731
    want = {mode: make(mode).generate([PROMPT], sampling)[0] for mode in ("rejection", "coupled")}
    assert want["rejection"].token_ids != want["coupled"].token_ids
    for default in want:
        engine = make(default)
        requests = {mode: engine.submit([PROMPT], sampling, speculative={"verify_mode": mode})[0] for mode in want}
        while engine.step():
            pass
        assert all(same(engine.result(requests[mode]), want[mode]) for mode in want)


@pytest.mark.parametrize(
    ("drafters", "speculative", "reason"),
    [
        ([], None, "load `ngram`"),
        ([Small(history_model(7), 7)], None, "load `ngram`"),
        ([Ngram(), Small(history_model(7), 7)], {"method": "small"}, "leaves out"),
        ([Ngram()], False, "leaves out"),
        ([Ngram()], {"max_draft": 0}, "nothing is drafted"),
    ],
)
def test_a_prediction_that_nothing_reads_is_refused(drafters, speculative, reason):
    """No option is ignored in silence: without a drafter that looks it up, or with that one left out, a predicted text
    is an error."""
    engine = engine_of(history_model(7), *drafters)
    with pytest.raises(OptionError, match=reason):
        engine.generate([[1, 2]], Sampling(max_tokens=2), prediction="abc", speculative=speculative)
    if drafters and drafters[0].name == "ngram":
        assert engine.generate([[1, 2]], Sampling(max_tokens=2), prediction="abc")
