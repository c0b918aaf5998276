"""What breaks costs no more than it must: a drafter only speed, a step only its requests, a request only itself."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch

from engine.conftest import PROMPTS, drafter_of, drive, engine_of, idle, ids, plain, same
from forerun import Sampling
from forerun.drafters.base import Draft, Drafter
from forerun.drafters.fake import Broken, Oracle, Script
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.errors import ModelError, OptionError
from forerun.sampling import Noise
from forerun.target.table import LetterTokenizer, TableTarget, history_model, position_model

GREEDY = Sampling(temperature=0, max_tokens=20, seed=2)  # for drafters that draw what they guess
WARM = Sampling(temperature=0.8, max_tokens=20, seed=2)
MODES = [("greedy", GREEDY, "rejection"), ("coupled", WARM, "coupled")]


class Handing(Drafter):
    """Returns for each view what a function makes of it, unchecked."""

    name = "handing"

    def __init__(self, make):
        self._make = make

    def propose(self, views, keep_drafting):
        return [self._make(view) for view in views]


def _law(view, rows=None, columns=7):
    return torch.full((rows or view.k, columns), 1 / columns, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- drafters


BAD_DRAFTS = {
    "too many tokens": lambda view: Draft([1] * (view.k + 5)),
    "too many tokens with laws": lambda view: Draft([1] * (view.k + 5), _law(view, view.k + 5)),
    "an id beyond the vocabulary": lambda view: Draft([1, 7, 2]),
    "a negative id": lambda view: Draft([-1]),
    "a law of one dimension": lambda view: Draft([1] * view.k, _law(view)[0]),
    "a law with a batch dimension": lambda view: Draft([1] * view.k, _law(view)[None]),
    "too few columns": lambda view: Draft([1] * view.k, _law(view, columns=5)),
    "too many columns": lambda view: Draft([1] * view.k, _law(view, columns=9)),
    "too few rows": lambda view: Draft([1] * view.k, _law(view)[:-1]),
    "too many rows": lambda view: Draft([1] * view.k, _law(view, view.k + 1)),
    "a law without mass": lambda view: Draft([1] * view.k, _law(view) * 0),
    "a law of twice the mass": lambda view: Draft([1] * view.k, _law(view) * 2),
    "a law that is a list": lambda view: Draft([1] * view.k, _law(view).tolist()),
    "tokens in a tensor": lambda view: Draft(torch.ones(view.k, dtype=torch.long)),
    "tokens of float": lambda view: Draft([1.0] * view.k),
    "tokens of text": lambda view: Draft(["b"] * view.k),
    "no draft": lambda view: None,
    "tokens alone": lambda view: [1, 2],
    "an infinite law": lambda view: Draft([1] * view.k, _law(view) * float("inf")),
}


@pytest.mark.parametrize("bad", BAD_DRAFTS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode[0])
def test_a_malformed_draft_costs_no_request(bad, mode):
    """Whatever a drafter hands over, the output is plain decoding's and the books balance."""
    _, sampling, verify_mode = mode
    known = plain(history_model(7, seed=3), PROMPTS, sampling, verify_mode)
    drafter = Handing(BAD_DRAFTS[bad])
    engine = engine_of(history_model(7, seed=3), drafter, verify_mode=verify_mode, num_speculative_tokens=4)
    done = drive(engine, engine.submit(PROMPTS, sampling))
    assert ids(done) == list(known.values())
    assert all(completion.stats.drafted <= 4 * completion.stats.drafting_rounds for completion in done)
    idle(engine)


@pytest.mark.parametrize("bad", BAD_DRAFTS)
def test_a_malformed_draft_costs_no_request_in_rejection_mode(bad):
    """At T > 0 in rejection mode, too, every request ends as it should."""
    engine = engine_of(history_model(7, seed=3), Handing(BAD_DRAFTS[bad]), num_speculative_tokens=4)
    done = drive(engine, engine.submit(PROMPTS, WARM))
    assert [len(completion.token_ids) for completion in done] == [20] * 4
    idle(engine)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_wrong_number_of_drafts_is_a_fault(count, caplog):
    """A proposal for more or fewer requests than were asked for is not used at all; one line tells that it happened."""

    class Miscounting(Drafter):
        name = "miscounting"

        def propose(self, views, keep_drafting):
            return [Draft([1])] * count

    known = plain(history_model(7, seed=3), PROMPTS, GREEDY)
    engine = engine_of(history_model(7, seed=3), Miscounting())
    done = engine.generate(PROMPTS, GREEDY)
    assert ids(done) == list(known.values())
    assert all(completion.stats.drafted == 0 and completion.stats.drafter_faults for completion in done)
    assert "miscounting" in caplog.text


