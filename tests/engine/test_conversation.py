"""Turns over kept rows: each as if computed afresh, whatever happens to the rows in between."""

from __future__ import annotations

import pytest

from engine.conftest import bytes_for, drafter_of, drive, engine_of, ids, plain, same
from forerun import Sampling
from forerun.drafters.fake import Broken, Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.errors import EngineClosed, OptionError, RequestCancelled
from forerun.target.table import history_model, position_model

GREEDY = Sampling(temperature=0, max_tokens=12)
WARM = Sampling(temperature=0.9, max_tokens=12, seed=4)
KINDS = ["ngram", "small", "other small"]


def _engine(kind: str = "other small", **options):
    return engine_of(history_model(7, seed=3), drafter_of(kind, {}, 7), num_speculative_tokens=3, **options)


def _fresh(kind: str, prompt, sampling, **options):
    """The turn in an engine that has seen nothing else."""
    return _engine(kind, **options).generate(prompt, sampling)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "sampling"), [("rejection", GREEDY), ("coupled", WARM), ("rejection", WARM)])
def test_every_turn_is_as_computed_afresh(kind, mode, sampling):
    """Turns that go on, repeat the prompt, diverge early, late and in the last token, are shorter than what is kept, or
    share nothing: results equal those of an engine without history, in rejection mode too.
    """
    engine = _engine(kind, verify_mode=mode)
    turns = engine.conversation()
    prompt = [1, 2, 3, 0, 5, 5, 2, 1, 6, 3, 3, 2, 1, 0, 4, 4, 5, 6]
    first = turns.generate(prompt, sampling)
    whole = [*prompt, *first.token_ids]
    assert same(first, _fresh(kind, prompt, sampling, verify_mode=mode))
    for later in (
        [*whole, 2, 2],
        [*whole, 2, 2],  # the same prompt twice
        [*whole[:-1], (whole[-1] + 1) % 7],
        whole[:20],
        whole[:16],
        whole[:1],
        [5, 5, 5, *whole],
        [0],
        whole,
    ):
        assert same(turns.generate(later, sampling), _fresh(kind, later, sampling, verify_mode=mode)), later
        engine.audit()
    turns.close()
    assert engine.core.pool.used == 0


def test_a_turn_computes_only_what_is_new():
    """The rows of a turn are those behind the shared prefix: prompt + answer less the newest token stays."""
    engine = _engine("ngram")
    turns = engine.conversation()
    prompt = [1, 2, 3, 0, 5, 5, 2, 1, 6, 3, 3, 2, 1, 0, 4, 4, 5, 6]
    answer = turns.generate(prompt, GREEDY).token_ids
    engine.target.passes.clear()
    turns.generate([*prompt, *answer, 2, 2], Sampling(temperature=0, max_tokens=1))
    assert engine.target.passes == [3]


def test_rows_given_back_to_running_requests_are_computed_again():
    """An idle conversation loses its rows to a request that needs them; the next turn is unchanged."""
    engine = _engine("small", kv_cache_memory_bytes=bytes_for(4, history_model(7), drafter_of("small", {}, 7)))
    turns, prompt = engine.conversation(), [1, 2, 3] * 9
    answer = turns.generate(prompt, GREEDY).token_ids
    assert engine.core.pool.used == 3
    engine.generate([4] * 40, GREEDY)
    assert engine.core.pool.used == 0
    later = [*prompt, *answer, 1]
    assert same(turns.generate(later, GREEDY), _fresh("small", later, GREEDY))
    engine.audit()


def test_a_waiting_turn_gives_its_rows_to_what_is_before_it_in_the_queue():
    """A queued request that needs the blocks which a turn behind it still holds is served: no endless wait."""
    target = history_model(7, seed=3)
    engine = engine_of(target, Ngram(), kv_cache_memory_bytes=bytes_for(4, target))
    turns, prompt = engine.conversation(), [1, 2, 3] * 9
    answer = turns.generate(prompt, GREEDY).token_ids
    big = [4] * 50
    [before] = engine.submit(big, GREEDY)
    chunks = turns.stream([*prompt, *answer, 1], GREEDY)
    rest = [next(chunks)]
    rest += chunks
    known = plain(history_model(7, seed=3), [big, [*prompt, *answer, 1]], GREEDY)
    assert rest[-1].completion.token_ids == known[(*prompt, *answer, 1)]
    assert ids(drive(engine, [before])) == [known[tuple(big)]]
    engine.audit()


def test_a_turn_of_no_tokens_keeps_what_was_kept():
    """max_tokens=0 answers with nothing; no block leaks and the next turn still finds its rows."""
    engine = _engine("ngram")
    turns, prompt = engine.conversation(), [1, 2, 3] * 9
    answer = turns.generate(prompt, GREEDY).token_ids
    nothing = turns.generate([*prompt, *answer], Sampling(max_tokens=0))
    assert (nothing.token_ids, nothing.finish_reason) == ([], "length")
    engine.audit()
    later = [*prompt, *answer, 1]
    assert same(turns.generate(later, GREEDY), _fresh("ngram", later, GREEDY))
    engine.audit()


def test_a_cancelled_turn_drops_what_was_kept_and_the_next_one_starts_afresh():
    """Leaving a turn in the middle cancels it: no block stays, and the next turn is computed whole."""
    engine = _engine("small")
    turns, prompt = engine.conversation(), [1, 2, 3] * 9
    answer = turns.generate(prompt, GREEDY).token_ids
    chunks = turns.stream([*prompt, *answer, 1], GREEDY)
    next(chunks)
    chunks.close()
    engine.audit()
    assert engine.core.pool.used == 0
    later = [*prompt, *answer, 2]
    assert same(turns.generate(later, GREEDY), _fresh("small", later, GREEDY))
    engine.audit()


