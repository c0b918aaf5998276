"""A drafter's output vocabulary: all ids of the target, or the D of them it keeps (EAGLE-3's `d2t` and `t2d`)."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ModelError, OptionError


class DraftVocabulary:
    """Which target ids a drafter can propose.

    Args:
        size: V, columns of the target's logits (the config's padded value).
        kept: [D] target ids, strictly increasing; None: all.

    Raises:
        ModelError: `kept` is not strictly increasing within 0 .. V - 1.
    """

    def __init__(self, size: int, kept: Tensor | None = None):
        self.size = size
        self.kept = kept
        if kept is not None:
            ascending = bool((kept[1:] > kept[:-1]).all()) and len(kept) > 0
            if not ascending or int(kept[0]) < 0 or int(kept[-1]) >= size:
                raise ModelError(f"the draft vocabulary must be strictly increasing ids below {size} (d2t is broken)")

    @classmethod
    def of_offsets(cls, size: int, d2t: Tensor) -> DraftVocabulary:
        """From the stored form: target id = i + d2t[i]."""
        return cls(size, d2t.long() + torch.arange(len(d2t), device=d2t.device))

    @classmethod
    def most_frequent(cls, counts: Tensor, draft_size: int) -> DraftVocabulary:
        """The draft_size ids that occur most often in counts [V]; ties to the lower id."""
        if not 1 <= draft_size <= len(counts):
            raise OptionError("draft_vocab_size", f"must be in 1 .. {len(counts)}, got {draft_size}")
        if draft_size == len(counts):
            return cls(len(counts))
        order = torch.sort(counts, descending=True, stable=True).indices[:draft_size]
        return cls(len(counts), order.sort().values)

    @property
    def draft_size(self) -> int:
        """D."""
        return self.size if self.kept is None else len(self.kept)

    def tensors(self) -> dict[str, Tensor]:
        """`d2t` [D] int64 offsets and `t2d` [V] bool, as stored; nothing if every id is kept."""
        if self.kept is None:
            return {}
        kept = self.kept.cpu()
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[kept] = True
        return {"d2t": kept - torch.arange(len(kept)), "t2d": mask}

    def to_draft(self, token_ids: Tensor) -> Tensor:
        """Target ids -> draft ids; -1 for one that is not kept."""
        if self.kept is None:
            return token_ids
        kept = self.kept.to(token_ids.device)
        places = torch.searchsorted(kept, token_ids).clamp(max=len(kept) - 1)
        return places.where(kept[places] == token_ids, -1)

    def to_target(self, logits: Tensor) -> Tensor:
        """Draft logits [..., D] -> [..., V], -inf at the ids that are not kept: no mass before anything is drawn."""
        if self.kept is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return out.index_copy_(-1, self.kept.to(logits.device), logits)