@pytest.mark.parametrize("where", ["propose", "commit", "release"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode[0])
def test_a_drafter_that_raises_costs_no_request(where, mode):
    """An exception in any of the three calls leaves the output as it is, and nothing leaks."""
    _, sampling, verify_mode = mode

    class Raising(Small):
        def _maybe(self, name):
            if name == where:
                raise RuntimeError("on purpose")

        def propose(self, views, keep_drafting):
            drafts = super().propose(views, keep_drafting)
            self._maybe("propose")
            return drafts

        def commit(self, accepted):
            super().commit(accepted)
            self._maybe("commit")

        def release(self, request_id):
            super().release(request_id)
            self._maybe("release")

    known = plain(history_model(7, seed=3), PROMPTS, sampling, verify_mode)
    engine = engine_of(history_model(7, seed=3), Raising(position_model(7, seed=8), 7), verify_mode=verify_mode)
    done = drive(engine, engine.submit(PROMPTS, sampling))
    assert ids(done) == list(known.values())
    idle(engine)


def test_a_drafter_that_keeps_failing_is_left_alone_and_the_next_one_goes_on(caplog):
    """After three rounds in a row a request stops asking the broken drafter, with one log line; the one behind it
    still drafts.
    """
    calls = []

    class Counting(Broken):
        def propose(self, views, keep_drafting):
            calls.append(len(views))
            return super().propose(views, keep_drafting)

    known = plain(history_model(7, seed=3), [[1, 2, 3]], GREEDY)
    engine = engine_of(history_model(7, seed=3), Counting(lambda view: None, raises=True), Oracle(known))
    with caplog.at_level(logging.WARNING):
        [done] = engine.generate([[1, 2, 3]], GREEDY)
    assert done.token_ids == known[1, 2, 3]
    assert len(calls) == 3
    assert caplog.text.count("from here on") == 1
    assert done.drafter == "oracle"
    assert done.stats.mean_accepted_length == 1 + 15 / 4  # 19 tokens after the first: 5, 5, 5 and 4


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode[0])
@pytest.mark.parametrize("first_bad", [0, 1, 2])
def test_nu_3_a_drafter_of_nan(first_bad, mode, caplog):
    """NaN in the draft law of some rows in some steps: output as plain; the draft ends before the first such row, which
    is counted; after a few in a row the request is decoded plainly, with one log line.

    https://github.com/vllm-project/vllm/issues/55250, https://github.com/vllm-project/vllm/pull/55294,
    https://github.com/sgl-project/sglang/pull/27883, https://github.com/SafeAILab/EAGLE/pull/69
    """
    _, sampling, verify_mode = mode
    known = plain(history_model(7, seed=3), PROMPTS, sampling, verify_mode)

    def law(view):
        probs = torch.zeros(view.k, 7, dtype=torch.float64)
        done = len(view.tokens) - view.prompt_length
        future = known[tuple(view.tokens[: view.prompt_length])][done : done + view.k]
        probs[range(len(future)), future] = 1.0
        if view.prompt_length == 3 or done % 4 == 0:  # one request always, the others now and then
            probs[first_bad:] = float("nan")
        return probs

    engine = engine_of(
        history_model(7, seed=3), Broken(law, first_bad=99), verify_mode=verify_mode, num_speculative_tokens=3
    )
    with caplog.at_level(logging.WARNING):
        done = engine.generate(PROMPTS, sampling)
    assert ids(done) == list(known.values())
    always = done[0].stats
    assert always.invalid_drafts == 3
    assert always.drafted == 3 * first_bad
    assert caplog.text.count("request") == 1
    assert all(completion.stats.mean_accepted_length for completion in done[1:])


def test_nu_3_a_small_model_of_nan():
    """The same for a draft model whose logits are NaN from a position on: drafts end before it."""
    known = plain(history_model(7, seed=3), PROMPTS, GREEDY)
    exact = history_model(7, seed=3)
    model = TableTarget(lambda p: [float("nan")] * 7 if len(p) in (8, 9, 30) else exact._logits(p), 7)
    engine = engine_of(history_model(7, seed=3), Small(model, 7), num_speculative_tokens=4)
    done = drive(engine, engine.submit(PROMPTS, GREEDY))
    assert ids(done) == list(known.values())
    assert all(completion.stats.invalid_drafts for completion in done)
    assert all(completion.stats.draft_acceptance_rate == 1 for completion in done)
    idle(engine)


