"""Asking the drafters. A drafter that fails costs speed, never the request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from forerun import budget
from forerun.drafters.base import Draft, Drafter, DraftView
from forerun.drafters.config import SpeculativeConfig
from forerun.engine.admission import Work, draft_room
from forerun.engine.request import Request

logger = logging.getLogger("forerun")

FAULTS_ALLOWED = 3
"""Rounds in a row whose drafting may fail before the request is decoded plainly to its end."""


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
        return (methods is None or self.name in methods) and request.faults < FAULTS_ALLOWED

    def draft_length(self, request: Request, batch_size: int) -> int:
        """K by configuration, batch size and request, before what is left of window and step."""
        k = self.config.draft_length(self.drafter.default_draft, batch_size)
        caps = [cap for cap in (self.drafter.max_draft, request.speculative.max_draft) if cap is not None]
        return min([k, *caps])


def plan_length(loaded: Sequence[LoadedDrafter], request: Request, batch_size: int, window: int, rows_left: int) -> int:
    """The longest draft any drafter that serves the request may make in this step."""
    return max(
        (
            budget.plan(
                entry.draft_length(request, batch_size), draft_room(request, window, rows_left, entry.drafter.window)
            )
            for entry in loaded
            if entry.serves(request)
        ),
        default=0,
    )


def propose(loaded: Sequence[LoadedDrafter], works: Sequence[Work], batch_size: int, vocab_size: int) -> list[Draft]:
    """One draft per work, empty where nothing is proposed.

    Drafters are asked in the order they were loaded; a request goes on to the next one where the one before proposes
    nothing (an n-gram that does not match). Which one drafts is thus a function of the history alone.
    """
    drafts = [Draft() for _ in works]
    open_works = [i for i, work in enumerate(works) if work.k > 0]
    for entry in loaded:
        mine = [i for i in open_works if entry.serves(works[i].request)]
        views = [_view(entry, works[i], batch_size) for i in mine]
        asked = [(i, view) for i, view in zip(mine, views, strict=True) if view.k > 0]
        if not asked:
            continue
        for (i, view), draft in zip(asked, _ask(entry, works, asked), strict=True):
            drafts[i] = _checked(draft, view, works[i].request, vocab_size)
            if drafts[i].tokens:
                used = works[i].request.drafters_used
                used[entry.name] = used.get(entry.name, 0) + 1
        open_works = [i for i in open_works if not drafts[i].tokens]
    return drafts


def _view(entry: LoadedDrafter, work: Work, batch_size: int) -> DraftView:
    request = work.request
    k = min(work.k, entry.draft_length(request, batch_size))
    if entry.drafter.window is not None:
        k = min(k, entry.drafter.window - request.anchor)
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


def _ask(entry: LoadedDrafter, works: Sequence[Work], asked: Sequence[tuple[int, DraftView]]) -> Sequence[Draft]:
    views = [view for _, view in asked]
    try:
        proposal = entry.drafter.propose(views, lambda view, k, confidence: True)  # noqa: ARG005 - policy `fixed`
        assert len(proposal) == len(views), f"{entry.name} made {len(proposal)} drafts for {len(views)} requests"
    except Exception:  # a drafter is a plug-in: whatever it raises, the target can go on without it
        logger.warning("drafter %r failed; this step is decoded plainly", entry.name, exc_info=True)
        for i, view in asked:
            forget(entry, view.request_id)
            works[i].request.stats.drafter_faults += 1
            _count_fault(entry, works[i].request)
        return [Draft() for _ in views]
    return proposal


def _count_fault(entry: LoadedDrafter, request: Request) -> None:
    request.faults += 1
    if request.faults == FAULTS_ALLOWED:
        logger.warning("request %d is decoded plainly from here on: %r keeps failing", request.id, entry.name)


def forget(entry: LoadedDrafter, request_id: int) -> None:
    """Drops a drafter's state of one request, also where the drafter itself is broken."""
    try:
        entry.drafter.release(request_id)
    except Exception:
        logger.warning("drafter %r failed to release request %d", entry.name, request_id, exc_info=True)


def _checked(draft: Draft, view: DraftView, request: Request, vocab_size: int) -> Draft:
    """The draft up to its first row that cannot be verified: a law that is not finite, or an id the target lacks.

    Cutting before a non-finite law looks at x_<k only. An id outside the vocabulary has p = 0; it can only come from a
    point mass (a law over the vocabulary cannot yield it), where cutting is lossless as well.
    """
    length = min(len(draft.tokens), view.k)
    if draft.probs is not None:
        finite = draft.probs.sum(-1).isfinite().tolist()
        length = min(length, finite.index(False) if False in finite else length)
    outside = [not 0 <= token < vocab_size for token in draft.tokens[:length]]
    length = min(length, outside.index(True) if True in outside else length)
    if draft.invalid or length < min(len(draft.tokens), view.k):
        request.stats.invalid_drafts += 1
        request.faults += 1
        if request.faults == FAULTS_ALLOWED:
            logger.warning("request %d is decoded plainly from here on: its drafts are not valid", request.id)
    else:
        request.faults = 0
    return draft.truncate(length)