def test_one_turn_at_a_time():
    """A second turn while the first is open is refused by name; the first goes on undisturbed."""
    engine = _engine("small")
    turns = engine.conversation()
    chunks = turns.stream([1, 2, 3], GREEDY)
    started = [next(chunks)]
    with pytest.raises(OptionError, match="turn"):
        turns.generate([1, 2], GREEDY)
    started += chunks
    assert same(started[-1].completion, _fresh("small", [1, 2, 3], GREEDY))
    assert same(turns.generate([1, 2], GREEDY), _fresh("small", [1, 2], GREEDY))
    engine.audit()


def test_more_than_one_sample_is_refused():
    """n > 1 names the option, and the conversation is as it was."""
    engine = _engine("ngram")
    turns = engine.conversation()
    answer = turns.generate([1, 2, 3], GREEDY).token_ids
    with pytest.raises(OptionError, match="n: "):
        turns.generate([1, 2, 3, *answer], Sampling(n=2))
    engine.target.passes.clear()
    turns.generate([1, 2, 3, *answer], Sampling(max_tokens=1))
    assert engine.target.passes == [1]


def test_closing_a_conversation_in_the_middle_of_a_turn():
    """close() cancels the open turn, and stays closed after its iterator ends."""
    engine = _engine("small")
    turns = engine.conversation()
    chunks = turns.stream([1, 2, 3], GREEDY)
    next(chunks)
    turns.close()
    with pytest.raises(RequestCancelled):
        list(chunks)
    with pytest.raises(EngineClosed):
        turns.generate([1], GREEDY)
    engine.audit()
    assert engine.core.pool.used == 0
    assert not engine.core.kept


def test_a_conversation_ends_with_its_engine():
    """A closed engine takes no turn, and holds no block for its conversations."""
    engine = _engine("small")
    turns = engine.conversation()
    turns.generate([1, 2, 3], GREEDY)
    engine.close()
    with pytest.raises(EngineClosed):
        turns.generate([1, 2, 3], GREEDY)
    with pytest.raises(EngineClosed):
        engine.conversation()
    engine.audit()
    assert engine.core.pool.used == 0


def test_a_drafter_that_cannot_be_cut_costs_no_turn():
    """A drafter that raises when it is told to go back is forgotten for this conversation, and nothing leaks."""

    class Stubborn(Script):
        def commit(self, accepted):
            if any(rows.start == rows.end for rows in accepted):
                raise RuntimeError("cannot go back")

    engine = engine_of(history_model(7, seed=3), Stubborn(lambda view: [1]))
    turns = engine.conversation()
    turns.generate([1, 2, 3], GREEDY)
    assert same(turns.generate([1, 2], GREEDY), _fresh("ngram", [1, 2], GREEDY))
    engine.audit()


def test_a_turn_that_fails_leaves_the_conversation_usable():
    """An error of the target ends the turn with that error; the next turn is computed whole."""
    target = history_model(7, seed=3)
    engine = engine_of(target, Broken(lambda view: None, raises=True))
    turns = engine.conversation()
    turns.generate([1, 2, 3], GREEDY)
    forward = target.forward
    target.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("out of order"))
    with pytest.raises(RuntimeError, match="out of order"):
        turns.generate([1, 2, 3, 4], GREEDY)
    engine.audit()
    target.forward = forward
    assert same(turns.generate([1, 2, 3, 4], GREEDY), _fresh("ngram", [1, 2, 3, 4], GREEDY))
    engine.audit()


def test_preempted_turns_are_unchanged():
    """A turn preempted at any step answers as alone, though its kept rows are lost."""
    prompt = [1, 2, 3] * 9
    for index in range(5):
        engine = _engine("other small")
        turns = engine.conversation()
        answer = turns.generate(prompt, WARM).token_ids
        later = [*prompt, *answer, 1]
        chunks, done = turns.stream(later, WARM), []
        for step, chunk in enumerate(chunks):
            done.append(chunk)
            if step == index and engine.core.admission.running:
                engine.core.admission.preempt(engine.core.admission.running[0])
        assert same(done[-1].completion, _fresh("other small", later, WARM))
        engine.audit()


@pytest.mark.parametrize("change", range(6))
def test_the_index_of_an_ngram_drafter_follows_the_new_branch(change):
    """After a turn that diverges at any place near the end of what was indexed, n-grams are those of the new history:
    drafted and accepted counts equal those of a fresh engine.
    """
    make = lambda: engine_of(position_model(3, seed=1), Ngram(prompt_lookup_min=1, prompt_lookup_max=2))  # noqa: E731
    engine = make()
    turns, prompt = engine.conversation(), [0, 1, 2, 1, 0, 2, 2, 1]
    whole = [*prompt, *turns.generate(prompt, GREEDY).token_ids]
    later = [*whole[: len(whole) - change - 1], (whole[-change - 1] + 1) % 3, 1, 0]
    again, fresh = turns.generate(later, GREEDY), make().generate(later, GREEDY)[0]
    assert same(again, fresh)
    assert (again.stats.drafted, again.stats.accepted) == (fresh.stats.drafted, fresh.stats.accepted)


def test_small_drafter_holds_no_more_than_the_target():
    """Its own tables are cut with the target's when a turn goes back."""
    drafter = Small(position_model(7, seed=8), 7)
    engine = engine_of(history_model(7, seed=3), drafter)
    turns = engine.conversation()
    turns.generate([1, 2, 3] * 9, GREEDY)
    turns.generate([1, 2], GREEDY)
    assert max(drafter._tables.lengths.values()) <= 2 + 12
    drafter.audit()