# ---------------------------------------------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("columns", [96, 104])
@pytest.mark.parametrize("mode", [*MODES, ("rejection", WARM, "rejection")], ids=lambda mode: mode[0])
def test_nu_5_tables_of_different_size(columns, mode):
    """Target of 100 ids of which the tokenizer knows 97, drafter of 96 and of 104 that loves what the other lacks: no
    foreign id is ever drafted, and ids the drafter's table lacks in the text cost no other request its drafts.

    https://github.com/vllm-project/vllm/issues/5203, https://github.com/vllm-project/vllm/issues/7252,
    https://github.com/vllm-project/vllm/pull/13849, https://github.com/vllm-project/vllm/issues/42775,
    https://github.com/ggml-org/llama.cpp/pull/3812, https://github.com/LostRuins/koboldcpp/issues/2325
    """
    _, sampling, verify_mode = mode
    tokenizer = LetterTokenizer(97)
    target = history_model(100, seed=3, tokenizer=tokenizer)
    # Both like ids from 95 on best; so the text has ids that the drafter of 96 does not have.
    biased = TableTarget(lambda p: _lift(target._logits(p)), 100, tokenizer=tokenizer)
    model = history_model(columns, seed=3)
    loving = TableTarget(lambda p: _lift(model._logits(p)), columns)
    drafter = Small(loving, 100, shared_ids=min(97, columns))
    prompts = [[1, 2, 3], [99, 98, 97, 96], [4]]
    known = plain(biased, prompts, sampling, verify_mode)
    seen = []

    class Watched(Small):
        def propose(self, views, keep_drafting):
            drafts = super().propose(views, keep_drafting)
            seen.extend(token for draft in drafts for token in draft.tokens)
            for draft in drafts:
                if draft.probs is not None:
                    assert draft.probs[:, min(97, columns) :].sum() == 0
                    assert torch.allclose(draft.probs.sum(-1), torch.ones(len(draft.tokens), dtype=torch.float64))
            return drafts

    drafter.__class__ = Watched
    engine = engine_of(biased, drafter, verify_mode=verify_mode, num_speculative_tokens=3)
    done = drive(engine, engine.submit(prompts, sampling))
    if mode[0] != "rejection":
        assert ids(done) == list(known.values())
    assert all(completion.stats.drafter_faults == 0 for completion in done)
    assert all(completion.stats.drafting_rounds > 2 for completion in done)
    assert seen
    assert max(seen) < min(97, columns)
    idle(engine)


def _lift(row):
    return [x + 1.5 * len(row) * (i >= 90) for i, x in enumerate(row)]


@pytest.mark.parametrize("mode", [*MODES, ("rejection", WARM, "rejection")], ids=lambda mode: mode[0])
def test_a_draft_law_without_support_is_one_requests_matter(mode):
    """`allowed_token_ids` that the drafter lacks leave its law empty: that request is decoded plainly, batch-mates keep
    their drafts.
    """
    _, sampling, verify_mode = mode
    only_high = Sampling(temperature=sampling.temperature, max_tokens=12, seed=sampling.seed, allowed_token_ids=[8, 9])
    make = lambda: engine_of(  # noqa: E731
        history_model(10, seed=3), Small(history_model(10, seed=3), 10, shared_ids=7), verify_mode=verify_mode
    )
    alone = make().generate([[1, 2, 3]], sampling)[0]
    engine = make()
    strange, mate = drive(engine, engine.submit([[4, 4], [1, 2, 3]], [only_high, sampling]))
    assert set(strange.token_ids) <= {8, 9}
    assert strange.stats.drafted == 0
    assert same(mate, alone)
    assert mate.stats.drafter_faults == 0
    assert mate.stats.drafted == alone.stats.drafted > 0
    idle(engine)


# ---------------------------------------------------------------------------------------------------------- target


