"""A target's chat template as serving applies it, and where in its text the answers lie.

An answer begins where the prompt ends that serving would send: the template applied to the messages before it, with the
generation prompt. It ends with the first end-of-sequence token of the target behind that place, which is the last token
the target emits. Both are found by comparing ids of renderings, so nothing needs to be known about a template:

    head    <start>user\\n hi <end>\\n <start>assistant\\n
    closed  <start>user\\n hi <end>\\n <start>assistant\\n Hello <end> \\n
                                                           ^^^^^^^^^^^ learned
    full    the same up to that end, and then the later turns

A template that marks its answers by `{% generation %}` decides itself which of these tokens are learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun.errors import OptionError, PromptError
from forerun.training.data.report import Dropped

if TYPE_CHECKING:
    from forerun.target.base import Tokenizer
    from forerun.training.data.records import Chat, Message

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""Names that a template option cannot have: they are what the rendering itself is made of."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one answer, start .. end; the last of them is its end-of-sequence token."""

    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A conversation as ids, and its answers."""

    ids: list[int]
    spans: list[Span]
    marked: list[bool] | None = None
    """For each token, whether the template itself marks it as an answer's; None: it marks none anywhere."""

    def learned(self, span: Span) -> list[bool]:
        """Of each token of an answer. The end is learned with the token before it: templates often leave it outside."""
        if self.marked is None:
            return [True] * (span.end - span.start + 1)
        inner = self.marked[span.start : span.end]
        last = inner[-1] if inner else self.marked[span.end]
        return [*inner, last or self.marked[span.end]]


