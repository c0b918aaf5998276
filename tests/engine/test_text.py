"""Ids to text as they come: whole characters, stop strings across every border, bounded work."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.conftest import engine_of
from forerun import Sampling
from forerun.drafters.fake import Oracle
from forerun.engine.text import Detokenizer, TextStream
from forerun.target.table import ByteTokenizer, TableTarget

BYTES = ByteTokenizer()
MIXED = "aé中🙂 é👩‍💻x日本語\n𝄞"


def _sentencepiece():
    """A decoder as of Llama 2, Mistral and Gemma: words with ▁, unknown characters as byte tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "▁hello": 3, "▁world": 4, "x": 5, "▁▁": 6}
    vocab |= {f"<0x{b:02X}>": 7 + b for b in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def _pieces(decode, ids):
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


# ------------------------------------------------------------------------------------------------------- characters


def test_su_1_every_split_of_every_character():
    """Characters of 2, 3 and 4 bytes and a joined emoji, in one token a byte: the deltas are whole characters, and
    joined they are the decoding of all ids, however the tokens are grouped into blocks.

    https://github.com/sgl-project/sglang/issues/31598, https://github.com/sgl-project/sglang/pull/34852,
    https://github.com/vllm-project/vllm/pull/19449, https://github.com/tenstorrent/tt-inference-server/pull/2594,
    https://github.com/ai-dynamo/dynamo/issues/12630
    """
    ids = BYTES.encode("é中🙂")
    for cuts in itertools.product([False, True], repeat=len(ids)):
        stream, deltas = TextStream(BYTES.decode, ()), []
        for token, cut in zip(ids, cuts, strict=True):
            stream.push(token)
            if cut:
                deltas.append(stream.release())
        deltas.append(stream.finish(flush=True))
        assert "".join(deltas) == "é中🙂"
        assert "�" not in "".join(deltas)
    assert "".join(_pieces(BYTES.decode, BYTES.encode(MIXED))) == MIXED


def test_su_1_through_the_engine():
    """The same through the engine, at every K: chunks of several tokens hold whole characters."""
    output = [*BYTES.encode(MIXED), ByteTokenizer.EOS]

    def row(prefix):
        done = len(prefix) - 1
        return [float(i == (output[done] if done < len(output) else 0)) for i in range(257)]

    target = TableTarget(row, 257, tokenizer=BYTES, eos_token_ids=[ByteTokenizer.EOS])
    for k in range(9):
        engine = engine_of(target, Oracle({(7,): output}), num_speculative_tokens=k)
        chunks = list(engine.stream([[7]], Sampling(temperature=0, max_tokens=99)))
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].completion.text == MIXED
        assert max(len(chunk.token_ids) for chunk in chunks) == k + 1


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("é中🙂".encode()))), max_size=120))
@settings(max_examples=150, deadline=None)
def test_any_bytes_decode_as_a_whole(ids):
    """Arbitrary bytes, broken ones included: the joined deltas are the decoding of all ids."""
    assert "".join(_pieces(BYTES.decode, ids)) == BYTES.decode(ids)


def test_an_unfinished_character_at_the_end_is_one_replacement():
    """What is left of a character when the text ends becomes one U+FFFD; while it may go on, it is held back."""
    ids = list("é🙂".encode())[:-1]
    pieces = _pieces(BYTES.decode, ids)
    assert pieces[-1] == "�"
    assert "".join(pieces) == "é�"


