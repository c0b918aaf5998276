"""Turns of one chat over kept KV rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forerun.engine.intake import Ask, Prompt, Speculative
from forerun.engine.request import Chunk, Completion, Request
from forerun.errors import EngineClosed, OptionError
from forerun.sampling import Sampling
from forerun.target.base import BLOCK_SIZE

if TYPE_CHECKING:
    from forerun.engine.engine import Engine


class Conversation:
    """Turns of one chat whose keys and values stay in memory, so that a turn computes only what is new in its prompt.

    Unlike a prefix cache it holds on to every row, those of the last incomplete block included. Idle conversations give
    their rows back when running requests need them; the next turn then takes what the prefix cache still has, and
    computes the others again.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._id = engine.intake.new_id()
        self._tokens: list[int] = []  # all but the last of them have kept rows, unless those were taken back
        self._published = 0
        self._turn: Request | None = None
        self._closed = False
        engine.core.kept[self._id] = []

    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, speculative: Speculative = None
    ) -> Completion:
        """The answer to a prompt that contains the whole conversation so far (as a rendered chat template does)."""
        *_, last = self.stream(prompt, sampling, speculative=speculative)
        assert last.completion is not None
        return last.completion

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, speculative: Speculative = None
    ) -> Iterator[Chunk]:
        """`generate`, yielding what each step adds. Closing the iterator cancels the turn and drops what was kept."""
        engine = self._engine
        engine.check_open()
        if self._closed:
            raise EngineClosed("the conversation is closed")
        if self._turn is not None:
            raise OptionError("conversation", "its last turn is still open; finish or close that iterator first")
        [request, *more] = engine.intake.requests([prompt], sampling, Ask(speculative))
        if more:
            raise OptionError("n", "a conversation has one sample a turn; use n = 1")
        self._turn = request
        try:
            self._resume(request)
            yield from engine.follow([request])
            if request.output:
                self._tokens, self._published = list(request.tokens), request.published
        finally:
            self._turn = None
            if not self._closed:
                engine.core.kept.setdefault(self._id, [])

    def _resume(self, request: Request) -> None:
        """Hands the kept rows to the new turn, cut back to the prefix both share."""
        core = self._engine.core
        request.id = self._id
        request.blocks, core.kept[self._id] = core.kept[self._id], []
        shared = self._shared(request) if request.blocks else 0
        request.rows = shared
        request.published = self._published = min(self._published, shared // BLOCK_SIZE)
        self._tokens = request.tokens[: shared + 1]
        core.pool.shrink(request.blocks, shared)
        core.cut_drafters(self._id, shared)

    def _shared(self, request: Request) -> int:
        """How many of the kept rows the new turn goes on from; 0 where the prefix cache has more of its prompt."""
        cache, equal = self._engine.core.prefix_cache, 0
        for kept, token in zip(self._tokens, request.tokens, strict=False):
            if kept != token:
                break
            equal += 1
        # The newest token has no row yet, and the last prompt token must be fed to get logits.
        rows = min(equal, len(self._tokens) - 1, len(request.tokens) - 1)
        rows = cache.intact(self._published, rows, equal)
        return rows if rows >= cache.found(request) * BLOCK_SIZE else 0

    def close(self) -> None:
        """Cancels an open turn and frees what was kept."""
        self._closed = True
        if self._turn is not None:
            self._engine.cancel([self._turn])
        self._engine.core.drop_kept(self._id)