class Rendering:
    """A tokenizer with its chat template and the options given to it.

    Args:
        tokenizer: of the target.
        end_ids: ids that end an answer, of the target.
        options: handed to the template, such as {"enable_thinking": False}.

    Raises:
        OptionError: an option has a reserved name.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], options: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.options = dict(options or {})
        for name in RESERVED:
            if name in self.options:
                raise OptionError("--chat-template-kwargs", f"{name!r} is set by the rendering itself")

    @cached_property
    def end_texts(self) -> list[str]:
        """How the end-of-sequence tokens read in text."""
        texts = (self.tokenizer.decode([i], skip_special_tokens=False) for i in sorted(self.end_ids))
        return [text for text in texts if text]

    @cached_property
    def _marks(self) -> bool:
        return bool(GENERATION.search(self.tokenizer.chat_template or ""))

    def text(self, messages: Sequence[Message], tools: Any = None, answer_next: bool = True) -> str:
        """The template applied. `answer_next`: up to where the next answer begins, as serving does.

        Raises:
            ModelError: there is no template. OptionError: it is none. Dropped: it refuses these messages.
        """
        given = {**self.options, **({"tools": list(tools)} if tools else {})}
        try:
            return self.tokenizer.render_chat(_shown(messages), add_generation_prompt=answer_next, **given)
        except PromptError as error:
            from jinja2 import TemplateSyntaxError

            if isinstance(error.__cause__, TemplateSyntaxError):
                raise OptionError("--chat-template", f"is no template: {error.__cause__.message}") from error
            raise Dropped("the template refuses it", _one_line(str(error))) from error

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """The ids that serving would give the target for the answer to these messages."""
        return self.ids(self.text(messages, tools))

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; a rendered chat has its special tokens already. Dropped: it is not valid UTF-8."""
        try:
            return self.tokenizer.encode(text, add_special_tokens)
        except PromptError as error:
            raise Dropped("invalid UTF-8") from error

    def render(self, chat: Chat, answers: Sequence[int], where: str) -> Rendered:
        """A conversation that ends with its last answer.

        Args:
            chat: the messages.
            answers: numbers of the messages to find, ascending; the last message is the last of them.
            where: the record, for messages.

        Raises:
            Dropped: the template refuses it, an answer contains an end of sequence, or its first token would merge
                with the prompt's last one, as no emitted token does.
            OptionError: the template does not say where an answer begins or ends, or renders it differently once a
                later turn follows.
        """
        assert answers[-1] == len(chat.messages) - 1
        self._check_ends(chat, answers)
        full_text = self.text(chat.messages, chat.tools, answer_next=False)
        whole = self._closed(chat, answers[-1], full_text, where)
        spans: list[Span] = []
        for number in answers[:-1]:
            closed_text = self.text(chat.messages[: number + 1], chat.tools, answer_next=False)
            one = self._closed(chat, number, closed_text, where)
            [span] = one.spans
            if one.ids[: span.end + 1] != whole.ids[: span.end + 1]:
                raise self._changed(closed_text, full_text, where)
            spans.append(span)
        return Rendered(whole.ids, [*spans, *whole.spans], self._marked(chat, whole.ids))

    def _check_ends(self, chat: Chat, answers: Sequence[int]) -> None:
        for number in answers:
            said = [str(chat.messages[number].get(key, "")) for key in ("reasoning_content", "content")]
            found = next((text for text in self.end_texts if any(text in one for one in said)), None)
            if found is not None:
                raise Dropped("an end of sequence within an answer", found)

    def _closed(self, chat: Chat, number: int, closed_text: str, where: str) -> Rendered:
        """The conversation up to an answer, and where that lies."""
        head_text = self.text(chat.messages[:number], chat.tools)
        if not closed_text.startswith(head_text):
            raise OptionError(
                "--chat-template",
                "where an answer begins cannot be found: the prompt that serving sends is not how the answered "
                f"conversation begins ({where}); {_difference(head_text, closed_text)}",
            )
        head, closed = self.ids(head_text), self.ids(closed_text)
        if closed[: len(head)] != head:
            closed = self.joined(head, closed_text[len(head_text) :], closed)
        end = next((i for i in range(len(head), len(closed)) if closed[i] in self.end_ids), None)
        if end is None:
            raise OptionError(
                "--chat-template",
                f"where an answer ends cannot be found ({where}): it is rendered as "
                f"{_excerpt(closed_text[len(head_text) :])}, without an end-of-sequence token of the target "
                f"({', '.join(map(repr, self.end_texts)) or 'it has none'}), so the target would never stop there",
            )
        return Rendered(closed, [Span(len(head), end)])

    def joined(self, head: list[int], rest: str, whole: Sequence[int]) -> list[int]:
        """A prompt and what follows it, encoded apart because together they would share a token: serving never joins
        them. Dropped: apart they read differently, as with tokenizers that put a space before every text."""
        ids = [*head, *self.ids(rest)]
        if self.tokenizer.decode(ids, False) != self.tokenizer.decode(whole, False):
            raise Dropped("an answer whose first token merges with its prompt")
        return ids

    def _changed(self, closed: str, full: str, where: str) -> OptionError:
        return OptionError(
            "--turns",
            "the template renders an answer differently once a later turn follows, so one rendering is not what "
            f"serving shows at every turn ({where}); {_difference(closed, full)}; "
            "'split' makes a sample of each answer, 'last' keeps the last one",
        )

    def _marked(self, chat: Chat, ids: Sequence[int]) -> list[bool] | None:
        """The template's own marks, by transformers."""
        inner: Any = getattr(self.tokenizer, "inner", None)
        if not self._marks or inner is None:
            return None
        found = inner.apply_chat_template(
            _shown(chat.messages),
            tools=list(chat.tools) if chat.tools else None,
            chat_template=self.tokenizer.chat_template,
            add_generation_prompt=False,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **self.options,
        )
        if list(found["input_ids"]) != list(ids):
            raise Dropped("an answer whose first token merges with its prompt")
        return [bool(mark) for mark in found["assistant_masks"]]


def _shown(messages: Sequence[Message]) -> list[Message]:
    """What the template sees of messages: not what they weigh in training."""
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def _difference(before: str, after: str) -> str:
    """Where two renderings part, and how each goes on."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return (
        f"after {_excerpt(before[max(0, at - 24) : at], 24)} it is {_excerpt(before[at:])}, then {_excerpt(after[at:])}"
    )


def _excerpt(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")


def _one_line(text: str) -> str:
    return " ".join(text.removeprefix("messages: ").split())[:200]
