"""A training sample for the eye: which of its tokens are learned."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING

from forerun.cli.console import screen
from forerun.cli.show import OWN, Painted, put

if TYPE_CHECKING:
    from forerun.target.base import Tokenizer
    from forerun.training.data import Sample

LEARNED = "bold green"
OPEN, CLOSE = "[[", "]]"
"""Around learned tokens where there are no colours."""


def show_sample(sample: Sample, tokenizer: Tokenizer) -> None:
    """Prints a sample, special tokens as they read, under a line with its id and size."""
    coloured = screen().color_system is not None and not screen().no_color
    learned = int(sample.loss_mask.sum())
    sys.stdout.write(f"--- {sample.id}: {len(sample.token_ids)} tokens, {learned} learned ---\n")
    put([*painted(sample, tokenizer, coloured), ("\n", OWN)])


def painted(sample: Sample, tokenizer: Tokenizer, coloured: bool) -> Painted:
    """Pieces of its text, each learned or not."""
    pieces: Painted = []
    tokens = zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for learned, run in groupby(tokens, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        if not learned:
            pieces.append((text, OWN))
        else:
            pieces.append((text, LEARNED) if coloured else (f"{OPEN}{text}{CLOSE}", OWN))
    return pieces
