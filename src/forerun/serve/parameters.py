"""From the fields of a request to what the engine is asked: sampling, drafting, order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import OptionError
from forerun.sampling import LogprobsMode, Sampling
from forerun.serve.errors import invalid, too_long, unknown, unsupported
from forerun.serve.fields import GenerationFields, Speculative, TextPart
from forerun.serve.grammar import Form, Grammar

SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "n", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens",
)  # fmt: skip
"""Fields that `Sampling` has under the same name."""


MOST_BAD_CHARACTERS = 1 << 16
"""Of all texts in `bad_words` together: each is tokenised twice, where every request's are."""


@dataclass(frozen=True)
class Ask:
    """What the engine is asked for one HTTP request."""

    prompts: list[list[int]]
    samplings: list[Sampling]
    """One for each prompt."""
    speculative: Any = None
    prediction: str | None = None
    priority: int = 0
    form: Form | None = None
    """That of its answers, where one is prescribed."""
    cache_salt: str | None = None
    """Only requests with the same one share prefixes."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the engine calls by another name than the request: its options -> fields."""

    @property
    def n(self) -> int:
        return self.samplings[0].n

    @property
    def samples(self) -> int:
        """Answers it will have."""
        return self.n * len(self.prompts)


@dataclass
class Parameters:
    """Makes the sampling of requests.

    Args:
        defaults: values of a request that gives none.
        max_logprobs: most log-probabilities a request may ask for.
        window: positions of the model.
        seeds: where unseeded requests get theirs; None: fresh ones, from the engine.
        logprobs_mode: of which law log-probabilities are.
    """

    defaults: Mapping[str, Any]
    max_logprobs: int
    window: int
    seeds: random.Random | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"

    def sampling(self, fields: GenerationFields, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """The sampling of all prompts of a request, without its grammar."""
        given = {name: value for name in SAME_NAME if (value := getattr(fields, name)) is not None}
        if fields.logit_bias:
            given["logit_bias"] = _bias(fields.logit_bias)
        seed = fields.seed
        if seed is None and self.seeds is not None:
            seed = self.seeds.getrandbits(63)
        own = {"max_tokens": max_tokens, "min_tokens": _min_tokens(fields), "logprobs": logprobs, "seed": seed}
        try:
            return Sampling(**{**self.defaults, **given, **own, "logprobs_mode": self.logprobs_mode})
        except OptionError as error:
            raise invalid(error.option, error.reason) from None

    def check_logprobs(self, param: str, count: int | None) -> None:
        if count is not None and count > self.max_logprobs:
            raise invalid(param, f"at most {self.max_logprobs} (--max-logprobs), got {count}")

    def max_tokens(self, param: str, prompts: Sequence[Sequence[int]], asked: int | None, default: int | None) -> int:
        """Tokens to generate at most, for prompts that all have to leave room for them.

        What is asked for must fit; a default is cut to the room there is.

        Raises:
            ApiError: 400 `context_length_exceeded`, with the limit and the count.
        """
        longest = max(map(len, prompts))
        room = self.window - longest
        if asked is not None and asked > room:
            raise too_long(param, longest, asked, self.window)
        if room < 1 and asked != 0:
            raise too_long(param, longest, 1, self.window)
        return asked if asked is not None else room if default is None else min(default, room)

    def truncated(self, fields: GenerationFields, ids: list[int]) -> list[int]:
        """The last `truncate_prompt_tokens` of a prompt; -1: as many as leave room for one token."""
        keep = fields.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == 0:
            raise invalid("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        return ids[-(self.window - 1 if keep == -1 else keep) :]


def refuse_unbuilt(fields: GenerationFields) -> None:
    """Values of known fields that cannot be honoured."""
    if fields.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "only true is built")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "belongs to stream: true")
    if fields.stream and fields.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "cannot be streamed; leave stream away")
    if fields.prediction is not None:
        _check_prediction(fields)
    characters = sum(len(word) for word in fields.bad_words or () if isinstance(word, str))
    if characters > MOST_BAD_CHARACTERS:
        raise invalid("bad_words", f"has {characters} characters in all; at most {MOST_BAD_CHARACTERS}")


def _check_prediction(fields: GenerationFields) -> None:
    asked = fields.speculative
    if (fields.n or 1) > 1:
        raise invalid("prediction", "cannot be combined with n > 1")
    if asked is False or (isinstance(asked, Speculative) and asked.max_draft == 0):
        said = "speculative: false" if asked is False else "speculative.max_draft: 0"
        raise invalid("prediction", f"has no effect with {said}: nothing is drafted")


