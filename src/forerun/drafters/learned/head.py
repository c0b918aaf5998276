"""The target's head as numbers, for drafters that start from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.vocabulary import DraftVocabulary
    from forerun.target.base import Target

HEAD_COLUMNS = 64
"""Columns read at once."""


@torch.no_grad()
def head_rows(target: Target, vocabulary: DraftVocabulary) -> Tensor:
    """[D, H] in float32: the target's head at the ids of the draft vocabulary, read off by applying it to unit vectors.

    A bias is left out; of a soft-cap, nearly linear around 0, hardly anything is in it. Ids that are no tokens (-inf in
    the target's logits) get zeros. Good for starting from.
    """
    head = target.logits if vocabulary.kept is None else target.partial_logits(vocabulary.kept)
    units = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    origin = head(torch.zeros_like(units[:1]))
    never = origin == -torch.inf
    columns = ((head(part) - origin).masked_fill(never, 0) for part in torch.split(units, HEAD_COLUMNS))
    return torch.cat([column.float().T.cpu() for column in columns], 1)
