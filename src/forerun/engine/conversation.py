"""Turns of one chat over kept KV rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forerun.engine.intake import Ask, Prompt, Speculative
from forerun.engine.request import Chunk, Completion, Request
from forerun.errors import EngineClosed, OptionError
from forerun.sampling import Sampling

if TYPE_CHECKING:
    from forerun.engine.engine import Engine


class Conversation:
    """Turns of one chat whose keys and values stay in memory, so that a turn computes only what is new in its prompt.

    Idle conversations give their rows back when running requests need them; the next turn then computes them again.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._id = engine.intake.new_id()
        self._tokens: list[int] = []  # all but the last of them have kept rows, unless those were taken back
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
                self._tokens = list(request.tokens)
        finally:
            self._turn = None
            if not self._closed:
                engine.core.kept.setdefault(self._id, [])

    def _resume(self, request: Request) -> None:
        """Hands the kept rows to the new turn, cut back to the prefix both share."""
        core = self._engine.core
        request.id = self._id
        request.blocks, core.kept[self._id] = core.kept[self._id], []
        shared = 0
        if request.blocks:
            # The newest token has no row yet, and the last prompt token must be fed to get logits.
            longest = min(len(self._tokens), len(request.tokens)) - 1
            while shared < longest and self._tokens[shared] == request.tokens[shared]:
                shared += 1
        request.rows = shared
        self._tokens = request.tokens[: shared + 1]
        core.pool.shrink(request.blocks, shared)
        core.cut_drafters(self._id, shared)

    def close(self) -> None:
        """Cancels an open turn and frees what was kept."""
        self._closed = True
        if self._turn is not None:
            self._engine.cancel([self._turn])
        self._engine.core.drop_kept(self._id)
