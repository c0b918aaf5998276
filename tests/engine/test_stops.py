"""Committing one token at a time: the first rule that fires ends the request, wherever in a block that is."""

from __future__ import annotations

from functools import partial

import pytest

from engine.conftest import bytes_for, drafter_of, engine_of, idle, plain, same
from forerun import Sampling
from forerun.drafters.fake import Oracle, Script
from forerun.errors import PromptError
from forerun.target.base import BLOCK_SIZE
from forerun.target.table import ByteTokenizer, LetterTokenizer, TableTarget, history_model

PROMPT = [1, 2, 3]
GREEDY = Sampling(temperature=0, max_tokens=30)
OUTPUT = plain(history_model(30, seed=3), [PROMPT], GREEDY)[tuple(PROMPT)]
"""What plain decoding emits if nothing stops it."""
KS = [0, 1, 2, 3, 4, 5, 6, 7, 8]


def _spoken(output, prompt=(7,), vocab_size=257, **options) -> tuple[TableTarget, Oracle]:
    """A target that says exactly this after the prompt, and the oracle of it."""
    length = len(prompt)

    def row(prefix):
        done = len(prefix) - length
        return [float(i == (output[done] if done < len(output) else 0)) for i in range(vocab_size)]

    return TableTarget(row, vocab_size, **options), Oracle({tuple(prompt): [*output, *[0] * 20]})


def _consistent(completion, chunks) -> None:
    """One entry per committed token everywhere, and nothing of the rest of a block anywhere."""
    count = len(completion.token_ids)
    assert len(completion.from_draft) == count
    assert len(completion.logprobs) == count
    assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
    assert [flag for chunk in chunks for flag in chunk.from_draft] == completion.from_draft
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert 1 + completion.stats.emitted - completion.stats.discarded == count


# ---------------------------------------------------------------------------------------------------- ids that end


