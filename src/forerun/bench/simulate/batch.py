"""Simulated requests in the engine's own admission: who runs in a step, with how many rows, is decided by its code.

Requests are the engine's; their tokens are only counted, so all of them are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forerun import budget
from forerun.bench.simulate.texts import Text
from forerun.budget.planning import Option
from forerun.engine.admission import Admission, Limits, PlanStep, Work, draft_room
from forerun.engine.request import Request
from forerun.engine.text import TextStream
from forerun.sampling import Noise, Sampling
from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockPool, blocks_for

_SAMPLING, _NOISE = Sampling(temperature=0), Noise.of(0)
_SILENT = TextStream(lambda ids: "", (), False)  # noqa: ARG005 - nothing is ever written
_ZEROS = [0] * 64

FOLLOWS_FEATURES = ("eagle", "eagle3", "dflash", "dspark")
"""They need the target's features of every row: a state that was dropped cannot be rebuilt."""


@dataclass(eq=False)
class Live:
    """A request in the system, with what it is made of and when things happened to it."""

    request: Request
    text: Text
    arrived: float
    first: float | None = None
    """When its first token came; None also of a request that was there from the beginning."""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def made(self) -> int:
        """Output tokens so far, which is the place of the next one."""
        return len(self.request.tokens) - self.request.prompt_length

    @property
    def done(self) -> bool:
        return len(self.request.tokens) >= self.request.limit


class Batch:
    """Requests in the system.

    Args:
        limits: of the engine.
        tokens: whose keys and values fit in memory.
        on_preempt: told of a request that loses its rows.
    """

    def __init__(self, limits: Limits, tokens: int, on_preempt: Callable[[int], None]):
        self.live: dict[int, Live] = {}
        self.admission = Admission(
            limits, BlockPool(max(1, tokens // BLOCK_SIZE)), lambda request: on_preempt(request.id)
        )

    def __len__(self) -> int:
        return len(self.live)

    @property
    def running(self) -> int:
        return len(self.admission.running)

    def add(self, number: int, text: Text, now: float, done: int = 0) -> None:
        """A request arrives; with `done` > 0 output tokens it is already decoding, if there is room for its rows."""
        request = Request(
            id=number,
            tokens=[0] * text.prompt,
            prompt_length=text.prompt,
            sampling=_SAMPLING,
            noise=_NOISE,
            verify_mode="rejection",
            limit=text.prompt + text.output,
            text=_SILENT,
            eos_ids=frozenset(),
        )
        self.live[number] = Live(request, text, now)
        admission = self.admission
        # A block more for everyone, as admission asks for: else the next step would preempt some of them.
        rows = text.prompt + done + (len(admission.running) + 1) * BLOCK_SIZE
        if done and len(admission.running) < admission.limits.max_num_seqs and admission.pool.can_grow([], rows):
            request.tokens += [0] * done
            request.rows = len(request.tokens) - 1
            admission.pool.grow(request.blocks, request.rows)
            admission.running.append(request)
        else:
            admission.waiting.append(request)

    def choose(self, plan: PlanStep) -> list[Work]:
        """The work of the next step."""
        return self.admission.choose(plan)

    def commit(self, work: Work, emitted: int) -> None:
        """Rows of a prefill become final, or tokens are emitted and what lies behind them is cut back."""
        request = work.request
        request.rows += work.count
        if emitted:
            request.tokens += _ZEROS[:emitted] if emitted <= len(_ZEROS) else [0] * emitted
            request.rows = len(request.tokens) - 1
            self.admission.pool.shrink(request.blocks, request.rows)
        assert len(request.tokens) <= request.limit, f"request {request.id} has more tokens than it asked for"

    def remove(self, live: Live) -> None:
        self.admission.remove(live.request)
        del self.live[live.id]

    def audit(self) -> None:
        self.admission.audit([])
        waiting, running = self.admission.waiting, self.admission.running
        assert sorted(r.id for r in (*waiting, *running)) == sorted(self.live), "a request is lost"


_OPTIONS: dict[tuple[str, int], Option] = {}


def options(request: Request, drafters: Sequence[tuple[str, int]], window: int, rows_left: int) -> Iterator[Option]:
    """Drafters with the K that request, window and step leave of theirs, as the engine reckons it."""
    room = draft_room(request, window, rows_left, None)
    for name, most in drafters:
        k = budget.plan(most, room)
        if k > 0:
            key = name, k
            if key not in _OPTIONS:
                _OPTIONS[key] = Option(name, k, rebuilds=name not in FOLLOWS_FEATURES)
            yield _OPTIONS[key]


def tokens_for(requests: int, longest: int) -> int:
    """Rows that hold so many requests of the longest kind without a preemption."""
    return requests * (blocks_for(longest) + 1) * BLOCK_SIZE


__all__ = ["Batch", "Live", "options", "tokens_for"]