def test_a_target_that_raises_fails_only_the_requests_of_that_step():
    """Requests of the step end with that very error; those that wait finish; no block leaks."""
    target = history_model(7, seed=3)
    known = plain(target, PROMPTS, GREEDY)
    engine = engine_of(target, Ngram(prompt_lookup_min=1), max_num_seqs=2)
    whole, calls = target.forward, itertools.count()

    def forward(*args):
        if next(calls) == 4:
            raise MemoryError("no room for this step")
        return whole(*args)

    target.forward = forward
    requests = engine.submit(PROMPTS, GREEDY)
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.audit()
    for request in requests[:2]:
        with pytest.raises(MemoryError, match="no room"):
            engine.result(request)
    assert ids([engine.result(request) for request in requests[2:]]) == list(known.values())[2:]
    idle(engine)
    calls = iter([0, 4, *range(5, 200)])
    with pytest.raises(MemoryError):  # generate raises it once everything else is done
        engine.generate(PROMPTS[:1], GREEDY)
    idle(engine)


def test_a_processor_that_raises_fails_its_own_request_only():
    """The error of one request's logits processor is that request's; its batch-mates are as alone."""

    def processor(tokens, logits):
        if len(tokens) == 6:
            raise ZeroDivisionError("a processor's own mistake")
        return logits

    make = lambda: engine_of(  # noqa: E731
        history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode="coupled"
    )
    broken = Sampling(temperature=0, max_tokens=20, logits_processors=[processor])
    alone = [
        make().generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS[:2], [GREEDY, WARM], strict=True)
    ]
    engine = make()
    requests = engine.submit([*PROMPTS[:2], [5, 5]], [GREEDY, WARM, broken])
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.audit()
    assert all(same(engine.result(r), one) for r, one in zip(requests, alone, strict=False))
    with pytest.raises(ZeroDivisionError):
        engine.result(requests[2])
    idle(engine)


FAILING = {
    "raises": (lambda logits: [][0], IndexError),
    "returns another shape": (lambda logits: logits[:2], OptionError),
    "returns nothing": (lambda logits: None, AttributeError),
}


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("mode", [*MODES, ("rejection", WARM, "rejection")], ids=lambda mode: mode[0])
def test_a_processor_that_fails_while_drafting_costs_no_other_request_its_drafts(how, mode):
    """The draft model runs the processor at every slot. Where it fails that request's draft ends; batch-mates have the
    very rounds they have alone, and the request goes on to the place at which plain decoding fails.
    """
    _, sampling, verify_mode = mode
    answer, error = FAILING[how]

    def processor(tokens, logits):
        return answer(logits) if len(tokens) == 6 else logits

    broken = replace(sampling, logits_processors=[processor])
    make = lambda: engine_of(  # noqa: E731
        history_model(7, seed=3), drafter_of("other small", {}, 7), verify_mode=verify_mode
    )
    alone = [make().generate([prompt], sampling)[0] for prompt in PROMPTS[:2]]
    engine = make()
    *mates, strange = engine.submit([*PROMPTS[:2], [5, 5]], [sampling, sampling, broken])
    while any(request.finish_reason is None for request in (*mates, strange)):
        engine.step()
        engine.audit()
    for request, one in zip(mates, alone, strict=True):
        assert same(engine.result(request), one)
        assert request.stats == one.stats
    with pytest.raises(error):
        engine.result(strange)
    assert len(strange.output) == 4
    if mode[0] != "rejection":
        assert strange.output == plain(history_model(7, seed=3), [[5, 5]], sampling, verify_mode)[5, 5][:4]
    idle(engine)