def _min_tokens(fields: GenerationFields) -> int:
    ours, theirs = fields.min_tokens, fields.min_new_tokens
    if ours is not None and theirs is not None and ours != theirs:
        raise invalid("min_new_tokens", "is another name of min_tokens; give one of them")
    return (ours if ours is not None else theirs) or 0


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """Token ids are JSON keys, hence texts."""
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise invalid("logit_bias", f"keys must be token ids, got {key[:40]!r}")
        bias[int(key)] = float(value)
    return bias


def speculative_of(fields: GenerationFields) -> Any:
    """What `Engine.submit` takes as `speculative`."""
    asked, mode = fields.speculative, fields.verify_mode
    if mode is None and not isinstance(asked, Speculative):
        return asked
    given = asked.model_dump(exclude_none=True) if isinstance(asked, Speculative) else {}
    if asked is False:
        given["method"] = []  # no drafter, but a rule of its own
    if mode is not None and given.setdefault("verify_mode", mode) != mode:
        raise invalid("verify_mode", "contradicts speculative.verify_mode")
    return given


def prediction_of(fields: GenerationFields) -> str | None:
    """The expected text; None where it is empty."""
    if fields.prediction is None:
        return None
    return text_of(fields.prediction.content, "prediction.content") or None


def text_of(content: str | Sequence[TextPart] | None, where: str) -> str:
    """Content that is a text or a list of parts, as one text. ApiError: a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type != "text":
            raise unsupported(f"{where}[{index}].type", f"only text can be read here, got {part.type[:40]!r}")
        if part.text is None:
            raise invalid(f"{where}[{index}].text", "is required")
        for name in part.model_extra or ():
            raise unknown(f"{where}[{index}].{name}", part.names())
    return "".join(part.text or "" for part in content)


def form_of(fields: GenerationFields) -> Grammar | None:
    """The form that a request prescribes for its answer, other than by tools. ApiError: more than one."""
    found: dict[str, Grammar | None] = {}
    if fields.response_format is not None:
        found["response_format"] = _of_format(fields)
    if fields.structured_outputs is not None:
        found["structured_outputs"] = _of_structured(fields)
    if fields.guided_json is not None:
        found["guided_json"] = Grammar.json("guided_json", fields.guided_json)
    if fields.guided_regex is not None:
        found["guided_regex"] = Grammar.regex("guided_regex", fields.guided_regex)
    if fields.guided_choice is not None:
        found["guided_choice"] = Grammar.choice("guided_choice", fields.guided_choice)
    if fields.guided_grammar is not None:
        found["guided_grammar"] = Grammar.lark("guided_grammar", fields.guided_grammar)
    chosen = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(chosen) > 1:
        raise invalid(list(chosen)[1], f"{' and '.join(chosen)} exclude each other; give one form")
    return next(iter(chosen.values()), None)


def _of_format(fields: GenerationFields) -> Grammar | None:
    wanted = fields.response_format
    assert wanted is not None
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise invalid("response_format.json_schema.schema", "is required")
        return Grammar.json("response_format.json_schema.schema", wanted.json_schema.schema_)
    if wanted.json_schema is not None:
        raise invalid("response_format.json_schema", 'belongs to type "json_schema"')
    return None if wanted.type == "text" else Grammar.json("response_format", {"type": "object"})


def _of_structured(fields: GenerationFields) -> Grammar:
    wanted = fields.structured_outputs
    assert wanted is not None
    given = wanted.model_dump(exclude_none=True, by_alias=True)
    if len(given) != 1:
        raise invalid("structured_outputs", f"needs exactly one form, got {', '.join(given) or 'none'}")
    if wanted.json_ is not None:
        return Grammar.json("structured_outputs.json", wanted.json_)
    if wanted.regex is not None:
        return Grammar.regex("structured_outputs.regex", wanted.regex)
    if wanted.choice is not None:
        return Grammar.choice("structured_outputs.choice", wanted.choice)
    if wanted.grammar is not None:
        return Grammar.lark("structured_outputs.grammar", wanted.grammar)
    if not wanted.json_object:
        raise invalid("structured_outputs.json_object", "must be true")
    return Grammar.json("structured_outputs.json_object", {"type": "object"})


__all__ = [
    "Ask",
    "Parameters",
    "form_of",
    "prediction_of",
    "refuse_unbuilt",
    "speculative_of",
    "text_of",
]
