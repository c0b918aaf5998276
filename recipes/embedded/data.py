"""Documents -> token blocks. A step's batch depends on the step alone, so resuming needs no saved data state."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from config import BLOCK, TEST_SHARE, Phase
from corpus import Document
from transformers import PreTrainedTokenizerFast

Tokens = npt.NDArray[np.uint16]


def encode(docs: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> list[Tokens]:
    """Each document with the end-of-text token before it: a fresh file starts after one, and ends with the next."""
    eos = tokenizer.eos_token_id
    rows = tokenizer([doc.text for doc in docs], verbose=False)["input_ids"]
    return [np.array([eos, *row], dtype=np.uint16) for row in rows]


def save_documents(path: Path, rows: Sequence[Tokens], is_test: Sequence[bool]) -> None:
    temporary = path.with_suffix(".tmp.npz")
    np.savez(
        temporary,
        tokens=np.concatenate(rows),
        lengths=np.array([len(row) for row in rows], dtype=np.int64),
        is_test=np.array(is_test, dtype=bool),
    )
    temporary.replace(path)


class Blocks:
    """Passes over the documents, each in a new order, cut into shuffled blocks of BLOCK tokens."""

    def __init__(self, path: Path, seed: int) -> None:
        stored = np.load(path)
        self._rows = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
        self._is_test = stored["is_test"]
        self._seed = seed
        self._passes: list[Tokens] = []  # each [blocks, BLOCK]

    def _one_pass(self, number: int) -> Tokens:
        random = np.random.default_rng((self._seed, number))
        keep = ~self._is_test | (random.random(len(self._rows)) < TEST_SHARE)
        stream = np.concatenate([self._rows[i] for i in random.permutation(np.flatnonzero(keep))])
        blocks = stream[: len(stream) // BLOCK * BLOCK].reshape(-1, BLOCK)
        # Neighbouring blocks come from one file; shuffled, a batch is a fair sample of the library.
        return blocks[random.permutation(len(blocks))]

    def take(self, first: int, count: int) -> Tokens:
        """Blocks first .. first + count of the endless sequence of passes, [count, BLOCK]."""
        number, pieces = 0, []
        while count:
            if number == len(self._passes):
                self._passes.append(self._one_pass(number))
            piece = self._passes[number][first : first + count]
            pieces.append(piece)
            count -= len(piece)
            first = max(0, first - len(self._passes[number]))
            number += 1
        return np.concatenate(pieces)

    def batch(self, phase: Phase, step: int) -> torch.Tensor:  # [B, T]
        rows = self.take(step * phase.blocks_per_step, phase.blocks_per_step)
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens.view(-1, BLOCK // 2) if step < phase.short_context_steps else tokens


def windows(path: Path) -> torch.Tensor:
    """The held-out text as overlapping-by-one windows [N, BLOCK + 1]: every token but the first is predicted once."""
    stream = torch.from_numpy(np.load(path)["tokens"].astype(np.int64))
    return stream.unfold(0, BLOCK + 1, BLOCK)
