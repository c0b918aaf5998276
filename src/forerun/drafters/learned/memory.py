"""What a pass in training holds, for plans: arithmetic over sizes, checked against torch's own count of its memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from forerun.drafters.learned.batch import Held

if TYPE_CHECKING:
    from torch import nn

BETWEEN = 1.5
"""Numbers kept for each that goes into or comes out of a linear layer: norms, rotations and gates in between. Measured
on llama-like layers; other networks keep about as many."""


def linear_numbers(network: nn.Module, tables: Collection[nn.Module] = ()) -> int:
    """Numbers that a row puts into and gets out of the linear layers; a head's, made in chunks, are left out."""
    from torch import nn

    found = (m for m in network.modules() if isinstance(m, nn.Linear) and m not in tables)
    return sum(m.in_features + m.out_features for m in found)


def kept_by_linears(rows: int, numbers: int, half: bool) -> Held:
    """What a network of which nothing else is known keeps."""
    size = 2 if half else 4
    text = f"{BETWEEN} x {rows:,} rows x {numbers:,} x {size} bytes"
    return Held("activations", BETWEEN * rows * numbers * size, text)


def chunk_of_logits(rows: int, vocab_size: int, draft_vocab_size: int) -> Held:
    """What `in_chunks` computes at once of `rows` rows of logits, and of the teacher's laws beside them."""
    from forerun.drafters.losses import COPIES, chunk_rows

    most = min(rows, chunk_rows(vocab_size))
    text = f"{COPIES} x {most:,} rows x {draft_vocab_size:,} x 4 bytes"
    return Held("chunk of logits", COPIES * 4 * most * draft_vocab_size, text)


def fit_of_states(known: int, hidden_size: int, draft_size: int) -> Held:
    """What `fit_states` and what is made of it hold at their height: sums over rows, what is solved with them and the
    code, or the target's head as float32 beside the sums.

    Args:
        known: numbers that are known of a row, F.
        hidden_size: of the target, H.
        draft_size: rows of the head that are read, D.
    """
    from forerun.drafters.learned.fitting import SHARES

    states = len(SHARES) * hidden_size
    sums = (known**2 + known * states, f"{known:,} x ({known:,} + {states:,})")
    most = [
        (3 * sums[0] + known * states, f"3 x {sums[1]} + {known:,} x {states:,}"),
        # For few taps: the squares of all states that the code is found in; measured.
        (
            2 * known**2 + 3 * known * states + 4 * states**2,
            f"2 x {known:,}^2 + 3 x {known:,} x {states:,} + 4 x {states:,}^2",
        ),
        (sums[0] + 2 * draft_size * hidden_size, f"{sums[1]} + 2 x {draft_size:,} x {hidden_size:,}"),
    ]
    numbers, text = max(most)
    return Held("fitted start", 4 * numbers, f"({text}) x 4 bytes")
