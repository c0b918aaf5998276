"""The exact part of a certificate: tiny targets, the whole engine, every possible outcome.

Drafter, scheduler, processors, verification and commit are the real ones; only the random numbers are scripted
(`enumeration`). The law of tokens 2 .. N given the first (which no verification meets) must equal the target's own,
written a second time (`secondlaw`), to 1e-12. `controls` runs the same comparison on engines that cheat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from forerun.bench import secondlaw
from forerun.bench.enumeration import Key, Law, Run, Script, Scripted, measure
from forerun.drafters.base import Accepted, Draft, Drafter, DraftView, KeepDrafting, Proposal
from forerun.drafters.config import SpeculativeConfig
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import Engine, EngineOptions
from forerun.engine.intake import Ask
from forerun.engine.propose import LoadedDrafter
from forerun.engine.request import Chunk, Request
from forerun.sampling import ACCEPT, DRAFT, FINAL, Row, Sampling
from forerun.target.table import TableTarget

EQUAL = 1e-12
"""Laws whose total variation is at most this are called equal."""

BATCH, WINDOW = 256, 64

Logits = Callable[[Sequence[int]], Sequence[float]]


@dataclass(frozen=True)
class Case:
    """One target, drafter and sampling whose output is enumerated."""

    name: str
    logits: Logits
    drafter: Callable[[], Drafter]
    k: int
    length: int
    """Tokens compared; the first of them is fixed."""
    vocab_size: int
    sampling: Sampling = field(default_factory=Sampling)
    prompt: tuple[int, ...] = (0,)
    eos: tuple[int, ...] = ()
    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)


def distance(case: Case) -> float:
    """Total variation between what the engine emits and the target's own law."""
    runner = _CaseRunner(case)
    emitted = measure(runner)
    first = next(iter(emitted))[0]
    expected = plain_law(case, first)
    return math.fsum(abs(emitted.get(o, 0.0) - expected.get(o, 0.0)) for o in emitted.keys() | expected.keys()) / 2


def plain_law(case: Case, first: int) -> Law:
    """The target's own law of `length` tokens that begin with `first`."""
    done: Law = {}
    open_: Law = {(first,): 1.0}
    while open_:
        output = next(iter(open_))
        weight = open_.pop(output)
        if len(output) == case.length or output[-1] in case.eos:
            done[output] = weight
            continue
        for token, p in enumerate(_law_after(case, output)):
            if p > 0:
                open_[(*output, token)] = weight * p
    return done


def _law_after(case: Case, output: Sequence[int], drafted: Sequence[int] = ()) -> list[float]:
    tokens = [*case.prompt, *output]
    row = Row(case.sampling, tokens, len(case.prompt), drafted, frozenset(case.eos))
    return secondlaw.law(case.logits([*tokens, *drafted]), row)


class _CaseRunner:
    """One engine over a case; every call decodes one request per script."""

    def __init__(self, case: Case):
        self.case = case
        self.watched = Watched(case.drafter())
        target = TableTarget(case.logits, case.vocab_size, eos_token_ids=case.eos, window=WINDOW)
        options = EngineOptions(max_num_seqs=BATCH, max_num_batched_tokens=8 * BATCH)
        config = case.config.model_copy(update={"num_speculative_tokens": case.k})
        self.engine = Engine(target, [LoadedDrafter(self.watched, config)], options)

    def __call__(self, scripts: Sequence[Script]) -> list[Run]:
        case = self.case
        self.watched.drafts.clear()
        # One token more than compared: the last one compared may then be a draft, and not only a bonus.
        sampling = replace(case.sampling, max_tokens=case.length + 1, seed=0)
        requests = self.engine.intake.requests([case.prompt] * len(scripts), sampling, Ask())
        start = len(case.prompt)
        for request, script in zip(requests, scripts, strict=True):
            request.noise = Scripted(0, script, request.tokens, range(start + 1, start + case.length))
        rounds: list[list[Round]] = [[] for _ in requests]
        for chunk in self.engine.follow(requests):
            rounds[chunk.prompt_index].append(Round.of(chunk))
        # A drafter that fails leaves plain decoding behind, and a comparison that shows nothing.
        assert not any(request.stats.drafter_faults or request.stats.invalid_drafts for request in requests)
        self.engine.audit()
        return [self._run(request, mine) for request, mine in zip(requests, rounds, strict=True)]

    def _run(self, request: Request, rounds: Sequence[Round]) -> Run:
        assert isinstance(request.noise, Scripted)
        drafts = self.watched.drafts.get(request.id, {})
        acts = tuple(rounds), tuple((anchor, tuple(draft.tokens)) for anchor, draft in drafts.items())
        hints = partial(_hints, self.case, request.output, drafts, rounds)
        return Run(request.noise.reads, acts, tuple(request.output[: self.case.length]), hints)


@dataclass(frozen=True, slots=True)
class Round:
    """What one step emitted."""

    tokens: tuple[int, ...]
    accepted: int

    @classmethod
    def of(cls, chunk: Chunk) -> Round:
        return cls(tuple(chunk.token_ids), sum(chunk.from_draft))


