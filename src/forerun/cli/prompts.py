"""Prompts as users give them: text, a file, standard input, or JSONL of completions and conversations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import OptionError, PromptError, nearest

if TYPE_CHECKING:
    from forerun.cli.options import PromptFlags
    from forerun.engine import Engine
    from forerun.sampling import Sampling
    from forerun.target.base import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt to complete, or one conversation to continue. Exactly one of the three is given."""

    where: str
    """Where it was read, for messages: `line 3`; empty for the only one."""
    prompt: str | Sequence[int] = ""
    """Raw text or token ids, completed as they are."""
    messages: Sequence[Message] = ()
    """A chat up to the answer that is wanted."""
    turns: Sequence[str] = ()
    """User turns to be answered one after another."""
    as_chat: bool = False
    """Raw text is put as a user's message."""

    @property
    def answers(self) -> int:
        return max(1, len(self.turns))

    def render(self, tokenizer: Tokenizer, answers: Sequence[str] = ()) -> str | list[int]:
        """What the model is given for the next answer, after `answers` to the turns before.

        A single turn of a model without a chat template is raw text. A rendered chat becomes ids here, since its
        template writes the special tokens itself.

        Raises:
            OptionError: a conversation, but the model has no chat template.
        """
        plain = self.prompt or (self.turns[0] if len(self.turns) == 1 and tokenizer.chat_template is None else "")
        if plain and not self.as_chat:
            return plain if isinstance(plain, str) else list(plain)
        if tokenizer.chat_template is None and self.as_chat and plain:
            raise OptionError("--apply-chat-template", "the model has no chat template")
        if tokenizer.chat_template is None:
            raise OptionError("--prompts", f"{self.where or 'it'} is a conversation; the model has no chat template")
        if not isinstance(plain, str):
            raise OptionError("--apply-chat-template", f"{self.where or 'the prompt'} consists of token ids")
        turns = self.turns or ((plain,) if plain else ())
        return tokenizer.encode(tokenizer.render_chat([*self.messages, *_dialogue(turns, answers)]), False)


def _dialogue(turns: Sequence[str], answers: Sequence[str]) -> list[Message]:
    """Turns and their answers, up to the first turn without one."""
    messages: list[Message] = []
    for turn, answer in zip(turns, [*answers, None], strict=False):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return messages


def read_prompts(flags: PromptFlags) -> list[PromptRecord]:
    """All prompts the flags name.

    Raises:
        OptionError: none or two sources, a missing file, invalid UTF-8, an empty prompt, a line that is not understood.
    """
    if (flags.prompt is None) == (flags.prompts is None):
        raise OptionError("--prompt", "give one of --prompt TEXT, --prompt @FILE, --prompts FILE (- is standard input)")
    _check_limit(flags)
    if flags.prompt is not None:
        if flags.limit is not None:
            raise OptionError("--limit", "belongs to --prompts; --prompt is a single one")
        text = _not_empty(expand("--prompt", flags.prompt), "--prompt")
        return [PromptRecord("", text, as_chat=flags.apply_chat_template)]
    assert flags.prompts is not None
    records = list(_records(read_text("--prompts", flags.prompts)))
    if not records:
        raise PromptError("--prompts", f"{_name_of(flags.prompts)} holds no prompt")
    return [replace(record, as_chat=flags.apply_chat_template) for record in records[: flags.limit]]


def named_prompts(flags: PromptFlags) -> list[PromptRecord] | None:
    """What the flags name, as `read_prompts` gives it; None where they name nothing: the package's own are meant."""
    _check_limit(flags)
    if flags.prompt is not None or flags.prompts is not None:
        return read_prompts(flags)
    if flags.apply_chat_template:
        raise OptionError("--apply-chat-template", "belongs to --prompts and --prompt")
    return None


def _check_limit(flags: PromptFlags) -> None:
    if flags.limit is not None and flags.limit < 1:
        raise OptionError("--limit", f"must be at least 1, got {flags.limit}")


def prompt_ids(records: Sequence[PromptRecord] | None, tokenizer: Tokenizer, own: int) -> list[list[int]]:
    """Token ids of each prompt; of the first `own` of the package's where none were named."""
    texts = embedded_prompts(own) if records is None else [record.render(tokenizer) for record in records]
    return [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]


