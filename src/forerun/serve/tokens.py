"""Single tokens as text and as bytes, for log-probabilities: a token may be a part of a character."""

from __future__ import annotations

import re
from functools import cached_property

from forerun.target.base import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""How sentencepiece writes a space."""


class TokenText:
    """Text and bytes of each id of a tokenizer. Joined bytes of a text's ids are the bytes of the text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        return self._tokenizer.special_ids

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {i: piece for piece, i in self._tokenizer.vocabulary().items()}

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The letters that stand for bytes, if the tokenizer is of that kind (GPT-2's byte-level BPE)."""
        known = self._tokenizer.vocabulary()
        # A space alone is a token of each kind; that of GPT-2's is also a letter which a large vocabulary has anyway.
        return _byte_letters() if "\u0120" in known and _SPACE not in known else None

    def bytes_of(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None or token in self._tokenizer.special_ids:
            return self._tokenizer.decode([token], False).encode(errors="replace")
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        letters = self._byte_of
        if letters is not None and all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return piece.replace(_SPACE, " ").encode(errors="replace")

    def text_of(self, token: int) -> str:
        """Text of one token; U+FFFD where it is only a part of a character."""
        return self.bytes_of(token).decode(errors="replace")


def _byte_letters() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the other bytes for the letters from U+0100 on (Radford et al., 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
