"""The chain in training: from every taught row at once, several steps on, fed with the text's own tokens.

Step 0 of row i is the row that decoding makes of (feature i, token i + 1). Step t feeds its own output back, with token
i + 1 + t, at position i + t; it sees the step-0 rows up to i and its own steps, as a draft in flight does (EAGLE-3's
training-time test; methods, 4.3). After step 0 a row thus depends on no other row's steps, so rows are computed in
chunks, each with all of its steps and its gradient: memory is that of one chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from forerun.drafters.chain.network import ChainNetwork
from forerun.drafters.layers import Attention, Rotation
from forerun.drafters.learned import TrainingBatch, wide
from forerun.drafters.losses import RowLosses, chunk_rows, compare

if TYPE_CHECKING:
    from forerun.drafters.chain.decode import ChainDrafter

KeysValues = tuple[Tensor, Tensor]


def taught(batch: TrainingBatch, steps: int) -> Tensor:
    """[T, steps] bool: whether row i is taught at step t: token i + 2 + t is in its sequence and under the loss mask.

    The last row with a token behind it has none to predict and is not taught.
    """
    count = len(batch.tokens)
    labels = (
        torch.arange(count, device=batch.tokens.device)[:, None] + 2 + torch.arange(steps, device=batch.tokens.device)
    )
    return (labels < batch.ends[:, None]) & batch.loss_mask[labels.clamp(max=count - 1)]


def _of_rows(batch: TrainingBatch, values: list[int]) -> Tensor:
    """[T] each row's value of its sequence."""
    device = batch.tokens.device
    lengths = torch.tensor(list(batch.lengths), device=device)
    return torch.tensor(values, device=device).repeat_interleave(lengths)


class Unroll:
    """Chains from the rows of a packed batch.

    Args:
        network: in training.
        batch: T packed rows.
        embedded: [T, H] embedded tokens.
        features: [T, H] what the network is given at step 0.
    """

    def __init__(self, network: ChainNetwork, batch: TrainingBatch, embedded: Tensor, features: Tensor):
        self._network, self._batch, self._embedded, self._features = network, batch, embedded, features
        rows = torch.arange(len(embedded), device=embedded.device)
        x = network.attention_input(self._behind(rows, 0), features)
        self._keys, self._values = network.attention.keys_values(x, self._rotation(rows, 0))

    @property
    def shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features [T, H], and the keys and values [T, kv_heads, dim] of step 0: what every chain reads."""
        return self._features, self._keys, self._values

    def over(self, features: Tensor, keys: Tensor, values: Tensor) -> Self:
        """The same chains over other tensors in the place of `shared`."""
        other = copy(self)
        other._features, other._keys, other._values = features, keys, values
        return other

    def hidden(self, rows: Tensor, steps: int) -> Tensor:
        """[n, steps, H] hidden states of the chains from packed rows [n], ascending."""
        network, feature = self._network, self._features[rows]
        own: list[KeysValues] = []
        hidden: list[Tensor] = []
        for step in range(steps):
            mix = partial(self._mix, rows=rows, step=step, own=own)
            hidden.append(network(self._behind(rows, step), feature, mix))
            feature = network.feedback(hidden[-1])
        return torch.stack(hidden, 1)

    def _behind(self, rows: Tensor, step: int) -> Tensor:
        """Embedded token i + 1 + step; beyond the end of a sequence some other one, for rows that nobody looks at."""
        return self._embedded[(rows + 1 + step).clamp(max=len(self._embedded) - 1)]

    def _rotation(self, rows: Tensor, step: int) -> Rotation:
        rotation: Rotation = self._network.rotary(self._batch.positions[rows] + step, self._features.dtype)
        return rotation

    def _mix(self, attention: Attention, x: Tensor, rows: Tensor, step: int, own: list[KeysValues]) -> Tensor:
        rotation = self._rotation(rows, step)
        if step > 0:
            own.append(attention.keys_values(x, rotation))
        return attention.output(self._attend(attention.query(x, rotation), rows, own, attention.scaling))

    def _attend(self, query: Tensor, rows: Tensor, own: list[KeysValues], scaling: float) -> Tensor:
        """[n, heads, dim]: each row over the step-0 rows of its sequence up to itself, and over its own later steps."""
        low, high = int(self._starts[rows[0]]), int(rows[-1]) + 1
        keys, values = self._keys[low:high], self._values[low:high]  # [L, kv_heads, dim]
        grouped = query.reshape(len(rows), keys.shape[1], -1, query.shape[-1]) * scaling  # [n, kv_heads, groups, dim]
        packed = torch.arange(low, high, device=rows.device)
        seen = (packed <= rows[:, None]) & (packed >= self._starts[rows][:, None])  # [n, L]
        scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys).masked_fill(~seen[:, None, None], -torch.inf)
        if own:
            own_keys, own_values = (torch.stack(part, 1) for part in zip(*own, strict=True))  # [n, t, kv_heads, dim]
            scores = torch.cat([scores, torch.einsum("nkgd,ntkd->nkgt", grouped, own_keys)], -1)
        weights = wide(scores).softmax(-1).to(values.dtype)
        mixed = torch.einsum("nkgl,lkd->nkgd", weights[..., : high - low], values)
        if own:
            mixed = mixed + torch.einsum("nkgt,ntkd->nkgd", weights[..., high - low :], own_values)
        return mixed.flatten(1, 2)

    @cached_property
    def _starts(self) -> Tensor:
        return _of_rows(self._batch, self._batch.starts)


def compare_chains(drafter: ChainDrafter, batch: TrainingBatch, rows: Tensor, logits: Tensor) -> RowLosses:
    """[n, steps] losses of draft logits [n, steps, D] of the chains from rows [n], against the target's laws."""
    steps = logits.shape[1]
    behind = rows[:, None] + 1 + torch.arange(steps, device=rows.device)  # [n, steps]: the rows that say what follows
    teachers, where = torch.unique(behind.clamp(max=len(batch.tokens) - 1), return_inverse=True)
    known = None if batch.log_normalizer is None else batch.log_normalizer[teachers]
    target_probs = drafter.target_probs(batch.last[teachers], known)  # once for all chains that pass a row
    labels = drafter.vocabulary.to_draft(batch.tokens[(behind + 1).clamp(max=len(batch.tokens) - 1)])
    losses = compare(wide(logits).flatten(0, 1), target_probs[where.flatten()], labels.flatten())
    return RowLosses(*(column.reshape(-1, steps) for column in losses))