@given(st.lists(st.sampled_from(["▁hello", "▁world", "x", "▁", "▁▁", "é", "中", "🙂", "</s>"]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_byte_fallback_tokenizers(words):
    """Sentencepiece decoders write one U+FFFD for every byte of an unfinished run of byte tokens, also for the bytes of
    characters already complete; and they drop a leading space. The deltas still join to the decoding of all ids.
    """
    tokenizer = _sentencepiece()
    ids = []
    for word in words:
        known = tokenizer.token_to_id(word)
        ids += [7 + b for b in word.encode()] if known is None else [known]
    assert "".join(_pieces(tokenizer.decode, ids)) == tokenizer.decode(ids)


def test_a_byte_that_never_completes_leaves_what_was_shown():
    """A broken byte behind complete characters of a byte-fallback decoder costs one U+FFFD, not the characters."""
    tokenizer = _sentencepiece()
    ids = [7 + b for b in "中中".encode()] + [7 + 0xE4, 5, 4]
    assert "".join(_pieces(tokenizer.decode, ids)) == "中中�x world"
    ids = [7 + b for b in "中".encode()] + [7 + 0xE4] * 200 + [5]
    assert "".join(_pieces(tokenizer.decode, ids)) == "中" + "�" * 200 + "x"


@pytest.mark.parametrize("kind", ["text", "broken bytes", "one long character after another", "nothing visible"])
def test_su_1_work_per_token_is_bounded(kind):
    """10,000 tokens of text, of broken bytes, of characters that never end, or of skipped ids: decoding them one by one
    handles at most 120 ids per token on average, and never more than 120 at a time.
    """
    rng = random.Random(5)
    ids = {
        "text": [rng.choice(b"abc \xc3\xa9") for _ in range(10_000)],
        "broken bytes": [rng.choice(b"\x80\xbf\xff\xf0") for _ in range(10_000)],
        "one long character after another": list(b"\xf0\x9f\x99" * 3334)[:10_000],
        "nothing visible": [ByteTokenizer.EOS] * 10_000,
    }[kind]
    sizes = []

    def decode(window):
        sizes.append(len(window))
        return BYTES.decode(window)

    assert "".join(_pieces(decode, ids)) == BYTES.decode(ids)
    assert max(sizes) <= 120
    assert sum(sizes) <= 120 * len(ids)


# ------------------------------------------------------------------------------------------------------ stop strings


def _naive(ids, stops, include, looked_from=0):
    """(final text, stop, tokens used): what the rule says, by decoding everything anew after every token."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = BYTES.decode(ids[:count])
        text = text[:-1] if text.endswith("�") else text
        if count > looked_from:
            matches = [
                (at, -len(stop), stop)
                for stop in stops
                for at in range(len(text))
                if text.startswith(stop, at) and at + len(stop) > len(before)
            ]
            if matches:
                at, _, stop = min(matches)
                return text[: at + len(stop) if include else at], stop, count
        before = text
    return BYTES.decode(ids), None, len(ids)


@given(
    text=st.text(alphabet="abé🙂", max_size=25),
    stops=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    looked_from=st.sampled_from([0, 0, 3, 9]),
    groups=st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_across_every_border(text, stops, include, looked_from, groups):
    """Stop strings across token, character and block borders, overlapping ones, and with `min_tokens`: the same text,
    stop and token count as by searching the whole text anew; the deltas are a prefix of it at any time.
    """
    ids = list(text.encode())
    want_text, want_stop, want_count = _naive(ids, stops, include, looked_from)
    stream, shown, used, stop, pending = TextStream(BYTES.decode, stops, include), "", 0, None, iter(groups)
    left = next(pending)
    for token in ids:
        used += 1
        stop = stream.push(token, look_for_stops=used > looked_from)
        if stop is not None:
            break
        left -= 1
        if left == 0:
            shown += stream.release()
            assert want_text.startswith(shown)
            left = next(pending)
    shown += stream.finish(flush=stop is None)
    assert (stream.text, stop, used) == (want_text, want_stop, want_count)
    assert shown == stream.text


def test_no_more_is_held_back_than_could_start_a_stop_string():
    """Held back is the longest end of the text that is a beginning of a stop string, nothing else."""
    stream = TextStream(BYTES.decode, ["STOP", "TX"])
    shown = []
    for token in b"aSTbSTOx":
        stream.push(token)
        shown.append(stream.release())
    assert shown == ["a", "", "", "STb", "", "", "", "STOx"]


def test_a_shorter_stop_string_from_before_min_tokens_is_not_found_later():
    """With two stop strings, the search window of the longer one does not reach a match of the shorter one that was
    complete before stop strings were looked for: it has been shown already.
    """
    stream = TextStream(BYTES.decode, ["ab", "xxxxxxxx"])
    shown = ""
    for token in b"zab":
        stream.push(token, look_for_stops=False)
        shown += stream.release()
    assert stream.push(ord("c")) is None
    assert shown + stream.finish(flush=True) == stream.text == "zabc"
