"""Answers of a prescribed form: a mask that is part of the target's law, and of the draft's before it is drawn from.

The mask of a position is a pure function of the tokens of the answer before it, so every row of a verify block sees its
own, and nothing has to be brought back after a rejection. Masking a law before drawing is lossless; a token drawn
without the mask would be refused with p = 0 (methods 7.5, rule 4).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from forerun.errors import not_imported
from forerun.parsing import json_of
from forerun.serve.errors import ApiError, invalid, unsupported
from forerun.target.base import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 64
"""Compiled grammars kept for later requests."""

LONGEST = 1 << 18
"""Characters of a grammar's source: its compilation must not take memory without bound."""

MOST_ITEMS, MOST_ITEMS_OF_A_STEP = 384, 20_000
"""Of a client's own grammar: items that its parser keeps at one place, and adds for one mask. An ambiguous one gathers
them with its text, and a mask costs up to the square of their number, on the engine's thread: `s: "a" | s s | s s s`
would go on for 400 tokens, to the parser's own bound of 2,000. Measured over Qwen's vocabulary, ordinary grammars (SQL,
arithmetic, JSON) need 8 and 7,300, and a rule needs one for each of its literals. A JSON schema cannot be ambiguous
like that, and needs many (4 for each optional property): it keeps the parser's bounds."""


WHITE_SPACE = r"[ \t]{1,2}|[ \t]{0,2}\r?\n[ \t]{0,64}"
"""Between two tokens of JSON, at most, as a regular expression: what printers write, 16 levels of four blanks deep.
Without a bound a small model fills its answer with blanks, which every place of a form but the inside of a word lets
it."""

OWN_WHITE_SPACE = {"whitespace_pattern", "whitespace_flexible"}
"""Options in a schema (`x-guidance`, of llguidance) by which a client says itself what there may be."""


class _TooComplex(Exception):
    """The parser of forms has reached a bound of its own: nobody can say what is allowed."""


@dataclass(frozen=True)
class Reasoning:
    """What an answer may begin with, and its form is not about."""

    begin: int | None
    """The token that begins it, if the answer's first one does; None: the prompt has begun it."""
    end: int
    """The token that ends it."""


