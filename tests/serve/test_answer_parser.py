"""Reasoning and tool calls are told apart, whole or cut into any pieces; the bytes of tokens are those of the text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.serve.answer import AnswerParser, Piece
from forerun.serve.calls import CallReader, HermesReader, Llama3Reader, MistralReader
from forerun.serve.tokens import TokenText
from forerun.target.table import ByteTokenizer, LetterTokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
NESTED = '{"name": "f", "arguments": {"x": "}]\\"{", "y": [1, {"z": 2}]}}'
LLAMA = '{"name": "f", "parameters": {"x": 1}}'
MISTRAL = '{"name": "f", "arguments": {"x": 1}}'
READERS: dict[str, type[CallReader] | None] = {
    "none": None,
    "hermes": HermesReader,
    "llama3_json": Llama3Reader,
    "mistral": MistralReader,
}
TEXTS = [
    "plain", "", " \n", "a < b <tool", "<think>why</think>because", "  <think>a</think>\n\nb", "why</think>because",
    "<think>never ends", f"before {CALL}", f"{CALL}\n{CALL}", f"{CALL} after ", f"<think>t</think>\n{CALL}",
    "<tool_call>no json</tool_call> text", '<tool_call>{"name": "g", "arguments": "{}"}', "<tool_call>{", "<think",
    '<tool_call>{"no": "name"}</tool_call>', "x </think> y", "<tool_call>", f"<tool_call>{NESTED}</tool_call>",
    LLAMA, f" {LLAMA}; {LLAMA};{LLAMA} \n", f"<|python_tag|>{LLAMA}", "<|python_tag|>print(1)", "<|pyt", f"{LLAMA};",
    f"<think>t</think>{NESTED}", f'{LLAMA}; {{"a": 1}} tail', '{"a": {"b": 1}} more', "{ ] }", "{", f"{LLAMA} and more",
    f"[TOOL_CALLS] [{MISTRAL}, {NESTED}]", f"so [TOOL_CALLS][{MISTRAL}] tail ", "[TOOL_CALLS] []", "[TOOL_CALLS]",
    '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{"y": "}"}', '[TOOL_CALLS]f{"x": 1} ', "[TOOL_C",
    f"[TOOL_CALLS] [{MISTRAL}, 5]", f"[TOOL_CALLS] [{MISTRAL[:20]}", "[TOOL_CALLS]two words[ARGS]{} [TOOL_CALLS]f{}",
    "[TOOL_CALLS]" + "x" * 250 + '{"a": 1}', "[TOOL_CALLS]" + " " * 250 + "f{}",
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


def _parsed(parts: list[str], calls: str = "none", **options) -> list[tuple[str, str, str]]:
    reader = READERS[calls]
    parser = AnswerParser(**options, calls=None if reader is None else reader())
    pieces = [piece for part in parts for piece in parser.push(part)]
    return _merged([*pieces, *parser.finish()])


@settings(max_examples=600)
@given(
    text=st.sampled_from(TEXTS),
    thinking=st.sampled_from([None, False, True]),
    calls=st.sampled_from(sorted(READERS)),
    cuts=st.sets(st.integers(0, 60)),
)
def test_pieces_add_up_however_the_text_is_cut(text, thinking, calls, cuts):
    """A stream of any chunks says what the whole answer says, in every notation of calls."""
    options = {"reasoning": thinking is not None, "thinking": bool(thinking), "calls": calls}
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    assert _parsed(parts, **options) == _parsed([text], **options)


@pytest.mark.parametrize("calls", READERS)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:30])
def test_every_letter_may_come_alone(text, calls):
    """The finest stream there is."""
    assert _parsed(list(text), calls) == _parsed([text], calls)


F = ("call", '{"x": 1}', "f")


@pytest.mark.parametrize(
    ("text", "options", "want"),
    [
        ("plain", {}, [("content", "plain", "")]),
        ("<think>a</think>b", {}, [("content", "<think>a</think>b", "")]),
        ("<think>a</think>b", {"reasoning": True}, [("reasoning", "a", ""), ("content", "b", "")]),
        ("a</think>b", {"reasoning": True, "thinking": True}, [("reasoning", "a", ""), ("content", "b", "")]),
        ("no thought", {"reasoning": True}, [("content", "no thought", "")]),
        (f"so: {CALL}", {"calls": "hermes"}, [("content", "so:", ""), F]),
        (f"{CALL}\n{CALL}", {"calls": "hermes"}, [F] * 2),
        ("<tool_call>{}</tool_call>", {"calls": "hermes"}, [("content", "<tool_call>{}</tool_call>", "")]),
        ('<tool_call>{"name": "g", "arguments": {}}', {"calls": "hermes"}, [("call", "{}", "g")]),
        ("trailing \n", {"calls": "hermes"}, [("content", "trailing \n", "")]),
        (LLAMA, {"calls": "hermes"}, [("content", LLAMA, "")]),
        (LLAMA, {"calls": "llama3_json"}, [F]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", {"calls": "llama3_json"}, [F] * 2),
        (f"{MISTRAL}\n", {"calls": "llama3_json"}, [F]),
        ('{"name": "Ada"}', {"calls": "llama3_json"}, [("content", '{"name": "Ada"}', "")]),
        (f"I call {LLAMA}", {"calls": "llama3_json"}, [("content", f"I call {LLAMA}", "")]),
        (f"[TOOL_CALLS] [{MISTRAL}, {MISTRAL}]", {"calls": "mistral"}, [F] * 2),
        (f"ok [TOOL_CALLS][{MISTRAL}]", {"calls": "mistral"}, [("content", "ok", ""), F]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f{"x": 1}', {"calls": "mistral"}, [F] * 2),
        ('[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"x": 1}', {"calls": "mistral"}, [F]),
        ("[TOOL_CALLS] soon", {"calls": "mistral"}, [("content", "[TOOL_CALLS] soon", "")]),
        (f"[TOOL_CALLS] [{MISTRAL}, 5]", {"calls": "mistral"}, [F, ("content", ", 5]", "")]),
    ],
    ids=str,
)
def test_what_is_told_apart(text, options, want):
    """By example, among them what models of each family write."""
    assert _parsed([text], **options) == want


def test_nothing_that_is_certain_waits():
    """Only what may become a tag is kept back, and a call comes with its last brace."""
    parser = AnswerParser(reasoning=True, calls=HermesReader())
    assert parser.push("<th") == []
    assert parser.push("ink>a <") == [Piece("reasoning", "a ")]
    assert parser.push("b") == [Piece("reasoning", "<b")]
    assert parser.push("</think>c <to") == [Piece("content", "c")]
    assert parser.push("ast") == [Piece("content", " <toast")]
    parser = AnswerParser(calls=MistralReader())
    assert parser.push("[TOOL_CALLS] [" + MISTRAL[:-1]) == []
    assert parser.push("}, ") == [Piece("call", '{"x": 1}', "f")]


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