def _hints(
    case: Case, output: Sequence[int], drafts: Mapping[int, Draft], rounds: Sequence[Round], key: Key
) -> Sequence[float]:
    """Where this number's decision changes if the engine is right. Only a hint: `measure` looks for itself."""
    anchor, purpose, slot = key
    before = output[: anchor - len(case.prompt) + 1]
    draft = drafts.get(anchor, Draft())
    if purpose != FINAL and slot >= len(draft.tokens):
        return []
    if purpose == DRAFT:
        return [] if draft.probs is None else cuts(draft.probs[slot].tolist())
    if purpose == ACCEPT:
        target = _law_after(case, before, draft.tokens[:slot])[draft.tokens[slot]]
        own = draft_law(draft, slot, case.vocab_size)[draft.tokens[slot]]
        return [target / own] if own > 0 else []
    accepted = next((r.accepted for r, at in _starts(rounds) if at == len(before)), 0)
    law = _law_after(case, before, draft.tokens[:accepted])
    if accepted < len(draft.tokens):
        law = [max(p - q, 0.0) for p, q in zip(law, draft_law(draft, accepted, case.vocab_size), strict=True)]
    return cuts(law)


def _starts(rounds: Sequence[Round]) -> Iterator[tuple[Round, int]]:
    """Each round with the number of tokens before it."""
    before = 0
    for one in rounds:
        yield one, before
        before += len(one.tokens)


def draft_law(draft: Draft, slot: int, vocab_size: int) -> list[float]:
    """[V] law the token of a slot was drawn from."""
    if draft.probs is None:
        return [float(token == draft.tokens[slot]) for token in range(vocab_size)]
    law: list[float] = draft.probs[slot].double().tolist()
    return law


def cuts(law: Sequence[float]) -> list[float]:
    """Where inversion goes from one token to the next."""
    whole = math.fsum(law)
    return [math.fsum(law[: i + 1]) / whole for i in range(len(law) - 1)] if whole > 0 else []


class Watched(Drafter):
    """A drafter whose drafts are kept, by request and anchor."""

    name = "watched"

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.window = inner.window
        self.drafts: dict[int, dict[int, Draft]] = {}

    @property
    def block_bytes(self) -> int:
        return self.inner.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self.inner.allocate(num_blocks)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        proposal = self.inner.propose(views, keep_drafting)
        for view, draft in zip(views, proposal, strict=True):
            self.drafts.setdefault(view.request_id, {})[view.anchor] = draft
        return proposal

    def commit(self, accepted: Sequence[Accepted]) -> None:
        self.inner.commit(accepted)

    def release(self, request_id: int) -> None:
        self.inner.release(request_id)

    def audit(self) -> None:
        self.inner.audit()


# ------------------------------------------------------------------------------------------------------------- cases

TARGET = ((0.0, 1.1, -0.4), (0.7, -0.2, 0.3), (-0.6, 0.5, 0.9))
DRAFT_TABLE = ((0.6, 0.2, -0.1), (-0.5, 0.4, 0.8), (0.3, 0.9, -0.7))
"""Logits after each token: the two agree nowhere and exclude nothing, so every branch of the rule is taken."""


def after_last(table: Sequence[Sequence[float]]) -> Logits:
    return lambda prefix: table[prefix[-1]]


def small(table: Sequence[Sequence[float]], vocab_size: int, **options: Any) -> Drafter:
    return Small(TableTarget(after_last(table), vocab_size, window=WINDOW), vocab_size, **options)


def _three(name: str, k: int = 2, length: int = 3, eos: tuple[int, ...] = (), **sampling: Any) -> Case:
    """Three tokens, a small model that disagrees, and these sampling options."""
    return Case(
        name=name,
        logits=after_last(TARGET),
        drafter=partial(small, DRAFT_TABLE, 3),
        k=k,
        length=length,
        vocab_size=3,
        sampling=Sampling(**sampling),
        eos=eos,
    )


def cases() -> list[Case]:
    """What a certificate enumerates: each sampling option, each kind of draft, K = 1 .. 3."""
    two = [row[:2] for row in TARGET[:2]]
    return [
        _three("small, K = 1", k=1),
        _three("small, K = 2"),
        _three("temperature and filters", temperature=0.7, top_k=2, top_p=0.9, min_p=0.05),
        _three("top_p", temperature=1.4, top_p=0.7),
        _three("penalties and bias", repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={2: 0.8}),
        _three("bad words and min_tokens", eos=(2,), bad_words=[[1, 0]], min_tokens=2, presence_penalty=0.4),
        replace(_three("greedy drafts"), config=SpeculativeConfig(draft_sample_method="greedy")),
        replace(_three("draft = target"), drafter=partial(small, TARGET, 3)),
        replace(_three("reduced draft vocabulary"), drafter=partial(small, DRAFT_TABLE, 3, shared_ids=2)),
        Case("small, K = 3", after_last(two), partial(small, [row[:2] for row in DRAFT_TABLE[:2]], 2), 3, 4, 2),
        Case("ngram", after_last(two), partial(Ngram, 2, 1), 2, 4, 2, prompt=(0, 1, 0, 1, 1)),
    ]
