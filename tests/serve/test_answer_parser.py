"""Reasoning and tool calls are told apart, whole or cut into any pieces; the bytes of tokens are those of the text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.serve.answer import AnswerParser, Piece
from forerun.serve.tokens import TokenText
from forerun.target.table import ByteTokenizer, LetterTokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEXTS = [
    "plain", "", " \n", "a < b <tool", "<think>why</think>because", "  <think>a</think>\n\nb", "why</think>because",
    "<think>never ends", f"before {CALL}", f"{CALL}\n{CALL}", f"{CALL} after ", f"<think>t</think>\n{CALL}",
    "<tool_call>no json</tool_call> text", '<tool_call>{"name": "g", "arguments": "{}"}', "<tool_call>{", "<think",
    '<tool_call>{"no": "name"}</tool_call>', "x </think> y",
]  # fmt: skip


def _merged(pieces: list[Piece]) -> list[tuple[str, str, str]]:
    """Neighbouring text of one kind as one."""
    found: list[tuple[str, str, str]] = []
    for piece in pieces:
        if found and piece.kind == found[-1][0] != "call":
            found[-1] = (piece.kind, found[-1][1] + piece.text, "")
        else:
            found.append((piece.kind, piece.text, piece.name))
    return found


def _parsed(parts: list[str], **options) -> list[tuple[str, str, str]]:
    parser = AnswerParser(**options)
    pieces = [piece for part in parts for piece in parser.push(part)]
    return _merged([*pieces, *parser.finish()])


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("text", TEXTS)
@given(cuts=st.sets(st.integers(0, 60)))
def test_pieces_add_up_however_the_text_is_cut(text, thinking, tools, cuts):
    """A stream of any chunks says what the whole answer says."""
    options = {"reasoning": thinking is not None, "thinking": bool(thinking), "tools": tools}
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert _parsed(parts, **options) == _parsed([text], **options)


@pytest.mark.parametrize(
    ("text", "options", "want"),
    [
        ("plain", {}, [("content", "plain", "")]),
        ("<think>a</think>b", {}, [("content", "<think>a</think>b", "")]),
        ("<think>a</think>b", {"reasoning": True}, [("reasoning", "a", ""), ("content", "b", "")]),
        ("a</think>b", {"reasoning": True, "thinking": True}, [("reasoning", "a", ""), ("content", "b", "")]),
        ("no thought", {"reasoning": True}, [("content", "no thought", "")]),
        (f"so: {CALL}", {"tools": True}, [("content", "so:", ""), ("call", '{"x": 1}', "f")]),
        (f"{CALL}\n{CALL}", {"tools": True}, [("call", '{"x": 1}', "f")] * 2),
        ("<tool_call>{}</tool_call>", {"tools": True}, [("content", "<tool_call>{}</tool_call>", "")]),
        ('<tool_call>{"name": "g", "arguments": {}}', {"tools": True}, [("call", "{}", "g")]),
        ("trailing \n", {"tools": True}, [("content", "trailing \n", "")]),
    ],
    ids=str,
)
def test_what_is_told_apart(text, options, want):
    """By example."""
    assert _parsed([text], **options) == want


def test_nothing_that_is_certain_waits():
    """Only what may become a tag is kept back."""
    parser = AnswerParser(reasoning=True, tools=True)
    assert parser.push("<th") == []
    assert parser.push("ink>a <") == [Piece("reasoning", "a ")]
    assert parser.push("b") == [Piece("reasoning", "<b")]
    assert parser.push("</think>c <to") == [Piece("content", "c")]
    assert parser.push("ast") == [Piece("content", " <toast")]


def test_bytes_of_tokens_make_up_the_text(tiny_qwen3_dir):
    """Of a byte-level tokenizer, of one with byte fallback, and of letters: also where a token is half a character."""
    from transformers import AutoTokenizer

    from forerun.target.tokenizer import HFTokenizer

    text = "a é 日本 🙂\n\t\u00a0x"
    hf = HFTokenizer(AutoTokenizer.from_pretrained(tiny_qwen3_dir))
    for tokenizer in (hf, ByteTokenizer()):
        tokens = TokenText(tokenizer)
        ids = tokenizer.encode(text)
        assert b"".join(tokens.bytes_of(i) for i in ids).decode() == text
    letters = TokenText(LetterTokenizer(7))
    assert [letters.text_of(i) for i in range(3)] == ["a", "b", "c"]
    assert TokenText(hf).text_of(256) == "<|end|>"
    assert json.dumps(TokenText(ByteTokenizer()).text_of(0xE6)) == '"\\ufffd"'
