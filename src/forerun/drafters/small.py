"""A classic drafter: an independent smaller model with the same vocabulary (Leviathan et al., Chen et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from forerun.drafters.base import (
    Accepted,
    Draft,
    Drafter,
    DraftView,
    KeepDrafting,
    LoadContext,
    Proposal,
    draw_drafts,
    law_of,
)
from forerun.errors import ModelError, OptionError
from forerun.sampling import NOTHING
from forerun.target.base import Batch, Segment, Target
from forerun.target.blocks import BlockPool

if TYPE_CHECKING:
    from torch import Tensor

INGEST_ROWS = 512
"""Rows per pass while catching up with a prompt, which bounds the memory of one pass."""


class Small(Drafter):
    """Drafts with a model of its own, one pass per token over its own paged KV.

    The model is fed lazily: rows the target has committed since the last draft (one after a full acceptance, many after
    rounds with K = 0, the whole prompt at first) are ingested in one pass before the next draft, never skipped.

    Args:
        model: the drafter's model, loaded like a target.
        vocab_size: columns of the target's logits.
        shared_ids: ids 0 .. shared_ids - 1 mean the same in both; others are masked before a token is drawn.
    """

    name = "small"
    config_keys = frozenset({"model", "revision", "max_model_len"})
    default_draft = 4

    def __init__(self, model: Target, vocab_size: int, shared_ids: int | None = None, window: int | None = None):
        self.model = model
        self.vocab_size = vocab_size
        self.shared_ids = min(model.vocab_size, vocab_size, shared_ids or vocab_size)
        self.window = min(model.window, window or model.window)
        self._tables: dict[int, list[int]] = {}
        self._rows: dict[int, int] = {}
        self._pool = BlockPool(0)

    @classmethod
    def load(cls, options: Mapping[str, Any], context: LoadContext) -> Self:
        source = options.get("model")
        if source is None and context.target.name == "embedded":
            source = "embedded-small"
        if source is None:
            raise OptionError("model", "the drafter `small` needs a model: a directory, a .gguf file or a hub id")
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
        return cls(model, context.target.vocab_size, shared, options.get("max_model_len"))

    @property
    def block_bytes(self) -> int:
        return self.model.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self.model.allocate(num_blocks)
        self._pool = BlockPool(num_blocks)
        self._tables.clear()
        self._rows.clear()

    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        drafts = [Draft() for _ in views]
        laws: list[list[Tensor]] = [[] for _ in views]
        active = list(range(len(views)))
        while active:
            logits = self._advance([views[i] for i in active], [drafts[i].tokens for i in active])
            going = []
            confidences = self._confidence(logits)
            for row, i in enumerate(active):
                slot = len(drafts[i].tokens) + 1
                if not math.isfinite(confidences[row]):
                    drafts[i].invalid = True
                elif keep_drafting(views[i], slot, confidences[row]):
                    going.append(row)
            if not going:
                break
            mine = [active[row] for row in going]
            tokens, probs = draw_drafts(logits[going], [views[i] for i in mine], [drafts[i].tokens for i in mine])
            for row, i in enumerate(mine):
                if tokens[row] == NOTHING:
                    drafts[i].invalid = True
                    continue
                drafts[i].tokens.append(tokens[row])
                drafts[i].confidence.append(confidences[going[row]])
                laws[i].append(probs[row])
            active = [i for i in mine if len(drafts[i].tokens) < views[i].k and not drafts[i].invalid]
        for draft, view, law in zip(drafts, views, laws, strict=True):
            draft.probs = law_of(view, law)
        return drafts

    def _advance(self, views: Sequence[DraftView], drafted: Sequence[Sequence[int]]) -> Tensor:
        """Feeds each request all tokens that have no row yet; logits [R, V] after the last one, over target ids."""
        segments = []
        for view, draft in zip(views, drafted, strict=True):
            tokens = list(draft[-1:] or view.tokens[self._rows.get(view.request_id, 0) :])
            segments.append(self._segment(view.request_id, tokens))
        return self._over_target_ids(self.model.forward(Batch(segments)).logits)

    def _segment(self, request_id: int, tokens: list[int]) -> Segment:
        """The last piece of `tokens`, after a long beginning has been ingested in bounded passes."""
        # A token this model has no row for: any of its own stands for it. That costs acceptance, never the output.
        tokens = [min(token, self.model.vocab_size - 1) for token in tokens]
        table = self._tables.setdefault(request_id, [])
        start = self._rows.setdefault(request_id, 0)
        self._pool.grow(table, start + len(tokens))
        while len(tokens) > INGEST_ROWS:
            self.model.forward(Batch([Segment(tokens[:INGEST_ROWS], start, table, 0)]))
            start, tokens = start + INGEST_ROWS, tokens[INGEST_ROWS:]
        self._rows[request_id] = start + len(tokens)
        return Segment(tokens, start, table, 1)

    def _over_target_ids(self, logits: Tensor) -> Tensor:
        """[R, V]: ids the two vocabularies do not share get no mass before anything is drawn."""
        import torch

        if logits.shape[-1] == self.vocab_size == self.shared_ids:
            return logits
        out = torch.full((len(logits), self.vocab_size), -math.inf, dtype=logits.dtype, device=logits.device)
        out[:, : self.shared_ids] = logits[:, : self.shared_ids]
        return out

    def _confidence(self, logits: Tensor) -> list[float]:
        """[R] top probability of the unprocessed draft law, known before the draw; NaN where the law is not finite."""
        wide = logits.float()
        top = wide.amax(-1)
        return (top - wide.logsumexp(-1)).exp().tolist()

    def commit(self, accepted: Sequence[Accepted]) -> None:
        for rows in accepted:
            held = self._rows.get(rows.request_id)
            if held is not None and held > rows.end:
                self._rows[rows.request_id] = rows.end
                self._pool.shrink(self._tables[rows.request_id], rows.end)

    def release(self, request_id: int) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.shrink(table, 0)
        self._rows.pop(request_id, None)

    def audit(self) -> None:
        """Asserts that its own pool holds exactly what its tables hold."""
        self._pool.audit(list(self._tables.values()))
