"""The drafters of one engine together: what they are asked, told and made to forget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from forerun.budget.rounds import DraftTime
from forerun.drafters.base import Accepted, KeepDrafting
from forerun.engine.admission import Work
from forerun.engine.propose import Clock, LoadedDrafter, Proposed, logger, propose
from forerun.target.base import Target

if TYPE_CHECKING:
    from torch import Tensor


class FinalRows(NamedTuple):
    """Rows of one request that became final in a step."""

    request_id: int
    start: int
    end: int
    packed_row: int
    """Where the first of them lies in the step's features."""


class Drafters:
    """Asks them, and keeps them informed.

    A drafter that needs the target's features cannot rebuild what it has dropped of a request while that goes on. It is
    then told no more of it, and not asked, until the request is computed again from its beginning.
    """

    def __init__(self, loaded: Sequence[LoadedDrafter], target: Target, clock: Clock):
        self.loaded = list(loaded)
        self.taps = tuple(sorted({h for entry in loaded for h in entry.drafter.taps}))
        self._target = target
        self._clock = clock
        self._named = {entry.name: entry for entry in loaded}
        self._lost: dict[int, set[str]] = {}

    def named(self, name: str) -> LoadedDrafter:
        return self._named[name]

    def lost(self, request_id: int) -> frozenset[str] | set[str]:
        """Drafters that have lost a request for good."""
        return self._lost.get(request_id, frozenset())

    def propose(
        self, works: Sequence[Work], keep_drafting: Callable[[str], KeepDrafting]
    ) -> tuple[list[Proposed], list[DraftTime]]:
        """See `propose`. Before it, states go that the plans release; after it, those of drafters that failed."""
        for work in works:
            if work.plan is not None and work.plan.release:
                self.release(work.request.id, work.plan.release)
        proposed, calls = propose(self.loaded, works, keep_drafting, self._target.vocab_size, self._clock)
        for work, one in zip(works, proposed, strict=True):
            self.release(work.request.id, one.failed)
        return proposed, calls

    def inform(self, final: Sequence[FinalRows], features: Tensor | None) -> None:
        """Tells every drafter which rows became final, with the features it asked for."""
        for entry in self.loaded:
            self._tell(
                entry,
                [
                    Accepted(rows.request_id, rows.start, rows.end, self._columns(entry, features, rows))
                    for rows in final
                    if entry.name not in self.lost(rows.request_id)
                ],
            )

    def cut(self, request_id: int, rows: int) -> None:
        """A request goes on from fewer rows than the drafters may hold; from none, it starts over."""
        if rows == 0:
            self._lost.pop(request_id, None)
        for entry in self.loaded:
            self._tell(entry, [Accepted(request_id, rows, rows, None)])

    def _tell(self, entry: LoadedDrafter, accepted: Sequence[Accepted]) -> None:
        """One that cannot follow starts over with these requests."""
        try:
            entry.drafter.commit(accepted)
        except Exception:  # a drafter is a plug-in
            logger.warning("drafter %r failed to follow a step; it starts over", entry.name, exc_info=True)
            for rows in accepted:
                self.release(rows.request_id, [entry.name])

    def _columns(self, entry: LoadedDrafter, features: Tensor | None, rows: FinalRows) -> Tensor | None:
        """[end - start, m * H] of the taps this drafter asked for, out of the union that was computed."""
        if features is None or not entry.drafter.taps:
            return None
        count = rows.end - rows.start
        mine = features[rows.packed_row : rows.packed_row + count]
        if entry.drafter.taps == self.taps:
            return mine
        where = [self.taps.index(h) for h in entry.drafter.taps]
        return mine.reshape(count, len(self.taps), self._target.hidden_size)[:, where].flatten(1)

    def release(self, request_id: int, names: Iterable[str]) -> None:
        """These drafters drop what they hold of a request that goes on."""
        for name in names:
            entry = self._named[name]
            _forget(entry, request_id)
            if not entry.rebuilds:
                self._lost.setdefault(request_id, set()).add(name)

    def forget(self, request_id: int) -> None:
        """All drafters drop a request that is gone, or will be computed again."""
        self._lost.pop(request_id, None)
        for entry in self.loaded:
            _forget(entry, request_id)

    def audit(self) -> None:
        """Asserts that the books of every drafter balance."""
        for entry in self.loaded:
            entry.drafter.audit()


def _forget(entry: LoadedDrafter, request_id: int) -> None:
    """Also where the drafter itself is broken."""
    try:
        entry.drafter.release(request_id)
    except Exception:  # a drafter is a plug-in
        logger.warning("drafter %r failed to release request %d", entry.name, request_id, exc_info=True)


__all__ = ["Drafters", "FinalRows"]
