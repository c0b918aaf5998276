"""Everything that changes logits before the temperature: allowed ids, bad words, processors, bias, penalties.

All of it depends on the tokens before a position. The drafted prefix counts as if it had been committed, so that each
row of a verify block has the very law that plain decoding would have there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.errors import OptionError
from forerun.sampling.options import Sampling, _ids

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """The place a row of logits stands at: whose law it is and which tokens come before.

    `drafted` are the tokens of the proposal before this row; they count as if they had been committed, so that a row
    of a verify block has exactly the law that plain decoding would have there.
    """

    sampling: Sampling
    tokens: Sequence[int]
    """Prompt and committed output."""
    prompt_length: int
    drafted: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()
    """Ids that `min_tokens` forbids: end-of-sequence (unless ignored) and `stop_token_ids`."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length + len(self.drafted)

    @property
    def adjusted(self) -> bool:
        s = self.sampling
        return s.adjusts or (s.min_tokens > 0 and bool(self.end_ids) and self.generated < s.min_tokens)

    @property
    def block(self) -> Hashable:
        """Equal for rows of one block, whose history is then looked at once and not row by row."""
        return id(self.tokens), id(self.sampling), self.prompt_length, self.end_ids


def adjust(logits: Tensor, row: Row) -> Tensor:
    """Masks, biases and penalties on one row of logits [V], everything that comes before the temperature."""
    out = logits.clone()[None]
    adjust_block(out, [row])
    return out[0]


def adjust_block(logits: Tensor, rows: Sequence[Row]) -> None:
    """`adjust` in place on the rows [n, V] of one block: the same tokens and sampling, different drafted prefixes."""
    s = rows[0].sampling
    if s.allowed_token_ids is not None:
        _keep_allowed(logits, s.allowed_token_ids)
    if s.bad_words:
        _ban_words(logits, rows)
    if s.logits_processors:
        _run_processors(logits, rows)
    if s.min_tokens > 0:
        _ban_ends(logits, rows)
    if s.logit_bias:
        logits[:, list(s.logit_bias)] += logits.new_tensor(list(s.logit_bias.values()))
    if s.uses_counts:
        _penalise(logits, rows)


def _keep_allowed(logits: Tensor, ids: Sequence[int]) -> None:
    allowed = list(ids)
    kept = logits[:, allowed]
    logits.fill_(-math.inf)
    logits[:, allowed] = kept


def _ban_words(logits: Tensor, rows: Sequence[Row]) -> None:
    """Masks the last token of each banned sequence whose other tokens have just been produced."""
    words = [list(_ids(word)) for word in rows[0].sampling.bad_words]
    for j, row in enumerate(rows):
        banned = [word[-1] for word in words if _last_tokens(row, len(word) - 1) == word[:-1]]
        if banned:
            logits[j, banned] = -math.inf


def _last_tokens(row: Row, count: int) -> list[int]:
    """The last `count` tokens before a row (fewer at the very beginning), without copying the history."""
    drafted = list(row.drafted[-count:]) if count else []
    start = len(row.tokens) - (count - len(drafted))
    return [*row.tokens[max(start, 0) :], *drafted]


def _run_processors(logits: Tensor, rows: Sequence[Row]) -> None:
    history = list(rows[0].tokens)
    for j, row in enumerate(rows):
        for processor in row.sampling.logits_processors:
            result = processor([*history, *row.drafted], logits[j])
            if result.shape != logits[j].shape:
                shape = tuple(logits[j].shape)
                raise OptionError("logits_processors", f"must return logits {shape}, got {tuple(result.shape)}")
            logits[j] = result


def _ban_ends(logits: Tensor, rows: Sequence[Row]) -> None:
    s, end_ids = rows[0].sampling, rows[0].end_ids
    early = [j for j, row in enumerate(rows) if row.generated < s.min_tokens]
    # An end id beyond this vocabulary (a tokenizer larger than the head) cannot be produced anyway.
    ends = [i for i in end_ids if i < logits.shape[-1]]
    if not early or not ends:
        return
    masked = logits[early]
    masked[:, ends] = -math.inf
    # Where nothing but an end is allowed, min_tokens yields: an empty support has no law.
    alive = masked.amax(-1, keepdim=True) > -math.inf
    logits[early] = masked.where(alive, logits[early])


def _penalise(logits: Tensor, rows: Sequence[Row]) -> None:
    """Repetition, then frequency and presence penalty, on the ids [U] that occur before any row of the block."""
    import torch

    s, tokens, prompt_length = rows[0].sampling, rows[0].tokens, rows[0].prompt_length
    prompt = set(tokens[:prompt_length]) if s.repetition_penalty != 1.0 else set()
    output = Counter(tokens[prompt_length:])
    ids = list(prompt | output.keys() | {x for row in rows for x in row.drafted})
    if not ids:
        return
    column = {token: c for c, token in enumerate(ids)}
    index = torch.tensor(ids, device=logits.device)
    counts = logits.new_tensor([output[token] for token in ids]).repeat(len(rows), 1)  # [n, U]
    drafted = [(j, column[token]) for j, row in enumerate(rows) for token in row.drafted]
    if drafted:
        at_row, at_column = torch.tensor(drafted, device=logits.device).T
        counts.index_put_((at_row, at_column), logits.new_ones(len(drafted)), accumulate=True)
    values = logits[:, index]
    if s.repetition_penalty != 1.0:
        r = s.repetition_penalty
        seen = (counts > 0) | logits.new_tensor([token in prompt for token in ids]).bool()
        values = values.where(~seen, (values / r).where(values > 0, values * r))
    logits[:, index] = values - s.frequency_penalty * counts - s.presence_penalty * (counts > 0).to(counts)
