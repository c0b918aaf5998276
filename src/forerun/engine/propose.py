"""Asking the drafters. A drafter that fails costs speed, never the request."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun import budget
from forerun.budget.planning import Choice, Option
from forerun.budget.rounds import DraftTime
from forerun.drafters.base import Draft, Drafter, DraftView, KeepDrafting
from forerun.drafters.config import SpeculativeConfig
from forerun.engine.admission import Work
from forerun.engine.request import Request

logger = logging.getLogger("forerun")

FAULTS_ALLOWED = 3
"""Rounds in a row in which a drafter may fail a request before it is no longer asked for it."""

MASS_TOLERANCE = 1e-3
"""How far the sum of a draft law may be from 1: far above rounding, far below what was never normalised."""

Clock = Callable[[], float]
"""Seconds, monotonic."""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter with the configuration it was loaded under."""

    drafter: Drafter
    config: SpeculativeConfig

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def label(self) -> str:
        """In reports."""
        return self.config.labelled(self.name)

    @property
    def rebuilds(self) -> bool:
        """Whether it can rebuild what it has dropped of a request: features of the target are not computed again."""
        return not self.drafter.taps

    @property
    def draws(self) -> bool:
        """Whether it draws its drafts of sampled requests from laws, those of the request's own options."""
        return not (self.config.draft_sample_method == "greedy" or self.drafter.deterministic)

    @property
    def exposed(self) -> bool:
        """Whether its confidences may know tokens that are not decided yet (in rejection mode, above temperature 0)."""
        return self.draws and not (self.drafter.blind or self.drafter.max_draft == 0)

    def allowed(self, request: Request) -> bool:
        """Whether the request wants it."""
        methods = request.speculative.methods
        return methods is None or self.name in methods

    def serves(self, request: Request) -> bool:
        return self.allowed(request) and request.faults.get(self.name, 0) < FAULTS_ALLOWED

    def longest(self, batch_size: int) -> int:
        """K by configuration and batch size, whatever the request."""
        k, most = self.config.draft_length(self.drafter.default_draft, batch_size), self.drafter.max_draft
        return k if most is None else min(k, most)

    def draft_length(self, request: Request, batch_size: int) -> int:
        """K by configuration, batch size and request, before what is left of window and step."""
        k, most = self.longest(batch_size), request.speculative.max_draft
        return k if most is None else min(k, most)

    def option(self, request: Request, batch_size: int, room: budget.Room) -> Option | None:
        """What it may draft for a request in a step; None if that is nothing, or less than `min_draft`.

        `room` is what request, target and step leave; how far the drafter itself reaches is seen to here.
        """
        k, window = self.draft_length(request, batch_size), self.drafter.window
        k = budget.plan(k if window is None else min(k, window - request.anchor), room)
        return Option(self.name, k, self.rebuilds) if k >= max(1, self.config.min_draft) else None


# ------------------------------------------------------------------------------------------------------ asking them all


@dataclass(slots=True)
class Proposed:
    """What the drafters came up with for one request."""

    draft: Draft = field(default_factory=Draft)
    drafter: str | None = None
    """Whose it is; None: there is none."""
    missed: list[str] = field(default_factory=list)
    """Drafters that were asked and had nothing to propose."""
    failed: list[str] = field(default_factory=list)
    """Drafters that broke when they were asked; what they hold of the request cannot be relied on."""


def propose(
    loaded: Sequence[LoadedDrafter],
    works: Sequence[Work],
    keep_drafting: Callable[[str], KeepDrafting],
    vocab_size: int,
    clock: Clock,
) -> tuple[list[Proposed], list[DraftTime]]:
    """What was proposed for each work, and how long each call of a drafter took.

    Every work's choices are asked in its own order; it goes on to the next one where the one before proposes nothing
    (an n-gram that does not match). Which one drafts is thus a function of the history and of what is known before its
    first token is drawn.
    """
    proposed = [Proposed() for _ in works]
    left = {i: list(work.plan.choices) for i, work in enumerate(works) if work.plan is not None and work.plan.choices}
    calls: list[DraftTime] = []
    while left:
        entry = _next_to_ask(loaded, left)
        mine = {i: choices.pop(0) for i, choices in left.items() if choices[0].drafter == entry.name}
        asked = [(i, _view(entry, works[i].request, choice.k)) for i, choice in mine.items()]
        calls += _ask(entry, works, asked, proposed, _Asking(keep_drafting(entry.name), vocab_size, clock))
        left = {i: choices for i, choices in left.items() if choices and not proposed[i].draft.tokens}
    return proposed, calls


def _next_to_ask(loaded: Sequence[LoadedDrafter], left: Mapping[int, Sequence[Choice]]) -> LoadedDrafter:
    """The first drafter some work has come to that no other work will come to later, so that each makes one pass."""
    here = {choices[0].drafter for choices in left.values()}
    later = {choice.drafter for choices in left.values() for choice in choices[1:]}
    waiting = [entry for entry in loaded if entry.name in here]
    return next((entry for entry in waiting if entry.name not in later), waiting[0])


def _view(entry: LoadedDrafter, request: Request, k: int) -> DraftView:
    return DraftView(
        request_id=request.id,
        tokens=request.tokens,
        prompt_length=request.prompt_length,
        k=k,
        sampling=request.sampling,
        end_ids=request.end_ids,
        noise=request.noise,
        verify_mode=request.verify_mode,
        draft_greedily=entry.config.draft_sample_method == "greedy",
        prediction=request.prediction,
    )


