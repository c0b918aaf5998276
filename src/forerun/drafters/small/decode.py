"""A classic drafter: an independent smaller model with the same vocabulary (Leviathan et al., Chen et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forerun.drafters.base import (
    Accepted,
    Draft,
    DraftView,
    KeepDrafting,
    LoadContext,
    Proposal,
    top_probability,
)
from forerun.drafters.copying import SerialDrafter
from forerun.drafters.tables import Tables
from forerun.errors import ModelError, OptionError
from forerun.target.base import Batch, Segment, Target

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.learned import Learner
    from forerun.target.blocks import BlockKey

INGEST_ROWS = 512
"""Rows per pass while catching up with a prompt, which bounds the memory of one pass."""

STALE = 256
"""Rows that a request may go on for without a draft before others may have the memory of what was taken in of it."""


class Small(SerialDrafter):
    """Drafts with a model of its own, one pass per token over its own paged KV.

    The model is fed lazily: rows the target has committed since the last draft (one after a full acceptance, many after
    rounds with K = 0, the whole prompt at first) are ingested in one pass before the next draft, never skipped.

    Args:
        model: the drafter's model, loaded like a target.
        vocab_size: columns of the target's logits.
        shared_ids: ids 0 .. shared_ids - 1 mean the same in both; others are masked before a token is drawn.
    """

    name = "small"
    config_keys = SerialDrafter.config_keys | {"model", "revision", "max_model_len"}
    default_draft = 4

    def __init__(self, model: Target, vocab_size: int, shared_ids: int | None = None, window: int | None = None):
        self.model = model
        self.vocab_size = vocab_size
        self.shared_ids = min(model.vocab_size, vocab_size, shared_ids or vocab_size)
        self.window = min(model.window, window or model.window)
        self._tables = Tables()
        self._behind: dict[int, int] = {}
        """By request, rows that became final and were not taken in yet."""

    @classmethod
    def learner(cls) -> type[Learner]:
        from forerun.drafters.small.learn import SmallLearner

        return SmallLearner

    @classmethod
    def load(cls, options: Mapping[str, Any], context: LoadContext) -> Self:
        source = options.get("model")
        if source is None and context.target.name == "embedded":
            source = "embedded-small"
        if source is None:
            raise OptionError("model", "the drafter `small` needs a model: a directory, a .gguf file or a hub id")
        from forerun.drafters.small.record import warn_of_another_target
        from forerun.target.load import load_target, shared_vocabulary

        try:
            model = load_target(
                source,
                dtype=context.dtype,
                device=context.device,
                revision=options.get("revision"),
                trust_remote_code=context.trust_remote_code,
            )
        except ModelError as error:  # it was loaded like a target, but it is not the one
            raise type(error)(str(error).replace("--target: ", "--drafter: ", 1)) from error
        shared = shared_vocabulary(context.target.tokenizer, model.tokenizer)
        folder = model.model.config.name_or_path  # also of a model that came from the hub
        if folder:
            warn_of_another_target(Path(folder), context.target)
        drafter = cls(model, context.target.vocab_size, shared, options.get("max_model_len"))
        drafter.copy_from_text(options)
        return drafter

    @property
    def block_bytes(self) -> int:
        return self.model.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self.model.allocate(num_blocks)
        self._tables = Tables(num_blocks)

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        asked = {view.request_id for view in views}
        ready = [i for i, view in enumerate(views) if self._reserve(view, asked)]
        mine = [views[i] for i in ready]

        def advance(active: Sequence[int], drafts: Sequence[Draft]) -> tuple[Tensor, list[float]]:
            segments = []
            for i, draft in zip(active, drafts, strict=True):
                view = mine[i]
                tokens = draft.tokens[-1:] or view.tokens[self._tables.rows(view.request_id) :]
                segments.append(self._segment(view.request_id, list(tokens)))
            logits = self._over_target_ids(self.model.forward(Batch(segments)).logits)
            return logits, top_probability(logits)

        proposal = [Draft() for _ in views]
        for i, draft in zip(ready, self.draft(mine, keep_drafting, advance), strict=True):
            proposal[i] = draft
        return proposal

    def _reserve(self, view: DraftView, asked: Container[int]) -> bool:
        """Whether there is room for all rows of a round.

        There is, but where requests share blocks of the target whose rows each of them had to make here: what the
        target holds once is then held several times. Requests that have gone on without a draft for long make room, and
        are taken in again when they are asked for. Of others, those that come too late are not drafted for.
        """
        idle = [request for request in self._behind if request not in asked and self._behind[request] > STALE]
        while not self._tables.has_room(view.request_id, view.anchor + view.k):
            if not idle:
                return False
            self.release(idle.pop())
        self._tables.reserve(view.request_id, view.anchor + view.k)
        return True

    def _segment(self, request_id: int, tokens: list[int]) -> Segment:
        """The last piece of `tokens`, after a long beginning has been ingested in bounded passes."""
        # A token this model has no row for: any of its own stands for it. That costs acceptance, never the output.
        tokens = [min(token, self.model.vocab_size - 1) for token in tokens]
        start = self._tables.rows(request_id)
        end = start + len(tokens)
        table = self._tables.reserve(request_id, end)
        while len(tokens) > INGEST_ROWS:
            self.model.forward(Batch([Segment(tokens[:INGEST_ROWS], start, table, 0)]))
            start, tokens = start + INGEST_ROWS, tokens[INGEST_ROWS:]
        self._tables.extend(request_id, end)
        return Segment(tokens, start, table, 1)

    def _over_target_ids(self, logits: Tensor) -> Tensor:
        """[R, V]: ids the two vocabularies do not share get no mass before anything is drawn."""
        import torch

        if logits.shape[-1] == self.vocab_size == self.shared_ids:
            return logits
        out = torch.full((len(logits), self.vocab_size), -math.inf, dtype=logits.dtype, device=logits.device)
        out[:, : self.shared_ids] = logits[:, : self.shared_ids]
        return out

    def commit(self, accepted: Sequence[Accepted]) -> None:
        super().commit(accepted)
        for rows in accepted:
            self._tables.cut(rows.request_id, rows.end)
            self._behind[rows.request_id] = rows.end - self._tables.rows(rows.request_id)

    def release(self, request_id: int) -> None:
        super().release(request_id)
        self._tables.release(request_id)
        self._behind.pop(request_id, None)

    def keep(self, request_id: int, tokens: Sequence[int], keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        """What it has ingested so far: a prompt nobody drafted behind is not worth a pass of the model."""
        self._tables.keep(request_id, keys)

    def kept(self, keys: Sequence[BlockKey]) -> int:
        return self._tables.kept(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        self._tables.release(request_id)
        self._tables.adopt(request_id, keys)

    def drop(self, key: BlockKey) -> None:
        self._tables.drop(key)

    def audit(self) -> None:
        """Asserts that its own pool holds exactly what its tables hold."""
        self._tables.audit()