@pytest.mark.parametrize("k", KS)
def test_st_1_end_of_sequence_in_the_middle_of_a_block(k):
    """Every token of the output declared end-of-sequence in turn: the output ends there, nothing behind it is visible.

    https://github.com/huggingface/transformers/issues/47912
    """
    for place in {OUTPUT.index(token) for token in OUTPUT if OUTPUT.index(token) > 0}:
        end = OUTPUT[place]
        tokenizer = LetterTokenizer(30, eos_id=end)
        target = history_model(30, seed=3, eos_token_ids=[end], tokenizer=tokenizer)
        engine = engine_of(target, Oracle({tuple(PROMPT): OUTPUT}), num_speculative_tokens=k)
        chunks = list(engine.stream([PROMPT], Sampling(temperature=0, max_tokens=30, logprobs=0)))
        done = chunks[-1].completion
        assert done.token_ids == OUTPUT[: place + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", None)
        assert done.text == tokenizer.decode(OUTPUT[:place])
        _consistent(done, chunks)
        idle(engine)


@pytest.mark.parametrize("k", KS)
def test_st_2_every_end_id_ends(k):
    """Two end ids: whichever comes first ends the text; with `ignore_eos` neither does, an explicit stop id still does.

    https://github.com/LostRuins/koboldcpp/issues/1276
    """
    first, second = OUTPUT[4], next(token for token in OUTPUT[7:] if token not in OUTPUT[:7])
    known = {tuple(PROMPT): OUTPUT}
    for ends in ([first, second], [second]):
        target = history_model(30, seed=3, eos_token_ids=ends)
        engine = engine_of(target, Oracle(known), num_speculative_tokens=k)
        want = OUTPUT[: min(OUTPUT.index(end) for end in ends) + 1]
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == want
        [free] = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=30, ignore_eos=True))
        assert (free.token_ids, free.finish_reason) == (OUTPUT, "length")
        explicit = Sampling(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[second])
        [stopped] = engine.generate([PROMPT], explicit)
        assert stopped.token_ids == OUTPUT[: OUTPUT.index(second) + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", second)


@pytest.mark.parametrize("k", [0, 3, 5, 8])
def test_st_3_by_position_and_not_by_rule(k):
    """max_tokens 5 and a run of 10, 11, STOP, 20, 21, 22: `stop` and three ids; with STOP at index 5: `length`, five.

    https://github.com/sgl-project/sglang/issues/31599, https://github.com/sgl-project/sglang/pull/33758
    """
    stop = 25
    for run, want, reason in (
        ([10, 11, stop, 20, 21, 22], [10, 11, stop], "stop"),
        ([10, 11, 20, 21, 22, stop], [10, 11, 20, 21, 22], "length"),
        ([10, 11, 20, 21, stop, 22], [10, 11, 20, 21, stop], "stop"),
    ):
        target, oracle = _spoken(run, vocab_size=30, tokenizer=LetterTokenizer(30))
        engine = engine_of(target, oracle, num_speculative_tokens=k)
        [done] = engine.generate([[7]], Sampling(temperature=0, max_tokens=5, stop_token_ids=[stop]))
        assert (done.token_ids, done.finish_reason) == (want, reason)
        assert done.stop_reason == (stop if reason == "stop" else None)
    # The same run as one emission, which is how verification hands it over.
    [request] = engine_of(target).intake.requests([[7]], Sampling(max_tokens=5, stop_token_ids=[stop]), _ask())
    assert request.commit([10, 11, stop, 20, 21, 22], 5) == 3
    assert (request.finish_reason, request.output) == ("stop", [10, 11, stop])


def _ask():
    from forerun.engine.intake import Ask

    return Ask()


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("kind", ["small", "other small", "ngram"])
def test_st_4_a_conversation_goes_on_behind_a_stop(kind, mode):
    """A stop string in the middle of a block, then the same conversation goes on over the kept rows: the continuation
    is that of plain decoding, greedy and seeded.

    https://github.com/microsoft/onnxruntime-genai/pull/2528
    """
    sampling = {"temperature": 0.8 if mode == "coupled" else 0, "seed": 8, "max_tokens": 20}
    plain_turn = engine_of(history_model(7, seed=3), verify_mode="coupled").generate([PROMPT], Sampling(**sampling))[0]
    stop = plain_turn.text[4:6]
    make = partial(engine_of, history_model(7, seed=3), num_speculative_tokens=8, verify_mode="coupled")
    engine = make(drafter_of(kind, {}, 7))
    turns = engine.conversation()
    first = turns.generate(PROMPT, Sampling(**sampling, stop=stop))
    assert (first.finish_reason, first.stop_reason) == ("stop", stop)
    assert first.text == plain_turn.text[: plain_turn.text.index(stop)]
    later = [*PROMPT, *first.token_ids, 4, 4]
    engine.target.passes.clear()
    second = turns.generate(later, Sampling(**sampling))
    assert engine.target.passes[0] == 3  # the newest token of the first turn and the two new ones
    engine.audit()
    assert same(second, make().generate([later], Sampling(**sampling))[0])


@pytest.mark.parametrize("max_tokens", range(1, 11))
def test_st_5_usage_counts_what_is_returned(max_tokens):
    """max_tokens 1 .. 10, K = 8, the oracle: returned ids = log-probability entries = max_tokens; text is theirs.

    https://github.com/ikawrakow/ik_llama.cpp/pull/2358
    """
    target = history_model(30, seed=3)
    engine = engine_of(target, Oracle({tuple(PROMPT): OUTPUT}), num_speculative_tokens=8)
    chunks = list(engine.stream([PROMPT], Sampling(temperature=0, max_tokens=max_tokens, logprobs=0)))
    done = chunks[-1].completion
    assert done.token_ids == OUTPUT[:max_tokens]
    assert done.text == target.tokenizer.decode(OUTPUT[:max_tokens])
    assert done.finish_reason == "length"
    assert done.stats.discarded == 0  # K is bounded by what may still be committed
    _consistent(done, chunks)


# ------------------------------------------------------------------------------------------------------ stop strings


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["🙂", "é中", "中🙂x", "x", "\nend", ["nd", "en"], ["zzz", "x\n", "中🙂"]], ids=str)
def test_stop_strings_through_the_engine(stop, include, k):
    """Stop strings across characters of several tokens and across blocks: the text before the match (or with it), one
    stop reason, tokens up to the completing one; deltas joined are the text and never show a part of the match.
    """
    said = "aé中🙂x\nend?"
    output = list(said.encode())
    target, oracle = _spoken(output, tokenizer=ByteTokenizer())
    engine = engine_of(target, oracle, num_speculative_tokens=k)
    stops = [stop] if isinstance(stop, str) else stop
    found = {one: said.index(one) for one in stops if one in said}
    by_end = min(found, key=lambda one: len(said[: found[one] + len(one)].encode()))
    end = len(said[: found[by_end] + len(by_end)].encode())
    want = said[: found[by_end] + (len(by_end) if include else 0)]
    sampling = Sampling(
        temperature=0, max_tokens=len(output), stop=stop, include_stop_str_in_output=include, logprobs=0
    )
    chunks = list(engine.stream([[7]], sampling))
    done = chunks[-1].completion
    assert (done.text, done.stop_reason, done.finish_reason) == (want, by_end, "stop")
    assert done.token_ids == output[:end]
    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert want.startswith(shown)
        assert chunk.text.encode().decode() == chunk.text
    _consistent(done, chunks)
    idle(engine)


