"""Asking the drafters. A drafter that fails costs speed, never the request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from forerun import budget
from forerun.drafters.base import Accepted, Draft, Drafter, DraftView
from forerun.drafters.config import SpeculativeConfig
from forerun.engine.admission import Work, draft_room
from forerun.engine.request import Request
from forerun.target.base import Target

logger = logging.getLogger("forerun")

FAULTS_ALLOWED = 3
"""Rounds in a row in which a drafter may fail a request before it is no longer asked for it."""

MASS_TOLERANCE = 1e-3
"""How far the sum of a draft law may be from 1: far above rounding, far below what was never normalised."""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter with the configuration it was loaded under."""

    drafter: Drafter
    config: SpeculativeConfig

    @property
    def name(self) -> str:
        return self.drafter.name

    def serves(self, request: Request) -> bool:
        methods = request.speculative.methods
        return (methods is None or self.name in methods) and request.faults.get(self.name, 0) < FAULTS_ALLOWED

    def draft_length(self, request: Request, batch_size: int) -> int:
        """K by configuration, batch size and request, before what is left of window and step."""
        k = self.config.draft_length(self.drafter.default_draft, batch_size)
        caps = [cap for cap in (self.drafter.max_draft, request.speculative.max_draft) if cap is not None]
        return min([k, *caps])

    def plan(self, request: Request, batch_size: int, window: int, rows_left: int) -> int:
        """K after all limits; 0 if that is less than `min_draft`."""
        room = draft_room(request, window, rows_left, self.drafter.window)
        k = budget.plan(self.draft_length(request, batch_size), room)
        return k if k >= self.config.min_draft else 0


def plan_length(loaded: Sequence[LoadedDrafter], request: Request, batch_size: int, window: int, rows_left: int) -> int:
    """The longest draft any drafter that serves the request may make in this step."""
    lengths = (entry.plan(request, batch_size, window, rows_left) for entry in loaded if entry.serves(request))
    return max(lengths, default=0)


def propose(loaded: Sequence[LoadedDrafter], works: Sequence[Work], batch_size: int, target: Target) -> list[Draft]:
    """One draft per work, empty where nothing is proposed.

    Drafters are asked in the order they were loaded; a request goes on to the next one where the one before proposes
    nothing (an n-gram that does not match). Which one drafts is thus a function of the history alone.
    """
    drafts = [Draft() for _ in works]
    open_works = [i for i, work in enumerate(works) if work.k > 0]
    for entry in loaded:
        mine = [i for i in open_works if entry.serves(works[i].request)]
        # The rows a work has been given bound each drafter's own K.
        lengths = [entry.plan(works[i].request, batch_size, target.window, works[i].k) for i in mine]
        views = [_view(entry, works[i].request, k) for i, k in zip(mine, lengths, strict=True)]
        asked = [(i, view) for i, view in zip(mine, views, strict=True) if view.k > 0]
        if not asked:
            continue
        for (i, view), draft in zip(asked, _ask(entry, works, asked, target.vocab_size), strict=False):
            drafts[i] = _checked(entry, draft, view, works[i].request, target.vocab_size)
            if drafts[i].tokens:
                used = works[i].request.drafters_used
                used[entry.name] = used.get(entry.name, 0) + 1
        open_works = [i for i in open_works if not drafts[i].tokens]
    return drafts


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


def _ask(
    entry: LoadedDrafter, works: Sequence[Work], asked: Sequence[tuple[int, DraftView]], vocab_size: int
) -> Sequence[Draft]:
    """One draft for each; none at all if the drafter fails."""
    views = [view for _, view in asked]
    try:
        proposal = entry.drafter.propose(views, lambda view, k, confidence: True)  # noqa: ARG005 - policy `fixed`
        _check_form(proposal, len(views), vocab_size)
    except Exception:  # a drafter is a plug-in: whatever it raises, the target can go on without it
        logger.warning("drafter %r failed; this step is decoded plainly", entry.name, exc_info=True)
        for i, view in asked:
            forget(entry, view.request_id)
            works[i].request.stats.drafter_faults += 1
            _count_fault(entry, works[i].request)
        return ()
    return proposal


def _check_form(proposal: Sequence[Draft], count: int, vocab_size: int) -> None:
    """Raises TypeError or ValueError if a proposal is not what `Drafter.propose` promises to return."""
    if len(proposal) != count:
        raise ValueError(f"{len(proposal)} drafts for {count} requests")
    for draft in proposal:
        if not isinstance(draft, Draft) or not all(isinstance(token, int) for token in draft.tokens):
            raise TypeError(f"a draft must be a `Draft` whose tokens are a list of int, got {draft!r}")
        want = (len(draft.tokens), vocab_size)
        if draft.probs is not None and tuple(draft.probs.shape) != want:
            raise ValueError(f"the laws of a draft must have the shape {want}, got {tuple(draft.probs.shape)}")


def _count_fault(entry: LoadedDrafter, request: Request) -> None:
    faults = request.faults[entry.name] = request.faults.get(entry.name, 0) + 1
    if faults == FAULTS_ALLOWED:
        logger.warning("%r keeps failing; request %d is decoded without it from here on", entry.name, request.id)


def follow(entry: LoadedDrafter, accepted: Sequence[Accepted]) -> None:
    """Tells a drafter which rows became final. One that cannot follow starts over with these requests."""
    try:
        entry.drafter.commit(accepted)
    except Exception:
        logger.warning("drafter %r failed to follow a step; it starts over", entry.name, exc_info=True)
        for rows in accepted:
            forget(entry, rows.request_id)


def forget(entry: LoadedDrafter, request_id: int) -> None:
    """Drops a drafter's state of one request, also where the drafter itself is broken."""
    try:
        entry.drafter.release(request_id)
    except Exception:
        logger.warning("drafter %r failed to release request %d", entry.name, request_id, exc_info=True)


def _checked(entry: LoadedDrafter, draft: Draft, view: DraftView, request: Request, vocab_size: int) -> Draft:
    """The draft up to its first row that cannot be verified: a law that is none, or an id the target lacks.

    Cutting before a law that is not finite or has not the mass of 1 looks at x_<k only. An id outside the vocabulary
    has p = 0; it can only come from a point mass (a law over the vocabulary cannot yield it), where cutting is
    lossless as well.
    """
    asked = min(len(draft.tokens), view.k)
    length = asked
    if draft.probs is not None:
        lawful = ((draft.probs.sum(-1) - 1).abs() < MASS_TOLERANCE).tolist()
        length = min(length, _leading(lawful))
    length = min(length, _leading([0 <= token < vocab_size for token in draft.tokens]))
    if draft.invalid or length < asked:
        request.stats.invalid_drafts += 1
        _count_fault(entry, request)
    else:
        request.faults.pop(entry.name, None)
    return draft.truncate(length)


def _leading(passed: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return next((i for i, ok in enumerate(passed) if not ok), len(passed))