@dataclass(frozen=True)
class Grammar:
    """The form of an answer as it was asked for. `param` is the field that asked."""

    param: str
    kind: Literal["json", "regex", "lark", "own"]
    """`own`: Lark that was made here, around what a client gave."""
    source: str

    def __post_init__(self) -> None:
        if len(self.source) > LONGEST:
            raise invalid(self.param, f"is longer than {LONGEST} characters")

    @classmethod
    def json(cls, param: str, schema: dict[str, Any] | str) -> Grammar:
        """JSON that a schema describes; the schema as an object or as text."""
        return cls(param, "json", _spaced_text(schema) if isinstance(schema, str) else json.dumps(spaced(schema)))

    @classmethod
    def regex(cls, param: str, pattern: str) -> Grammar:
        """The whole answer matches a regular expression."""
        return cls(param, "regex", pattern)

    @classmethod
    def choice(cls, param: str, texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if not all(texts):
            raise invalid(param, "an empty text cannot be chosen")
        # A terminal: the parser keeps one item for it, where it would keep one for each text of a rule.
        one_of = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls(param, "own", f"start: CHOICE\nCHOICE: {one_of}")

    @classmethod
    def lark(cls, param: str, source: str) -> Grammar:
        """A context-free grammar in Lark's notation, as llguidance reads it."""
        return cls(param, "lark", source)

    @classmethod
    def own(cls, param: str, source: str) -> Grammar:
        """The same notation, of a grammar that this program wrote and knows not to be ambiguous."""
        return cls(param, "own", source)


def spaced(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with bounded white space, unless it says itself what there may be. It must be the outermost one."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or OWN_WHITE_SPACE & own.keys():
        return schema
    return {**schema, "x-guidance": {**own, "whitespace_pattern": WHITE_SPACE}}


def _spaced_text(source: str) -> str:
    """The same of a schema's text. What is no schema stays as it is: compiling it says what is wrong."""
    if len(source) > LONGEST:
        return source
    try:
        schema = json_of(source)
    except ValueError:
        return source
    schema = {} if schema is True else schema  # which mean the same
    return json.dumps(spaced(schema)) if isinstance(schema, dict) else source


class Grammars:
    """Compiles grammars for one tokenizer. Callers may be in any thread.

    Args:
        tokenizer: of the target.
        vocab_size: columns of its logits.
        eos_ids: any of them may end an answer where its form is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(i for i in eos_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._ready: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._inner: Any = None

    def compile(self, grammar: Grammar) -> Form:
        """The form, for the prompts of one request.

        Raises:
            ApiError: 400, the grammar cannot be read, or nothing here reads grammars.
        """
        key = (grammar.kind, grammar.source)
        with self._lock:
            matcher = self._ready.get(key) or self._compiled(grammar)
            self._ready[key] = matcher
            self._ready.move_to_end(key)
            if len(self._ready) > KEPT:
                self._ready.popitem(last=False)
            return Form(grammar.param, matcher.deep_copy(), self._vocab_size, self._eos_ids)

    def _compiled(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise unsupported(grammar.param, not_imported(error, "serve", "llguidance")) from error
        if not self._eos_ids:
            raise unsupported(grammar.param, "the model has no end-of-sequence token to end a complete answer with")
        try:
            if grammar.kind == "json":
                text = LLMatcher.grammar_from_json_schema(grammar.source)
            elif grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.source)
            else:
                text = LLMatcher.grammar_from_lark(grammar.source)
        except ValueError as error:
            raise _refused(grammar, str(error)) from None
        limits = LLParserLimits()
        if grammar.kind == "lark":
            limits = LLParserLimits(max_items_in_row=MOST_ITEMS, step_max_items=MOST_ITEMS_OF_A_STEP)
        matcher = LLMatcher(self._tokens(), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return matcher

    def _tokens(self) -> Any:
        """llguidance's view of the tokenizer: bytes of every token."""
        if self._inner is None:
            from llguidance import LLTokenizer

            own = getattr(getattr(self._tokenizer, "inner", None), "backend_tokenizer", None)
            described = own.to_str() if own is not None else _described(self._tokenizer, self._eos_ids[0])
            self._inner = LLTokenizer(described, n_vocab=self._vocab_size, eos_token=self._eos_ids[0])
        return self._inner


def _refused(grammar: Grammar, message: str) -> ApiError:
    return invalid(grammar.param, f"this form cannot be compiled: {' '.join(message.split())[:300]}")


def _described(tokenizer: Tokenizer, eos_id: int) -> Any:
    """A tokenizer that is not Hugging Face's, by the bytes of its tokens."""
    from llguidance import TokenizerWrapper

    from forerun.serve.tokens import TokenText

    text = TokenText(tokenizer)

    class Described:
        eos_token_id = eos_id
        bos_token_id = None
        tokens = [text.bytes_of(i) for i in range(tokenizer.size)]  # noqa: RUF012 - read once
        special_token_ids = sorted(tokenizer.special_ids)

        def __call__(self, content: bytes | str) -> list[int]:
            return tokenizer.encode(content if isinstance(content, str) else content.decode(errors="replace"), False)

    return TokenizerWrapper(Described())


class Form:
    """A compiled grammar with the places in it that are being looked at. It belongs to the engine's thread."""

    MOST = 16
    """Places kept: one for each sample of a request, were there not more; others are walked to again."""

    def __init__(self, param: str, fresh: Any, vocab_size: int, eos_ids: Sequence[int]):
        self.param = param
        self.vocab_size = vocab_size
        self.eos_ids = list(eos_ids)
        self._trouble: str | None = None
        self._fresh = fresh
        self._places: OrderedDict[int, tuple[list[int], Any]] = OrderedDict()
        self._numbers = 0

    def of(self, prompt_length: int, reasoning: Reasoning | None = None) -> Constraint:
        """The form as a constraint on what follows a prompt of this length, and reasoning if there may be some."""
        return Constraint(self, prompt_length, reasoning)

    @property
    def nothing_left(self) -> str:
        """Why no token could be drawn."""
        if self._trouble is not None:
            return f"this form is too complex to follow: {self._trouble}"
        return "no token is left by this form together with the other options"

    def allowed(self, output: Sequence[int]) -> Any:
        """[V] bool, what may follow these tokens; None where the grammar does not allow them. `_TooComplex`."""
        import numpy as np

        matcher = self.at(output)
        if matcher is None:
            return None
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._check(matcher)
        allowed = np.zeros(self.vocab_size, dtype=bool)
        known = min(self.vocab_size, len(bits))
        allowed[:known] = bits[:known].astype(bool)
        allowed[self.eos_ids] = allowed[self.eos_ids[0]]
        return allowed

    def at(self, output: Sequence[int]) -> Any:
        """A matcher that has read exactly these tokens; None where the grammar does not allow them. `_TooComplex`."""
        wanted = [self.eos_ids[0] if token in self.eos_ids else token for token in output]
        number, read, matcher = self._nearest(wanted)
        shared = _common(read, wanted)
        if shared < len(read):
            matcher.rollback(len(read) - shared)
            del read[shared:]
        rest = wanted[shared:]
        consumed = matcher.try_consume_tokens(rest) if rest else 0
        read += rest[:consumed]
        self._places.move_to_end(number)
        self._check(matcher)
        return matcher if consumed == len(rest) else None

    def _check(self, matcher: Any) -> None:
        """Gives a matcher up that has reached a bound: it never answers again, and refuses whatever it is given."""
        if matcher.is_error():
            self._trouble = " ".join(matcher.get_error().partition("<state>")[0].split())[:200]
            self._places = OrderedDict((n, place) for n, place in self._places.items() if place[1] is not matcher)
            raise _TooComplex

    def _nearest(self, wanted: list[int]) -> tuple[int, list[int], Any]:
        """The place from which least has to be taken back or read; a new one where none is near."""
        best = max(self._places.items(), key=lambda item: _common(item[1][0], wanted), default=None)
        if best is not None:
            number, (read, matcher) = best
            if len(read) - _common(read, wanted) <= 32 or len(self._places) >= self.MOST:
                return number, read, matcher
        self._numbers += 1
        self._places[self._numbers] = [], self._fresh.deep_copy()
        return self._numbers, *self._places[self._numbers]


class Constraint:
    """A form as a logits processor of one prompt's samples, and as the rule that ends them."""

    def __init__(self, form: Form, prompt_length: int, reasoning: Reasoning | None = None):
        self._form = form
        self._prompt_length = prompt_length
        self._reasoning = reasoning

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [V] with everything masked that the form does not allow behind these tokens.

        Reasoning is free, but the answer does not end with it. Behind a draft token that is itself not allowed nothing
        is masked: verification refuses that token, so the row is never looked at. Where the form cannot be followed any
        more nothing is left: whoever has to draw there learns it, however the place was reached.
        """
        import torch

        output = tokens[self._prompt_length :]
        start = self._start(output)
        if start is None:
            return logits.index_fill(-1, torch.tensor(self._form.eos_ids, device=logits.device), float("-inf"))
        try:
            allowed = self._form.allowed(output[start:])
        except _TooComplex:
            return torch.full_like(logits, float("-inf"))
        if allowed is None:
            return logits
        if not output and self._reasoning is not None and self._reasoning.begin is not None:
            allowed[self._reasoning.begin] = True
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), float("-inf"))

    def _start(self, output: Sequence[int]) -> int | None:
        """Where the form begins; None: not yet."""
        reasoning = self._reasoning
        if reasoning is None or (reasoning.begin is not None and list(output[:1]) != [reasoning.begin]):
            return 0
        return output.index(reasoning.end) + 1 if reasoning.end in output else None

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the answer is complete and nothing may follow it."""
        output = tokens[self._prompt_length :]
        start = self._start(output)
        try:
            matcher = None if start is None else self._form.at(output[start:])
        except _TooComplex:  # told where the next token would be drawn
            return False
        return matcher is not None and matcher.is_stopped()


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning, by halving: comparing slices is a loop in C."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


__all__ = ["Constraint", "Form", "Grammar", "Grammars", "Reasoning", "spaced"]