# -------------------------------------------------------------------------------------------------------------- chunks


def rows_per_chunk(drafter: ChainDrafter, batch: TrainingBatch, rows: Tensor, steps: int) -> int:
    """Of the taught rows [n], ascending, how many are computed at once."""
    return chunk_of(drafter, batch.lengths, rows, steps, batch.log_normalizer is not None)[0]


def chunk_of(
    drafter: ChainDrafter, lengths: Sequence[int], rows: Tensor, steps: int, normalized: bool
) -> tuple[int, int]:
    """(rows, span): rows whose logits, scores and teacher's laws of all steps are within the memory of one chunk, and
    the most packed rows that so many are scored against.

    Each row of a chunk is scored against all from the start of its first row's sequence to its last row
    (`Unroll._attend`): where sequences are short, or few rows are taught, far more than one sequence.

    Args:
        drafter: any chain.
        lengths: of the packed sequences.
        rows: [n] packed rows that are taught, ascending.
        steps: of every chain.
        normalized: whether the teacher's log-sum-exp is known.
    """
    rows, ends = rows.cpu().contiguous(), torch.tensor(list(lengths)).cumsum(0)
    starts = (ends - torch.tensor(list(lengths)))[torch.bucketize(rows, ends, right=True)]

    def span(count: int) -> int:
        first, last = starts[: max(1, len(rows) - count + 1)], rows[min(count, len(rows)) - 1 :]
        return int((last - first).max()) + 1

    def too_many(count: int) -> bool:
        return count > chunk_rows(columns_of_row(drafter, steps, span(count), normalized))

    most = chunk_rows(columns_of_row(drafter, steps, 0, normalized))
    count = bisect_left(range(1, most + 1), True, key=too_many)
    return count, span(count)


def columns_of_row(drafter: ChainDrafter, steps: int, span: int, normalized: bool) -> int:
    """Numbers of a row's logits and of its scores against `span` rows, over all steps, and of its teacher's law."""
    scores = drafter.network.attention.heads * span
    return steps * (drafter.vocabulary.draft_size + scores) + drafter.teacher_columns(normalized)


def metrics_by_step(losses: RowLosses, mask: Tensor) -> dict[str, tuple[float, float]]:
    """`name@k` of losses [n, steps] over the rows that are taught at step k - 1."""
    columns = {"ce": losses.ce, "soft_ce": losses.soft_ce, "teacher_forced_acceptance": losses.acceptance}
    counts = mask.sum(0).tolist()
    return {
        f"{name}@{k}": (total, count)
        for name, column in columns.items()
        for k, (total, count) in enumerate(zip((column * mask).sum(0).tolist(), counts, strict=True), 1)
    }