@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_string_on_the_last_allowed_token(k):
    """A stop that completes exactly at max_tokens gives `stop`; one token later it is `length`, with the text whole."""
    target, oracle = _spoken(list(b"abcdef"), tokenizer=ByteTokenizer())
    engine = engine_of(target, oracle, num_speculative_tokens=k)
    for length, reason, text in ((4, "stop", "ab"), (3, "length", "abc")):
        [done] = engine.generate([[7]], Sampling(temperature=0, max_tokens=length, stop="cd"))
        assert (done.finish_reason, done.text) == (reason, text)


@pytest.mark.parametrize("k", [0, 1, 8])
def test_an_incomplete_character_at_the_end(k):
    """max_tokens in the middle of a character: one U+FFFD at the very end, and only there."""
    target, oracle = _spoken(list("é🙂".encode()), tokenizer=ByteTokenizer())
    engine = engine_of(target, oracle, num_speculative_tokens=k)
    for length, text in ((1, "�"), (2, "é"), (4, "é�"), (6, "é🙂")):
        chunks = list(engine.stream([[7]], Sampling(temperature=0, max_tokens=length)))
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].completion.text == text


def test_the_text_of_a_stop_id():
    """`include_stop_str_in_output` keeps the text of a stop id, and of end-of-sequence where special ids are shown."""
    end = ByteTokenizer.EOS
    target, oracle = _spoken([*b"ab", end], tokenizer=ByteTokenizer(), eos_token_ids=[end])
    engine = engine_of(target, oracle, num_speculative_tokens=4)

    def text(**options):
        return engine.generate([[7]], Sampling(temperature=0, max_tokens=9, **options))[0].text

    assert text() == text(include_stop_str_in_output=True) == text(skip_special_tokens=False) == "ab"
    assert text(skip_special_tokens=False, include_stop_str_in_output=True) == "ab</s>"
    assert text(stop_token_ids=[ord("b")]) == "a"
    assert text(stop_token_ids=[ord("b")], include_stop_str_in_output=True) == "ab"


# -------------------------------------------------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("min_tokens", [1, 4, 9])
def test_min_tokens_keeps_every_end_away(min_tokens, k):
    """Before min_tokens, end-of-sequence and stop ids cannot be produced and stop strings are not looked for; a stop
    string that was complete before then does not end the text later.
    """
    target = history_model(7, seed=3, eos_token_ids=[6], tokenizer=LetterTokenizer(7))
    for ends in ({}, {"stop_token_ids": [1, 2]}, {"stop": ["a", "bcdefga"]}):
        sampling = Sampling(temperature=0, max_tokens=30, min_tokens=min_tokens, logprobs=0, **ends)
        known = plain(target, [PROMPT], Sampling(temperature=0, max_tokens=30, min_tokens=min_tokens, **ends))
        want = engine_of(target).generate([PROMPT], sampling)[0]
        engine = engine_of(target, Oracle(known), num_speculative_tokens=k)
        chunks = list(engine.stream([PROMPT], sampling))
        done = chunks[-1].completion
        assert same(done, want)
        assert len(done.token_ids) > min_tokens
        assert not {6, *ends.get("stop_token_ids", ())} & set(done.token_ids[:min_tokens])
        _consistent(done, chunks)


@pytest.mark.parametrize("k", [0, 3])
def test_min_tokens_yields_where_nothing_but_an_end_is_allowed(k):
    """allowed ids that are all ends and min_tokens: the end comes, and ends the text."""
    target = history_model(7, seed=3, eos_token_ids=[6])
    engine = engine_of(target, Script(lambda view: [6] * view.k), num_speculative_tokens=k)
    sampling = Sampling(temperature=0, max_tokens=9, min_tokens=5, allowed_token_ids=[6])
    [done] = engine.generate([PROMPT], sampling)
    assert (done.token_ids, done.finish_reason) == ([6], "stop")