def check_prompts(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    records: Sequence[PromptRecord] | None,
    sampling: Sampling,
    prediction: str | None = None,
) -> None:
    """Whether the engine can decode these prompts, before it decodes the first one.

    Raises:
        PromptError: it cannot, for instance one that is longer than the window; with the line it was read from.
    """
    from forerun.engine.intake import Ask

    for number, prompt in enumerate(prompts):
        try:
            engine.intake.requests([prompt], sampling, Ask(prediction=prediction))
        except PromptError as error:
            where = f"{records[number].where}: " if records and records[number].where else ""
            raise PromptError(error.option, f"{where}{error.reason}") from error


def expand(option: str, value: str) -> str:
    """Text typed at a flag: `@FILE` stands for the file's text, `-` for standard input, `@@` for a literal `@`."""
    if value.startswith("@@"):
        return value[1:]
    if value == "@":
        raise OptionError(option, "name a file behind @; a literal @ is written @@")
    if value == "-" or value.startswith("@"):
        return read_text(option, value.removeprefix("@"), " (a text that begins with @ is written @@...)")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PromptError(option, f"is not valid UTF-8 at character {error.start}") from None
    return value


def read_text(option: str, path: str, hint: str = "") -> str:
    """A file, or standard input for `-`, as strict UTF-8. OptionError names the option, with the hint where there is no
    such file."""
    name = _name_of(path)
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise OptionError(option, f"cannot read {name}: {error.strerror or error}{hint}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            option, f"{name} is not valid UTF-8 (byte {data[error.start]:#04x} at {error.start})"
        ) from None


def _name_of(path: str) -> str:
    return "standard input" if path == "-" else path


def parse_json(option: str, text: str, where: str = "") -> Any:
    """What a user wrote as JSON.

    Args:
        option: the text was given by.
        text: one line, or typed at the option.
        where: of the option's file it was read, like `line 3`; empty: all of it.

    Raises:
        OptionError: it is none, or more than Python's reader takes.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        said = f"is not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        said = "is nested too deep"
    except ValueError:  # all that is left; its own words are about an internal of Python
        said = "has a number of too many digits"
    raise OptionError(option, f"{where} {said}" if where else said)


def _records(text: str) -> Iterator[PromptRecord]:
    """JSONL if the first character is a brace, else one raw prompt a line; blank lines are skipped."""
    text = text.removeprefix("\ufeff")  # some editors begin a file with a byte order mark
    as_json = text.lstrip()[:1] == "{"
    # Not `splitlines`, which also ends lines at form feeds and the separators of Unicode, inside of a prompt.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if line.strip():
            yield _parse(line, f"line {number}") if as_json else PromptRecord(f"line {number}", line)


def _parse(line: str, where: str) -> PromptRecord:
    found = parse_json("--prompts", line, where)
    given = [key for key in _KINDS if isinstance(found, Mapping) and found.get(key) is not None]
    if not given and isinstance(found, Mapping) and (null := next((key for key in _KINDS if key in found), None)):
        raise PromptError("--prompts", f"{where}: {null!r} is null")
    if len(given) != 1:
        keys = (", ".join(map(str, found)) or "no keys") if isinstance(found, Mapping) else type(found).__name__
        hint = nearest(keys.split(",")[0], _KINDS) if not given else "only one of them"
        raise OptionError("--prompts", f"{where} needs 'prompt', 'turns' or 'messages', it has {keys}; {hint}")
    [key] = given
    if not found[key] or not _KINDS[key](found[key]):
        raise PromptError("--prompts", f"{where}: {key!r} {'has the wrong type' if found[key] else 'is empty'}")
    value: Any = _unanswered(found[key], where) if key == "messages" else found[key]
    return PromptRecord(where, **{key: value})


def _unanswered(messages: Sequence[Message], where: str) -> Sequence[Message]:
    """A chat without the answer it ends with, which is what will be decoded: training data and regenerated answers have
    one, and behind it a template would begin a second answer, which nobody asks a model for."""
    asked = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != "assistant"), 0)
    if asked < len(messages) and all(one["role"] in ("system", "developer") for one in messages[:asked]):
        raise PromptError("--prompts", f"{where}: 'messages' has only answers; give the user's message before them")
    return messages[:asked]


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, str) and turn for turn in value)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)


_KINDS = {"prompt": _is_prompt, "turns": _is_turns, "messages": _is_messages}


def _not_empty(text: str, option: str) -> str:
    if not text:
        raise PromptError(option, "is empty; give at least one token")
    return text


def embedded_prompts(limit: int | None = None) -> list[str]:
    """The package's own prompts: Python code that its models have not been trained on."""
    import importlib.resources

    text = (importlib.resources.files("forerun") / "embedded" / "prompts.jsonl").read_text(encoding="utf-8")
    return [str(record.prompt) for record in _records(text)][:limit]
