"""Tiny exact targets whose logits are a function of the prefix in float64, over real paged storage.

What a transformer's KV rows are, token ids are here: a pass writes its tokens to `batch.slots` and reads every prefix
back through the block table, so that a stale, missing or misplaced row changes the logits. Logits do not depend on how
rows are batched: equality with plain decoding can be asserted bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError, PromptError
from forerun.target.base import BLOCK_SIZE, Batch, Forward, Segment, Shape, Target, Tokenizer

Logits = Callable[[Sequence[int]], Sequence[float]]
"""`logits(prefix)`: the next token's logits [V] after all tokens up to and including the row's own."""

NEVER_WRITTEN = -1


class TableTarget(Target):
    """A target whose logits are `logits(prefix)`; `passes` counts the rows of every pass so far.

    The hidden state below the last layer is `feature(h, prefix)`; the last one, h = num_layers, holds the halved
    logits, and `final_norm` doubles them: leaving the norm out changes what `logits` returns.
    """

    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(
        self,
        logits: Logits,
        vocab_size: int,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        window: int = 1 << 16,
        num_layers: int = 3,
        name: str = "table",
    ):
        self.name = name
        self.vocab_size = vocab_size
        self.hidden_size = vocab_size
        self.num_layers = num_layers
        self.window = window
        self.tokenizer = tokenizer or LetterTokenizer(vocab_size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.sampling_defaults: Mapping[str, float] = {}
        self.shape = Shape(vocab_size, 2 * vocab_size, 1, 1, 4, 1e-6, {"rope_type": "default", "rope_theta": 10000.0})
        self.passes: list[int] = []
        self._logits = logits
        self._rows: list[int] = []

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * 8

    def allocate(self, num_blocks: int) -> None:
        self._rows = [NEVER_WRITTEN] * (num_blocks * BLOCK_SIZE)

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Forward:
        for slot, token in zip(batch.slots, batch.token_ids, strict=True):
            assert 0 <= token < self.vocab_size, f"token {token} is not in the vocabulary"
            self._rows[slot] = token
        assert max(batch.positions) < self.window, "a row lies beyond the window"
        self.passes.append(len(batch.token_ids))
        logits, features = [], []
        for segment in batch.segments:
            prefixes = self._prefixes(segment)
            logits += [self._row(prefix) for prefix in prefixes[len(prefixes) - segment.logit_rows :]]
            features += [self._features(prefix, taps) for prefix in prefixes if taps]
        stacked = torch.tensor(logits, dtype=self.dtype).reshape(-1, self.vocab_size)
        return Forward(stacked, torch.tensor(features, dtype=self.dtype) if taps else None)

    def _prefixes(self, segment: Segment) -> list[list[int]]:
        """The tokens up to each of the segment's rows, as the storage has them."""
        tokens = [self._rows[segment.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(segment.end)]
        assert NEVER_WRITTEN not in tokens, f"row {tokens.index(NEVER_WRITTEN)} was read but never written"
        return [tokens[: p + 1] for p in range(segment.start, segment.end)]

    def _row(self, prefix: Sequence[int]) -> list[float]:
        row = list(self._logits(prefix))
        assert len(row) == self.vocab_size, (len(row), self.vocab_size)
        return row

    def _features(self, prefix: Sequence[int], taps: Sequence[int]) -> list[float]:
        assert list(taps) == sorted(set(taps)), f"taps must ascend: {taps}"
        assert 0 <= taps[0] <= taps[-1] <= self.num_layers, taps
        return [x for h in taps for x in self.feature(h, prefix)]

    def feature(self, h: int, prefix: Sequence[int]) -> list[float]:
        """Hidden state h after this prefix, [H]: what `forward` returns for a tap, for tests of alignment."""
        if h == 0:
            return [x / 2**32 for x in _hashed(prefix[-1:], "feature 0", self.hidden_size)]
        if h == self.num_layers:
            return [x / 2 for x in self._row(prefix)]
        return [x / 2**32 for x in _hashed(prefix, f"feature {h}", self.hidden_size)]

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden * 2

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        rows = torch.tensor([self.feature(0, [token]) for token in token_ids.flatten().tolist()], dtype=self.dtype)
        return rows.reshape(*token_ids.shape, self.hidden_size)

    def partial_logits(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self.logits(hidden)[..., ids]


def table_model(table: Sequence[Sequence[float]], **options: Any) -> TableTarget:
    """Logits looked up from the last token: row v of the [V, V] table follows token v."""
    return TableTarget(lambda prefix: table[prefix[-1]], len(table), **options)


def position_model(vocab_size: int, seed: int = 0, **options: Any) -> TableTarget:
    """Logits depend on the row's absolute position only: finds wrong positions."""
    return TableTarget(lambda prefix: _levels((len(prefix) - 1,), seed, vocab_size), vocab_size, **options)


def history_model(vocab_size: int, seed: int = 0, **options: Any) -> TableTarget:
    """Logits are a hash of the whole prefix: finds stale and missing cache rows."""
    return TableTarget(lambda prefix: _levels(prefix, seed, vocab_size), vocab_size, **options)


def _levels(key: Sequence[int], seed: int, vocab_size: int) -> list[float]:
    """A permutation of 0, -1, -2, ...: no two logits lie nearer than 1.0, so that no rounding decides an argmax."""
    hashed = _hashed(key, f"levels {seed}", vocab_size)
    row = [0.0] * vocab_size
    for level, token in enumerate(sorted(range(vocab_size), key=lambda v: (hashed[v], v))):
        row[token] = -float(level)
    return row


def _hashed(key: Sequence[int], salt: str, count: int) -> list[int]:
    """`count` 32-bit numbers, a function of key and salt alone (unlike `hash`, the same in every process)."""
    digest = hashlib.shake_128(f"{salt}|{','.join(map(str, key))}".encode()).digest(4 * count)
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(count)]


# -------------------------------------------------------------------------------------------------------- tokenizers

PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class _PlainTokenizer:
    """What the two tokenizers share: an end id that decodes to nothing, and a template."""

    def __init__(self, size: int, eos_id: int | None, chat_template: str | None):
        self.size = size
        self.eos_id = eos_id
        self.chat_template = chat_template

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset() if self.eos_id is None else frozenset({self.eos_id})

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if self.chat_template is None:
            raise ModelError("--chat-template: the tokenizer has no chat template; give one")
        from jinja2 import Template

        return str(Template(self.chat_template).render(messages=messages, **options))


class ByteTokenizer(_PlainTokenizer):
    """One id per byte and an end id, 256: every character beyond ASCII is split over several tokens."""

    EOS = 256

    def __init__(self, chat_template: str | None = PLAIN_TEMPLATE):
        super().__init__(257, self.EOS, chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - it has none to add
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise PromptError("prompt", f"not valid UTF-8: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = b"".join(b"</s>" * (not skip_special_tokens) if i == self.EOS else bytes([i]) for i in ids)
        return parts.decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {**{f"<0x{b:02X}>": b for b in range(256)}, "</s>": self.EOS}


class LetterTokenizer(_PlainTokenizer):
    """One letter per id, `a` for 0: for vocabularies of a few tokens. Text of other letters cannot be encoded."""

    def __init__(self, size: int, eos_id: int | None = None, chat_template: str | None = None):
        super().__init__(size, eos_id, chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - it has none to add
        ids = [ord(c) - ord("a") for c in text]
        if any(not 0 <= i < self.size for i in ids):
            raise PromptError("prompt", f"only the first {self.size} letters from 'a' on are tokens, got {text!r}")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._text(i) for i in ids if not (skip_special_tokens and i == self.eos_id))

    def vocabulary(self) -> dict[str, int]:
        return {self._text(i): i for i in range(self.size)}

    def _text(self, token: int) -> str:
        return "</s>" if token == self.eos_id else chr(ord("a") + token)


__all__ = [
    "ByteTokenizer",
    "LetterTokenizer",
    "TableTarget",
    "history_model",
    "position_model",
    "table_model",
]