@dataclass(frozen=True, slots=True)
class _Asking:
    """What every call of a drafter needs."""

    keep_drafting: KeepDrafting
    vocab_size: int
    clock: Clock


def _ask(
    entry: LoadedDrafter,
    works: Sequence[Work],
    asked: Sequence[tuple[int, DraftView]],
    proposed: Sequence[Proposed],
    asking: _Asking,
) -> list[DraftTime]:
    """Fills in what one drafter proposes, and says how long it took; nothing at all if it fails."""
    views = [view for _, view in asked]
    start = asking.clock()
    try:
        drafts = entry.drafter.propose(views, asking.keep_drafting)
        # Whatever it asked of a GPU is done: token ids are ints on the host, copied by the `tolist` of `draw_drafts`.
        seconds = asking.clock() - start
        _check_form(entry.drafter, drafts, len(views), asking.vocab_size)
    except Exception:  # a drafter is a plug-in: whatever it raises, the target can go on without it
        logger.warning("drafter %r failed; this step is decoded plainly", entry.name, exc_info=True)
        for i, _ in asked:
            proposed[i].failed.append(entry.name)
            works[i].request.stats.drafter_faults += 1
            _count_fault(entry, works[i].request)
        return []
    for (i, view), draft in zip(asked, drafts, strict=True):
        _take(entry, proposed[i], _checked(entry, draft, view, works[i].request, asking.vocab_size), works[i].request)
    computed = [_computed(entry.drafter, draft, view) for draft, view in zip(drafts, views, strict=True)]
    return [DraftTime(entry.name, computed, [len(view.tokens) for view in views], seconds)]


def _computed(drafter: Drafter, draft: Draft, view: DraftView) -> int:
    """K that a call was for, whatever came of it: a block is one pass over all its slots (only blocks have a longest
    draft); slot by slot, the pass that told c_k of the slot that was refused was made as well."""
    return view.k if drafter.max_draft is not None else min(view.k, len(draft.tokens) + 1)


def _take(entry: LoadedDrafter, proposed: Proposed, draft: Draft, request: Request) -> None:
    if not draft.tokens:
        proposed.missed.append(entry.name)
        return
    proposed.draft, proposed.drafter = draft, entry.name
    request.drafters_used[entry.name] = request.drafters_used.get(entry.name, 0) + 1


def _check_form(drafter: Drafter, proposal: Sequence[Draft], count: int, vocab_size: int) -> None:
    """Raises TypeError or ValueError if a proposal is not what `Drafter.propose` promises to return."""
    if len(proposal) != count:
        raise ValueError(f"{len(proposal)} drafts for {count} requests")
    for draft in proposal:
        if not isinstance(draft, Draft) or not all(isinstance(token, int) for token in draft.tokens):
            raise TypeError(f"a draft must be a `Draft` whose tokens are a list of int, got {draft!r}")
        want = (len(draft.tokens), vocab_size)
        if draft.probs is not None and tuple(draft.probs.shape) != want:
            raise ValueError(f"the laws of a draft must have the shape {want}, got {tuple(draft.probs.shape)}")
        if draft.probs is not None and drafter.deterministic:
            raise ValueError("a drafter that calls itself deterministic reports laws")
        if not _are_confidences(draft.confidence, len(draft.tokens)):
            raise ValueError(f"confidences must be one in [0, 1] for each token, or none, got {draft.confidence!r}")


def _are_confidences(values: Sequence[float], count: int) -> bool:
    """NaN counts as one (it ends what is verified). Survivals must not rise along a draft, so nothing is above 1."""
    return len(values) in (0, count) and all(math.isnan(c) or 0.0 <= c <= 1.0 for c in values)


def _count_fault(entry: LoadedDrafter, request: Request) -> None:
    faults = request.faults[entry.name] = request.faults.get(entry.name, 0) + 1
    if faults == FAULTS_ALLOWED:
        logger.warning("%r keeps failing; request %d is decoded without it from here on", entry.name, request.id)


def _checked(entry: LoadedDrafter, draft: Draft, view: DraftView, request: Request, vocab_size: int) -> Draft:
    """The draft up to its first row that cannot be verified: a law that is none, or an id the target lacks.

    Cutting before a law that is not finite or has not the mass of 1 looks at x_<k only. An id outside the vocabulary
    has p = 0; it can only come from a point mass (a law over the vocabulary cannot yield it), where cutting is
    lossless as well.
    """
    asked = lawful = min(len(draft.tokens), view.k)
    if draft.probs is not None:
        lawful = min(asked, _leading(((draft.probs.sum(-1) - 1).abs() < MASS_TOLERANCE).tolist()))
    length = min(lawful, _leading([0 <= token < vocab_size for token in draft.tokens]))
    if len(draft.tokens) > asked:
        request.stats.record_invalid("limit", "cut", len(draft.tokens) - asked)
    if draft.invalid or length < asked:
        behind = asked - length if length < asked else max(1, view.k - asked)
        request.stats.record_invalid("vocab" if length < lawful else "nan", "cut", behind)
        request.stats.invalid_drafts += 1
        _count_fault(entry, request)
    else:
        request.faults.pop(entry.name, None)
    return draft.truncate(length)


def _leading(passed: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return next((i for i, ok in enumerate(passed) if not ok), len(passed))