@pytest.mark.parametrize("kind", ["never", "coin", "other small"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode[0])
def test_a_processor_that_raises_behind_a_refused_draft_fails_nothing(kind, mode):
    """One that raises at every history but those of plain decoding: drafts lead it astray, and the ids are the same."""
    _, sampling, verify_mode = mode
    known = plain(history_model(7, seed=3), PROMPTS, sampling, verify_mode)
    texts, astray = [[*prompt, *output] for prompt, output in known.items()], []

    def processor(tokens, logits):
        if all(text[: len(tokens)] != tokens for text in texts):
            astray.append(tokens)
            raise KeyError("on purpose")
        return logits

    engine = engine_of(history_model(7, seed=3), drafter_of(kind, known, 7), verify_mode=verify_mode)
    done = drive(engine, engine.submit(PROMPTS, replace(sampling, logits_processors=[processor])))
    assert ids(done) == list(known.values())
    assert astray
    assert all(completion.stats.drafted for completion in done)
    idle(engine)


@pytest.mark.parametrize("place", range(1, 9))
def test_a_processor_that_raises_behind_the_end_is_not_reached(place):
    """A draft goes on behind the end of an answer, where the processor raises: it ends there, at every place of a
    block.
    """
    known = plain(history_model(7, seed=3), [[1, 2, 3]], GREEDY)
    output = known[1, 2, 3]

    def processor(tokens, logits):
        if len(tokens) >= 3 + place:
            raise KeyError("on purpose")
        return logits

    ending = replace(GREEDY, stop_when=[lambda tokens: len(tokens) == 3 + place], logits_processors=[processor])
    [done] = engine_of(history_model(7, seed=3), Oracle(known), num_speculative_tokens=4).generate([[1, 2, 3]], ending)
    assert (done.token_ids, done.finish_reason) == (output[:place], "stop")


def test_nothing_left_to_draw_fails_its_own_request_only():
    """Masks that leave no token end that request with an OptionError that names them; batch-mates go on."""

    def mask(tokens, logits):
        return logits - float("inf") if len(tokens) >= 5 else logits

    engine = engine_of(history_model(7, seed=3), Ngram(prompt_lookup_min=1))
    known = plain(history_model(7, seed=3), PROMPTS, GREEDY)
    masked = Sampling(temperature=0, max_tokens=20, logits_processors=[mask])
    requests = engine.submit([*PROMPTS, [1, 2, 3]], [GREEDY] * 4 + [masked])
    while any(request.finish_reason is None for request in requests):
        engine.step()
    assert ids([engine.result(r) for r in requests[:4]]) == list(known.values())
    with pytest.raises(OptionError, match="logits_processors"):
        engine.result(requests[4])
    assert len(requests[4].output) == 2
    idle(engine)


def test_a_target_of_nan_fails_the_request_it_hits():
    """Logits of NaN at one position end the request that reaches it with a ModelError, not with token 0."""
    exact = history_model(7, seed=3)
    target = TableTarget(lambda p: [float("nan")] * 7 if p[0] == 6 and len(p) == 7 else exact._logits(p), 7)
    known = plain(exact, PROMPTS, GREEDY)
    for drafter in (Ngram(prompt_lookup_min=1), Oracle(known)):
        engine = engine_of(target, drafter)
        requests = engine.submit(PROMPTS, GREEDY)
        while any(request.finish_reason is None for request in requests):
            engine.step()
            engine.audit()
        assert ids([engine.result(r) for r in requests[:3]]) == list(known.values())[:3]
        with pytest.raises(ModelError, match="not finite"):
            engine.result(requests[3])
        assert requests[3].output == known[6, 6][:5]
        idle(engine)


def test_a_tokenizer_that_raises_fails_the_request_it_hits():
    """Text that cannot be decoded is one request's error; the others are untouched."""

    class Partial(LetterTokenizer):
        def decode(self, tokens, skip_special_tokens=True):
            if 5 in tokens:
                raise KeyError("no such id")
            return super().decode(tokens, skip_special_tokens)

    target = history_model(7, seed=3, tokenizer=Partial(7))
    engine = engine_of(target, Ngram(prompt_lookup_min=1))
    never_five = Sampling(temperature=0, max_tokens=20, logit_bias={5: -100})
    alone = engine.generate([[1, 2, 3]], never_five)[0]
    requests = engine.submit([[4], [1, 2, 3]], [GREEDY, never_five])
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.audit()
    with pytest.raises(KeyError):
        engine.result(requests[0])
    assert same(engine.result(requests[1]), alone)
    idle(engine)


def test_a_drafter_sees_only_what_is_committed():
    """Views hold committed tokens and a K that can be used: at least 1, never more than tokens left minus one."""
    seen = []

    def guess(view):
        seen.append((list(view.tokens), view.k, view.prompt_length))
        return [0] * view.k

    known = plain(history_model(7, seed=3), [[1, 2, 3]], GREEDY)
    engine = engine_of(history_model(7, seed=3), Script(guess), num_speculative_tokens=5)
    engine.generate([[1, 2, 3]], GREEDY)
    for tokens, k, prompt_length in seen:
        assert tokens == [1, 2, 3, *known[1, 2, 3]][: len(tokens)]
        assert prompt_length == 3
        assert 1 <= k <= min(5, 3 + 20 - len(tokens) - 1)


def test_noise_of_a_request_is_its_own():
    """The noise a drafter sees is that of (seed, sample), so that a certificate can replay it."""
    seen = set()
    engine = engine_of(history_model(7, seed=3), Script(lambda view: seen.add(view.noise.seed) or [0]))
    engine.generate([[1, 2]], Sampling(seed=9, n=3, max_tokens=5))
    assert seen == {Noise.of(9, sample).seed for sample in range(3)}