# ----------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("kind", ["oracle", "never", "ngram", "small"])
@pytest.mark.parametrize("k", [1, 8])
def test_max_tokens_zero_one_and_none(kind, k):
    """0 computes nothing and emits nothing; 1 is the prefill alone; None goes on to the end of the window."""
    make = lambda: history_model(7, seed=3, window=20)  # noqa: E731
    known = plain(make(), [PROMPT], Sampling(temperature=0, max_tokens=17))
    engine = engine_of(make(), drafter_of(kind, known, 7), num_speculative_tokens=k)
    [nothing] = engine.generate([PROMPT], Sampling(max_tokens=0))
    assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ([], "", "length")
    assert engine.target.passes == []
    [one] = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=1))
    assert one.token_ids == known[tuple(PROMPT)][:1]
    assert engine.target.passes == [3]
    assert one.stats.target_steps == 0
    [all_of_it] = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=None))
    assert (all_of_it.token_ids, all_of_it.finish_reason) == (known[tuple(PROMPT)], "length")
    idle(engine)


def test_max_tokens_none_ends_where_all_the_memory_ends():
    """Without max_tokens a request may use the whole pool, and ends with it."""
    target = history_model(7, seed=3)
    engine = engine_of(target, drafter_of("ngram", {}, 7), kv_cache_memory_bytes=bytes_for(2, target))
    [done] = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=None))
    assert len(PROMPT) + len(done.token_ids) == 2 * BLOCK_SIZE + 1
    assert done.finish_reason == "length"
    with pytest.raises(PromptError, match=r"^prompt: 40 prompt tokens need .* raise kv_cache_memory_bytes"):
        engine.generate([[1] * 40], Sampling(temperature=0, max_tokens=None))
    idle(engine)


@pytest.mark.parametrize("kind", ["oracle", "never", "ngram", "small"])
def test_li_1_k_is_cut_to_what_is_left(kind):
    """Window = prompt + 3 with K = 8, then max_tokens 1, 2 and 3: K reaches 0, the text is plain decoding's to the last
    position, and no row lies beyond the window.

    https://github.com/turboderp-org/exllamav2/issues/274, https://github.com/vllm-project/vllm/issues/5342,
    https://github.com/vllm-project/vllm/pull/16087, https://github.com/vllm-project/vllm/pull/24662,
    https://github.com/vllm-project/vllm/issues/57941, https://github.com/predibase/lorax/pull/793,
    https://github.com/NVIDIA/TensorRT-LLM/issues/16826, https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/499
    """
    for window, max_tokens in ((6, 9), (6, None), (99, 1), (99, 2), (99, 3)):
        make = lambda window=window: history_model(7, seed=3, window=window)  # noqa: E731
        length = min(window - 3, max_tokens or 99)
        known = plain(make(), [PROMPT], Sampling(temperature=0, max_tokens=length))
        engine = engine_of(make(), drafter_of(kind, known, 7), num_speculative_tokens=8)
        [done] = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=max_tokens))
        assert done.token_ids == known[tuple(PROMPT)]
        assert len(done.token_ids) == length
        assert done.finish_reason == "length"
        assert done.stats.discarded == 0


@pytest.mark.parametrize("behind", [10, 18, 25])
@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_li_1_the_drafters_own_limit_only_lowers_k(behind, mode):
    """A draft model with fewer positions than the target: it drafts up to its last one, then the request goes on
    plainly; the draft model never sees a position that it does not have.
    """
    from forerun.drafters.small import Small

    sampling = Sampling(temperature=0 if mode == "rejection" else 0.7, seed=1, max_tokens=27)
    make = lambda window: history_model(7, seed=3, window=window)  # noqa: E731
    known = plain(make(30), [PROMPT], sampling, mode)
    drafter = Small(make(30 - behind), 7)
    engine = engine_of(make(30), drafter, num_speculative_tokens=4, verify_mode=mode)
    [done] = engine.generate([PROMPT], sampling)
    assert done.token_ids == known[tuple(PROMPT)]
    if behind < 25:  # TableTarget asserts that no row lies beyond its window
        assert done.stats.drafted > 0
    assert done.stats.drafter_faults == 0
    assert done.stats.target_steps > done.stats.drafting_rounds


def test_a_drafters_limit_that_lies_in_the_middle_of_a_block_is_used_up():
    """The last draft of a model with W positions is drafted from position W - 1, the highest it has."""
    from forerun.drafters.small import Small

    engine = engine_of(
        history_model(7, seed=3, window=60), Small(history_model(7, seed=3, window=13), 7), num_speculative_tokens=4
    )
    [done] = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=30))
    # Anchors 3 (K 4), 8 (K 4), 13: behind the model's last position 12.
    assert done.stats.drafted == 8
    assert done.stats.accepted == 8
